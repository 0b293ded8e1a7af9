"""Pointers: small objects named after prompts, by which a server finds what others keep, without an index. Pure.

    at-<lineage>           a state ends exactly here: looked for at a prompt's own boundaries
    near-<grid>-<lineage>  the latest state in the cell of a grid that begins here: for prompts without boundaries

A pointer names a state and the KV that makes it whole, so that everything can be fetched at once. Names depend on the
fingerprint and the namespace (see ``lineage.root_key``), so no other namespace finds them.

A pointer and an object are authenticated with a keyed BLAKE3 over the object's name, its model's fingerprint, its
size and its head. The head holds the BLAKE3 of every section and all other bytes must be zero, so it covers every
byte without a second pass over them. Without the key no other writer can make one, move one to another name, or pass
it off as another model's.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import blake3
import msgspec

from everwarm.state.store.object import OBJECT_NAME, Damaged, ObjectHeader, ObjectPart, state_name

GRIDS = (64, 512, 4096)
N_PER_GRID = 3  # cells from a prompt's end back
N_DEEPEST, N_FIRST = 12, 4  # boundaries: the ends of conversations, and of system prompts
MAX_POINTER = 1 << 20
MAX_NEEDS = 8192
MAX_OBJECT = 4 << 30  # what one request can write is little more
MAC_BYTES = 32
_LENGTH = struct.Struct("<Q")


class Need(msgspec.Struct, frozen=True, array_like=True):
    name: str
    size: int
    reach: int  # up to which item it is used


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    n_items: int
    size: int
    needs: tuple[Need, ...] = ()

    @property
    def name(self) -> str:
        """The name of the state."""
        return state_name(self.key)

    @property
    def makes_sense(self) -> bool:
        sizes = [self.size, *(need.size for need in self.needs)]
        named = all(OBJECT_NAME.fullmatch(need.name) for need in self.needs)
        right = all(0 < size <= MAX_OBJECT for size in sizes) and len(self.needs) <= MAX_NEEDS
        return right and named and len(self.key) == 64 and self.n_items > 0

    def n_bytes(self, n_kv: int) -> int:
        """Bytes to fetch, if the KV of the first items is here already."""
        return self.size + sum(need.size for need in self.needs if need.reach > n_kv)


@dataclass(frozen=True, slots=True)
class Parcel:
    """KV first, then the state that needs it, and the names of the pointers that are written once everything is there."""

    objects: tuple[tuple[ObjectHeader, Mapping[str, ObjectPart]], ...]
    pointer: Pointer
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(part.nbytes for _, parts in self.objects for part in parts.values())


_decoder = msgspec.json.Decoder(Pointer)


def encode_signed(pointer: Pointer, name: str, mac: Mac) -> bytes:
    body = msgspec.json.encode(pointer)
    return body + mac.of(name, len(body), body)


def decode_signed(data: bytes, name: str, mac: Mac) -> Pointer:
    """``Damaged``: it was not written under this name with this key."""
    body = data[:-MAC_BYTES]
    own = data[-MAC_BYTES:]
    if not mac.is_right(own, name, len(body), body):
        raise Damaged("its MAC is not one of this key, name and model")
    try:
        pointer = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise Damaged(f"it cannot be read: {error}") from None
    if not pointer.makes_sense:
        raise Damaged("it makes no sense")
    return pointer


# names


def grid_points(n_items: int) -> dict[int, int]:
    """Grid → the cell's beginning, for a state that ends there."""
    return {grid: n_items // grid * grid for grid in GRIDS}


def names_at(key: str, cells: Mapping[int, str]) -> list[str]:
    """All the names under which a state that ends at ``key`` is announced; ``cells``: grid → the cell's lineage."""
    return [f"at-{key[:32]}", *(f"near-{grid}-{cell[:32]}" for grid, cell in cells.items())]


def probes(ends: Iterable[int], least: int, most: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Where to look for a state of more than ``least`` and at most ``most`` items: exact points, or (grid, cell) pairs for
    a prompt without boundaries. Bounded, however many there are."""
    known = sorted(set(ends), reverse=True)
    inside = [end for end in known if least < end <= most]
    if known:
        return list(dict.fromkeys((*inside[:N_DEEPEST], *inside[-N_FIRST:]))), []
    tops = ((grid, most // grid * grid) for grid in GRIDS)
    cells = ((grid, top - i * grid) for grid, top in tops for i in range(N_PER_GRID))
    return [], [(grid, at) for grid, at in cells if at >= 0 and at + grid > least + 1]


class Mac:
    def __init__(self, key: bytes, fingerprint: str) -> None:
        """``key`` is used as it is; the keys derived from it for different purposes are independent."""
        self._key = _derived(key, "everwarm remote objects 1: seal")
        self._fingerprint = fingerprint.encode()
        self.key_id = _derived(key, "everwarm remote objects 1: name of the key").hex()[:16]

    def of(self, name: str, size: int, head: bytes | memoryview) -> bytes:
        """The MAC of an object of ``size`` bytes, whose ``head`` holds the digests of all other bytes."""
        hasher = blake3.blake3(key=self._key)
        for part in (name.encode(), self._fingerprint):
            hasher.update(_LENGTH.pack(len(part)) + part)
        hasher.update(_LENGTH.pack(size))
        hasher.update(head)
        return bytes(hasher.digest())

    def is_right(self, mac: bytes, name: str, size: int, head: bytes | memoryview) -> bool:
        return hmac.compare_digest(mac, self.of(name, size, head))


def _derived(key: bytes, purpose: str) -> bytes:
    return bytes(blake3.blake3(key, derive_key_context=purpose).digest())
