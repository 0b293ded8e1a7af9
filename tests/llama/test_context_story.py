"""Random stories: whatever happens in a context, what it calls clean can be replayed cold, bit for bit.

Sequences are read, batched, parked, dropped, saved and brought back at random. Each remembers how it came to be: its
chunks, the logits after each, and where it was captured. At the end every clean one is replayed alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from everwarm.errors import ContextFull
from everwarm.llama.batch import Feed, Tokens
from everwarm.llama.context import Context, Logits
from everwarm.llama.model import Model
from everwarm.types import START, SeqId
from support.steps import (
    KINDS,
    OPTIONS,
    Saved,
    Segment,
    load,
    mark,
    open_context,
    restore,
    same_bits,
    say,
    segment_of,
    splice,
    text,
)

N_STORIES = 200 if os.environ.get("EVERWARM_CAMPAIGN") else 3
N_STEPS = 25
SIZES = (1, 1, 2, 5, 33, 64, 65)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Equal only to itself: two sequences share a past only where one was copied from the other."""

    tokens: Tokens
    row: Logits


CAPTURED = None  # in a past: here a state was captured
Past = tuple[Chunk | None, ...]


@dataclass(frozen=True)
class Kept:
    past: Past
    saved: Saved


class Story:
    def __init__(self, model: Model, seed: int) -> None:
        self.context = open_context(model, n_ctx=768)
        self.random = random.Random(seed)
        self.past: dict[SeqId, Past] = {SeqId(i): () for i in range(OPTIONS.n_seq_max)}
        self.kept: list[Kept] = []
        self.claims: list[Past] = []  # pasts of which the context said that they were clean

    def tell(self) -> None:
        steps = 3 * (self.read,) + 2 * (self.take, self.bring_back) + (self.reload, self.start_over)
        steps += (self.visit, self.visit, self.send_away, self.read_together)
        steps += (self.park,) if self.context.kind.can_share_cells else ()
        for _ in range(N_STEPS):
            self.random.choice(steps)(self.host())
            self.context.check()

    def host(self) -> SeqId:
        """The sequence that most happens to: the first that has a past."""
        return next((seq for seq, past in self.past.items() if past), self.somebody())

    def somebody(self) -> SeqId:
        return self.random.choice(list(self.past))

    def tokens(self) -> Tokens:
        return text(self.random.choice(SIZES), seed=self.random.randrange(1000))

    # what can happen

    def read(self, seq: SeqId) -> None:
        tokens = self.tokens()
        try:
            self.past[seq] += (Chunk(tokens, say(self.context, seq, tokens)),)
        except ContextFull:
            self.drop(seq)
        if self.context.is_clean(seq):
            self.claims.append(self.past[seq])

    def read_together(self, seq: SeqId) -> None:
        other, a, b = self.somebody(), self.tokens()[:60], self.tokens()[:60]
        feeds = [Feed(s, tokens, self.context.end(s), wants_logits=True) for s, tokens in ((seq, a), (other, b))]
        if seq != other and len(a) + len(b) <= self.context.cells.free:
            self.context.decode(feeds)
            self.past[seq] += (Chunk(a, self.context.logits(0).copy()),)
            self.past[other] += (Chunk(b, self.context.logits(1).copy()),)

    def visit(self, host: SeqId) -> None:
        """Somebody else reads, and mostly leaves again."""
        guest = self.somebody()
        if guest != host:
            for _ in range(self.random.randrange(1, 4)):
                self.read(guest)
            if self.random.random() < 0.8:
                self.drop(guest)

    def send_away(self, host: SeqId) -> None:
        for seq in self.past:
            if seq != host:
                self.drop(seq)

    def start_over(self, host: SeqId) -> None:
        self.send_away(host)
        self.drop(host)

    def drop(self, seq: SeqId) -> None:
        self.context.drop(seq)
        self.past[seq] = ()

    def park(self, seq: SeqId) -> None:
        spare = self.somebody()
        if spare != seq:
            self.context.park(seq, spare)
            self.past[spare] = self.past[seq]

    def take(self, seq: SeqId) -> None:
        """Keep the sequence: its state, and its KV in one or two segments."""
        context, end = self.context, self.context.end(seq)
        if end.n_tokens:
            state = context.capture(seq) if context.kind.needs_checkpoints else None
            self.past[seq] += (CAPTURED,)
            segments = self._segments(seq) if context.kind.has_attention else ()
            self.kept.append(Kept(self.past[seq], Saved(end, segments, state, context.is_clean(seq))))

    def _segments(self, seq: SeqId) -> tuple[Segment, ...]:
        end = self.context.end(seq)
        middle = mark(self.random.randrange(end.n_tokens))
        pairs = [(start, stop) for start, stop in ((START, middle), (middle, end)) if start < stop]
        return tuple(segment_of(self.context, seq, start, stop) for start, stop in pairs)

    def bring_back(self, seq: SeqId) -> None:
        """Go back within one's own past, the KV kept as it lies or its second half spliced anew."""
        own = [kept for kept in self.kept if self.past[seq][: len(kept.past)] == kept.past]
        if own:
            kept = self.random.choice(own)
            if self.context.kind.has_attention and self.random.random() < 0.5:
                self._splice_second_half(seq, kept.saved)
            restore(self.context, seq, kept.saved)
            self.past[seq] = kept.past

    def _splice_second_half(self, seq: SeqId, saved: Saved) -> None:
        *_, last = saved.segments
        if last.stop.n_tokens - last.start.n_tokens <= self.context.cells.free and last.start.n_tokens:
            self.context.keep_kv(seq, last.start)
            splice(self.context, seq, last)

    def reload(self, seq: SeqId) -> None:
        if self.kept:
            kept = self.random.choice(self.kept)
            self.start_over(seq)
            seq = self.somebody()
            if kept.saved.end.n_tokens <= self.context.cells.free:
                load(self.context, seq, kept.saved)
                self.past[seq] = kept.past

    # the end

    def longest_claims(self) -> list[Past]:
        """Those that no other one begins with: replaying them covers all."""
        begun = {past[:n] for past in self.claims for n in range(len(past))}
        return [past for past in dict.fromkeys(self.claims) if past not in begun]


