"""The engine process of an embedding model: texts in, vectors out, one after the other. It keeps nothing.

The reader's thread takes frames, the main thread computes. A text that is waiting can be cancelled.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everwarm.engine.process import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.errors import BadRequest, EverwarmError, ModelChanged
from everwarm.llama.abi import BUILD
from everwarm.llama.embedder import Embedder
from everwarm.llama.model import Progress

log = logging.getLogger("everwarm.worker")

LEAST_TEXT = 2048  # tokens of a text that can be read in any case, if the model was trained with as many
NOTHING: dict[str, object] = {"slots": [], "cache": None}  # what there is to inspect

Read = Callable[[], m.ToEngine | None]
Send = Callable[[m.Message], None]


def open_embedder(path: Path, settings: EngineSettings, progress: Progress | None = None) -> Embedder:
    assert settings.embedding is not None
    n_most = min(settings.n_ctx, max(settings.n_ubatch, LEAST_TEXT))
    options, n_threads = settings.model, settings.n_threads
    return Embedder(path, options, settings.embedding, n_most=n_most, n_threads=n_threads, progress=progress)


class EmbeddingHandler:
    def __init__(self, embedder: Embedder, send: Send) -> None:
        self._embedder = embedder
        self._vocab = embedder.model.vocab
        self._send = send
        self._waiting: queue.SimpleQueue[m.ToEngine | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._n_read = 0  # texts, each in one decode

    def run(self, read: Read, gone: Callable[[], None]) -> None:
        """Until ``Stop``; ``gone`` is called when there is no gateway any more. ``ModelChanged`` if a file of the model
        was overwritten."""
        threading.Thread(target=self._take_all, args=(read, gone), name="everwarm-reader", daemon=True).start()
        while (message := self._waiting.get()) is not None:
            self._answer(message)

    def _take_all(self, read: Read, gone: Callable[[], None]) -> None:
        while (message := read()) is not None:
            if isinstance(message, m.Stop):
                return self._waiting.put(None)
            if isinstance(message, m.Cancel):
                self._cancelled.add(message.id)
            else:
                self._waiting.put(message)
        gone()

    def _answer(self, message: m.ToEngine) -> None:
        id = getattr(message, "id", 0)
        if id in self._cancelled:
            self._cancelled.discard(id)
            return
        try:
            self._send(m.Answer(id, self._data(message)))
        except ModelChanged:
            raise
        except EverwarmError as error:
            self._send(m.failed(id, error))
        except Exception:
            log.exception("%s could not be handled", type(message).__name__)
            self._send(m.failed(id, EverwarmError("internal error")))

    def _data(self, message: m.ToEngine) -> object:
        vocab = self._vocab
        match message:
            case m.Embed():
                return self._embed(message)
            case m.Tokenize(text=text, add_special=special, parse_special=parse):
                tokens = vocab.tokenize(text, add_special=special, parse_special=parse)
                pieces = [vocab.piece(token) for token in tokens.tolist()] if message.with_pieces else []
                sizes = np.fromiter(map(len, pieces), "<u4", len(pieces)).tobytes()
                return m.Tokenized(tokens.astype("<i4").tobytes(), sizes, b"".join(pieces))
            case m.Detokenize(tokens=tokens):
                return vocab.detokenize(tokens)
            case m.Inspect(what="counts"):
                return {"n_decodes": self._n_read, "n_fed": self._n_read}
            case m.Inspect(what=what) if what in NOTHING:
                return NOTHING[what]
        raise BadRequest("this model makes embeddings: it writes no text and keeps no cache")

    def _embed(self, message: m.Embed) -> m.Embedded:
        inputs = [self._tokens(each, message.query) for each in message.inputs]
        rows = []
        for tokens in inputs:
            if message.id in self._cancelled:
                break
            files = self._embedder.model.files
            before = files.before_use()
            rows.append([row.astype("<f4").tobytes() for row in self._embedder.embed(tokens)])
            self._n_read += 1
            if files.look() != before and files.is_changed:
                raise ModelChanged(files.reason)
        return m.Embedded(rows, [len(tokens) for tokens in inputs])

    def _tokens(self, given: str | list[int | str], query: str | None) -> NDArray[np.int32]:
        if isinstance(given, list):
            tokens: list[int] = []
            for each in given:
                is_first = not tokens
                tokens += [each] if isinstance(each, int) else self._text_tokens(each, add_special=is_first)
            return np.array(tokens, np.int32)
        if query is None:
            return self._vocab.tokenize(given, add_special=True, parse_special=True)
        return self._pair(query, given)

    def _text_tokens(self, text: str, *, add_special: bool) -> list[int]:
        return list(self._vocab.tokenize(text, add_special=add_special, parse_special=True).tolist())

    def _pair(self, query: str, document: str) -> NDArray[np.int32]:
        """A question and a text, as a model that ranks was trained to see them."""
        vocab = self._vocab
        template = self._embedder.model.template("rerank")
        if template is not None:
            text = template.replace("{query}", query).replace("{document}", document)
            return vocab.tokenize(text, add_special=False, parse_special=True)
        end = vocab.eos if vocab.eos is not None else vocab.sep
        ending = [end] if vocab.adds_eos and end is not None else []
        parts = [
            [vocab.bos] if vocab.adds_bos else [],
            vocab.tokenize(query, add_special=False, parse_special=False).tolist(),
            ending,
            [vocab.sep] if vocab.adds_sep else [],
            vocab.tokenize(document, add_special=False, parse_special=False).tolist(),
            ending,
        ]
        return np.array([token for part in parts for token in part], np.int32)


def info(embedder: Embedder) -> m.ModelInfo:
    model, vocab = embedder.model, embedder.model.vocab
    return m.ModelInfo(
        description=model.description,
        memory_kind=model.memory_kind.value,
        n_params=model.n_params,
        size_bytes=model.size_bytes,
        n_ctx=embedder.n_most,
        n_ctx_train=model.n_ctx_train,
        n_vocab=vocab.n_tokens,
        n_slots=1,
        n_spares=0,
        ram_bytes=0,
        state_bytes=0,
        kv_bytes_per_token=0,
        every_n_tokens=0,
        max_checkpoints=0,
        chat_template=None,
        bos="",
        eos="",
        adds_bos=vocab.adds_bos,
        build=BUILD,
        pooling=embedder.pooling,
    )
