"""Replies as OpenAI's clients expect them: choices, chunks, usage, and llama-server's timings beside them. Pure."""

from __future__ import annotations

import abc
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from everwarm.engine.process import messages as m
from everwarm.engine.process.messages import Reason
from everwarm.gateway.http.sse import SSE_DONE, sse
from everwarm.gateway.openai.schema import Body, CompletionBody
from everwarm.gateway.parsing.output_parser import Piece, call_of, message_of
from everwarm.gateway.parsing.reasoning import Reasoning, Text
from everwarm.gateway.parsing.tool_parser import CallArguments, CallBegun, CallEnded
from everwarm.gateway.serving.generate import Choice, EngineMessage, ReplyEvent
from everwarm.gateway.serving.replies import Dialect
from everwarm.types import Json

_LOWEST = -3.4e38  # JSON has no infinity


def usage(choices: Sequence[m.Done], n: int = 1) -> Json:
    """OpenAI's accounting; ``cached_tokens`` is part of ``prompt_tokens``. ``n``: choices that share a prompt."""
    prompts = choices[::n]
    n_prompt = sum(done.n_prompt for done in prompts)
    n_reply = sum(done.n_reply for done in choices)
    n_cached = sum(done.n_cached for done in prompts)
    n_new = sum(map(n_written, prompts))
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_reply,
        "total_tokens": n_prompt + n_reply,
        "prompt_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": n_new},
    }


def timings(done: m.Done) -> Json:
    """llama-server's accounting, and in words what was kept and why the prompt was read."""
    return {**figures(done), **words(done)}


def words(done: m.Done) -> Json:
    return {"kept": done.kept, "cache": cache(done)}


def figures(done: m.Done) -> Json:
    """llama-server's accounting; ``cache_n + prompt_n`` is always the whole prompt."""
    n_read = done.n_prompt - done.n_cached
    return {
        "cache_n": done.n_cached,
        **_speeds(n_read, 1e3 * (done.restore_s + done.prefill_s), done.n_reply, 1e3 * done.decode_s),
        "queue_ms": 1e3 * done.queue_s,
        "restore_ms": 1e3 * done.restore_s,
        "keep_ms": 1e3 * done.keep_s,
        **({"draft_n": done.n_drafted, "draft_n_accepted": done.n_draft_accepted} if done.n_drafted else {}),
    }


def _speeds(n_read: int, prompt_ms: float, n_reply: int, decode_ms: float) -> Json:
    n_decoded = max(0, n_reply - 1)  # the first token comes with the prompt
    return {
        "prompt_n": n_read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, n_read),
        "prompt_per_second": 1e3 * n_read / prompt_ms if prompt_ms else 0.0,
        "predicted_n": n_reply,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / n_decoded if n_decoded else 0.0,
        "predicted_per_second": 1e3 * n_decoded / decode_ms if decode_ms else 0.0,
    }


def progress(read: m.PromptRead) -> Json:
    return {"total": read.n_prompt, "cache": read.n_cached, "processed": read.n_read, "time_ms": 1e3 * read.seconds}


def logprobs(probs: Sequence[m.TokenProb]) -> Json:
    """OpenAI's chat shape, with llama-server's ids."""
    return {"content": [_token_prob(prob) for prob in probs]}


def _token_prob(prob: m.TokenProb) -> Json:
    return {
        "id": prob.token,
        "token": _text(prob.piece),
        "bytes": list(prob.piece),
        "logprob": _finite(prob.logprob),
        "top_logprobs": [
            {"id": token, "token": _text(piece), "bytes": list(piece), "logprob": _finite(logprob)}
            for token, piece, logprob in prob.top
        ],
    }


def legacy_logprobs(probs: Sequence[m.TokenProb]) -> Json:
    """OpenAI's older completions shape."""
    offsets, at = [], 0
    for prob in probs:
        offsets.append(at)
        at += len(_text(prob.piece))
    return {
        "tokens": [_text(prob.piece) for prob in probs],
        "token_logprobs": [_finite(prob.logprob) for prob in probs],
        "top_logprobs": [{_text(piece): _finite(logprob) for _, piece, logprob in prob.top} for prob in probs],
        "text_offset": offsets,
    }


# timings of a reply that is not over

Live = Callable[[ReplyEvent], Json]  # what the chunk of an event says besides, as llama-server's ``timings_per_token``


def untimed(_event: ReplyEvent) -> Json:
    return {}


def live_timings(body: Body, clock: Callable[[], float]) -> Live:
    """What was read and written so far, with every chunk of a stream whose request asks for that."""
    if not body.timings_per_token:
        return untimed
    choices: dict[int, LiveTimings] = {}

    def after(event: ReplyEvent) -> Json:
        now_s = clock()
        return choices.setdefault(event.index, LiveTimings(now_s)).after(event.message, now_s)

    return after


