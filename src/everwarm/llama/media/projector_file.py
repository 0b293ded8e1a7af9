"""The header of a projector file (an *mmproj*): its keys and tensors, read with bounds before libmtmd sees the file.

Every tensor is known to lie inside the file afterwards. Reads no tensor's numbers and does not know what a projector
needs; ``projector_rules`` does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everwarm.errors import ModelFileError
from everwarm.llama.model import GGUF_MAGIC

MAX_HEADER_BYTES = 1 << 24
MAX_KEYS = 1 << 12
MAX_TENSORS = 1 << 14
MAX_REASON = 300

U32, I32, F32, BOOL, TEXT, LIST = 4, 5, 6, 7, 8, 9  # GGUF's types of values
PLAIN, HALF = 0, 1  # ggml's number formats f32 and f16
NO_WEIGHTS = frozenset({9, 15, 24, 25, 26, 27, 28})  # integers, f64 and formats of intermediate results

SizeOf = Callable[[int], tuple[int, int]]  # of a number format: elements and bytes of a block
Value = int | float | bool | str | tuple[int | float | bool, ...]

_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_N_FORMATS = 43  # ggml's number formats in this build
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Tensor:
    shape: tuple[int, ...]  # in ggml's order, without trailing ones
    format: int


class Projector:
    """Raises ``ModelFileError`` for a file that is none, or not whole."""

    def __init__(self, path: Path, size_of: SizeOf) -> None:
        self.path = path
        self.kinds: dict[str, int] = {}
        self.values: dict[str, Value] = {}
        self.tensors: dict[str, Tensor] = {}
        self._size_of = size_of
        try:
            with path.open("rb") as file:
                self._n_bytes = path.stat().st_size
                self._data = file.read(MAX_HEADER_BYTES)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ModelFileError(f"cannot open projector {path}: {reason}; give the path of a GGUF file") from None
        self._at = 0
        self._read()
        self._data = b""

    # questions

    def bad(self, why: str) -> ModelFileError:
        """Names and values come from the file: one line of what can be printed, and not too long."""
        printable = "".join(letter if letter.isprintable() else "?" for letter in why[:MAX_REASON])
        return ModelFileError(f"{self.path.name} {printable}")

    @property
    def style(self) -> str:
        found = self.values.get("clip.projector_type") or self.values.get("clip.vision.projector_type")
        return found if isinstance(found, str) else ""

    def number(self, key: str, default: int | None = None) -> int:
        found = self.values.get(f"clip.vision.{key}", default)
        if not isinstance(found, int):
            raise self.bad(f"lacks the number clip.vision.{key}")
        return found

    def need(self, name: str, shape: tuple[int, ...], formats: frozenset[int] | None = None) -> None:
        """A tensor of this shape: a vector in f32 and a matrix in any format of weights, unless said otherwise."""
        tensor, shape = self.tensors.get(name), _trimmed(shape)
        if tensor is None:
            raise self.bad(f"lacks the tensor {name}")
        if tensor.shape != shape:
            raise self.bad(f"has {name} with the shape {tensor.shape} where {shape} is needed")
        if formats is None and len(shape) == 1:
            formats = frozenset({PLAIN})
        if tensor.format in NO_WEIGHTS if formats is None else tensor.format not in formats:
            raise self.bad(f"has {name} in the number format {tensor.format}, which cannot be used there")

    def may(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self.tensors:
            self.need(name, shape)

    # reading

    def _read(self) -> None:
        magic = self._data[:4]
        if magic != GGUF_MAGIC:
            raise self.bad(f"is not a GGUF file (it starts with {magic!r}, a GGUF starts with {GGUF_MAGIC!r})")
        self._at = 4
        version = self._one("I")
        if version not in (2, 3):
            raise self.bad(f"has GGUF version {version}; versions 2 and 3 can be read")
        n_tensors, n_keys = self._one("Q"), self._one("Q")
        if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
            raise self.bad(f"claims {n_tensors} tensors and {n_keys} keys; {MAX_TENSORS} and {MAX_KEYS} are believed")
        for _ in range(n_keys):
            self._read_pair()
        places = [self._read_tensor() for _ in range(n_tensors)]
        self._check_places(places)

    def _read_pair(self) -> None:
        key, kind = self._text(), self._one("I")
        if key in self.kinds:
            raise self.bad(f"has the key {key} twice")
        self.kinds[key] = kind
        if kind == TEXT:
            self.values[key] = self._text()
        elif kind == LIST:
            self.values[key] = self._list(self._one("I"), self._one("Q"))
        else:
            self.values[key] = self._unpack(self._letter(kind), 1)[0]

    def _list(self, kind: int, length: int) -> tuple[int | float | bool, ...]:
        """Texts are only walked over."""
        if kind != TEXT:
            return self._unpack(self._letter(kind), length)
        for _ in range(length):  # ends with the data, if not before
            self._take(self._one("Q"))
        return ()

    def _read_tensor(self) -> tuple[str, int, int]:
        """Its name, where it lies and how many bytes it has."""
        name, n_dimensions = self._text(), self._one("I")
        if name in self.tensors:
            raise self.bad(f"has the tensor {name} twice")
        if not 1 <= n_dimensions <= 4:
            raise self.bad(f"has {name} with {n_dimensions} dimensions; 1 to 4 exist")
        shape = tuple(int(n) for n in self._unpack("Q", n_dimensions))
        number_format, offset = self._one("i"), self._one("Q")
        n_per_block, n_bytes = self._size_of(number_format) if 0 <= number_format < _N_FORMATS else (0, 0)
        if n_per_block < 1 or min(shape) < 1 or shape[0] % n_per_block:
            raise self.bad(f"has {name} with the shape {shape} in the number format {number_format}: there is no such")
        self.tensors[name] = Tensor(_trimmed(shape), number_format)
        return name, offset, math.prod(shape) // n_per_block * n_bytes

    def _check_places(self, places: list[tuple[str, int, int]]) -> None:
        step = self.values.get("general.alignment", _ALIGNMENT)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise self.bad(f"has the alignment {step}; it must be a power of two")
        begin, expected = _rounded_up(self._at, step), 0
        for name, offset, n_bytes in places:
            if offset != expected:
                raise self.bad(f"has {name} at {offset} of its data, where {expected} is next")
            if begin + offset + n_bytes > self._n_bytes:
                raise self.bad(f"ends inside {name}, after {self._n_bytes} bytes; copy or download it again")
            expected += _rounded_up(n_bytes, step)

    def _letter(self, kind: int) -> str:
        found = _LETTERS.get(kind)
        if found is None:
            raise self.bad(f"has metadata of the unknown type {kind}")
        return found

    def _text(self) -> str:
        return self._take(self._one("Q")).decode("utf-8", "replace")

    def _one(self, letter: str) -> int:
        return int(self._unpack(letter, 1)[0])

    def _unpack(self, letter: str, n: int) -> tuple[int | float | bool, ...]:
        taken = self._take(n * struct.calcsize(f"<{letter}"))
        return struct.unpack(f"<{n}{letter}", taken)

    def _take(self, n: int) -> bytes:
        if self._at + n > len(self._data):
            if self._n_bytes > len(self._data):
                raise self.bad(f"has a header of more than {MAX_HEADER_BYTES} bytes")
            raise self.bad(f"ends inside its header, after {self._n_bytes} bytes; copy or download it again")
        self._at += n
        return self._data[self._at - n : self._at]


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _rounded_up(n: int, step: int) -> int:
    return -(-n // step) * step
