"""A request's way through the engine: what the caller wants, how far it is, what came out."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from everwarm.config import require
from everwarm.engine.inspect.read_reason import counted
from everwarm.engine.process.messages import AskOptions, CheckpointUse, CutHints, ReadReason, SentMedia
from everwarm.engine.speculation.draft_length import Record
from everwarm.engine.tiers.ram import Receipt
from everwarm.errors import BadRequest, EverwarmError
from everwarm.llama.constraints.matcher import CompiledConstraint
from everwarm.llama.sampler import Sampler
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import Chunks
from everwarm.state.policy import Cut
from everwarm.state.returns import Continuation

MAX_PROBS = 100
MIN_SHIFTED = 4  # items behind those that are kept, for a shift to drop some of them
MAX_SHIFTS = 64  # of one reply: each reads a part of the context again

_ids = itertools.count(1)


class Ask(AskOptions, frozen=True):
    """What a caller wants, with cut hints in items."""

    prompt: Prompt
    images: Mapping[bytes, SentMedia] = {}  # of the prompt's media items, by their digest
    constraint: CompiledConstraint | None = None  # what the reply must look like
    ahead: bool = False  # no client has requested it yet: see ``prewarm``

    @property
    def is_background(self) -> bool:
        """No user waits for it: it runs last, and what it leaves is the first to be evicted."""
        return self.priority > 0

    def __post_init__(self) -> None:
        n = len(self.prompt)
        require(n > 0, "the prompt is empty; give at least one token")
        require(0 <= self.max_tokens <= 1 << 26, f"max_tokens is {self.max_tokens}; give 0 or more")
        require(
            self.n_probs is None or 0 <= self.n_probs <= MAX_PROBS, f"n_probs is {self.n_probs}; give 0 to {MAX_PROBS}"
        )
        for hint in self.hints.points:
            if not 0 <= hint <= n:
                raise BadRequest(f"a cut hint is at {hint}; the prompt has {n} items")


class Finish(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Result:
    tokens: tuple[int, ...]
    finish: Finish
    n_prompt: int
    n_cached: int
    n_shared: int  # how much of the prompt had ever been read: n_prompt - n_shared could not be avoided
    checkpoint: CheckpointUse | None
    queue_s: float
    restore_s: float
    prefill_s: float
    decode_s: float
    error: EverwarmError | None = None
    why: ReadReason | None = None  # None: it never started; in tokens
    n_drafted: int = 0
    n_draft_accepted: int = 0
    n_shifts: int = 0

    @property
    def n_processed(self) -> int:
        return self.n_prompt - self.n_cached


@dataclass(slots=True, eq=False)
class Request:
    """The engine's own record of an ask. ``items`` holds the prompt and then the reply."""

    ask: Ask
    sampler: Sampler
    room: int  # the most items it may ever hold; an image is one
    submitted_at: float
    id: int = field(default_factory=lambda: next(_ids))
    n_prompt: int = field(init=False)
    n_items: int = field(init=False)
    n_cached: int = 0
    n_shared: int = 0
    why: ReadReason | None = None
    used: CheckpointUse | None = None
    continuation: Continuation = field(default_factory=Continuation)  # what its prompt returns to
    attempts: int = 0
    admitted: int | None = None  # which one it was to be admitted; kept when it is suspended
    n_furthest: int = 0  # items it had decoded when it was suspended, at most
    chunks: Chunks = ()  # how they were decoded, if deterministic: it continues in the same chunks
    cuts: tuple[Cut, ...] = ()  # where its prompt is cut, of a deterministic one
    started_at: float | None = None
    restored_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None  # before what was read is put away
    cancelled: bool = False
    n_drafted: int = 0
    n_draft_accepted: int = 0
    draft_record: Record = field(default_factory=Record)
    stop_watch: Callable[[int], bool] | None = None  # whether the text so far, with one more token, holds a stop string
    before: Result | None = None  # what came of it before its context was shifted; None: it never was

    def __post_init__(self) -> None:
        self._codes = np.empty(self.room, np.int32)
        self.n_prompt = self.n_items = len(self.ask.prompt)
        self._codes[: self.n_prompt] = self.ask.prompt.codes

    _codes: np.ndarray[tuple[int], np.dtype[np.int32]] = field(init=False)

    @property
    def n_reply(self) -> int:
        return self.n_items - self.n_prompt

    @property
    def n_left(self) -> int:
        return self.room - self.n_items

    @property
    def is_full(self) -> bool:
        return self.n_items >= self.room

    @property
    def n_prompt_tokens(self) -> int:
        return self.ask.prompt.n_tokens(self.n_prompt)

    def n_tokens(self, n_items: int) -> int:
        """Cells of the first ``n_items``."""
        n_read = min(n_items, self.n_prompt)
        return self.ask.prompt.n_tokens(n_read) + n_items - n_read

    def note_start(self, n_restored: int, n_shared: int, used: CheckpointUse | None) -> None:
        """Records that it continues from ``n_restored`` items; ``n_shared`` items of its prompt were ever read."""
        self.restored_at = time.monotonic()
        self.n_cached = min(n_restored, self.n_prompt)
        self.n_shared = n_shared
        self.used = used

    @property
    def n_most_drafted(self) -> int:
        """Tokens that may be drafted in one step."""
        return self.room if self.ask.max_draft is None else self.ask.max_draft

    @property
    def may_draft(self) -> bool:
        """Bits of a deterministic reply must not depend on drafts, so it has none."""
        return not self.ask.deterministic and self.n_most_drafted > 0

    def watch_for_stop(self, token: int | None) -> bool:
        """Takes note of a token that was picked, each once and in order; True if the text holds a stop string now."""
        return token is not None and self.stop_watch is not None and self.stop_watch(token)

    def append(self, token: int) -> None:
        self._codes[self.n_items] = token
        self.n_items += 1

    def tokens(self, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return self._codes[start:stop]

    def items(self, n_items: int) -> Prompt:
        """The first ``n_items``, prompt and reply alike, as a prompt of their own."""
        media = {i: item for i, item in self.ask.prompt.media.items() if i < n_items}
        return Prompt(self._codes[:n_items], MappingProxyType(media))

    def without_token(self) -> tuple[Finish, EverwarmError | None]:
        """Why no token was picked: none was wanted, or the constraint is complete or cannot be followed."""
        matcher = self.sampler.matcher
        if matcher is None or self.ask.max_tokens == 0:
            return Finish.LENGTH, None
        return (Finish.STOP, None) if matcher.error is None else (Finish.ERROR, matcher.error)

    def end(self) -> Finish | None:
        """Whether the reply ends with the token it has just got, and how."""
        if self.sampler.matcher is not None and self.sampler.matcher.is_complete:
            return Finish.STOP
        return Finish.LENGTH if self.is_full else None

    def shifted(self, n_ctx: int) -> Request | None:
        """The same request with less behind it, where its context was full: what is left is a prompt that is read like any
        other, so all that is kept of it is what its items give. None: it may not go on, or nothing can be dropped."""
        shift = self.ask.shift
        n_more = self.ask.max_tokens - self.n_reply
        if shift is None or n_more <= 0 or self.ask.prompt.media:
            return None
        result = self.result(Finish.LENGTH)
        before = dataclasses.replace(result, n_shifts=result.n_shifts + 1)
        n_keep = min(before.n_prompt if shift.n_keep < 0 else shift.n_keep, n_ctx // 2)
        n_left = self.n_items - n_keep
        if n_left < MIN_SHIFTED or before.n_shifts > MAX_SHIFTS:
            return None
        n_discard = min(max(shift.n_discard or n_left // 2, n_left // 4), n_left - 1)
        codes = np.concatenate([self._codes[:n_keep], self._codes[n_keep + n_discard : self.n_items]])
        ask = replace(self.ask, prompt=Prompt.of_tokens(codes), max_tokens=n_more, hints=CutHints())
        room = min(len(codes) + n_more, n_ctx)
        # it is the same request: only what it holds is another
        return dataclasses.replace(self, ask=ask, room=room, before=before, n_furthest=0, chunks=(), cuts=())

    def result(self, finish: Finish, error: EverwarmError | None = None) -> Result:
        now = self.ended_at or time.monotonic()
        started = self.started_at or now
        restored = self.restored_at or now
        first = self.first_token_at or now
        reply = tuple(int(t) for t in self._codes[self.n_prompt : self.n_items])
        before = self.before
        return Result(
            tokens=reply if before is None else before.tokens + reply,
            finish=finish,
            n_prompt=self.n_prompt_tokens if before is None else before.n_prompt,
            n_cached=self.n_tokens(self.n_cached) if before is None else before.n_cached,
            n_shared=self.n_tokens(self.n_shared) if before is None else before.n_shared,
            checkpoint=self.used,
            queue_s=started - self.submitted_at,
            restore_s=restored - started,
            prefill_s=first - restored,
            decode_s=now - first,
            error=error,
            why=None if self.why is None else replace(counted(self.why, self.n_tokens), restored=self.used),
            n_drafted=self.n_drafted,
            n_draft_accepted=self.n_draft_accepted,
            n_shifts=0 if before is None else before.n_shifts,
        )


class Started(NamedTuple):
    request_id: int
    n_prompt: int
    n_cached: int
    slot: int


class Progress(NamedTuple):
    request_id: int
    n_read: int
    n_prompt: int


class Probs(NamedTuple):
    """The log-probability of a token that was picked, and the most likely ones at that place."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class NewToken(NamedTuple):
    request_id: int
    token: int
    probs: Probs | None = None


class Finished(NamedTuple):
    request_id: int
    result: Result
    receipt: Receipt | None = None  # what must be safe before the last frame leaves; None: nothing


Event = Started | Progress | NewToken | Finished
