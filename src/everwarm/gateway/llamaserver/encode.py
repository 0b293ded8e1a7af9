"""Replies of ``/completion`` as llama-server writes them, and its lists of tokens. Pure."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from everwarm.engine.process import messages as m
from everwarm.gateway.http.sse import sse
from everwarm.gateway.llamaserver.infill import InfillBody
from everwarm.gateway.openai.encode import Live, figures, logprobs, progress, words
from everwarm.gateway.openai.schema import Body, CompletionBody, RequestDefaults
from everwarm.gateway.serving.generate import Choice, ReplyEvent
from everwarm.gateway.serving.replies import Dialect
from everwarm.types import Json

_MISSING = object()


def _at(answer: Any, path: list[str]) -> Any:
    for step in path:
        answer = answer.get(step, _MISSING) if isinstance(answer, dict) else _MISSING
    return answer


def generation_settings(body: Body, defaults: RequestDefaults, eog: Sequence[int] = ()) -> Json:
    """How a reply is sampled, under llama-server's names. ``defaults`` are of requests that do not set it,
    ``eog`` the tokens that end a reply."""
    sampling = asdict(body.sampling(defaults.sampling))
    bias = sampling.pop("logit_bias") | (dict.fromkeys(eog, float("-inf")) if body.ignore_eos else {})
    sampling["repeat_last_n"] = sampling.pop("penalty_last_n")
    sampling["seed"] = _RANDOM_SEED if sampling["seed"] is None else sampling["seed"]
    n_predict = body.reply_tokens(-1 if defaults.max_tokens is None else defaults.max_tokens)
    n_probs = getattr(body, "n_probs", None)
    return {
        **sampling,
        "n_predict": n_predict,
        "max_tokens": n_predict,
        "n_keep": body.n_keep or 0,
        "n_discard": body.n_discard or 0,
        "n_probs": n_probs or 0,
        "post_sampling_probs": bool(body.post_sampling_probs),
        "backend_sampling": False,
        "speculative.types": "none",
        "stop": list(body.stops()),
        "stream": bool(body.stream),
        "ignore_eos": bool(body.ignore_eos),
        "grammar": body.grammar or "",
        "logit_bias": [
            {"token": token, "bias": value if math.isfinite(value) else None} for token, value in bias.items()
        ],
        "timings_per_token": bool(body.timings_per_token),
        "lora": [],
    }


_RANDOM_SEED = (1 << 32) - 1


class LlamaEncoder(Dialect):
    """One reply, whole or in chunks. ``prompt``: None if it came as tokens; ``info``: of the model, which may not be loaded
    yet; ``defaults``: of requests that do not set a field."""

    def __init__(
        self,
        model: str,
        body: CompletionBody | InfillBody,
        prompt: str | None,
        defaults: RequestDefaults,
        info: Callable[[], m.ModelInfo | None],
        live: Live,
    ) -> None:
        self._model = model
        self._body = body
        self._prompt = prompt
        self._defaults = defaults
        self._info = info
        self._live = live
        self._has_new_line = False
        self._slot = 0
        self._n_prompt = 0
        self._n_reply = 0

    def encode(self, event: ReplyEvent) -> list[bytes]:
        now = self._live(event)
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
                self._has_new_line |= "\n" in piece.text
                chunk = {"index": 0, "content": piece.text, "tokens": piece.tokens, "stop": False}
                chunk |= {"id_slot": self._slot, "tokens_predicted": self._n_reply, "tokens_evaluated": self._n_prompt}
                if piece.probs:
                    chunk["completion_probabilities"] = _probabilities(self._body, piece.probs)
            case m.Done() as done:
                has_new_line = self._has_new_line or "\n" in done.text
                chunk = self._shown({"index": 0, "content": done.text, "tokens": [], **self._end(done, has_new_line)})
        return [sse({**chunk, **now})]

    def whole(self, choice: Choice, *, index: int = 0) -> Json:
        answer = {
            "index": index,
            "content": choice.text,
            "tokens": choice.tokens if self._body.return_tokens else [],
            **self._end(choice.done, "\n" in choice.text),
        }
        if choice.probs:
            answer["completion_probabilities"] = _probabilities(self._body, choice.probs)
        return self._shown(answer)

    def _shown(self, answer: Json) -> Json:
        """Only the fields that were asked for; a slash leads into an object."""
        wanted = self._body.response_fields
        if not wanted:
            return answer
        found = {path: _at(answer, path.split("/")) for path in wanted}
        return {path: value for path, value in found.items() if value is not _MISSING}

    def _end(self, done: m.Done, has_new_line: bool) -> Json:
        body = self._body
        info = self._info()
        eog = () if info is None else info.eog
        was_cut = done.finish == "length" and done.n_reply < body.reply_tokens(done.n_reply + 1)
        stop_type = "eos" if done.finish == "stop" else "limit"
        return {
            "id_slot": done.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": done.n_reply,
            "tokens_evaluated": done.n_prompt,
            "tokens_cached": done.n_cached,
            "generation_settings": generation_settings(body, self._defaults, eog),
            **({"prompt": self._prompt} if self._prompt is not None else {}),
            "has_new_line": has_new_line,
            "truncated": was_cut or done.n_shifts > 0,  # by the end of the context
            "stop_type": stop_type if done.stop_text is None else "word",
            "stopping_word": done.stop_text or "",
            "timings": figures(done),  # all are numbers, as there
            **words(done),
        }


def _probabilities(body: Body, probs: Sequence[m.TokenProb]) -> list[Json]:
    """Log-probabilities; with ``post_sampling_probs`` probabilities, of what the samplers left."""
    if not body.post_sampling_probs:
        return list(logprobs(probs)["content"])
    return [
        {**_prob(each.token, each.piece, each.logprob), "top_probs": [_prob(*other) for other in each.top]}
        for each in probs
    ]


def _prob(token: int, piece: bytes, logprob: float) -> Json:
    text = piece.decode("utf-8", "replace")
    return {"id": token, "token": text, "bytes": list(piece), "prob": math.exp(logprob)}


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
