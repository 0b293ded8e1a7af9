"""What llama-server does with a trace: checkpoints belong to a slot, at most 32, and the oldest go.

They are taken where messages of the user begin (the last one, and others 8192 tokens after the one before) and near the
prompt's end. When a request starts, the other slots' prompts are copied to a cache of whole prompts, oldest out first,
each with all its KV, and so is one that loses its slot; one that was taken out of there is in there no more. Nothing
outlives the process. Read off build b11549; that there is no checkpoint right after an image is left out here. Pure.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from everwarm.prompt.prompt import Prompt
from everwarm.simulate.simulated_cache import Outcome
from everwarm.simulate.simulated_machine import Curves
from everwarm.simulate.trace import TraceTurn

MAX_CHECKPOINTS = 32
MIN_STEP = 8192
N_BATCH = 2048
N_UBATCH = 512
NEAR_END = 4
SIMILAR = 0.1
WORTH_KEEPING = 0.5
WORTH_LOADING = 0.25
_EMPTY = Prompt.of_tokens([])


@dataclass(slots=True, eq=False)
class _FifoSlot:
    prompt: Prompt = field(default_factory=lambda: _EMPTY)
    points: list[tuple[int, int]] = field(default_factory=list)  # tokens and the request that made it, oldest first
    used_at: float = -1.0

    def clear(self) -> None:
        self.prompt = _EMPTY
        self.points = []


class FifoMemory:
    def __init__(self, curves: Curves, budget: int, n_slots: int) -> None:
        self.most_bytes = 0  # that were held at once
        self.written_bytes = 0
        self._curves = curves
        self._budget = budget
        self._slots = [_FifoSlot() for _ in range(n_slots)]
        self._cache: list[_FifoSlot] = []
        self._request = 0

    @property
    def disk_written(self) -> int:
        return 0  # llama-server keeps nothing on disk by itself

    @property
    def _held_bytes(self) -> int:
        """Cached prompts, and the checkpoints of those that have a slot."""
        return self._cached() + sum(len(slot.points) for slot in self._slots) * self._curves.state_bytes

    def _cached(self) -> int:
        return sum(self._size(each) for each in self._cache)

    def _size(self, slot: _FifoSlot) -> int:
        n = slot.prompt.n_tokens(len(slot.prompt))
        return n * self._curves.kv_bytes_per_token + (1 + len(slot.points)) * self._curves.state_bytes

    def serve(self, turn: TraceTurn) -> Outcome:
        self._request += 1
        if turn.before:
            self._slots = [_FifoSlot() for _ in self._slots]
            self._cache = []
        slot, loaded = self._slot_for(turn.prompt)
        for other in self._slots:
            if other is not slot:
                self._put_away(other)
        n_past, from_point = self._restore(slot, turn.prompt)
        self._read(slot, turn, n_past)
        slot.prompt, slot.used_at = turn.path_from(n_past), turn.at_s
        self.most_bytes = max(self.most_bytes, self._held_bytes)
        loaded += self._curves.state_bytes if from_point else 0
        return Outcome(turn.prompt.n_tokens(n_past), turn.prompt.n_tokens(max(n_past, turn.n_stop)), loaded)

    # slots and the cache of prompts

    def _slot_for(self, prompt: Prompt) -> tuple[_FifoSlot, int]:
        n = len(prompt)
        best = max(self._slots, key=lambda s: _common(s, prompt))
        if _common(best, prompt) / n > SIMILAR:
            if _common(best, prompt) / len(best.prompt) >= WORTH_KEEPING:
                return best, 0
        else:
            best = min(self._slots, key=lambda s: s.used_at)
        self._put_away(best)
        return best, self._take_out(best, prompt)

    def _put_away(self, slot: _FifoSlot) -> None:
        size = self._size(slot)
        n = len(slot.prompt)
        if not n or size > self._budget or any(_common(each, slot.prompt) == n for each in self._cache):
            return
        self._cache = [each for each in self._cache if _common(each, slot.prompt) < len(each.prompt)]
        while self._cache and self._cached() + size > self._budget:
            self._cache.pop(0)
        self._cache.append(_FifoSlot(slot.prompt, list(slot.points)))
        self.written_bytes += size - len(slot.points) * self._curves.state_bytes

    def _take_out(self, slot: _FifoSlot, prompt: Prompt) -> int:
        """Load the cached prompt that is most like this one, if it beats what the slot holds; returns its bytes."""
        keep = _common(slot, prompt) / len(slot.prompt) if len(slot.prompt) else -1.0
        like = _common(slot, prompt) / len(prompt)
        best = None
        for each in self._cache:
            n = _common(each, prompt)
            share = n / len(each.prompt)
            if share >= WORTH_LOADING and share > keep and n / len(prompt) > like:
                keep = share
                like = n / len(prompt)
                best = each
        if best is None:
            return 0  # what the slot holds is used as far as it goes
        self._cache.remove(best)
        slot.prompt, slot.points = best.prompt, best.points
        return self._size(best) - len(best.points) * self._curves.state_bytes

    # checkpoints

    def _restore(self, slot: _FifoSlot, prompt: Prompt) -> tuple[int, bool]:
        """Where prefill starts, and whether that needs a checkpoint."""
        n = _common(slot, prompt)
        n_past = n
        from_point = False
        if n and (n < len(slot.prompt) or n == len(prompt)):
            n_past = max((at for at, _ in slot.points if at <= n and at < len(prompt)), default=0)
            from_point = n_past > 0
        slot.points = [point for point in slot.points if point[0] <= n_past]
        return n_past, from_point

    def _read(self, slot: _FifoSlot, turn: TraceTurn, n_past: int) -> None:
        n = len(turn.prompt)
        start = n_past
        last_user = max(turn.users, default=None)
        while start < turn.n_stop:
            stop = self._next_stop(slot, turn, start, last_user)
            near = n < stop + N_UBATCH
            wanted = stop == n or start in turn.users or near
            spaced = not slot.points or start == last_user or near or start > slot.points[-1][0] + MIN_STEP
            if start and wanted and spaced:
                self._keep(slot, start)
            start = stop

    @staticmethod
    def _next_stop(slot: _FifoSlot, turn: TraceTurn, start: int, last_user: int | None) -> int:
        n = len(turn.prompt)
        stops = [at for at in (n - NEAR_END - N_UBATCH, n - NEAR_END, n, start + N_BATCH) if at > start]
        for at in turn.users[bisect.bisect(turn.users, start) :]:
            if at == last_user or not slot.points or at > slot.points[-1][0] + MIN_STEP:
                stops.append(at)
                break
        return min(stops)

    def _keep(self, slot: _FifoSlot, at: int) -> None:
        if len(slot.points) + 1 >= MAX_CHECKPOINTS:
            slot.points = self._spaced(slot.points)
        slot.points = [p for p in slot.points[-(MAX_CHECKPOINTS - 1) :] if p[0] != at]
        slot.points.append((at, self._request))
        self.written_bytes += self._curves.state_bytes

    def _spaced(self, points: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The checkpoints without those of earlier requests that are too close to another, until there is room."""
        kept: list[tuple[int, int]] = []
        for i, point in enumerate(points):
            n_now = len(kept) + len(points) - i
            close = bool(kept) and point[0] <= kept[-1][0] + MIN_STEP
            if n_now + 1 >= MAX_CHECKPOINTS and close and point[1] != self._request:
                continue
            kept.append(point)
        return kept


def _common(slot: _FifoSlot, prompt: Prompt) -> int:
    return int(prompt.common_prefix(slot.prompt))
