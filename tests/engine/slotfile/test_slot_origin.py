"""Whose a slot file is, and which model's: what nobody vouches for is refused; what an admin vouches for goes nowhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from everwarm.engine.request import Ask
from everwarm.engine.settings import StoreSettings
from everwarm.engine.slotfile import slot_io
from everwarm.errors import BadRequest
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import is_unverified, owner_of, unverified
from everwarm.state.store import slot_file
from everwarm.state.store.arena_file import memory_file
from everwarm.state.store.files import LEFT_S, TEMPORARY, Files, sweep
from everwarm.state.store.object import Damaged, ObjectReader, encode
from everwarm.state.store.slot_file import NO_FILE, Claim, UnknownOrigin
from everwarm.state.store.slot_names import COMPANION, namespace_folder, sweep_all
from support.drive import EVERY_KIND, check, drain, open_core, run, text, tidy
from support.models import tiny_model
from support.slot_files import MINE, conversation

HISTORY, NEW = text(1, 300), text(2, 30)
TRUSTING = replace(MINE, trusts_origin=True)


def read(path: Path, claim: Claim = MINE) -> slot_io.Saved:
    return slot_io.read(path, claim, 4096)[0]


def rewrite_header(companion: Path, **changes: object) -> None:
    with companion.open("rb") as file:
        reader = ObjectReader(file.fileno())
        parts = {section.name: reader.read(section.name) for section in reader.header.sections}
        header = msgspec.structs.replace(reader.header, sections=(), **changes)
    companion.write_bytes(b"".join(bytes(piece) for piece in encode(header, parts)))


# which model's


@pytest.mark.parametrize("claim", [MINE, TRUSTING], ids=["by default", "trusting"])
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("none", "it has no companion a.bin.checkpoints, .* --trust-slot-files"),
        ("other model", "saved by another model, .*fingerprint another, here model"),
        ("garbage", "companion a.bin.checkpoints is damaged"),
        ("cut", "companion a.bin.checkpoints is damaged"),
        ("damaged items", "companion a.bin.checkpoints is damaged"),
        ("other kind", "no companion of a slot file but a state object"),
        ("of another file", "a.bin.checkpoints belongs to another file"),
        ("main changed", "a.bin.checkpoints belongs to another file"),
        ("token changed", "a.bin.checkpoints belongs to another file"),
        ("link", "companion a.bin.checkpoints cannot be opened"),
    ],
)
def test_a_file_that_nobody_vouches_for_is_refused_with_the_reason(tmp_path, how, why, claim):
    path, companion = tmp_path / "a.bin", tmp_path / f"a.bin{COMPANION}"
    slot_io.write(path, conversation(), MINE)
    slot_io.write(tmp_path / "b.bin", conversation(seed=4), MINE)
    match how:
        case "none":
            companion.unlink()
        case "other model":
            rewrite_header(
                companion, fingerprint="another", owner=slot_file.owner_digest("another", "", "mine"), main=""
            )
        case "garbage":
            companion.write_bytes(b"x" * 9000)
        case "cut":
            companion.write_bytes(companion.read_bytes()[:-1])
        case "damaged items":
            data = bytearray(companion.read_bytes())
            data[4096] ^= 1
            companion.write_bytes(data)
        case "other kind":
            rewrite_header(companion, kind="state")
        case "of another file":
            companion.write_bytes((tmp_path / f"b.bin{COMPANION}").read_bytes())
        case "main changed" | "token changed":
            data = bytearray(path.read_bytes())
            data[-100 if how == "main changed" else 12] ^= 1
            path.write_bytes(data)
        case "link":
            companion.rename(tmp_path / "elsewhere")
            companion.symlink_to(tmp_path / "elsewhere")
    if how == "none" and claim.trusts_origin:
        assert read(path, claim).unverified, "only a file that says nothing is taken on somebody's word"
    else:
        with pytest.raises(UnknownOrigin, match=why):
            read(path, claim)
    assert read(tmp_path / "b.bin").points == () and not read(tmp_path / "b.bin").unverified, "this test could not fail"


# what is taken on somebody's word


def strange_file(path: Path, arch: str) -> list[int]:
    """A slot file of another model of the same shape, as llama-server would have written it; returns what it holds."""
    with open_core(arch, path=tiny_model(arch, seed=1)) as core:
        result = run(core, HISTORY, slot=0)
        slot_io.write(path, slot_io.capture(core, core.slots[0], ""), Claim("another model", ""))
    path.with_name(path.name + COMPANION).unlink()
    return [*HISTORY, *result.tokens[:-1]]


@contextlib.contextmanager
def trusting_core(arch: str, path: Path, *, is_apart: bool = True, **settings):
    """A file of unknown origin is in slot 0; or, for a control, as if somebody had vouched for it."""
    with open_core(arch, **settings) as core:
        saved = read(path, Claim("model", "", trusts_origin=True))
        slot_io.put_back(core, core.slots[0], saved if is_apart else replace(saved, unverified=""), "")
        check(core)
        yield core


def talk_on(core, whole: list[int]) -> list[int]:
    """Turns on top of a file, with everything that writes things down: pins, idle work, reading ahead, and a stop."""
    first = run(core, [*whole, *NEW], 8, stable=len(whole) + 20)
    assert first.n_cached == len(whole)
    second = [*whole, *NEW, *first.tokens, *text(4, 30)]
    assert run(core, second, stable=len(second) - 5).n_cached >= len(whole)
    for node in [slot.node for slot in core.slots if slot.n_fed]:
        core.cache.ram.pin(node)
        core.cache.tier_writer.keep_pinned(node)
    tidy(core)
    core.offer_prewarm(Ask(Prompt.of_tokens([*second, *text(5, 60)]), max_tokens=0, ahead=True))
    tidy(core)
    drain(core)
    core.put_away()
    return first.tokens


@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_nothing_that_stems_from_a_trusted_file_outlives_the_engine(tmp_path, arch, is_apart):
    path, memory = tmp_path / "a.bin", memory_file()
    whole = strange_file(path, arch)
    store = StoreSettings(str(tmp_path / "states"), restore_policy="always")
    with open_core(arch) as core:
        golden = run(core, [*whole, *NEW], 8).tokens
    with trusting_core(arch, path, is_apart=is_apart, memory=memory, store=store) as core:
        wrong = talk_on(core, whole)
        assert wrong != golden, "this test could not fail: the strange model says the same"
        assert not any(node.checkpoint and node.checkpoint.clean for node in core.cache.tree.nodes())
        assert bool(core.cache.tiers.disk.objects() or core.cache.tiers.disk.pins) is not is_apart
    with open_core(arch, memory=memory, store=store) as core:
        assert bool(core.cache.ram.n_adopted) is not is_apart
        result = run(core, [*whole, *NEW], 8)
        assert (result.n_cached == 0) is (result.tokens == golden) is is_apart
    os.close(memory)


def test_only_who_goes_on_from_all_of_a_trusted_file_has_to_do_with_it(tmp_path):
    whole = strange_file(tmp_path / "a.bin", "qwen35")
    store = StoreSettings(str(tmp_path / "states"), restore_policy="always")
    with trusting_core("qwen35", tmp_path / "a.bin", store=store) as core:
        beginning = [*whole[:280], *text(7, 40)]
        assert run(core, beginning).n_cached == 0, "it shares only a beginning"
        assert run(core, [*whole, *NEW], namespace="other").n_cached == 0, "it is another's"
        assert run(core, [*whole, *NEW], deterministic=True).n_cached <= 280, "it wants what is clean"
        assert run(core, [*whole, *text(8, 30)], use_cache=False).n_cached == 0
        core.put_away()
        spaces = {core.cache.tree.namespace(node) for node in core.cache.tree.nodes()}
        assert {owner_of(name) for name in spaces} == {"", "other"} and any(map(is_unverified, spaces))
        assert core.cache.tiers.disk.objects(), "what does not stem from it is kept as ever"
        assert run(core, [*whole, *text(9, 30)]).n_cached == len(whole)
        assert not is_unverified(next(s.namespace for s in core.slots if s.n_fed > len(whole))), "now it was read here"


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_what_stems_from_a_trusted_file_is_not_saved_and_can_be_erased(tmp_path, arch):
    whole = strange_file(tmp_path / "a.bin", arch)
    with trusting_core(arch, tmp_path / "a.bin") as core:
        for _ in range(2):  # as restored, and gone on from
            with pytest.raises(BadRequest, match="unknown origin"):
                slot_io.capture(core, core.slots[0], "")
            assert run(core, [*whole, *NEW], slot=0).n_cached >= len(whole)
        with pytest.raises(BadRequest, match="no conversation of yours"):
            slot_io.capture(core, core.slots[0], "other")
        assert slot_io.erase(core, core.slots[0], "other") == 0
        assert slot_io.erase(core, core.slots[0], "") == len(whole) + len(NEW) + 3
        check(core)
        assert run(core, [*whole, *NEW], slot=0).n_cached == 0
        assert slot_io.capture(core, core.slots[0], "").prompt.codes.tolist()[: len(whole)] == whole


def test_an_unverified_namespace_is_its_owners():
    name = unverified("mine", "abc")
    assert is_unverified(name) and owner_of(name) == "mine" and unverified(name, "abc") == name
    assert not is_unverified("mine") and owner_of("mine") == "mine"


# whose


def test_a_file_of_another_namespace_is_as_if_it_were_not_there(tmp_path):
    path, yours = tmp_path / "a.bin", Claim("model", "yours", owns_unbound=True, trusts_origin=True)
    slot_io.write(path, conversation(), MINE)
    with pytest.raises(Damaged) as other:
        read(path, yours)
    with pytest.raises(Damaged) as missing:
        read(tmp_path / "missing.bin", yours)
    assert str(other.value) == str(missing.value) == NO_FILE
    assert read(path).n_tokens == 40, "this test could not fail"


def test_a_file_of_another_namespace_is_not_written_over(tmp_path):
    path = tmp_path / "a.bin"
    slot_io.write(path, conversation(), MINE)
    before = [file.read_bytes() for file in sorted(tmp_path.iterdir())]
    with pytest.raises(BadRequest, match="choose another filename"):
        slot_io.write(path, conversation(seed=4), replace(MINE, namespace="yours", owns_unbound=True))
    assert [file.read_bytes() for file in sorted(tmp_path.iterdir())] == before
    slot_io.write(path, conversation(n=50), replace(MINE, fingerprint="another model of mine"))
    assert read(path, replace(MINE, fingerprint="another model of mine")).n_tokens == 50


@pytest.mark.parametrize("owns_unbound", [True, False])
def test_a_file_from_before_files_had_an_owner_is_the_default_namespaces(tmp_path, owns_unbound):
    path, claim = tmp_path / "a.bin", replace(MINE, owns_unbound=owns_unbound)
    slot_io.write(path, conversation(), MINE)
    rewrite_header(path.with_name(f"a.bin{COMPANION}"), owner="")
    if owns_unbound:
        assert read(path, claim).n_tokens == 40
        slot_io.write(path, conversation(n=50), claim)
        assert read(path).n_tokens == 50, "it has an owner now"
    else:
        with pytest.raises(UnknownOrigin, match="before slot files were bound"):
            read(path, claim)
        with pytest.raises(BadRequest, match="choose another filename"):
            slot_io.write(path, conversation(n=50), claim)


def test_a_companion_names_nobody(tmp_path):
    for name, namespace in (("a", "mine"), ("b", "mine"), ("c", "yours")):
        slot_io.write(tmp_path / name, conversation(seed=ord(name)), Claim("model", namespace))
    owners = set()
    for name in "abc":
        with (tmp_path / f"{name}{COMPANION}").open("rb") as file:
            owners.add(ObjectReader(file.fileno()).header.owner)
    assert len(owners) == 3 and not any("mine" in owner or "yours" in owner for owner in owners)
    assert namespace_folder("mine") != namespace_folder("yours")


def test_a_name_that_is_no_text_of_ours_is_nobodys(tmp_path):
    path = tmp_path / "a.bin"
    slot_io.write(path, conversation(), MINE)
    rewrite_header(path.with_name(f"a.bin{COMPANION}"), owner="ünïcödé")
    with pytest.raises(UnknownOrigin, match=NO_FILE):
        read(path)


def read_ahead(core, tokens: list[int], namespace: str) -> None:
    """Into slot 0, as idle work would."""
    core.enqueue(Ask(Prompt.of_tokens(tokens), max_tokens=0, namespace=namespace, slot=0, ahead=True))
    drain(core)


def test_what_was_read_ahead_in_a_slot_is_not_erased_by_whoever_had_it_before():
    with open_core() as core:
        run(core, text(8, 100), namespace="mine", slot=0)
        assert slot_io.erase(core, core.slots[0], "mine") > 0
        read_ahead(core, HISTORY, "yours")
        assert core.slots[0].node.root() is core.cache.tree.root("yours"), "this test could not fail"
        assert slot_io.erase(core, core.slots[0], "mine") == 0
        check(core)
        assert run(core, [*HISTORY, *NEW], namespace="yours").n_cached == len(HISTORY)


def test_a_slot_is_saved_from_its_own_namespaces_reading():
    """The same text, read ahead for somebody else in the slot, is another's."""
    with open_core() as core:
        run(core, HISTORY, namespace="mine", slot=0)
        whole = core.slots[0].content.codes.tolist()
        core.cache.room.vacate(core.slots[0])
        read_ahead(core, whole, "yours")
        assert core.slots[0].node.root() is core.cache.tree.root("yours"), "this test could not fail"
        assert slot_io.capture(core, core.slots[0], "mine").prompt.codes.tolist() == whole
        assert core.slots[0].node.root() is core.cache.tree.root("mine")
        with pytest.raises(BadRequest):
            slot_io.capture(core, core.slots[0], "yours")
        check(core)


