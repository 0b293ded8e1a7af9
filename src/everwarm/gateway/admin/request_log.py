"""The last requests with their timings, and totals of what the cache saved. In memory only; bounded.

``generate`` records the engine's messages for each choice of a request; watchers are notified. Knows no HTTP.

The log line has numbers, names and codes; never text of a prompt, of a reply or of an error that may quote one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from everwarm.engine.process import messages as m
from everwarm.logs import FIELDS
from everwarm.types import Json

MOST_KEPT = 512
NOTIFY_EVERY_S = 0.25

Status = Literal["running", "done", "failed", "cancelled"]

_PHASES_SO_FAR = ("queue", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Caller:
    """A request as its caller sent it: id, model, path and namespace."""

    id: str
    model: str
    path: str
    stream: bool
    traceparent: str | None = None  # W3C's name for the span it belongs to
    namespace: str = ""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One choice of a request. Timings are the gateway's until the engine reports its own."""

    id: str
    caller: Caller
    at: float = field(default_factory=time.time)
    number: int | None = None  # the engine's number for it, while it runs
    status: Status = "running"
    error: str | None = None  # its text may quote the request
    error_code: str | None = None
    done: m.Done | None = None
    n_prompt: int = 0
    n_cached: int = 0
    n_read: int = 0
    n_reply: int = 0
    slot: int | None = None
    received_at: float = field(default_factory=time.monotonic)
    began_at: float | None = None
    first_at: float | None = None

    def record(self, message: m.ToGateway) -> None:
        match message:
            case m.Begun(id=id, n_prompt=n_prompt, n_cached=n_cached, slot=slot):
                self.number = id
                self.n_prompt = n_prompt
                self.n_cached = n_cached
                self.slot = slot
                self.began_at = time.monotonic()
            case m.PromptRead(n_read=n_read):
                self.n_read = n_read - self.n_cached
            case m.TextPiece(tokens=tokens):
                self.first_at = self.first_at or time.monotonic()
                self.n_read = self.n_prompt - self.n_cached
                self.n_reply += len(tokens)
            case m.Done() as done:
                self.status = _status(done)
                self.done = done
                self.slot = done.slot
                self.n_prompt = done.n_prompt
                self.n_cached = done.n_cached
                self.n_reply = done.n_reply
                self.n_read = done.n_prompt - done.n_cached
            case m.Failed(message=text, code=code):
                self.status = "failed"
                self.error = text
                self.error_code = code

    def forget_words(self) -> None:
        """Removes every text that may quote a prompt."""
        self.error = self.error_code
        self.done = None if self.done is None else _without_words(self.done)

    def phases(self) -> list[tuple[str, float]]:
        """Seconds per phase. Until the engine reports them, restoring counts as queueing."""
        done = self.done
        if done is not None:
            parts = done.queue_s, done.restore_s, done.prefill_s, done.decode_s
            return list(zip(("queue", "restore", "prefill", "decode"), parts, strict=True))
        now = time.monotonic()
        marks = [self.received_at, *(at for at in (self.began_at, self.first_at) if at is not None), now]
        return [(name, stop - start) for name, start, stop in zip(_PHASES_SO_FAR, marks, marks[1:], strict=False)]

    def first_s(self) -> float | None:
        """Seconds from the request to the first token."""
        if self.done is not None:
            return self.done.queue_s + self.done.restore_s + self.done.prefill_s
        return None if self.first_at is None else self.first_at - self.received_at


def _without_words(done: m.Done) -> m.Done:
    if done.why.diverged is None:
        return done
    why = msgspec.structs.replace(done.why, diverged=m.Diverged(done.why.diverged.at))
    return msgspec.structs.replace(done, why=why)


def _status(done: m.Done) -> Status:
    return "cancelled" if done.finish == "cancelled" else "done"


@dataclass(slots=True)
class Totals:
    """Totals of the requests of one model since the server started."""

    n_requests: int = 0
    n_prompt: int = 0
    n_reused: int = 0
    n_avoidable: int = 0
    n_written: int = 0
    restore_s: float = 0.0

    def add(self, done: m.Done) -> None:
        self.n_requests += 1
        self.n_prompt += done.n_prompt
        self.n_reused += done.n_cached
        self.n_avoidable += max(0, done.n_shared - done.n_cached)
        self.n_written += done.n_reply
        self.restore_s += done.restore_s

    def seconds_saved(self, seconds_per_token: float | None) -> float:
        """Time that reading the reused tokens would have taken, minus restore time; 0 until reading was measured."""
        return max(0.0, self.n_reused * (seconds_per_token or 0.0) - self.restore_s)


