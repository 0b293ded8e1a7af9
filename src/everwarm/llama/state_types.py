"""Recurrent states in fewer bytes: half floats, or blocks of 32 bytes with a scale. Lossy, so only on request.

A blob of libllama's is a head and then records: a type, the bytes of a row, the row. Records of floats are packed, and
what has no finite packed form stays as it is. A packed blob says so at its beginning. Pure.

    magic "EWST" · head of libllama's blob · for each record: u8 how · i32 type · u64 bytes of the row · the row, packed
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from everwarm.config import StateType
from everwarm.errors import StateRejected
from everwarm.llama.blobs import RECURRENT_HEAD_BYTES
from everwarm.types import Blob, Place, heap

MAGIC = b"EWST"
BLOCK = 32  # numbers with one scale
_RAW, _F16, _Q8_0 = range(3)
_HOW = {"f16": _F16, "q8_0": _Q8_0}
_RECORD = struct.Struct("<iQ")  # of libllama: type, bytes of the row
_PACKED = struct.Struct("<BiQ")
_HEAD = RECURRENT_HEAD_BYTES + 8  # and whether values are transposed, and the layers
_FLOAT = 0  # GGML_TYPE_F32
_MAX_BYTES = 1 << 40
_MOST_F16 = 65504.0


def is_packed(blob: Blob) -> bool:
    return bytes(blob[: len(MAGIC)]) == MAGIC


def pack(blob: Blob, kind: StateType, place: Place = heap) -> Blob:
    """The same blob where it has another form than expected, or where packing would save nothing."""
    records = list(_records(blob))
    if kind == "f32" or not records:
        return blob
    parts = [np.frombuffer(MAGIC, np.uint8), blob[:_HEAD]]
    for number, row in records:
        how, packed = _packed_row(row, _HOW[kind]) if number == _FLOAT and not len(row) % 4 else (_RAW, row)
        parts += [np.frombuffer(_PACKED.pack(how, number, len(row)), np.uint8), packed]
    size = sum(map(len, parts))
    if size >= len(blob):
        return blob
    out = place(size)
    np.concatenate(parts, out=out)
    return out


def unpack(blob: Blob) -> Blob:
    """libllama's blob again; ``StateRejected``: it is not a packed one."""
    parts = [blob[len(MAGIC) : len(MAGIC) + _HEAD]]
    at = len(MAGIC) + _HEAD
    total = _HEAD
    while at < len(blob):
        if at + _PACKED.size > len(blob):
            raise StateRejected("a packed state ends inside a record")
        how, number, size = _PACKED.unpack_from(blob.data, at)
        at += _PACKED.size
        n_packed = _packed_bytes(how, size)
        total += size
        if n_packed is None or at + n_packed > len(blob) or total > _MAX_BYTES:
            raise StateRejected("a packed state has a record that makes no sense")
        parts += [np.frombuffer(_RECORD.pack(number, size), np.uint8), _row(how, blob[at : at + n_packed], size)]
        at += n_packed
    return np.concatenate(parts)


def _records(blob: Blob) -> Iterator[tuple[int, Blob]]:
    """Types and rows; none where they do not fill the blob exactly."""
    found, at = [], _HEAD
    while at + _RECORD.size <= len(blob):
        number, size = _RECORD.unpack_from(blob.data, at)
        at += _RECORD.size + size
        if at > len(blob):
            return
        found.append((number, blob[at - size : at]))
    if at == len(blob):
        yield from found


def _packed_row(row: Blob, how: int) -> tuple[int, Blob]:
    numbers = np.frombuffer(row.tobytes(), "<f4")
    most = float(np.abs(numbers).max(initial=0.0))
    if not most <= (_MOST_F16 if how == _F16 else 127 * _MOST_F16):  # also where it is not a number
        return _RAW, row
    if how == _F16:
        return how, numbers.astype("<f2").view(np.uint8)
    blocks = np.pad(numbers, (0, -len(numbers) % BLOCK)).reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(axis=1) / 127).astype("<f2")
    steps = scales.astype(np.float32)[:, None]
    whole = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps != 0)
    whole = np.rint(whole).clip(-127, 127).astype(np.int8)
    return how, np.concatenate([scales.view(np.uint8), whole.reshape(-1).view(np.uint8)])


def _packed_bytes(how: int, size: int) -> int | None:
    """None: there is no such row."""
    if size > _MAX_BYTES or (how != _RAW and size % 4):
        return None
    n_blocks = -(-(size // 4) // BLOCK)
    return {_RAW: size, _F16: size // 2, _Q8_0: n_blocks * (2 + BLOCK)}.get(how)


def _row(how: int, packed: Blob, size: int) -> Blob:
    if how == _RAW:
        return packed
    if how == _F16:
        numbers = np.frombuffer(packed.tobytes(), "<f2").astype("<f4")
    else:
        n_blocks = len(packed) // (2 + BLOCK)
        scales = np.frombuffer(packed[: 2 * n_blocks].tobytes(), "<f2").astype(np.float32)
        whole = packed[2 * n_blocks :].view(np.int8).reshape(n_blocks, BLOCK).astype(np.float32)
        numbers = (whole * scales[:, None]).reshape(-1).astype("<f4")
    return numbers.view(np.uint8)[:size]