@dataclass(slots=True)
class LiveTimings:
    """Of one choice. Times are those of the gateway's clock."""

    began_s: float
    first_s: float | None = None
    n_prompt: int = 0
    n_cached: int = 0
    n_read: int = 0
    n_reply: int = 0

    def after(self, message: EngineMessage, now_s: float) -> Json:
        """The field of a chunk for this message; nothing for one that has no chunk, and for the last, which has its own."""
        match message:
            case m.Begun():
                self.n_prompt = message.n_prompt
                self.n_cached = message.n_cached
                return {}
            case m.PromptRead():
                self.n_read = message.n_read - message.n_cached
                if not self.n_read:  # the first report, before anything is read
                    self.began_s = now_s
            case m.TextPiece():
                self.first_s = now_s if self.first_s is None else self.first_s
                self.n_read = self.n_prompt - self.n_cached
                self.n_reply += len(message.tokens)
            case m.Done():
                return {}
        read_ms = 1e3 * ((now_s if self.first_s is None else self.first_s) - self.began_s)
        write_ms = 0.0 if self.first_s is None else 1e3 * (now_s - self.first_s)
        return {"timings": {"cache_n": self.n_cached, **_speeds(self.n_read, read_ms, self.n_reply, write_ms)}}


# replies


class CompletionEncoder(Dialect):
    """A reply to chat completions or completions: as chunks, or whole. ``header`` is what every chunk repeats, and so is
    the ``fingerprint``, which is not known before the model is loaded."""

    id_prefix: str
    chunk_name: str

    def __init__(
        self,
        header: Json,
        fingerprint: Callable[[], str],
        body: Body,
        live: Live = untimed,
        *,
        with_probs: bool,
        keep: Callable[[Json], Awaitable[None]] | None = None,
    ) -> None:
        """``keep`` stores the whole answer of a stream before its last chunk."""
        self._header = header
        self._fingerprint = fingerprint
        self._body = body
        self._live = live
        self._with_probs = with_probs
        self._keep = keep
        self._choices: dict[int, Choice] = {}  # only to be kept
        self._has_role: set[int] = set()  # choices of a chat whose first chunk was sent
        self._dones: dict[int, m.Done] = {}

    @abc.abstractmethod
    def _chunks(self, event: ReplyEvent) -> list[tuple[Json | None, Json]]:
        """A choice (or none) and the other fields, for each chunk of an event."""

    @abc.abstractmethod
    def whole(self, choices: Sequence[Choice]) -> Json:
        """The answer to a request that does not stream."""

    def encode(self, event: ReplyEvent) -> list[bytes]:
        if isinstance(event.message, m.Done):
            self._dones[event.index] = event.message
        if self._keep is not None:
            self._choices.setdefault(event.index, Choice()).add(event)
        now = self._live(event)
        return [
            self._chunk([choice] if choice else [], more if _opens(choice) else {**now, **more})
            for choice, more in self._chunks(event)
        ]

    async def finish(self) -> list[bytes]:
        if self._keep is not None:
            await self._keep(self.whole([self._choices[i] for i in sorted(self._choices)]))
        dones = [self._dones[i] for i in sorted(self._dones)]
        last = self._diagnostics(dones[0])
        if self._body.includes_usage:
            last |= {"usage": usage(dones, self._body.n or 1), "timings": timings(dones[0])}
        return [*([self._chunk([], last)] if last else []), SSE_DONE]

    def _chunk(self, choices: list[Json], more: Json) -> bytes:
        header = {**self._header, "system_fingerprint": self._fingerprint(), "object": self.chunk_name}
        return sse({**header, "choices": choices, **more})

    def _whole(self, name: str, listed: list[Json], dones: Sequence[m.Done]) -> Json:
        return {
            **self._header,
            "system_fingerprint": self._fingerprint(),
            "object": name,
            "choices": listed,
            "usage": usage(dones, self._body.n or 1),
            "timings": timings(dones[0]),
            **self._diagnostics(dones[0]),
        }

    def _diagnostics(self, done: m.Done) -> Json:
        return {"prompt_cache_diagnostics": diagnostics(done)} if self._body.prompt_cache_diagnostics else {}


class ChatEncoder(CompletionEncoder):
    id_prefix = "chatcmpl"
    chunk_name = "chat.completion.chunk"

    def _chunks(self, event: ReplyEvent) -> list[tuple[Json | None, Json]]:
        """The role comes with the first token: clients take the first chunk for it when they measure."""
        chunks = self._content_chunks(event)
        if event.index in self._has_role or not any(choice for choice, _ in chunks):
            return chunks
        self._has_role.add(event.index)
        return [(_chat_choice(event.index, {"role": "assistant", "content": None}), {}), *chunks]

    def _content_chunks(self, event: ReplyEvent) -> list[tuple[Json | None, Json]]:
        deltas = [delta for delta in map(_delta, event.pieces) if delta is not None]
        match event.message:
            case m.Begun():
                return []
            case m.PromptRead() as read_so_far:
                return [(None, {"prompt_progress": progress(read_so_far)})]
            case m.TextPiece(probs=given):
                probs = logprobs(given) if self._with_probs and given else None
                deltas = deltas or ([{"content": ""}] if probs else [])
                return [(_chat_choice(event.index, delta, None if i else probs), {}) for i, delta in enumerate(deltas)]
            case m.Done() as done:
                end = {**_chat_choice(event.index, {}), "finish_reason": event.finish}
                rest: list[tuple[Json | None, Json]] = [(_chat_choice(event.index, delta), {}) for delta in deltas]
                return [*rest, (end, {"timings": timings(done)})]

    def whole(self, choices: Sequence[Choice]) -> Json:
        listed = [
            {
                "index": i,
                "message": message_of(choice.pieces),
                "logprobs": logprobs(choice.probs) if self._with_probs else None,
                "finish_reason": choice.finish,
            }
            for i, choice in enumerate(choices)
        ]
        return self._whole("chat.completion", listed, [choice.done for choice in choices])