class RequestLog:
    def __init__(self) -> None:
        self._rows: deque[RequestRecord] = deque(maxlen=MOST_KEPT)
        self._totals: dict[str, Totals] = {}
        self.notify: Callable[[RequestRecord], None] | None = None  # None: there are no watchers
        self.ended: list[Callable[[RequestRecord], None]] = []  # called at the end of each choice: traces and logs

    def rows(self, limit: int, namespace: str = "") -> Iterator[RequestRecord]:
        """The newest first, of namespaces with this prefix."""
        newest = (row for row in reversed(self._rows) if row.caller.namespace.startswith(namespace))
        return (row for row, _ in zip(newest, range(limit), strict=False))

    def forget_words(self, model: str, namespace: str) -> None:
        """Removes the text of a model's requests in namespaces with this prefix; their numbers stay."""
        for row in self._rows:
            if row.caller.model == model and row.caller.namespace.startswith(namespace):
                row.forget_words()

    def totals(self, model: str) -> Totals:
        return self._totals.setdefault(model, Totals())

    def running(self, model: str, number: int) -> str | None:
        """The id of the request with this number in the engine."""
        found = (row.id for row in self._rows if row.number == number and row.caller.model == model)
        return next(found, None)

    def follow(self, caller: Caller, index: int) -> TrackedRequest:
        """Begins to record one choice of a request."""
        row = RequestRecord(caller.id if index == 0 else f"{caller.id}-{index}", caller)
        self._rows.append(row)
        return TrackedRequest(self, row)

    def end(self, row: RequestRecord) -> None:
        row.number = None
        if row.status == "running":
            row.status = "cancelled"
        if row.done is not None:
            self.totals(row.caller.model).add(row.done)
        for callback in self.ended:
            callback(row)


@dataclass(slots=True)
class TrackedRequest:
    """One choice, from its beginning to ``end``: a context manager that ends it if it has not ended before."""

    request_log: RequestLog
    row: RequestRecord
    _notified_at: float = 0.0
    _wants_progress: bool = True
    _is_over: bool = False

    def __enter__(self) -> TrackedRequest:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()

    def submit(self, submit: m.Submit) -> m.Submit:
        """The same message, with progress reports from the engine if there are watchers."""
        self._wants_progress = submit.wants_progress
        self._notify()
        if self.request_log.notify is None:
            return submit
        return msgspec.structs.replace(submit, wants_progress=True)

    def record(self, message: m.ToGateway) -> bool:
        """Records a message; True if it is for the caller. Progress that was not requested goes to watchers only."""
        self.row.record(message)
        if self.request_log.notify is not None and (
            isinstance(message, m.Begun) or time.monotonic() - self._notified_at >= NOTIFY_EVERY_S
        ):
            self._notify()
        return self._wants_progress or not isinstance(message, m.PromptRead)

    def end(self) -> None:
        """Idempotent."""
        if not self._is_over:
            self._is_over = True
            self.request_log.end(self.row)
            self._notify()

    def _notify(self) -> None:
        if self.request_log.notify is not None:
            self._notified_at = time.monotonic()
            self.request_log.notify(self.row)


log = logging.getLogger("everwarm.requests")


_KINDS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/api/chat": "chat",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/api/generate": "generate",
}


def log_request(row: RequestRecord) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", line(row), extra={FIELDS: fields(row)})


def line(row: RequestRecord) -> str:
    """``chat 3,135 tokens: 3,117 reused, 18 read, 48 ms; 12 written, 310 ms; stop; MODEL; req_…``."""
    parts = [f"{_kind(row)} {row.n_prompt:,} tokens: {row.n_cached:,} reused, {row.n_read:,} read"]
    first_s = row.first_s()
    if first_s is not None:
        parts[0] += f", {1e3 * first_s:,.0f} ms"
    written_s = dict(row.phases()).get("decode")
    if row.n_reply and written_s is not None:
        parts.append(f"{row.n_reply:,} written, {1e3 * written_s:,.0f} ms")
    return "; ".join([*parts, _end(row), row.caller.model, row.id])


def fields(row: RequestRecord) -> Json:
    """The same as values, for a log in JSON."""
    first_s = row.first_s()
    return {
        "request": row.id,
        "kind": _kind(row),
        "path": row.caller.path,
        "model": row.caller.model,
        "stream": row.caller.stream,
        "status": row.status,
        "end": _end(row),
        "n_prompt": row.n_prompt,
        "n_cached": row.n_cached,
        "n_read": row.n_read,
        "n_reply": row.n_reply,
        "reason": None if row.done is None else row.done.why.reason,
        "ttft_ms": None if first_s is None else round(1e3 * first_s, 1),
        "phases_ms": {name: round(1e3 * seconds, 1) for name, seconds in row.phases()},
    }


def _kind(row: RequestRecord) -> str:
    return _KINDS.get(row.caller.path, "completion")


def _end(row: RequestRecord) -> str:
    """How it ended: the finish reason, or the status with the error's code."""
    if row.status == "done" and row.done is not None:
        return row.done.finish
    return row.status if row.error_code is None else f"{row.status} ({row.error_code})"
