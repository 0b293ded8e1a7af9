"""Hostile blobs for an engine under test: what libllama is given on a restore is replaced, behind every check of ours.

``install`` is named by EVERWARM_TEST_HOOK. In the directory EVERWARM_HOSTILE_DIR the test writes one ``Order`` (none: all
blobs are honest); every blob that was replaced is told in ``log.jsonl``, before libllama sees it and after. What is stored
stays honest. Blobs of other models (``foreign``) and of other tokens (``sibling``) lie there, as ``WHAT.TARGET.NAME``.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgspec
import numpy as np

from everwarm.engine.core import Core
from everwarm.errors import MemoryFault
from everwarm.llama import context as checked
from everwarm.llama.blobs import with_header
from everwarm.llama.model import MemoryKind
from everwarm.types import START, Blob, Mark, SeqId

DIRECTORY = "EVERWARM_HOSTILE_DIR"
ORDER, LOG = "order.json", "log.jsonl"
CHECKS: dict[str, Any] = dict.fromkeys(("describes_end", "describes_cells", "begins_sequence"), lambda *_: True)
HEADER = 8  # magic, sequence
_U32 = 0xFFFFFFFF
T = TypeVar("T")
_TYPES = {0: "<f4", 1: "<f2"}


class Order(msgspec.Struct, frozen=True):
    """Replace what is restored as ``target``, so many times, by a mutation of this kind; the number is its seed."""

    number: int
    kind: str
    target: str  # state, segment (at the start), second (segment behind it) or sequence
    variant: int = 0
    n_times: int = 1


class Entry(msgspec.Struct, frozen=True):
    """``said``: given (to libllama), then accepted, refused or failed; nothing after given: the process died."""

    number: int
    message: str
    why: str = ""


# anatomy


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    at: int
    size: int


@dataclass(slots=True)
class Anatomy:
    """Where in a blob everything lies."""

    fields: list[Field] = field(default_factory=list)
    bodies: list[tuple[int, int, str]] = field(default_factory=list)  # offset, bytes, type of the numbers
    sections: list[tuple[int, int]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(f.name for f in self.fields))

    def named(self, *names: str) -> list[Field]:
        return [f for f in self.fields if f.name in names]


_STATE = {
    MemoryKind.HYBRID: "r",
    MemoryKind.RECURRENT: "r",
    MemoryKind.WINDOW: "a",
}  # sections of attention or recurrent memory
_WHOLE = {MemoryKind.HYBRID: "ar", MemoryKind.RECURRENT: "r", MemoryKind.WINDOW: "aa", MemoryKind.ATTENTION: "a"}


class _Dissection:
    """Walks through an honest blob once. Written from the format; shares no code with the product."""

    def __init__(self, blob: Blob, sections: str) -> None:
        self._blob = blob
        self._at = 0
        self.found = Anatomy()
        self._word("magic")
        self._word("sequence")
        for section in sections:
            start = self._at
            self._attention() if section == "a" else self._recurrent()
            self.found.sections.append((start, self._at))
        assert self._at == len(blob), f"{self._at} of {len(blob)} bytes were understood"

    def _word(self, name: str, size: int = 4) -> int:
        self.found.fields.append(Field(name, self._at, size))
        self._at += size
        return int.from_bytes(self._blob[self._at - size : self._at].tobytes(), "little")

    def _attention(self) -> None:
        self._word("streams")
        n_cells = self._word("cells")
        if not n_cells:
            return
        n_extra = 3 if self._has_extra(n_cells) else 0
        for _ in range(n_cells):
            for name in ("position", "sequences", *["extra"] * n_extra, "cell-sequence"):
                self._word(name)
        _, n_layers, *_ = map(self._word, ("transposed", "layers", "rotation", "rotation"))
        for _ in range(2 * n_layers):
            self._rows(n_cells)

    def _has_extra(self, n_cells: int) -> bool:
        """M-RoPE models say more of a cell."""
        short = self._blob[self._at : self._at + 12 * n_cells].view("<u4").reshape(n_cells, 3)
        return bool((short[:, 1] != 1).any() or (short[:, 2] != short[0, 2]).any())

    def _recurrent(self) -> None:
        n_cells = self._word("cells")
        for name in (*("position", "sequences") * n_cells, "transposed", "layers"):
            self._word(name)
        while self._at < len(self._blob):
            self._rows(n_cells)

    def _rows(self, n: int) -> None:
        kind, size = self._word("type"), self._word("row", 8) * n
        if size:
            self.found.bodies.append((self._at, size, _TYPES[kind]))
        self._at += size


# mutations


@dataclass(frozen=True, slots=True)
class Subject:
    """An honest blob, what is known of it, and how to choose: variants go through all choices, the rest is seeded."""

    blob: Blob
    anatomy: Anatomy
    directory: Path
    target: str
    variant: int
    rng: np.random.Generator

    def put(self, *changes: tuple[Field, int]) -> Blob:
        """A copy with other values in some fields."""
        changed = self.blob.copy()
        for place, value in changes:
            data = (value & (1 << 8 * place.size) - 1).to_bytes(place.size, "little")
            changed[place.at : place.at + place.size] = np.frombuffer(data, np.uint8)
        return changed

    def value(self, place: Field) -> int:
        return int.from_bytes(self.blob[place.at : place.at + place.size].tobytes(), "little")

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.variant % len(choices)]

    def any_of(self, choices: Sequence[T]) -> T:
        return choices[int(self.rng.integers(len(choices)))]

    def noise(self, n: int) -> Blob:
        return self.rng.integers(0, 256, n).astype(np.uint8)


Mutation = Callable[[Subject], Blob]


def word(*names: str, to: Callable[[int], tuple[int, ...]]) -> Mutation:
    """One word of these names becomes another."""

    def mutate(s: Subject) -> Blob:
        place = s.any_of(s.anatomy.named(*names))
        return s.put((place, s.pick(to(s.value(place)))))

    return mutate


def flipped_bits(s: Subject) -> Blob:
    """In words of one name; another variant takes another name."""
    places = s.anatomy.named(s.pick(s.anatomy.names))
    changed = s.blob.copy()
    for _ in range(int(s.rng.integers(1, 4))):
        place = s.any_of(places)
        changed[place.at + int(s.rng.integers(place.size))] ^= 1 << int(s.rng.integers(8))
    return changed


def truncated(s: Subject) -> Blob:
    """Before, in, or behind a word of one name, or in the middle of what follows it."""
    place = s.any_of(s.anatomy.named(s.pick(s.anatomy.names)))
    at = place.at + s.any_of((0, 1, place.size, place.size + 1, place.size + 100))
    return s.blob[: min(max(1, at), len(s.blob) - 1)].copy()


def negative_positions(s: Subject) -> Blob:
    places, value = s.anatomy.named("position"), s.pick((-1, -2, -100, -(1 << 31)))
    return s.put(*((place, value) for place in (places if s.rng.integers(2) else places[:1])))


def moved_positions(s: Subject) -> Blob:
    """Later or earlier, all the same, far apart, or the wrong way round."""
    places = s.anatomy.named("position")
    values = [s.value(place) for place in places]
    moved = [[v + by for v in values] for by in (-1, 1, 40, 5000, 1 << 30)]
    ways = [*moved, [values[-1]] * len(values), [v * 1000 for v in values], values[::-1]]
    return s.put(*zip(places, s.pick(ways), strict=True))


def from_file(what: str) -> Mutation:
    def mutate(s: Subject) -> Blob:
        return np.fromfile(s.pick(sorted(s.directory.glob(f"{what}.{s.target}.*"))), np.uint8)

    return mutate


def swapped(s: Subject) -> Blob:
    """Sections in another order, or two bodies in each other's place."""
    changed = s.blob.copy()
    if len(s.anatomy.sections) > 1 and s.variant % 2:
        return np.concatenate([changed[:HEADER], *(changed[i:j] for i, j in reversed(s.anatomy.sections))])
    (a, n, _), (b, m, _) = s.any_of(s.anatomy.bodies), s.any_of(s.anatomy.bodies)
    n = min(n, m)
    changed[a : a + n], changed[b : b + n] = s.blob[b : b + n], s.blob[a : a + n]
    return changed


