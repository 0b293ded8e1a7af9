"""Replies of ``/completion`` as llama-server writes them, and its lists of tokens. Pure."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from everwarm.engine.process import messages as m
from everwarm.gateway.http.sse import sse
from everwarm.gateway.openai.encode import logprobs, progress, timings
from everwarm.gateway.serving.generate import Choice, ReplyEvent
from everwarm.gateway.serving.replies import Dialect
from everwarm.types import Json


class LlamaEncoder(Dialect):
    def __init__(self, model: str) -> None:
        self._model = model
        self._slot = 0
        self._n_prompt = 0
        self._n_reply = 0

    def encode(self, event: ReplyEvent) -> list[bytes]:
        match event.message:
            case m.Begun() as begun:
                self._n_prompt = begun.n_prompt
                self._slot = begun.slot
                return []
            case m.PromptRead() as read_so_far:
                chunk: Json = {"index": 0, "content": "", "stop": False, "id_slot": self._slot}
                chunk["prompt_progress"] = progress(read_so_far)
            case m.TextPiece() as piece:
                self._n_reply += len(piece.tokens)
                chunk = {"index": 0, "content": piece.text, "tokens": piece.tokens, "stop": False}
                chunk |= {"id_slot": self._slot, "tokens_predicted": self._n_reply, "tokens_evaluated": self._n_prompt}
                if piece.probs:
                    chunk["completion_probabilities"] = logprobs(piece.probs)["content"]
            case m.Done() as done:
                chunk = {"index": 0, "content": done.text, "tokens": [], **_end(self._model, done)}
        return [sse(chunk)]


def completion(model: str, choice: Choice, *, with_tokens: bool, with_probs: bool) -> Json:
    answer = {
        "index": 0,
        "content": choice.text,
        "tokens": choice.tokens if with_tokens else [],
        **_end(model, choice.done),
    }
    if with_probs:
        answer["completion_probabilities"] = logprobs(choice.probs)["content"]
    return answer


def _end(model: str, done: m.Done) -> Json:
    stop_type = "eos" if done.finish == "stop" else "limit"
    return {
        "id_slot": done.slot,
        "stop": True,
        "model": model,
        "tokens_predicted": done.n_reply,
        "tokens_evaluated": done.n_prompt,
        "tokens_cached": done.n_cached,
        "truncated": False,
        "stop_type": stop_type if done.stop_text is None else "word",
        "stopping_word": done.stop_text or "",
        "timings": timings(done),
    }


def tokenized(tokens: m.Tokenized, *, with_pieces: bool) -> bytes:
    """Tokens as JSON, encoded part by part, so that no other thread waits long for the GIL."""
    ids = struct.unpack(f"<{len(tokens.ids) // 4}i", tokens.ids)
    shown: Iterator[Any] = iter(ids)
    if with_pieces:
        ends = itertools.accumulate(struct.unpack(f"<{len(ids)}I", tokens.sizes), initial=0)
        pieces = (tokens.pieces[start:end] for start, end in itertools.pairwise(ends))
        shown = ({"id": id, "piece": _piece(piece)} for id, piece in zip(ids, pieces, strict=True))
    texts = []
    while part := list(itertools.islice(shown, 4096)):
        texts.append(msgspec.json.encode(part)[1:-1])
    return b'{"tokens":[' + b",".join(texts) + b"]}"


def _piece(piece: bytes) -> str | list[int]:
    """Text, or bytes where a token is only part of a character."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
