"""Forgetting in a tier, said in one of three ways, and tiers that are off."""

from __future__ import annotations

import inspect

import pytest

from everwarm.errors import EngineStopped
from everwarm.prompt.prompt import Prompt
from everwarm.state.remote.remote_tier import RemoteTier
from everwarm.state.store.disk import Disk
from everwarm.state.store.files import Files
from everwarm.state.tier import DiskTier, Dropped, InSpaces, OnPrompts, Pin, SharedTier
from support.crash_writer import ROOT, STEP, Thing, codes_of, conversation, state
from support.disks import OpenDisk, check, put_all


def size_of(*things: Thing) -> Dropped:
    return Dropped(len(things), sum(thing.size for thing in things))


def pin_of(thing: Thing) -> Pin:
    return Pin(thing.header.key, thing.header.n_items, thing.header.space)


def on_prompt(i: int, n_items: int, beyond: int = 0) -> OnPrompts:
    return OnPrompts(ROOT, (Prompt(codes_of(i, n_items)),), beyond)


def test_forgetting_a_prompt_takes_its_states_their_kv_and_their_pins(open_disk: OpenDisk) -> None:
    disk = open_disk()
    mine, others = conversation(1, n_kv=2), conversation(2, n_kv=2)
    put_all(disk, *mine, *others)
    for thing in (mine[-1], others[-1]):
        disk.pin(pin_of(thing))
    assert disk.forget(on_prompt(1, 2 * STEP, beyond=2 * STEP)) == Dropped(), "nothing lies beyond its end"
    assert disk.forget(on_prompt(1, 2 * STEP)) == size_of(*mine)
    assert disk.names() == {thing.name for thing in others}
    assert [pin.key for pin in disk.pins] == [others[-1].header.key]
    check(disk)


def test_kv_that_another_state_needs_stays(open_disk: OpenDisk) -> None:
    disk = open_disk()
    first, second, deep = conversation(1, n_kv=2)
    shallow = state(1, needs=[first.name])
    put_all(disk, first, second, shallow, deep)
    assert disk.forget(on_prompt(1, 2 * STEP, beyond=STEP)) == size_of(deep, second)
    assert disk.names() == {first.name, shallow.name}


def test_states_are_forgotten_by_name_as_far_as_they_are_there(open_disk: OpenDisk) -> None:
    disk = open_disk()
    mine, others = conversation(1), conversation(2)
    put_all(disk, *mine, *others)
    kept = tuple(each for each in disk.objects() if each.name == mine[-1].name)
    assert disk.forget(kept) == size_of(*mine)
    assert disk.forget(kept) == Dropped()
    assert disk.names() == {thing.name for thing in others}


def test_whole_spaces_are_forgotten(open_disk: OpenDisk) -> None:
    disk = open_disk()
    things = [*conversation(1), *conversation(2)]
    put_all(disk, *things)
    assert disk.forget(InSpaces(frozenset({"another"}))) == Dropped()
    assert disk.forget(InSpaces(None)) == size_of(*things)
    assert not disk.objects()


class Stuck(Files):
    def unlink(self, path):
        raise PermissionError(1, "not now", str(path))


def test_what_cannot_be_removed_is_an_error(open_disk: OpenDisk) -> None:
    disk = open_disk(files=Stuck())
    put_all(disk, *conversation(1))
    with pytest.raises(EngineStopped, match="1 files cannot be removed"):
        disk.forget(on_prompt(1, 2 * STEP))


@pytest.mark.parametrize(("null", "real"), [(DiskTier, Disk), (SharedTier, RemoteTier)])
def test_a_tier_that_is_off_takes_what_a_real_one_takes(null: type, real: type) -> None:
    verbs = [name for name in vars(null) if inspect.isfunction(getattr(null, name)) and not name.startswith("_")]
    assert {"has", "forget", "stats", "close", "find"} <= set(verbs)
    for name in verbs:
        assert name in vars(real), f"{name} is that of a tier that is off"
        ours = list(inspect.signature(getattr(null, name)).parameters)
        theirs = list(inspect.signature(getattr(real, name)).parameters)
        assert ours == theirs[: len(ours)], name


def test_a_tier_that_is_off_keeps_and_finds_nothing() -> None:
    disk, remote = DiskTier(), SharedTier()
    prompt = Prompt(codes_of(1, STEP))
    assert not conversation(1)[0].put(disk) and disk.find(ROOT, prompt, STEP) is None and not disk.objects()
    assert remote.find(ROOT, prompt, (), least=0, most=len(prompt) - 1) is None and not remote.answers_within(
        float("inf")
    )
    for tier in (disk, remote):
        assert not tier.is_on and tier.forget(InSpaces(None)) == Dropped() and tier.stats() == {}
