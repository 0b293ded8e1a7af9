"""Reads the metadata at the front of a GGUF file, with bounds: the file is untrusted.

Reads numbers, texts and lists of numbers, walks over the vocabulary without keeping it, and checks that the file is long
enough for the tensors it announces. Never maps or reads a tensor. Does not know what the numbers mean.
"""

from __future__ import annotations

import functools
import math
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from everwarm.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_PAIRS = 1 << 12
MAX_TENSORS = 1 << 18
MAX_KEY_BYTES = 1 << 10
MAX_TEXT_BYTES = 1 << 12  # longer ones (templates, licences) are walked over
MAX_LONG_TEXT_BYTES = 1 << 20  # of one that is requested by its name
MAX_LIST = 1 << 10  # one number per layer, at most; longer ones are walked over
MAX_KEPT = 1 << 17  # characters and numbers, of all values together
MAX_ELEMENTS = 1 << 21  # of all lists of texts together: vocabularies and merges
MAX_BYTES = 1 << 28  # of the whole header
MAX_DIMENSIONS = 4

_TEXT = 8
_LIST = 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_CHUNK = 1 << 16

T = TypeVar("T")
Scalar = int | float | bool | str
Value = Scalar | tuple[int | float | bool, ...]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """``lengths`` has the lists that were too long to keep, or hold texts."""

    values: Mapping[str, Value]
    lengths: Mapping[str, int]
    n_tensors: int
    n_params: int = 0  # numbers in this file's tensors

    @property
    def architecture(self) -> str:
        return self.text("general.architecture") or ""

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """A whole number that is not negative, of this architecture."""
        value = self.values.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int) and value >= 0 else None

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """A list of them, one per layer."""
        value = self.values.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple) and all(isinstance(n, int) and n >= 0 for n in value):
            return tuple(int(n) for n in value)
        return None


def read_header(path: Path) -> GgufHeader:
    """The header of a file as it is now; what was read once is remembered until the file changes."""
    return _read_checked(path, _read_cached)


def read_text(path: Path, key: str) -> str | None:
    """One text that may be too long to be kept with every header, such as a chat template; remembered as well."""
    return _read_checked(path, functools.partial(_read_text_cached, key))


def _read_checked(path: Path, read: Callable[[Path, int, int, int], T]) -> T:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
            raise ModelFileError(f"{path.name} is not a file")
        return read(path, found.st_size, found.st_mtime_ns, found.st_ino)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ModelFileError(f"{path.name} cannot be read: {reason}") from None


@functools.lru_cache(maxsize=1024)
def _read_cached(path: Path, n_bytes: int, _mtime_ns: int, _inode: int) -> GgufHeader:
    with path.open("rb", buffering=0) as file:
        return _Reader(file, path.name, n_bytes).header()


@functools.lru_cache(maxsize=64)
def _read_text_cached(key: str, path: Path, n_bytes: int, _mtime_ns: int, _inode: int) -> str | None:
    with path.open("rb", buffering=0) as file:
        return _Reader(file, path.name, n_bytes, key).header().text(key)