def numbers(*ways: Callable[[Subject, np.ndarray], Any]) -> Mutation:
    """Other numbers in all bodies, in one of them, or one in all of them."""

    def mutate(s: Subject) -> Blob:
        way, changed, how = s.pick(ways), s.blob.copy(), int(s.rng.integers(3))
        for at, n, kind in [s.any_of(s.anatomy.bodies)] if how == 1 else s.anatomy.bodies:
            body = changed[at : at + n].copy().view(kind)
            body[: 1 if how == 2 else None] = way(s, body)[: 1 if how == 2 else None]
            changed[at : at + n] = body.view(np.uint8)
        return changed

    return mutate


def random_bytes(s: Subject) -> Blob:
    n = s.pick((8, 100, 5000, len(s.blob), 300_000))
    return np.concatenate([s.blob[: s.any_of((0, 4, HEADER, HEADER + 8))], s.noise(n)])


def other_sequence(s: Subject) -> Blob:
    names = [name for name in ("sequence", "cell-sequence") if name in s.anatomy.names]
    value = s.pick((-1, 1, 3, 255, 1 << 30))
    return s.put(*((place, value) for place in s.anatomy.named(s.any_of(names))))


def no_cells(s: Subject) -> Blob:
    """A well-formed blob of nothing: who believes it has forgotten everything."""
    kept = [s.blob[:HEADER]]
    for start, stop in s.anatomy.sections:
        words = [f for f in s.anatomy.fields if start <= f.at < stop]
        if words[0].name == "streams":
            kept.append(np.array([1, 0], "<u4").view(np.uint8))
            continue
        shape = [f for f in words if f.name in ("transposed", "layers", "type", "row")]
        kept += [np.zeros(4, np.uint8), *(s.blob[f.at : f.at + f.size] for f in shape)]
    return np.concatenate(kept)


