"""The vocabulary of an open model: text to tokens and back, special tokens.

Tokenizing here is always of the whole text it is given; memory of fragments lives in ``everwarm.prompt``. Thread-safe:
libllama's tokenizer is, and the C call drops the GIL.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from everwarm.errors import BadRequest
from everwarm.llama import abi
from everwarm.llama.lib import Lib

MAX_TEXT_BYTES = 1 << 30


class Vocab:
    def __init__(self, lib: Lib, model_ptr: int) -> None:
        self._lib = lib
        self._ptr = lib.model_get_vocab(model_ptr)
        self.n_tokens = int(lib.vocab_n_tokens(self._ptr))
        self.bos = token_or_none(lib.vocab_bos(self._ptr))
        self.eos = token_or_none(lib.vocab_eos(self._ptr))
        self.adds_bos = bool(lib.vocab_get_add_bos(self._ptr)) and self.bos is not None
        self.adds_eos = bool(lib.vocab_get_add_eos(self._ptr)) and self.eos is not None
        self._pieces: dict[int, bytes] = {}
        self.sep = token_or_none(lib.vocab_sep(self._ptr))
        self.adds_sep = bool(lib.vocab_get_add_sep(self._ptr)) and self.sep is not None

    def fill_in(self, part: Literal["pre", "suf", "mid", "rep", "sep"]) -> int | None:
        """A token of fill-in-the-middle, if the model knows it: before the text above the cursor, before the text below
        it, at the cursor, before a project's name, before a file's name."""
        return token_or_none(getattr(self._lib, f"vocab_fim_{part}")(self._ptr))

    @functools.cached_property
    def eog(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return frozenset(t for t in range(self.n_tokens) if self._lib.vocab_is_eog(self._ptr, t))

    @functools.cached_property
    def suppressed(self) -> tuple[int, ...]:
        """Tokens that the model's file wants never to be picked."""
        n = ctypes.c_int32(0)
        tokens = self._lib.vocab_get_suppress_tokens(self._ptr, ctypes.byref(n))
        return tuple(tokens[i] for i in range(n.value))

    @functools.cached_property
    def splits_independently(self) -> bool:
        """Whether text between special tokens is tokenized without regard to its neighbours."""
        return int(self._lib.vocab_type(self._ptr)) in (abi.VOCAB_SPM, abi.VOCAB_BPE)

    @functools.cached_property
    def longest_piece_bytes(self) -> int:
        """No token stands for more bytes of text."""
        return max(len(self.piece(token)) for token in range(self.n_tokens))

    @functools.cached_property
    def special(self) -> dict[int, tuple[str, int]]:
        """Tokens that are cut out of a text before anything else: id to (text, attributes)."""
        wanted = abi.ATTR_CONTROL | abi.ATTR_USER_DEFINED | abi.ATTR_UNKNOWN
        found = {}
        for token in range(self.n_tokens):
            attributes = int(self._lib.vocab_get_attr(self._ptr, token))
            if attributes & wanted:
                text = self._lib.vocab_get_text(self._ptr, token)
                found[token] = (text.decode("utf-8", "replace"), attributes)
        return found

    @property
    def native(self) -> tuple[int, int | None]:
        """Addresses of the vocabulary and of libllama's tokenizer function, for a C library that calls it."""
        return self._ptr, ctypes.cast(self._lib.tokenize, ctypes.c_void_p).value  # type: ignore[arg-type]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        data = text.encode("utf-8", "replace")
        if len(data) > MAX_TEXT_BYTES:
            raise BadRequest(f"the text has {len(data)} bytes; give at most {MAX_TEXT_BYTES}")
        room = len(data) + 8  # never more tokens than bytes, plus BOS, EOS and a space prefix
        out = np.empty(room, np.int32)
        n = self._tokenize_into(out, data, add_special, parse_special)
        if n < 0:
            out = np.empty(-n, np.int32)
            n = self._tokenize_into(out, data, add_special, parse_special)
        if n < 0:
            raise BadRequest("the text has more tokens than can be counted; shorten it")
        return out[:n].copy()

    def _tokenize_into(self, out: NDArray[np.int32], data: bytes, add_special: bool, parse_special: bool) -> int:
        pointer = out.ctypes.data_as(abi.i32p)
        return int(self._lib.tokenize(self._ptr, data, len(data), pointer, len(out), add_special, parse_special))

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for, special tokens included; a piece may be part of a UTF-8 character."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._read_piece(token)
        return known

    def written(self, token: int) -> bytes:
        """The bytes a token adds to a text; none where no model ever writes it."""
        attributes = int(self._lib.vocab_get_attr(self._ptr, token))
        return b"" if attributes & (abi.ATTR_UNKNOWN | abi.ATTR_UNUSED) else self._read_piece(token)

    def _read_piece(self, token: int) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise BadRequest(f"token {token} is not in the vocabulary; give 0 to {self.n_tokens - 1}")
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = int(self._lib.token_to_piece(self._ptr, token, buffer, room, 0, True))
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    def detokenize(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.piece(int(token)) for token in tokens)


def token_or_none(token: int) -> int | None:
    return int(token) if token >= 0 else None