class _Reader:
    """Walks forward through a file, never past its end."""

    def __init__(self, file: IO[bytes], name: str, n_bytes: int, long: str | None = None) -> None:
        self._file = file
        self._name = name
        self._long = long  # the key of a text that may be long
        self._n_bytes = n_bytes
        self._buffer = b""
        self._start = 0  # of the buffer, in the file
        self._at = 0  # in the buffer
        self._n_elements = 0
        self._n_kept = 0

    def header(self) -> GgufHeader:
        if self._n_bytes == 0:
            raise self._fault("is empty")
        magic = self._take(4) if self._n_bytes >= 4 else b""
        if magic != MAGIC:
            raise self._fault(f"is not a GGUF file (it starts with {magic!r})")
        version = self._number("I")
        if version not in VERSIONS:
            raise self._fault(f"has GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} can be read")
        n_tensors = self._count("tensors", MAX_TENSORS)
        n_pairs = self._count("metadata keys", MAX_PAIRS)
        values: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for _ in range(n_pairs):
            self._pair(values, lengths)
        n_params = self._tensors(n_tensors, values.get("general.alignment"))
        return GgufHeader(values, lengths, n_tensors, n_params)

    def _pair(self, values: dict[str, Value], lengths: dict[str, int]) -> None:
        key = self._text(MAX_KEY_BYTES)
        if key is None:
            raise self._fault(f"has a metadata key of more than {MAX_KEY_BYTES} bytes")
        kind = self._number("I")
        if kind == _LIST:
            kept, lengths[key] = self._list()
            if kept is not None:
                values[key] = kept
                self._n_kept += len(kept)
        elif kind == _TEXT:
            text = self._text(MAX_LONG_TEXT_BYTES if key == self._long else MAX_TEXT_BYTES)
            if text is not None:
                values[key] = text
                self._n_kept += 0 if key == self._long else len(text)
        else:
            values[key] = self._unpack(self._format(kind))[0]
        self._n_kept += len(key)
        if self._n_kept > MAX_KEPT:
            raise self._fault(f"has more than {MAX_KEPT} characters and numbers of metadata")

    def _list(self) -> tuple[tuple[int | float | bool, ...] | None, int]:
        kind = self._number("I")
        length = self._number("Q")
        if kind == _TEXT:
            self._skip_texts(length)
            return None, length
        letter = self._format(kind)
        if length > MAX_LIST:
            self._skip(length * struct.calcsize(letter))
            return None, length
        return self._unpack(f"{length}{letter}"), length

    def _skip_texts(self, length: int) -> None:
        self._n_elements += length
        if self._n_elements > MAX_ELEMENTS:
            raise self._fault(f"has lists of more than {MAX_ELEMENTS} texts")
        unpack = struct.Struct("<Q").unpack_from
        buffer = self._buffer
        at = self._at
        for _ in range(length):
            if at + 8 > len(buffer):
                self._skip(at - self._at)
                self._need(8)
                buffer = self._buffer
                at = self._at
            at += 8 + unpack(buffer, at)[0]
        self._skip(at - self._at)

    def _tensors(self, n_tensors: int, alignment: Value | None) -> int:
        """How many values the tensors have. An interrupted copy has the whole header, and less data than it
        announces."""
        last = n_params = 0
        for _ in range(n_tensors):
            self._skip(self._number("Q"))  # the name
            n_dimensions = self._number("I")
            if n_dimensions > MAX_DIMENSIONS:
                raise self._fault(f"has a tensor of {n_dimensions} dimensions; at most {MAX_DIMENSIONS} exist")
            n_params += math.prod(map(int, self._unpack(f"{n_dimensions}Q")))
            self._skip(4)  # the type
            last = max(last, self._number("Q"))
        step = alignment if isinstance(alignment, int) and alignment > 0 else 32
        begin = -(-(self._start + self._at) // step) * step
        if n_tensors and begin + last >= self._n_bytes:
            raise self._fault(
                f"ends too early: it has {self._n_bytes} bytes, and a tensor begins at {begin + last}; "
                "copy or download it again"
            )
        return n_params

    def _count(self, what: str, most: int) -> int:
        count = self._number("Q")
        if count > most:
            raise self._fault(f"says it has {count} {what}; at most {most} are believed")
        return count

    def _text(self, most: int) -> str | None:
        """``None`` if it is longer than that; the reader is behind it either way."""
        length = self._number("Q")
        if length > most:
            self._skip(length)
            return None
        return self._take(length).decode("utf-8", "replace")

    def _number(self, letter: str) -> int:
        return int(self._unpack(letter)[0])

    def _unpack(self, letters: str) -> tuple[int | float | bool, ...]:
        return struct.unpack("<" + letters, self._take(struct.calcsize("<" + letters)))

    def _take(self, length: int) -> bytes:
        self._need(length)
        taken = self._buffer[self._at : self._at + length]
        self._at += length
        return taken

    def _need(self, length: int) -> None:
        """Fills the buffer with at least so many bytes from the reader's place."""
        if self._at + length <= len(self._buffer):
            return
        here = self._start + self._at
        self._require(here + length)
        self._file.seek(here)
        self._buffer = self._file.read(max(length, _CHUNK))
        self._start = here
        self._at = 0
        if len(self._buffer) < length:
            self._require(self._n_bytes + 1)  # it became shorter while it was read

    def _skip(self, length: int) -> None:
        self._require(self._start + self._at + length)
        self._at += length
        if self._at > len(self._buffer):
            self._start = self._start + self._at
            self._at = 0
            self._buffer = b""

    def _require(self, end: int) -> None:
        if end > self._n_bytes:
            raise self._fault(f"ends inside its header, after {self._n_bytes} bytes; copy or download it again")
        if end > MAX_BYTES:
            raise self._fault(f"has a header of more than {MAX_BYTES} bytes")

    def _format(self, kind: int) -> str:
        letter = _FORMATS.get(kind)
        if letter is None:
            raise self._fault(f"has metadata of the unknown type {kind}")
        return letter

    def _fault(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._name} {what}")