def repeated_cells(s: Subject) -> Blob:
    """Well-formed but for one thing: the last section with cells has each of them several times."""
    count = next(f for f in reversed(s.anatomy.named("cells")) if s.value(f))
    at = next(f.at for f in s.anatomy.named("transposed") if f.at > count.at)
    n_times = 2 + s.variant
    kept = [s.blob[: count.at], np.array([n_times * s.value(count)], "<u4").view(np.uint8)]
    kept += [s.blob[count.at + 4 : at]] * n_times
    for start, n, _ in (body for body in s.anatomy.bodies if body[0] > at):
        kept += [s.blob[at:start], *[s.blob[start : start + n]] * n_times]
        at = start + n
    return np.concatenate([*kept, s.blob[at:]])


MUTATIONS: dict[str, Mutation] = {
    "repeated cells": repeated_cells,
    "wild numbers": numbers(
        lambda s, body: s.rng.normal(size=len(body)),
        lambda s, body: -3 * body[::-1],
        lambda s, body: np.full(len(body), np.finfo(body.dtype).max),
        lambda s, body: np.zeros(len(body)),
    ),
    "no numbers": numbers(
        lambda s, body: np.full(len(body), np.nan),
        lambda s, body: np.full(len(body), np.inf),
        lambda s, body: np.full(len(body), -np.inf),
    ),
    "flipped bits": flipped_bits,
    "negative positions": negative_positions,
    "truncated": truncated,
    "huge count": word("cells", "streams", "sequences", to=lambda v: (0x7FFFFFFF, _U32, 4096, 1 << 31, 4097, 255)),
    "other model": from_file("foreign"),
    "moved positions": moved_positions,
    "wrong rows": word("row", to=lambda v: (0, v + 1, v - 1, 2 * v, v // 2, 1 << 63, v << 32)),
    "other tokens": from_file("sibling"),
    "no cells": no_cells,
    "random bytes": random_bytes,
    "other count": word("cells", to=lambda v: (v + 1, v - 1, v + 2, v + 16, 0, 2)),
    "swapped": swapped,
    "almost nothing": lambda s: s.blob[: s.pick((0, 4, 8, 1))].copy(),
    "wrong layers": word("layers", to=lambda v: (v + 1, 0, v - 1, 2 * v, _U32)),
    "extended": lambda s: np.concatenate([s.blob, s.pick((s.noise(1), s.noise(4096), s.blob[-4:], s.blob[HEADER:]))]),
    "other sequence": other_sequence,
    "wrong types": word("type", "transposed", to=lambda v: (1 - v, 2, 8, 39, 40, _U32)),
    "other owners": word("sequences", to=lambda v: (1 - v, 2, 3, _U32)),
}


# the hook


class Hostility:
    """Stands before a context's three ways of bringing something back."""

    def __init__(self, core: Core, directory: Path) -> None:
        self._directory = directory
        self._context = context = core.context
        self._restore, self._splice, self._sequence = context.restore, context.splice_segment, context.restore_sequence
        self._log = (directory / LOG).open("ab", buffering=0)

    def restore(self, seq: SeqId, blob: Blob, mark: Mark, *, clean: bool) -> None:
        with self._instead("state") as order:
            hostile = blob if order is None else self._hostile(blob, order)
            self._restore(seq, hostile, mark, clean=clean)

    def splice_segment(self, seq: SeqId, blob: Blob, start: Mark, stop: Mark, *, n_cells: int, clean: bool) -> None:
        with self._instead("segment" if start == START else "second") as order:
            hostile = blob if order is None else self._hostile(blob, order)
            self._splice(seq, hostile, start, stop, n_cells=n_cells, clean=clean)

    def restore_sequence(self, seq: SeqId, data: Blob, mark: Mark, head: Blob | None = None) -> int:
        with self._instead("sequence") as order:
            if order is None:
                return self._sequence(seq, data, mark, head)
            hostile = self._hostile(with_header(data, seq), order)
            with mock.patch.object(checked, "with_header", return_value=hostile):
                return self._sequence(seq, data, mark, head)

    def _order(self, target: str) -> Order | None:
        try:
            order = msgspec.json.decode((self._directory / ORDER).read_bytes(), type=Order)
        except FileNotFoundError:
            return None
        used = sum(entry.message == "given" and entry.number == order.number for entry in read_log(self._directory))
        return order if order.target == target and used < order.n_times else None

    def _hostile(self, blob: Blob, order: Order) -> Blob:
        sections = (_STATE if order.target == "state" else _WHOLE)[self._context.kind]
        anatomy = _Dissection(blob, sections).found
        rng = np.random.default_rng(order.number)
        return MUTATIONS[order.kind](Subject(blob, anatomy, self._directory, order.target, order.variant, rng))

    @contextlib.contextmanager
    def _instead(self, target: str) -> Iterator[Order | None]:
        """Tells what becomes of a hostile blob, and lets none of our checks see it."""
        order = self._order(target)
        if order is None:
            return (yield None)
        self._say(order, "given")
        try:
            with mock.patch.multiple(checked, **CHECKS):
                yield order
        except MemoryFault as error:
            self._say(order, "refused", str(error))
            raise
        except BaseException as error:
            self._say(order, "failed", repr(error))
            raise
        self._say(order, "accepted")

    def _say(self, order: Order, message: str, why: str = "") -> None:
        self._log.write(msgspec.json.encode(Entry(order.number, message, why)) + b"\n")


def read_log(directory: Path) -> list[Entry]:
    path = directory / LOG
    return [msgspec.json.decode(line, type=Entry) for line in path.read_bytes().splitlines()] if path.exists() else []


def install(core: Core) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hostility: Any = Hostility(core, Path(os.environ[DIRECTORY]))
    for name in ("restore", "splice_segment", "restore_sequence"):
        setattr(core.context, name, getattr(hostility, name))
