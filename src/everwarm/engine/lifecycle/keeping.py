"""What is kept of a request: checkpoints while it runs, and what stays of it when it ends."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np

from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.offload import Offload
from everwarm.engine.cache.prewarm import PrewarmQueue, unread_rest
from everwarm.engine.request import Finish, Request
from everwarm.engine.slots import Slot
from everwarm.engine.stats import EngineStats
from everwarm.engine.tiers.ram import Receipt
from everwarm.errors import StateRejected
from everwarm.state.policy import CutKind
from everwarm.state.returns import Returns

log = logging.getLogger("everwarm.engine")


@dataclass(slots=True)
class Keeper:
    checkpointer: Checkpointer
    returns: Returns
    offload: Offload | None  # None: nothing outlives this engine but what is on disk
    prewarm: PrewarmQueue
    counts: EngineStats
    finish_prefill_s: float  # so long a prompt whose client went away may wait to be read on; 0: it is not
    # prompts that ended in the last step and are not kept yet: how long each is, and the logits after it
    ends: dict[Slot, tuple[int, np.ndarray]] = field(default_factory=dict)

    # while it runs

    def take(self, slot: Slot, kind: CutKind) -> bool:
        """Takes a checkpoint. False: the state was lost by that, and the slot is empty now."""
        try:
            self.checkpointer.take(slot, kind)
        except StateRejected as error:
            log.warning("a state was lost while it was being kept: %s", error)
            slot.vacate()
            return False
        return True

    def keep_end(self, slot: Slot, kind: CutKind) -> None:
        """Takes a checkpoint where the slot is now, unless there is one."""
        if slot.n_fed > slot.node.n_items:
            self.checkpointer.mark_end(slot)
            self.take(slot, kind)

    def note_prompt_end(self, slot: Slot, logits: np.ndarray) -> None:
        self.ends[slot] = slot.n_fed, logits

    def keep_prompt_ends(self) -> None:
        """Parks the ends of prompts that the last step reached, after their first tokens have left."""
        while self.ends:
            slot, (n_fed, logits) = self.ends.popitem()
            if slot.n_fed == n_fed:  # else it was lost in the same step
                self.checkpointer.take(slot, CutKind.END, logits=logits)  # parks or does nothing

    def leave_to_next(self, slot: Slot, request: Request) -> None:
        """The request leaves its slot, and another continues it. What was read stays, without a checkpoint."""
        self.checkpointer.mark_end(slot)
        slot.release()
        slot.remember(request.ask.namespace)
        slot.touch(time.monotonic())

    # when it ends

    def end(self, slot: Slot, request: Request, finish: Finish) -> Receipt | None:
        """The request leaves its slot. Returns what must be safe before its last frame leaves; None: nothing."""
        now = time.monotonic()
        request.ended_at = now
        if request.ask.ahead:
            self._end_ahead(slot, request)
            return None
        if request.ask.is_background:
            self._end_background(slot, request)
            return None
        if finish is Finish.CANCELLED and self.finish_prefill_s:
            rest = unread_rest(request, slot.n_fed)
            if rest is not None:
                self.prewarm.offer(rest, now + self.finish_prefill_s)
        if slot.n_fed < request.n_prompt:
            self.keep_end(slot, CutKind.CANCEL)
        elif slot.n_fed > request.n_prompt and self.returns.keeps_replies:
            self.keep_end(slot, CutKind.REPLY)
        elif slot.n_fed:
            self.checkpointer.mark_end(slot)
        self.returns.leave(slot.node, request.n_prompt, request.continuation)
        slot.release()
        slot.remember(request.ask.namespace)
        slot.touch(time.monotonic())
        return None if self.offload is None else self.offload.finish(slot, request.n_prompt, now)

    def _end_ahead(self, slot: Slot, request: Request) -> None:
        """Keeps what was read ahead; it belongs to no conversation yet."""
        self.counts.n_prewarm_tokens += slot.n_fed - request.n_cached
        self.counts.n_prewarms += self.prewarm.ended(request)
        if slot.n_fed:
            self.take(slot, CutKind.PREWARM)
        slot.release()
        slot.touch(time.monotonic())

    def _end_background(self, slot: Slot, request: Request) -> None:
        """Keeps little: a retry continues from what was read. It is no visit that may return, and is not written to
        disk; its slot is the next to be given up."""
        if slot.n_fed < request.n_prompt:
            self.keep_end(slot, CutKind.BACKGROUND)
        elif slot.n_fed:
            self.checkpointer.mark_end(slot)
        slot.release()
        slot.remember(request.ask.namespace)
        slot.touch(0.0)
        slot.note_archived()