class TextEncoder(CompletionEncoder):
    id_prefix = "cmpl"
    chunk_name = "text_completion"

    def _chunks(self, event: ReplyEvent) -> list[tuple[Json | None, Json]]:
        match event.message:
            case m.Begun():
                return []
            case m.PromptRead() as read_so_far:
                return [(None, {"prompt_progress": progress(read_so_far)})]
            case m.TextPiece(text=text, probs=given):
                if not text and not (self._with_probs and given):
                    return []
                probs = legacy_logprobs(given or []) if self._with_probs else None
                return [(_text_choice(event.index, text, probs), {})]
            case m.Done() as done:
                end = {**_text_choice(event.index, done.text), "finish_reason": event.finish}
                return [(end, {"timings": timings(done)})]

    def whole(self, choices: Sequence[Choice]) -> Json:
        body, n = self._body, self._body.n or 1
        echoed = body.texts_or_tokens() if isinstance(body, CompletionBody) and body.echo else []
        listed = [
            {
                "index": i,
                "text": ((echoed[i // n][0] or "") if echoed else "") + choice.text,
                "logprobs": legacy_logprobs(choice.probs) if self._with_probs else None,
                "finish_reason": choice.finish,
            }
            for i, choice in enumerate(choices)
        ]
        return self._whole("text_completion", listed, [choice.done for choice in choices])


def _opens(choice: Json | None) -> bool:
    """Whether it is the chunk with the role, which comes before there is anything to time."""
    return choice is not None and "role" in choice.get("delta", ())


def _chat_choice(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _text_choice(index: int, text: str, logprobs: Json | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}


def _delta(piece: Piece) -> Json | None:
    match piece:
        case Reasoning(text=text):
            return {"reasoning_content": text}
        case Text(text=text):
            return {"content": text}
        case CallBegun():
            return {"tool_calls": [{"index": piece.index, **call_of(piece)}]}
        case CallArguments():
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.json_fragment}}]}
        case CallEnded():
            return None


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST


def cache(done: m.Done) -> Json:
    """``checkpoint`` is the short form of ``restored``."""
    why = done.why
    return {
        "reason": why.reason,
        "again": why.again,
        "n_shared": max(done.n_shared, why.n_shared),
        "n_kv": why.n_kv,
        "n_checkpoint": why.n_checkpoint,
        "checkpoint": done.checkpoint,
        "restored": None if why.restored is None else msgspec.structs.asdict(why.restored),
        "diverged": _diverged(why),
        **_notes(done.notes),
        "evicted": _evicted(why),
    }


def n_written(done: m.Done) -> int:
    """Tokens that were read and are cached now."""
    return 0 if done.why.reason == Reason.CACHE_OFF else done.n_prompt - done.n_cached


def diagnostics(done: m.Done) -> Json:
    """For requests with ``prompt_cache_diagnostics``."""
    why = done.why
    return {
        "status": _status(done),
        "reason": why.reason,
        "explanation": _explanation(why),
        "cached_tokens": done.n_cached,
        "read_tokens": done.n_prompt - done.n_cached,
        "known_tokens": max(done.n_shared, why.n_shared),
        "diverged": _diverged(why),
        **_notes(done.notes),
        "evicted": _evicted(why),
    }


def _notes(notes: m.PromptNotes) -> Json:
    """What the server changed in the request. Empty values are left out, except the number of restored replies."""
    more = {"background": notes.background, "rewritten": list(notes.rewritten)}
    return {"restored_replies": notes.n_recalled, **{name: value for name, value in more.items() if value}}


def _explanation(why: m.ReadReason) -> str:
    return why.reason.words if why.evicted is None else f"{why.reason.words} ({why.evicted.words})"


def _evicted(why: m.ReadReason) -> Json | None:
    return None if why.evicted is None else {**msgspec.structs.asdict(why.evicted), "words": why.evicted.words}


def _status(done: m.Done) -> str:
    if done.why.reason == Reason.HIT:
        return "hit"
    return "partial" if done.n_cached else "miss"


def _diverged(why: m.ReadReason) -> Json | None:
    """Without the texts that the request did not ask for."""
    if why.diverged is None:
        return None
    return {name: value for name, value in msgspec.structs.asdict(why.diverged).items() if value is not None}