# two who write at once


class Interrupted(Files):
    """Does something between the first and the second rename."""

    def __init__(self, between) -> None:
        self.between = between
        self.n_renamed = 0

    def rename(self, old: Path, new: Path) -> None:
        if self.n_renamed == 1:
            self.between()
        super().rename(old, new)
        self.n_renamed += 1


@pytest.mark.parametrize("takes_turns", [True, False])
def test_two_engines_that_save_one_name_leave_one_whole_pair(tmp_path, takes_turns, monkeypatch):
    path = tmp_path / "a.bin"
    other = threading.Thread(target=lambda: slot_io.write(path, conversation(n=60, seed=5), MINE))

    def between() -> None:
        other.start()
        if takes_turns:
            time.sleep(0.05)  # it must wait for the directory, or this changes nothing
        else:
            other.join()

    if not takes_turns:
        monkeypatch.setattr(slot_file, "locked", lambda *_, **__: contextlib.nullcontext())
    slot_io.write(path, conversation(n=50), MINE, Interrupted(between))
    other.join()
    if takes_turns:
        assert read(path).n_tokens == 60, "the second one's, whole"
    else:
        with pytest.raises(UnknownOrigin, match="belongs to another file"):
            read(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.bin", f"a.bin{COMPANION}"]


def test_a_reader_sees_both_files_of_one_save(tmp_path):
    path, seen = tmp_path / "a.bin", []
    slot_io.write(path, conversation(), MINE)
    reader = threading.Thread(target=lambda: seen.append(read(path).n_tokens))

    def between() -> None:
        reader.start()
        time.sleep(0.05)

    slot_io.write(path, conversation(n=50), MINE, Interrupted(between))
    reader.join()
    assert seen == [50]


def test_a_crash_between_the_two_leaves_what_is_refused_and_written_over(tmp_path):
    path = tmp_path / "a.bin"
    slot_io.write(path, conversation(), MINE)

    def crash() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slot_io.write(path, conversation(n=50), MINE, Interrupted(crash))
    with pytest.raises(UnknownOrigin, match="belongs to another file"):
        read(path)
    slot_io.write(path, conversation(n=60), MINE)
    assert read(path).n_tokens == 60
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.bin", f"a.bin{COMPANION}"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    class Full(Files):
        def append(self, *_: object) -> int:
            raise OSError(28, "No space left on device")

    path = tmp_path / "a.bin"
    slot_io.write(path, conversation(), MINE)
    with pytest.raises(OSError, match="No space"):
        slot_io.write(path, conversation(n=50), MINE, Full())
    assert read(path).n_tokens == 40
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.bin", f"a.bin{COMPANION}"]


def test_a_temporary_name_is_nobody_elses(tmp_path):
    names = set()
    for _ in range(3):
        with Files().aside(tmp_path / "a.bin", [b"x"]) as new:
            names.add(new.path.name)
    assert len(names) == 3 and all(name.startswith(f"{TEMPORARY}a.bin-") for name in names)
    assert sorted(names) == sorted(file.name for file in tmp_path.iterdir()), (
        "whoever does not rename it keeps it there"
    )


# what a crash leaves


def left(path: Path, age_s: float = 2 * LEFT_S) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<I", 7))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


HOLDER = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"


def test_what_a_crash_left_is_swept_and_what_somebody_writes_is_not(tmp_path):
    folder = tmp_path / namespace_folder("mine")
    old = [
        left(tmp_path / f"{TEMPORARY}a.bin-0123456789abcdef"),
        left(folder / f"{TEMPORARY}b.bin"),
        left(tmp_path / ".tmp-c"),
    ]
    young, other = left(tmp_path / f"{TEMPORARY}young", age_s=1), left(tmp_path / "a.bin")
    link = tmp_path / f"{TEMPORARY}link"
    link.symlink_to(other)
    held = left(tmp_path / f"{TEMPORARY}held")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, held], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        assert sweep_all(tmp_path) == 3
        assert not any(path.exists() for path in old)
        assert young.exists() and other.exists() and link.is_symlink() and held.exists()
        holder.stdin.close()
    assert sweep(tmp_path) == 1 and not held.exists(), "its process is gone"
    assert sweep(tmp_path / "missing") == 0


def test_what_is_being_written_is_held(tmp_path):
    with Files().aside(tmp_path / "a.bin", [b"x"]) as new:
        then = time.time() - 2 * LEFT_S
        os.utime(new.path, (then, then))
        assert sweep(tmp_path) == 0 and new.path.exists()
        with new.path.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert sweep(tmp_path) == 1


def test_saving_sweeps_what_an_earlier_save_left(tmp_path):
    old = left(tmp_path / f"{TEMPORARY}a.bin-0123456789abcdef")
    slot_io.write(tmp_path / "a.bin", conversation(), MINE)
    assert not old.exists()