def replay(context: Context, past: Past) -> list[Logits]:
    """The same chunks and captures in an empty context."""
    rows = []
    for chunk in past:
        if chunk is CAPTURED:
            context.touch(SeqId(0))
        else:
            rows.append(say(context, SeqId(0), chunk.tokens))
    return rows


def kept_claims(model: Model, seed: int) -> tuple[int, int]:
    """Tell a story and replay what was called clean: how many chunks were claimed, and how many replayed exactly."""
    story = Story(model, seed)
    with story.context:
        story.tell()
    n_claimed = n_kept = 0
    for past in story.longest_claims():
        rows = [chunk.row for chunk in past if chunk is not CAPTURED]
        with open_context(model, n_ctx=story.context.n_ctx) as cold:
            n_kept += len(rows) * same_bits(replay(cold, past), rows)
        n_claimed += len(rows)
    return n_claimed, n_kept


@pytest.mark.parametrize("arch", tuple(KINDS))
def test_what_is_called_clean_can_be_replayed(arch: str, open_tiny: Callable) -> None:
    n_all = 0
    for seed in range(N_STORIES):
        n_claimed, n_kept = kept_claims(open_tiny(arch), seed)
        assert n_kept == n_claimed, f"story {seed}"
        n_all += n_claimed
    assert n_all > 4 * N_STORIES, "hardly anything was clean: the stories prove nothing"


def test_a_context_that_calls_everything_clean_is_found_out(
    open_tiny: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control."""
    monkeypatch.setattr(Context, "is_clean", lambda self, seq: True)
    claimed_and_kept = [kept_claims(open_tiny("llama"), seed) for seed in range(N_STORIES)]
    assert any(n_kept < n_claimed for n_claimed, n_kept in claimed_and_kept)
