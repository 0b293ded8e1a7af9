"""The table of what is on disk: its sums and answers are those of a walk over all objects, whatever comes and goes."""

from __future__ import annotations

import random

from everwarm.state.store.index import IndexedObject, ObjectTable, RememberedObject

N_STEPS = 3000


def kept(rng: random.Random) -> IndexedObject:
    i = rng.randrange(40)
    if rng.random() < 0.5:
        return IndexedObject(f"kv-{i}", "kv", f"k{i}", i, rng.randrange(1, 9), (), 0.0, space=f"s{i % 3}")
    needs = tuple(f"kv-{rng.randrange(40)}" for _ in range(rng.randrange(4)))
    return IndexedObject(f"state-{i}", "state", f"key{i % 20}", i, rng.randrange(1, 9), needs, 0.0, space=f"s{i % 3}")


def test_every_answer_is_that_of_a_walk_over_all_objects() -> None:
    rng, table, plain = random.Random(1), ObjectTable(), dict[str, IndexedObject]()
    unopened = {f"kv-{i}" for i in range(30)} | {f"state-{i}" for i in range(30)}
    table.load([RememberedObject(name, 7, 5, 0.0, 0) for name in sorted(unopened)[::2]], unopened)
    for _ in range(N_STEPS):
        one = kept(rng)
        if rng.random() < 0.6:
            table.add(one)
            plain[one.name] = one
        else:
            assert table.remove(one.name) == plain.pop(one.name, None)
        unopened.discard(one.name)
        table.check()
        there = plain.keys() | unopened
        assert dict(table) == plain and table.n_bytes(plain) == sum(each.size for each in plain.values())
        assert all(table.is_whole(name) == all(n in there for n in plain[name].needs) for name in plain)
        lengths = {k.n_items for k in plain.values() if k.kind == "state" and k.n_items <= 20}
        assert table.lengths(20) - {7} == lengths - {7}
        assert table.names() == there and set(table.unopened()) == unopened
    assert len(unopened) < 5, "most were opened or removed"


def test_what_is_stranded_is_named_once_it_is_and_not_before() -> None:
    table = ObjectTable()
    table.add(IndexedObject("kv-1", "kv", "k", 1, 5, (), 0.0, space="a"))
    assert table.stranded((), None) == "kv-1" and table.stranded(("kv-1",), None) is None
    table.add(IndexedObject("state-1", "state", "s", 1, 5, ("kv-1",), 0.0, space="a"))
    assert table.stranded((), None) is None
    table.remove("kv-1")
    assert table.stranded((), "a") == "state-1" and table.stranded((), "b") is None


def test_a_question_looks_at_what_it_asks_about_however_much_there_is() -> None:
    class Counting(dict[str, IndexedObject]):
        n_looks = 0

        def __getitem__(self, name: str) -> IndexedObject:
            Counting.n_looks += 1
            return super().__getitem__(name)

        def get(self, name: str, default: IndexedObject | None = None) -> IndexedObject | None:  # type: ignore[override]
            Counting.n_looks += 1
            return super().get(name, default)

        def values(self):  # type: ignore[no-untyped-def]
            raise AssertionError("a walk over all objects")

        items = __iter__ = values

    looks = []
    for n in (100, 1000):
        table = ObjectTable()
        for i in range(n):
            table.add(IndexedObject(f"kv-{i}", "kv", f"k{i}", i, 1, (), 0.0))
            table.add(IndexedObject(f"state-{i}", "state", f"s{i}", i % 50, 1, (f"kv-{i}",), 0.0))
        table._kept = Counting(table._kept)
        Counting.n_looks = 0
        assert table.is_whole("state-7") and table.is_there("kv-7") and table.n_bytes(["state-7", "kv-7"]) == 2
        table.add(IndexedObject("state-new", "state", "new", 3, 1, ("kv-3",), 0.0))
        assert table.stranded((), None) is None and table.remove("state-new")
        looks.append(Counting.n_looks)
    assert looks[0] == looks[1] > 0
