"""A model that turns a text into vectors instead of more text. One text at a time; it remembers nothing between them.

Knows tokens and numbers; knows no requests.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everwarm.config import ModelOptions, Pooling
from everwarm.errors import BadRequest, ContextTooBig, DecodeFailed, ModelFileError
from everwarm.llama import abi
from everwarm.llama.batch import BatchArrays, Feed
from everwarm.llama.lib import Closing, Lib
from everwarm.llama.model import Model, Progress
from everwarm.types import START, SeqId

Rows = NDArray[np.float32]
_HEADS = (b"cls.weight", b"cls.output.weight")
_SEQ = SeqId(0)


class Embedder(Closing):
    """``n_most``: tokens of a text at most; all of them are read in one step."""

    def __init__(
        self,
        path: Path,
        options: ModelOptions,
        pooling: Pooling,
        *,
        n_most: int,
        n_threads: int,
        progress: Progress | None = None,
    ) -> None:
        self.model = Model(path, options, progress, embeds=True)
        self._lib: Lib = self.model.lib
        self._ptr: int | None = None
        try:
            self.n_most = min(n_most, self.model.n_ctx_train or n_most)
            self._require_head(pooling)
            self._ptr = self._open(pooling, n_threads)
            self.pooling = abi.POOLING_NAMES[int(self._lib.pooling_type(self._ptr))]
        except BaseException:
            self.close()
            raise
        self._n_values = int(self._lib.model_n_embd_out(self.model.ptr)) if self.pooling != "rank" else 1
        self._batch = BatchArrays(self.n_most)

    def _require_head(self, pooling: Pooling) -> None:
        """libllama aborts when a model is to rank and has no weights for it."""
        arch = self.model.metadata("general.architecture")
        by_file = self.model.metadata(f"{arch}.pooling_type") == str(abi.POOLING["rank"])
        if (pooling == "rank" or (pooling == "auto" and by_file)) and not _has_head(self._lib, self.model.path):
            raise ModelFileError(f"{self.model.path.name} has no head that ranks; start it without --reranking")

    def _open(self, pooling: Pooling, n_threads: int) -> int:
        params = self._lib.context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.n_most
        params.n_threads = params.n_threads_batch = n_threads
        params.embeddings = True
        params.pooling_type = abi.POOLING[pooling]
        params.kv_unified = True
        self._lib.forget_log()
        ptr: int | None = self._lib.init_from_model(self.model.ptr, params)
        if not ptr:
            raise ContextTooBig(f"a context of {self.n_most} tokens could not be made ({self._lib.last_words()})")
        return ptr

    def embed(self, tokens: NDArray[np.int32]) -> Rows:
        """One row; without pooling a row for each token; of a model that ranks, one number."""
        n = len(tokens)
        if n == 0:
            raise BadRequest("an input is empty; give at least one token")
        if n > self.n_most:
            raise BadRequest(
                f"the text is too large: it has {n} tokens, and {self.n_most} can be read at once; send a shorter one, or "
                "start with a larger --ubatch-size if the model can read more"
            )
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.model.vocab.n_tokens:
            raise BadRequest(f"a token is not in the vocabulary; give 0 to {self.model.vocab.n_tokens - 1}")
        self._clear()
        self._batch.put(0, Feed(_SEQ, tokens, START, wants_logits=True))
        self._batch.want_all(n)
        if int(self._lib.decode(self._ptr, self._batch.struct(n))) != 0:
            raise DecodeFailed(f"libllama could not read {n} tokens: {self._lib.last_words()}")
        rows = np.stack([self._row(i) for i in range(n)]) if self.pooling == "none" else self._row(None)[np.newaxis]
        if not np.isfinite(rows).all():
            raise DecodeFailed("the model's numbers overflowed (NaN)")
        return rows

    def _clear(self) -> None:
        memory = self._lib.get_memory(self._ptr)
        if memory:  # an encoder has none
            self._lib.memory_clear(memory, True)

    def _row(self, at: int | None) -> NDArray[np.float32]:
        """``at``: of one token; None: pooled."""
        lib = self._lib
        pointer = lib.get_embeddings_seq(self._ptr, _SEQ) if at is None else lib.get_embeddings_ith(self._ptr, at)
        if not pointer:
            raise DecodeFailed("libllama gave no embedding")
        return np.ctypeslib.as_array(pointer, (self._n_values,)).copy()

    def close(self) -> None:
        if self._ptr:
            self._lib.free(self._ptr)
            self._ptr = None
        self.model.close()


def _has_head(lib: Lib, path: Path) -> bool:
    header = lib.gguf_init_from_file(os.fsencode(path), abi.GgufInitParams(True, None))
    try:
        return any(int(lib.gguf_find_tensor(header, name)) >= 0 for name in _HEADS)
    finally:
        lib.gguf_free(header)
