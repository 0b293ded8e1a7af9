"""Freeing space: what stays is whole, within what was asked for, and a running engine is left alone."""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everwarm.errors import BadRequest
from everwarm.state.store.disk import Disk
from everwarm.state.store.folder_meta import FolderAbout, folder_name, write_about
from everwarm.state.store.object import SUFFIX
from everwarm.state.tools import inventory
from everwarm.state.tools.inventory import choose_to_prune, read_folder
from support.crash_writer import FINGERPRINT, STEP, Thing, conversation, in_memory, kv, state

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
PLENTY = 1 << 30
NOW = 1e9


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory() as path:
        yield Path(path) / folder_name(FINGERPRINT)


def fill(place: Path, *things: Thing) -> None:
    with contextlib.closing(Disk(place, PLENTY)) as disk:
        assert all(thing.put(disk) for thing in things)


def use(place: Path, ages: dict[str, float]) -> None:
    """Say when things were last used, where no index does."""
    for suffix in ("", "-wal", "-shm"):
        (place / f"index.sqlite{suffix}").unlink(missing_ok=True)
    for path in place.glob(f"*{SUFFIX}"):
        at = NOW - ages.get(path.name, 0.0)
        os.utime(path, (at, at))


def pruned(place: Path, **wish: Any) -> set[str]:
    """What is left."""
    with inventory.holding([place]):
        inventory.remove_objects(choose_to_prune([read_folder(place)], NOW, **wish))
    return {path.name for path in place.glob(f"*{SUFFIX}")}


def test_a_state_goes_with_the_kv_that_only_it_needs(place):
    first, second, deep = conversation(1, n_kv=2)
    shallow = state(1, needs=[first.name])
    other = conversation(2)
    fill(place, first, second, deep, shallow, *other)
    use(place, {deep.name: 1000.0, other[-1].name: 1000.0})
    assert pruned(place, used_since=NOW - 500) == {first.name, shallow.name}


def test_nothing_that_is_in_use_goes(place):
    fill(place, *conversation(1), *conversation(2))
    use(place, {})
    assert len(pruned(place, keep_bytes=PLENTY, used_since=NOW - 500)) == 4


def test_what_nobody_can_use_goes_first(place):
    alone, (_, broken) = kv(7), conversation(8)
    fill(place, alone, broken, *conversation(1))
    damaged = place / kv(9).name
    damaged.write_bytes(b"nothing")
    unreadable = place / kv(10).name
    unreadable.symlink_to(damaged)
    assert pruned(place, keep_bytes=PLENTY) == {
        *(thing.name for thing in conversation(1)),
        unreadable.name,
    }


def test_what_saves_least_time_for_its_size_and_age_goes_first(place):
    old, long, large = conversation(1), conversation(2, n_kv=3), conversation(3, n_bytes=50_000)
    fill(place, *old, *long, *large)
    use(place, {old[-1].name: 1e6})
    sizes = [sum(thing.size for thing in things) for things in (old, long, large)]
    assert pruned(place, keep_bytes=sum(sizes) - 1) == {thing.name for thing in (*long, *large)}
    assert pruned(place, keep_bytes=sizes[1] + sizes[2] - 1) == {thing.name for thing in long}
    assert pruned(place, keep_bytes=0) == set()


def test_a_slow_models_states_are_worth_more(place):
    other = "another model"
    places = {FINGERPRINT: place, other: place.with_name(folder_name(other))}
    for fingerprint, speed in ((FINGERPRINT, 0.001), (other, 0.1)):
        fill(places[fingerprint], *conversation(1 if fingerprint == FINGERPRINT else 2))
        use(places[fingerprint], {})
        write_about(places[fingerprint], FolderAbout(fingerprint=fingerprint, seconds_per_token=speed))
    total = sum(thing.size for i in (1, 2) for thing in conversation(i))
    doomed = choose_to_prune([read_folder(path) for path in places.values()], NOW, keep_bytes=total - 1)
    assert {item.path.parent for item in doomed} == {place}


def test_states_go_before_the_kv_they_need(place):
    fill(place, *conversation(1, n_kv=3), *conversation(2))
    doomed = choose_to_prune([read_folder(place)], NOW, keep_bytes=0)
    assert [item.is_state for item in doomed] == [True, True, False, False, False, False]


@pytest.mark.parametrize("seed", range(400 if CAMPAIGN else 40))
def test_random_directories_stay_whole_and_within_what_is_kept(place, seed):
    rng = random.Random(seed)
    things: dict[str, Thing] = {}
    for i in range(rng.randint(1, 6)):
        segments = [kv(i, at, rng.choice((100, 5000, 30_000))) for at in range(0, rng.randint(1, 4) * STEP, STEP)]
        for n in rng.sample(range(1, len(segments) + 1), rng.randint(1, len(segments))):
            made = state(i, n * STEP, needs=[thing.name for thing in segments[:n]])
            things[made.name] = made
        things |= {thing.name: thing for thing in segments if rng.random() < 0.95}
    fill(place, *things.values())
    use(place, {name: rng.uniform(0, 1e5) for name in things})
    ages = {path.name: NOW - path.stat().st_mtime for path in place.glob(f"*{SUFFIX}")}
    keep, oldest = rng.choice((None, rng.randint(0, 300_000))), rng.choice((None, rng.uniform(0, 1e5)))
    left = pruned(place, keep_bytes=keep, used_since=None if oldest is None else NOW - oldest)
    states = [things[name] for name in left if name.startswith("state")]
    needed = {need for thing in states for need in thing.header.needs}
    assert needed == {name for name in left if name.startswith("kv")}, "KV without a state, or a state without its KV"
    assert keep is None or sum(things[name].size for name in left) <= keep
    assert oldest is None or all(ages[thing.name] <= oldest for thing in states)
    if keep is None:
        young = {n for n, t in things.items() if n.startswith("state") and (oldest is None or ages[n] <= oldest)}
        assert {thing.name for thing in states} == {n for n in young if set(things[n].header.needs) <= set(things)}
    with contextlib.closing(Disk(place, PLENTY)) as disk:
        disk.settle()
        assert disk.names() == left == {name for name in disk.names() if disk.has(name)}


def test_a_directory_that_an_engine_holds_is_refused_with_a_sentence(place):
    held = contextlib.closing(Disk(place, PLENTY))
    with held, pytest.raises(BadRequest, match="running server"), inventory.holding([place]):
        raise AssertionError("it was held")


def test_while_it_is_held_no_engine_opens_it(place):
    fill(place, *conversation(1))
    with inventory.holding([place]), pytest.raises(Exception, match="another Everwarm"):
        Disk(place, PLENTY)
    Disk(place, PLENTY).close()


def test_a_folder_is_removed_whole_and_only_it(place):
    fill(place, *conversation(1))
    beside = place.with_name("beside")
    beside.mkdir()
    (place / "quarantine").mkdir()
    (place / "link").symlink_to(beside)
    left = place.with_name(f".tmp-{place.name}")
    left.mkdir()  # of a removal that was interrupted
    assert inventory.leftovers(place.parent) == [left] and inventory.folder_size(place) > 10_000
    with inventory.holding([place]):
        inventory.remove_folder(place)
    assert [path.name for path in place.parent.iterdir()] == ["beside"]
