"""Where states on disk hang, from the names of their KV alone: compared with what their items say."""

from __future__ import annotations

import random

import pytest

from everwarm.prompt.prompt import Prompt
from everwarm.state.disk_tree import DiskTree, TreePoint, build_disk_tree, id_of
from everwarm.state.lineage import keys, point_of, root_key
from everwarm.state.store.index import IndexedObject
from everwarm.state.store.object import ObjectHeader, name_of

ROOT = root_key("model", "somebody")
SPACE = ROOT[:16]
SIZE = 10


def key_of(items: list[int], n_items: int | None = None) -> str:
    n = len(items) if n_items is None else n_items
    return keys(ROOT, Prompt.of_tokens(items), (n,))[n]


def kv(items: list[int], start: int, stop: int) -> str:
    named = {"start": key_of(items, start), "key": key_of(items, stop)}
    return name_of(ObjectHeader(kind="kv", fingerprint="", n_start=start, n_items=stop, **named))


def state(items: list[int], needs: dict[str, int], space: str = SPACE) -> IndexedObject:
    key = key_of(items)
    name = f"state-{key[:16]}-{key[:32]}.ew"
    return IndexedObject(name, "state", key, len(items), SIZE, tuple(needs), 1.0, 0, space, tuple(needs.values()))


def above(tree: DiskTree) -> dict[int, int | None]:
    return {node.id: node.parent for node in tree.nodes if node.kept is not None}


def grown(
    *states: IndexedObject, in_ram: dict[tuple[str, int], TreePoint] | None = None, roots: dict[str, int] | None = None
) -> DiskTree:
    sizes = {need: SIZE for kept in states for need in kept.needs}
    return build_disk_tree(states, sizes, in_ram or {}, roots or {})


A, B = list(range(100, 160)), [*range(100, 130), *range(500, 540)]  # they part after 30 items
A_20, A_40 = kv(A, 0, 20), kv(A, 20, 40)


def test_a_state_hangs_below_the_deepest_one_that_its_kv_ends_at():
    first, second = state(A[:20], {A_20: 20}), state(A[:40], {A_20: 20, A_40: 40})
    third = state(A[:50], {A_20: 20, A_40: 40, kv(A, 40, 50): 50})
    found = above(grown(third, first, second))
    root = id_of(f"root of {SPACE}")
    ids = [id_of(kept.key) for kept in (first, second, third)]
    assert found == {ids[0]: root, ids[1]: ids[0], ids[2]: ids[1]}
    assert above(grown(third, first))[ids[2]] == ids[0]


def test_where_kv_is_used_in_part_its_end_is_anothers():
    """B goes away from A inside of A's KV: the state at the end of that is none of B's lineage."""
    own = {A_20: 20, A_40: 30, kv(B, 30, 60): 60}
    at_40, branch = state(A[:40], {A_20: 20, A_40: 40}), state(B[:60], own)
    assert above(grown(at_40, branch))[id_of(branch.key)] == id_of(f"root of {SPACE}")
    at_30 = state(A[:30], {A_20: 20, A_40: 30})
    both = above(grown(at_40, branch, at_30))
    assert both[id_of(branch.key)] == both[id_of(at_40.key)] == id_of(at_30.key)
    elsewhere = {kv(A, 0, 30): 30}  # kept once more, in another piece: the beginning of B's own KV says where it is
    assert above(grown(at_40, branch, state(A[:30], elsewhere)))[id_of(branch.key)] == id_of(at_30.key)


def test_it_hangs_at_a_node_in_ram_and_is_not_shown_where_one_is():
    first, second = state(A[:20], {A_20: 20}), state(A[:40], {A_20: 20, A_40: 40})
    spot = {point_of(key_of(A, 20), 20): TreePoint(7, 20, SPACE)}
    tree = grown(first, second, in_ram=spot, roots={SPACE: 5})
    assert above(tree) == {id_of(second.key): 7} and tree.n_children == {7: 1}
    assert [kept.name for kept in tree.below([7])] == [second.name] and not tree.below([8])
    assert above(grown(first, roots={SPACE: 5})) == {id_of(first.key): 5}
    assert above(grown(second, in_ram={point_of(key_of(A, 20), 20): TreePoint(7, 20, "another")})) != {
        id_of(second.key): 7
    }


def test_nobody_hangs_below_a_state_of_another_space_and_nonsense_hangs_at_the_root():
    first = state(A[:20], {A_20: 20}, space="f" * 16)
    second = state(A[:40], {A_20: 20, A_40: 40})
    odd = IndexedObject("state-x-y.ew", "state", "not a key", 50, SIZE, (A_20, "what.ew"), 1.0, 0, SPACE, (20,))
    found = above(grown(first, second, odd))
    assert found[id_of(second.key)] == found[id_of("not a key")] == id_of(f"root of {SPACE}")


@pytest.mark.parametrize("is_read_twice", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_conversations_hang_together_as_their_items_do(seed, is_read_twice):
    """Each state has its KV from cut to cut, some of it in the middle of what an earlier one kept. Where the same items
    were read twice, in other pieces, names say less: a state may hang higher, but never where it does not belong."""
    rng = random.Random(seed)
    texts: list[list[int]] = [[]]
    segments: dict[tuple[int, ...], list[tuple[str, int]]] = {(): []}  # the KV on the way to a point
    states: list[IndexedObject] = []
    for _ in range(30):
        base = rng.choice(texts)
        new = [*base, *(rng.randrange(1000) for _ in range(rng.randint(1, 30)))]
        segments[tuple(new)] = [*segments[tuple(base)], (kv(new, len(base), len(new)), len(new))]
        if is_read_twice and rng.random() < 0.3:
            segments[tuple(new)] = [(kv(new, 0, len(new)), len(new))]
        texts.append(new)
        if rng.random() < 0.3 and len(new) - len(base) > 2:  # a branch begins inside
            at = rng.randrange(len(base) + 1, len(new))
            segments[tuple(new[:at])] = [*segments[tuple(base)], (segments[tuple(new)][-1][0], at)]
            texts.append(new[:at])
        if rng.random() < 0.7:
            states.append(state(new, dict(segments[tuple(new)])))
    items = {id_of(key_of(each)): each for each in texts if each}
    tree = grown(*states)
    for id, parent in above(tree).items():
        mine = items[id]
        ancestors = [o for o in items if o != id and items[o] == mine[: len(items[o])] and o in tree.place]
        deepest = max(ancestors, key=lambda o: len(items[o]), default=id_of(f"root of {SPACE}"))
        assert parent == deepest or (
            is_read_twice and (parent in ancestors or tree.nodes[tree.place[parent]].kept is None)
        )
    order = [node.id for node in tree.nodes]
    assert all(t.parent is None or t.parent in order[:i] for i, t in enumerate(tree.nodes))
    used = {need for kept in states for need in kept.needs}
    assert sum(node.kv_bytes for node in tree.nodes) == SIZE * len(used), "all of it, and nothing twice"
