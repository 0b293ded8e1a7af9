"""What is on disk, in memory: objects by name, which needs which, and sums that are kept up to date.

As a mapping it has the objects whose headers were read. Of files that are *unopened* it knows only what the index
remembers: they count as there, but what they need is not known, so nothing may be evicted while there are any.

The cost of a change grows with the object's needs, that of a lookup with its result: only ``values`` walks over all
objects.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping

from everwarm.state.store.index import IndexedObject, RememberedObject

_FEW = 64
_STATE = "state-"


class ObjectTable(Mapping[str, IndexedObject]):
    def __init__(self) -> None:
        self._kept: dict[str, IndexedObject] = {}
        self._unopened: dict[str, RememberedObject | None] = {}  # None: the index says nothing of it
        self._n_users: Counter[str] = Counter()  # how many objects need each name, also names that are not here
        self._users: dict[str, set[str]] | None = None  # which these are; found when it is asked for
        self._lengths: Counter[int] = Counter()  # of states, in items
        self._stranded: OrderedDict[str, None] = OrderedDict()  # in the order in which they became so
        self._stranded_in: dict[str, OrderedDict[str, None]] = {}  # by space
        self.total_bytes = 0  # also of unopened files, as far as the index knows them
        self.space_bytes: Counter[str] = Counter()
        self._by_size: list[tuple[int, str]] = []  # spaces, the largest first; also sizes that they had before

    def __getitem__(self, name: str) -> IndexedObject:
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    # questions

    def is_there(self, name: str) -> bool:
        return name in self._kept or name in self._unopened

    def is_unopened(self, name: str) -> bool:
        return name in self._unopened

    def unopened(self) -> list[str]:
        return list(self._unopened)

    def remembered(self, name: str) -> RememberedObject | None:
        """What the index says of an unopened file."""
        return self._unopened.get(name)

    def names(self) -> frozenset[str]:
        return frozenset(self._kept.keys() | self._unopened.keys())

    def lengths(self, most: int) -> set[int]:
        """The lengths of states in items, up to ``most``; also of unopened ones."""
        return {n_items for n_items in self._lengths if n_items <= most}

    @property
    def n_lengths(self) -> int:
        return len(self._lengths)

    def is_whole(self, name: str) -> bool:
        """Whether an object was opened, and everything that it needs is there."""
        kept = self._kept.get(name)
        return kept is not None and all(map(self.is_there, kept.needs))

    def n_bytes(self, names: Iterable[str]) -> int:
        """Bytes of those objects that are here, each counted once."""
        found = (self._kept.get(name) or self._unopened.get(name) for name in set(names))
        return sum(each.size for each in found if each is not None)

    def stranded(self, besides: Collection[str], space: str | None) -> str | None:
        """KV that no state needs, or a state that is not whole; of one space, or of any."""
        names = self._stranded if space is None else self._stranded_in.get(space, ())
        return next((name for name in names if name not in besides), None)

    def largest_space(self) -> dict[str, int]:
        """The space with the most bytes, and how many; empty if there is nothing."""
        heap = self._by_size
        while heap and self.space_bytes.get(heap[0][1]) != -heap[0][0]:
            heapq.heappop(heap)
        return {space: -size for size, space in heap[:1]}

    # changes

    def load(self, objects: Iterable[RememberedObject], names: Iterable[str]) -> None:
        """Adds unopened files to an empty table: what the index remembers, and the names of all."""
        known = {each.name: each for each in objects}
        self._unopened = {**dict.fromkeys(names), **known}
        self._lengths = Counter([each.n_items for name, each in known.items() if name.startswith(_STATE)])
        self.total_bytes = sum([each.size for each in known.values()])

    def add(self, kept: IndexedObject) -> None:
        """Adds an object, in place of one of the same name."""
        self._remove_unopened(kept.name)
        self.remove(kept.name)
        self._kept[kept.name] = kept
        self._count(kept.space, kept.size)
        if kept.kind == "state":
            self._lengths[kept.n_items] += 1
        for need in kept.needs:
            self._n_users[need] += 1
            if self._users is not None:
                self._users.setdefault(need, set()).add(kept.name)
        self._judge({kept.name, *kept.needs, *self._users_of(kept.name)})

    def remove(self, name: str) -> IndexedObject | None:
        kept = self._kept.pop(name, None)
        if kept is None:
            self._remove_unopened(name)
            self._judge(set(self._users_of(name)))
            return None
        self._unstrand(kept)
        self._count(kept.space, -kept.size)
        if kept.kind == "state":
            self._remove_length(kept.n_items)
        for need in kept.needs:
            self._n_users[need] -= 1
            if not self._n_users[need]:
                del self._n_users[need]
            if self._users is not None:
                self._users[need].discard(name)
        self._judge({*kept.needs, *self._users_of(name)})
        return kept

    def update(self, kept: IndexedObject) -> None:
        """The same object, used once more."""
        self._kept[kept.name] = kept

    def _remove_unopened(self, name: str) -> None:
        remembered = self._unopened.pop(name, None)
        if not self._unopened:
            self._unopened = {}  # a dict that was large is slow to walk over, though it is empty
        if remembered is not None:
            self.total_bytes -= remembered.size
            if _is_state(name):
                self._remove_length(remembered.n_items)

    def _remove_length(self, n_items: int) -> None:
        self._lengths[n_items] -= 1
        if not self._lengths[n_items]:
            del self._lengths[n_items]

    def _count(self, space: str, n_bytes: int) -> None:
        self.total_bytes += n_bytes
        self.space_bytes[space] += n_bytes
        if not self.space_bytes[space]:
            del self.space_bytes[space]
        else:
            heapq.heappush(self._by_size, (-self.space_bytes[space], space))
        if len(self._by_size) > 2 * len(self.space_bytes) + _FEW:
            self._sort_spaces()

    def _sort_spaces(self) -> None:
        self._by_size = [(-size, space) for space, size in self.space_bytes.items()]
        heapq.heapify(self._by_size)

    def _users_of(self, name: str) -> Collection[str]:
        """The objects that need this one. Seldom asked: most KV comes before its first state and goes after its last."""
        if not self._n_users.get(name):
            return ()
        if self._users is None:
            self._users = {}
            for kept in self._kept.values():
                for need in kept.needs:
                    self._users.setdefault(need, set()).add(kept.name)
        return self._users.get(name, ())

    def _judge(self, names: set[str]) -> None:
        for name in sorted(names):
            kept = self._kept.get(name)
            if kept is not None:
                if self._is_stranded(kept):
                    self._strand(kept)
                else:
                    self._unstrand(kept)

    def _is_stranded(self, kept: IndexedObject) -> bool:
        return kept.name not in self._n_users if kept.kind == "kv" else not self.is_whole(kept.name)

    def _strand(self, kept: IndexedObject) -> None:
        self._stranded.setdefault(kept.name)
        self._stranded_in.setdefault(kept.space, OrderedDict()).setdefault(kept.name)

    def _unstrand(self, kept: IndexedObject) -> None:
        self._stranded.pop(kept.name, None)
        inside = self._stranded_in.get(kept.space)
        if inside is not None:
            inside.pop(kept.name, None)
            if not inside:
                del self._stranded_in[kept.space]

    def check(self) -> None:
        """Checks that the sums match the objects."""
        sizes: Counter[str] = Counter()
        for kept in self._kept.values():
            sizes[kept.space] += kept.size
        known = [each for each in self._unopened.values() if each is not None]
        assert +self.space_bytes == +sizes and self.total_bytes == sizes.total() + sum(each.size for each in known)
        lengths = [kept.n_items for kept in self._kept.values() if kept.kind == "state"]
        lengths += [each.n_items for each in known if _is_state(each.name)]
        assert self._lengths == Counter(lengths)
        assert not self._kept.keys() & self._unopened.keys()
        needed = {need for kept in self._kept.values() for need in kept.needs}
        assert self._n_users == Counter(need for kept in self._kept.values() for need in kept.needs)
        lost = {
            k.name
            for k in self._kept.values()
            if (k.name not in needed if k.kind == "kv" else not self.is_whole(k.name))
        }
        assert self._stranded.keys() == lost == {name for names in self._stranded_in.values() for name in names}
        assert list(self.largest_space().values()) == sorted(sizes.values())[-1:]


def _is_state(name: str) -> bool:
    return name.startswith(_STATE)
