"""Projector files with something wrong in them: seeded changes of keys, types, tensors and lengths.

A file is taken apart and put together again, so that most mutants are well-formed GGUF files that are wrong in one place
only: those get past a reader and reach what uses them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

_U32, _F32, _BOOL, _TEXT, _LIST = 4, 6, 7, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_NUMBERS = (
    0,
    1,
    2,
    3,
    5,
    7,
    15,
    32,
    63,
    65,
    128,
    255,
    1024,
    8193,
    65536,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
)
_FORMATS = {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}  # bytes of a number, of those without blocks
_ALIGNMENT = 32


@dataclass(frozen=True)
class Pair:
    key: bytes
    kind: int
    value: bytes  # as in the file, behind the type


@dataclass(frozen=True)
class Tensor:
    name: bytes
    shape: tuple[int, ...]
    format: int
    data: bytes


@dataclass(frozen=True)
class File:
    pairs: tuple[Pair, ...]
    tensors: tuple[Tensor, ...]

    def header(self) -> bytes:
        out = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.pairs))
        for pair in self.pairs:
            out += text(pair.key) + struct.pack("<I", pair.kind) + pair.value
        offset = 0
        for tensor in self.tensors:
            dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            out += text(tensor.name) + dimensions + struct.pack("<iQ", tensor.format, offset)
            offset += len(tensor.data) + -len(tensor.data) % _ALIGNMENT
        return out

    def whole(self, header: bytes | None = None) -> bytes:
        header = self.header() if header is None else header
        data = b"".join(tensor.data + bytes(-len(tensor.data) % _ALIGNMENT) for tensor in self.tensors)
        return header + bytes(-len(header) % _ALIGNMENT) + data


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def take_apart(path: Path) -> File:
    raw, at = path.read_bytes(), 24
    n_tensors, n_pairs = struct.unpack_from("<QQ", raw, 8)

    def one(letter: str) -> int:
        nonlocal at
        (found,) = struct.unpack_from(f"<{letter}", raw, at)
        at += struct.calcsize(f"<{letter}")
        return int(found)

    def take(n: int) -> bytes:
        nonlocal at
        at += n
        return raw[at - n : at]

    pairs, table = [], []
    for _ in range(n_pairs):
        key, kind, start = take(one("Q")), one("I"), at
        if kind == _LIST:
            take(_SIZES[one("I")] * one("Q"))
        else:
            take(one("Q") if kind == _TEXT else _SIZES[kind])
        pairs.append(Pair(key, kind, raw[start:at]))
    for _ in range(n_tensors):
        name = take(one("Q"))
        shape = tuple(one("Q") for _ in range(one("I")))
        table.append((name, shape, one("i"), one("Q")))
    at += -at % _ALIGNMENT
    tensors = [
        Tensor(name, shape, kind, raw[at + offset : at + offset + _FORMATS[kind] * prod(shape)])
        for name, shape, kind, offset in table
    ]
    return File(tuple(pairs), tuple(tensors))


Mutation = Callable[[File, random.Random], bytes]


def with_tensor(file: File, i: int, **changes: object) -> File:
    tensor = replace(file.tensors[i], **changes)
    return replace(file, tensors=(*file.tensors[:i], tensor, *file.tensors[i + 1 :]))


def with_pair(file: File, i: int, **changes: object) -> File:
    pair = replace(file.pairs[i], **changes)
    return replace(file, pairs=(*file.pairs[:i], pair, *file.pairs[i + 1 :]))


def _filled(n_bytes: int, data: bytes) -> bytes:
    return (data * (n_bytes // len(data) + 1))[:n_bytes]


def a_tensor_is_missing(file: File, rng: random.Random) -> bytes:
    i = rng.randrange(len(file.tensors))
    return replace(file, tensors=file.tensors[:i] + file.tensors[i + 1 :]).whole()


def a_tensor_has_another_name(file: File, rng: random.Random) -> bytes:
    i = rng.randrange(len(file.tensors))
    name = bytearray(file.tensors[i].name)
    name[rng.randrange(len(name))] = rng.choice(b"abvmx.0129_")
    return with_tensor(file, i, name=bytes(name)).whole()


def two_tensors_have_each_others_names(file: File, rng: random.Random) -> bytes:
    i, j = rng.sample(range(len(file.tensors)), 2)
    one, other = file.tensors[i].name, file.tensors[j].name
    return with_tensor(with_tensor(file, i, name=other), j, name=one).whole()


def a_tensor_has_another_shape(file: File, rng: random.Random) -> bytes:
    """With data of the right length for it."""
    i = rng.randrange(len(file.tensors))
    shape, data = list(file.tensors[i].shape), file.tensors[i].data
    if rng.random() < 0.3:
        shape = shape[::-1]
    else:
        at = rng.randrange(len(shape))
        shape[at] = rng.choice((1, 2, shape[at] - 1, shape[at] + 1, shape[at] * 2, max(1, shape[at] // 2)))
    return with_tensor(file, i, shape=tuple(shape), data=_filled(4 * prod(shape), data)).whole()


def a_tensor_has_more_or_fewer_dimensions(file: File, rng: random.Random) -> bytes:
    i = rng.randrange(len(file.tensors))
    shape = file.tensors[i].shape
    other = rng.choice(((prod(shape),), (*shape, 2), (1, *shape), (shape[0], 1, *shape[1:])))[:4]
    return with_tensor(file, i, shape=other, data=_filled(4 * prod(other), file.tensors[i].data)).whole()


def a_tensor_has_another_format(file: File, rng: random.Random) -> bytes:
    i = rng.randrange(len(file.tensors))
    kind = rng.choice([k for k in _FORMATS if k != file.tensors[i].format])
    n_bytes = _FORMATS[kind] * prod(file.tensors[i].shape)
    return with_tensor(file, i, format=kind, data=_filled(n_bytes, file.tensors[i].data)).whole()


def a_number_is_odd(file: File, rng: random.Random) -> bytes:
    i = rng.choice([i for i, pair in enumerate(file.pairs) if pair.kind == _U32])
    return with_pair(file, i, value=struct.pack("<I", rng.choice(_NUMBERS))).whole()


def a_key_is_missing(file: File, rng: random.Random) -> bytes:
    i = rng.randrange(len(file.pairs))
    return replace(file, pairs=file.pairs[:i] + file.pairs[i + 1 :]).whole()


def a_key_has_another_type(file: File, rng: random.Random) -> bytes:
    values = {
        _U32: struct.pack("<I", 2),
        5: struct.pack("<i", 2),
        _F32: struct.pack("<f", 2),
        _BOOL: b"\x01",
        _TEXT: text(b"two"),
        10: struct.pack("<Q", 2),
        _LIST: struct.pack("<IQ2f", _F32, 2, 1, 2),
    }
    i = rng.randrange(len(file.pairs))
    kind = rng.choice([kind for kind in values if kind != file.pairs[i].kind])
    return with_pair(file, i, kind=kind, value=values[kind]).whole()


def bits_of_the_header_are_flipped(file: File, rng: random.Random) -> bytes:
    header = bytearray(file.header())
    for _ in range(rng.choice((1, 1, 2, 8))):
        header[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
    return file.whole(bytes(header))


def a_word_of_the_header_is_odd(file: File, rng: random.Random) -> bytes:
    header = bytearray(file.header())
    at = rng.randrange(8, len(header) - 8)
    header[at : at + 8] = struct.pack("<Q", rng.choice((*_NUMBERS, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)))
    return file.whole(bytes(header))


def it_ends_too_early(file: File, rng: random.Random) -> bytes:
    whole = file.whole()
    return whole[: rng.choice((rng.randrange(len(file.header())), rng.randrange(len(whole) - _ALIGNMENT)))]


def its_numbers_are_noise(file: File, rng: random.Random) -> bytes:
    i = rng.randrange(len(file.tensors))
    return with_tensor(file, i, data=rng.randbytes(len(file.tensors[i].data))).whole()


MUTATIONS: tuple[Mutation, ...] = (
    a_tensor_is_missing,
    a_tensor_has_another_name,
    two_tensors_have_each_others_names,
    a_tensor_has_another_shape,
    a_tensor_has_more_or_fewer_dimensions,
    a_tensor_has_another_format,
    a_number_is_odd,
    a_key_is_missing,
    a_key_has_another_type,
    bits_of_the_header_are_flipped,
    a_word_of_the_header_is_odd,
    it_ends_too_early,
    its_numbers_are_noise,
)


def mutants(path: Path, n: int, seed: int = 0) -> dict[str, bytes]:
    """``n`` of each kind, by name."""
    file = take_apart(path)
    assert file.whole()[: len(file.header())] == path.read_bytes()[: len(file.header())]
    return {
        f"{mutation.__name__}-{i}": mutation(file, random.Random(f"{seed} {mutation.__name__} {i}"))
        for mutation in MUTATIONS
        for i in range(n)
    }


def minicpm(file: File) -> File:
    """A projector of MiniCPM-V's style, which cuts up large images, out of a tiny Gemma 3 one."""
    rng = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> Tensor:
        numbers = rng.standard_normal(int(np.prod(shape))) * shape[0] ** -0.5
        return Tensor(name.encode(), shape, 0, numbers.astype("<f4").tobytes())

    keys = {b"clip.projector_type": b"resampler"}
    pairs = [replace(p, value=text(keys[p.key])) if p.key in keys else p for p in file.pairs]
    pairs += [
        Pair(b"clip.minicpmv_version", 5, struct.pack("<i", 3)),
        Pair(b"clip.minicpmv_query_num", 4, struct.pack("<I", 8)),
    ]
    tensors = [t for t in file.tensors if not t.name.startswith((b"mm.", b"v.position"))]
    tensors += [tensor("v.position_embd.weight", 64, 70 * 70), tensor("resampler.query", 128, 8)]
    tensors += [tensor("resampler.kv.weight", 64, 128), tensor("resampler.proj.weight", 128, 128)]
    tensors += [tensor("resampler.pos_embed_k", 128, 8)]
    for part in ("q", "k", "v", "out"):
        tensors += [tensor(f"resampler.attn.{part}.weight", 128, 128), tensor(f"resampler.attn.{part}.bias", 128)]
    for part in ("q", "kv", "post"):
        tensors += [tensor(f"resampler.ln_{part}.weight", 128), tensor(f"resampler.ln_{part}.bias", 128)]
    return File(tuple(pairs), tuple(tensors))
