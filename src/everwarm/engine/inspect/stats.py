"""Counts what requests cost and what happens to checkpoints; logs why a prompt had to be read again, and why a checkpoint
went."""

from __future__ import annotations

import logging
from dataclasses import InitVar, dataclass, field

from everwarm.engine.process.messages import ReadReason
from everwarm.engine.request import Request
from everwarm.state.policy import GUARD
from everwarm.state.tree import Checkpoint, Node

log = logging.getLogger("everwarm.engine")

# Why something that was good went: no room in RAM, too many on one path, no spare on the device.
EVICTIONS = ("ram_budget", "thinning", "capacity")

_MIB = 1 << 20


@dataclass(slots=True)
class RequestStats:
    """What happened since the start."""

    n_requests: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_avoidable: int = 0  # prompt tokens read again although they had been read before
    n_full_rereads: int = 0
    n_suspended: int = 0
    n_turns: int = 0  # times a deterministic request and the others gave way to each other
    n_stalls: int = 0  # times that nothing moved although a request waited
    n_decode_failures: int = 0
    n_prewarms: int = 0  # turns read before they were requested
    n_prewarms_interrupted: int = 0
    n_prewarm_tokens: int = 0

    @property
    def new_share(self) -> float:
        """How much of the prompts had to be read."""
        return 1 - self.n_cached / self.n_prompt if self.n_prompt else 1.0

    def add(self, request: Request, why: ReadReason) -> None:
        """Counts a request that has started: what it reused, what that cost, and why it reads the rest."""
        self.n_requests += 1
        n_cached = request.n_tokens(request.n_cached)
        n_shared = request.n_tokens(request.n_shared)
        self.n_prompt += request.n_prompt_tokens
        self.n_cached += n_cached
        self.n_avoidable += max(0, n_shared - n_cached)
        if request.n_shared > GUARD and request.n_cached == 0 and request.ask.use_cache:
            self.n_full_rereads += 1
            reason = why.again or why.reason
            log.warning(
                "full re-read of %d tokens although %d were known: %s", request.n_prompt_tokens, n_shared, reason.words
            )


@dataclass
class CheckpointStats:
    """``max_checkpoints`` on one path are allowed: the log says how many there are."""

    max_checkpoints: InitVar[int]
    n_created: int = 0
    n_restored: int = 0
    n_dropped: int = 0
    n_quarantined: int = 0
    n_prewarms_used: int = 0
    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVICTIONS, 0))

    def __post_init__(self, max_checkpoints: int) -> None:
        self._max_checkpoints = max_checkpoints

    def evicted(self, reason: str) -> None:
        """Counts an eviction; other reasons are not counted."""
        if reason in self.evictions:
            self.evictions[reason] += 1

    def created(self, node: Node, checkpoint: Checkpoint) -> None:
        self.n_created += 1
        self._log("created", node, checkpoint)

    def restored(self, node: Node, checkpoint: Checkpoint, how: str) -> None:
        self.n_restored += 1
        self._log(f"restored ({how})", node, checkpoint)

    def dropped(self, node: Node, checkpoint: Checkpoint, reason: str) -> None:
        self.n_dropped += 1
        self.evicted(reason)
        self._log(f"dropped ({reason})", node, checkpoint)

    def quarantined(self, node: Node, reason: object) -> None:
        self.n_quarantined += 1
        log.warning("checkpoint at %d tokens quarantined: %s", node.mark.n_tokens, reason)

    def _log(self, what: str, node: Node, checkpoint: Checkpoint) -> None:
        if log.isEnabledFor(logging.DEBUG):
            n = sum(1 for other in node.lineage() if other.checkpoint is not None)
            place = (n, self._max_checkpoints, node.mark.n_tokens, node.mark.pos)
            about = (checkpoint.size_bytes / _MIB, checkpoint.tiers, checkpoint.kind.value)
            log.debug("checkpoint %s: %d of %d, n_tokens %d, pos %d, %.3f MiB, %s, %s", what, *place, *about)
