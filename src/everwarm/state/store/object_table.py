"""What the disk tier holds, in memory: objects by name, which needs which, and sums that are kept up to date.

A change costs as much as the object has needs, and a question as much as it asks about: only ``values`` walks over all
objects. Knows no files, no clock and no lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from everwarm.state.store.index import IndexedObject


class ObjectTable(Mapping[str, IndexedObject]):
    def __init__(self) -> None:
        self._kept: dict[str, IndexedObject] = {}
        self._states: dict[str, str] = {}  # names of states by key
        self._needed_by: dict[str, set[str]] = {}  # also of names that are not here
        self._lengths: Counter[int] = Counter()  # of states, in items
        self._stranded: dict[str, None] = {}  # in the order in which they became so
        self.space_bytes: Counter[str] = Counter()

    def __getitem__(self, name: str) -> IndexedObject:
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    # questions

    def state(self, key: str) -> IndexedObject | None:
        """The whole state at the end of this lineage."""
        name = self._states.get(key)
        return self._kept[name] if name is not None and self.is_whole(name) else None

    def lengths(self, most: int) -> set[int]:
        """At how many items there are states, up to ``most`` of them."""
        return {n_items for n_items in self._lengths if n_items <= most}

    @property
    def n_lengths(self) -> int:
        return len(self._lengths)

    def is_whole(self, name: str) -> bool:
        kept = self._kept.get(name)
        return kept is not None and all(need in self._kept for need in kept.needs)

    def is_needed(self, name: str) -> bool:
        return bool(self._needed_by.get(name))

    def n_bytes(self, names: Iterable[str]) -> int:
        """Of those that are here, each counted once."""
        return sum(self._kept[name].size for name in set(names) if name in self._kept)

    def stranded(self, besides: Collection[str], space: str | None) -> str | None:
        """KV that no state needs, or a state that is not whole; of one space, or of any."""
        for name in self._stranded:
            if name not in besides and space in (None, self._kept[name].space):
                return name
        return None

    # changes

    def add(self, kept: IndexedObject) -> None:
        """In place of one of the same name."""
        self.remove(kept.name)
        self._kept[kept.name] = kept
        self.space_bytes[kept.space] += kept.size
        if kept.kind == "state":
            self._states[kept.key] = kept.name
            self._lengths[kept.n_items] += 1
        for need in kept.needs:
            self._needed_by.setdefault(need, set()).add(kept.name)
        self._judge({kept.name, *kept.needs, *self._needed_by.get(kept.name, ())})

    def remove(self, name: str) -> IndexedObject | None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return None
        self._stranded.pop(name, None)
        self.space_bytes[kept.space] -= kept.size
        if not self.space_bytes[kept.space]:
            del self.space_bytes[kept.space]
        if kept.kind == "state":
            self._remove_state(kept)
        for need in kept.needs:
            users = self._needed_by.get(need, set())
            users.discard(name)
            if not users:
                self._needed_by.pop(need, None)
        self._judge({*kept.needs, *self._needed_by.get(name, ())})
        return kept

    def update(self, kept: IndexedObject) -> None:
        """The same object, used once more."""
        self._kept[kept.name] = kept

    def _remove_state(self, kept: IndexedObject) -> None:
        if self._states.get(kept.key) == kept.name:
            del self._states[kept.key]
        self._lengths[kept.n_items] -= 1
        if not self._lengths[kept.n_items]:
            del self._lengths[kept.n_items]

    def _judge(self, names: set[str]) -> None:
        for name in sorted(names):
            kept = self._kept.get(name)
            if kept is None:
                continue
            is_stranded = not self.is_needed(name) if kept.kind == "kv" else not self.is_whole(name)
            if is_stranded:
                self._stranded.setdefault(name)
            else:
                self._stranded.pop(name, None)

    def check(self) -> None:
        """The sums say what the objects say."""
        sizes: Counter[str] = Counter()
        for kept in self._kept.values():
            sizes[kept.space] += kept.size
        assert +self.space_bytes == +sizes
        states = [kept for kept in self._kept.values() if kept.kind == "state"]
        assert self._lengths == Counter(kept.n_items for kept in states)
        needed = {need for kept in self._kept.values() for need in kept.needs}
        assert self._needed_by.keys() == needed
        lost = {
            k.name
            for k in self._kept.values()
            if (k.name not in needed if k.kind == "kv" else not self.is_whole(k.name))
        }
        assert self._stranded.keys() == lost
