"""Images in a raw libllama context: the verbs of the media tests, by hand and by libmtmd's own helper."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from everwarm.config import ContextOptions
from everwarm.llama import abi
from everwarm.llama.batch import BatchArrays, Feed, Tokens
from everwarm.llama.context import open_context
from everwarm.llama.lib import library_path
from everwarm.llama.media.media_model import Embedding, MediaModel, decode_image
from everwarm.llama.model import Model
from everwarm.types import Mark, Position, SeqId, TokenCount
from support.steps import OPTIONS

N_SEQS = 4
Logits = np.ndarray


def make_image(width: int, height: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, width * height * 3, np.uint8).tobytes()


@cache
def _helper() -> Any:
    """The functions only tests need: how libmtmd itself decodes an image."""
    cdll, p = ctypes.CDLL(str(library_path())), ctypes.c_void_p
    decode = cdll.mtmd_helper_decode_image_chunk
    decode.restype = ctypes.c_int32
    decode.argtypes = (p, p, p, p, *(ctypes.c_int32,) * 3, abi.i32p, p, p)
    return decode


@dataclass
class Eye:
    """A context, and where its sequences end: positions only, libllama counts the cells."""

    model: Model
    media: MediaModel
    options: ContextOptions = OPTIONS
    ends: list[int] = field(default_factory=lambda: [0] * N_SEQS)

    def __post_init__(self) -> None:
        self.lib = self.model.lib
        self.ptr = open_context(self.model, self.options, N_SEQS)
        self.mem = self.lib.get_memory(self.ptr)
        self.batch = BatchArrays(self.options.n_batch)

    def close(self) -> None:
        self.lib.free(self.ptr)

    def logits(self) -> Logits:
        address = self.lib.get_logits_ith(self.ptr, -1)
        return np.ctypeslib.as_array((ctypes.c_float * self.model.vocab.n_tokens).from_address(address)).copy()

    def say(self, tokens: Tokens, seq: int = 0) -> Logits:
        for at in range(0, len(tokens), self.options.n_batch):
            part = tokens[at : at + self.options.n_batch]
            mark = Mark(TokenCount(self.ends[seq]), Position(self.ends[seq]))
            self.batch.put(0, Feed(SeqId(seq), part, mark, True))
            assert self.lib.decode(self.ptr, self.batch.struct(len(part))) == 0, self.lib.last_words()
            self.ends[seq] += len(part)
        return self.logits()

    def see(self, image: Embedding, seq: int = 0, **other: Any) -> int:
        """By hand. Returns libllama's code."""
        how = {
            "wants_logits": False,
            "uses_mrope": self.media.uses_mrope,
            "causal": self.media.is_causal,
            "n_batch": self.options.n_batch,
            "n_ubatch": self.options.n_ubatch,
        }
        code = decode_image(self.lib, self.ptr, seq, image, self.ends[seq], **(how | other))
        self.ends[seq] += image.shape.n_pos if code == 0 else 0
        return code

    def see_with_helper(self, image: Embedding, width: int, height: int, seq: int = 0, n_batch: int = 0) -> None:
        """The way libmtmd does it itself, with the same embeddings."""
        end = ctypes.c_int32(-1)
        n_batch = n_batch or self.options.n_batch
        with self.media._chunks(width, height, None) as chunks:
            chunk = self.media._only_image(chunks, width, height)
            values, start = image.values.ctypes.data, self.ends[seq]
            code = _helper()(
                self.media._ptr, self.ptr, chunk, values, start, seq, n_batch, ctypes.byref(end), None, None
            )
        assert code == 0, self.lib.last_words()
        self.ends[seq] = end.value

    def capture(self, seq: int = 0) -> np.ndarray:
        """The partial state, as ``Context.capture`` takes it: a window is seated anew."""
        blob = np.empty(self.lib.state_seq_get_size_ext(self.ptr, seq, abi.STATE_PARTIAL), np.uint8)
        n = self.lib.state_seq_get_data_ext(self.ptr, blob.ctypes.data, len(blob), seq, abi.STATE_PARTIAL)
        assert n == len(blob)
        if self.model.memory_kind.has_window:
            self.put(blob, seq)
        return blob

    def put(self, blob: np.ndarray, seq: int = 0) -> None:
        n = self.lib.state_seq_set_data_ext(self.ptr, blob.ctypes.data, len(blob), seq, abi.STATE_PARTIAL)
        assert n == len(blob), self.lib.last_words()

    def restore(self, blob: np.ndarray, end: int, seq: int = 0) -> None:
        self.put(blob, seq)
        assert self.lib.memory_seq_rm(self.mem, seq, end, -1)
        self.ends[seq] = end


@contextmanager
def eye(model: Model, media: MediaModel, **options: Any) -> Iterator[Eye]:
    opened = Eye(model, media, replace(OPTIONS, **options))
    try:
        yield opened
    finally:
        opened.close()
