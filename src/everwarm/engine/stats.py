"""What the engine counts and measures: what requests cost, what happens to checkpoints, and how fast prompts are read and
replies written. Logs why a prompt had to be read again, and why a checkpoint went.

What a checkpoint saves, whether a load pays, and how long a new request waits depend on the speed.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import InitVar, dataclass, field

from everwarm.engine.process.messages import ReadReason
from everwarm.engine.request import Request
from everwarm.state.policy import GUARD
from everwarm.state.tree import Checkpoint, Node

MIN_TOKENS = 32  # of a step that tells how fast prompts are read: a shorter one costs as much as a reply's token
FIRST_GUESS_S = 1e-3  # for a token of a prompt, until it is measured
FIRST_REPLY = 256.0  # tokens of a reply, until one has ended
_READ_MEMORY, _REPLY_MEMORY = 0.8, 0.8
_WRITE_MEMORY = 0.99  # single steps are often disturbed
log = logging.getLogger("everwarm.engine")

# Why something that was good went: no room in RAM, too many on one path, no spare on the device.
EVICTIONS = ("ram_budget", "thinning", "capacity")

_MIB = 1 << 20


class Speed:
    """The speed of reading is safe to use from any thread: the loop measures, and the disk's thread brings what an earlier
    engine measured. The rest is the loop's."""

    def __init__(self, seconds_per_token: float = FIRST_GUESS_S) -> None:
        self.seconds_per_token = seconds_per_token  # of a prompt
        self.n_measured = 0  # steps that read
        self._recently_read = (0.0, 0.0)  # tokens and seconds, of which each step forgets a part
        self.write_s = 0.02  # for each token of all replies that are written together
        self.n_reply = FIRST_REPLY  # tokens of a reply, on average
        self._n_written = 0  # steps that only wrote
        self._n_replies = 0
        self._lock = threading.Lock()

    def learn(self, n_tokens: int, seconds: float) -> None:
        """From a step: with many tokens it tells how fast prompts are read, with few how fast replies are written."""
        if n_tokens < MIN_TOKENS:
            self.write_s = _mixed(self.write_s, seconds / n_tokens, self._n_written, _WRITE_MEMORY)
            self._n_written += 1
            return
        with self._lock:
            n_before, s_before = self._recently_read
            self._recently_read = (_READ_MEMORY * n_before + n_tokens, _READ_MEMORY * s_before + seconds)
            self.seconds_per_token = self._recently_read[1] / self._recently_read[0]  # a long step counts for more
            self.n_measured += 1

    def learn_reply(self, n_tokens: int) -> None:
        """From a reply that has ended by itself."""
        self.n_reply = _mixed(self.n_reply, n_tokens, self._n_replies, _REPLY_MEMORY)
        self._n_replies += 1

    def assume(self, seconds_per_token: float) -> None:
        """What an earlier engine measured, until this one has."""
        with self._lock:
            if not self.n_measured:
                self.seconds_per_token = seconds_per_token


def _mixed(known: float, new: float, n: int, most: float) -> float:
    """A moving average. The first measurement replaces the guess."""
    memory = min(most, n / (n + 1))
    return memory * known + (1 - memory) * new


@dataclass
class EngineStats:
    """What happened since the start. ``max_checkpoints`` on one path are allowed: the log says how many there are."""

    max_checkpoints: InitVar[int]

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
    n_drafted: int = 0  # tokens
    n_draft_accepted: int = 0
    n_verified: int = 0  # drafts
    # checkpoints
    n_created: int = 0
    n_restored: int = 0
    n_dropped: int = 0
    n_quarantined: int = 0
    n_prewarms_used: int = 0
    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVICTIONS, 0))

    def __post_init__(self, max_checkpoints: int) -> None:
        self._max_checkpoints = max_checkpoints

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

    # checkpoints

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
