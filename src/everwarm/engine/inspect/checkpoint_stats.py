"""Counting and logging what happens to checkpoints, and why they went."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from everwarm.state.tree import Checkpoint, Node

log = logging.getLogger("everwarm.engine")

# Why something that was good went: no room in RAM, too many on one path, no spare on the device.
EVICTIONS = ("ram_budget", "thinning", "capacity")

_MIB = 1 << 20


@dataclass(slots=True)
class CheckpointStats:
    n_created: int = 0
    n_restored: int = 0
    n_dropped: int = 0
    n_quarantined: int = 0
    n_prewarms_used: int = 0
    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVICTIONS, 0))

    def evicted(self, reason: str) -> None:
        """Counts an eviction; other reasons are not counted."""
        if reason in self.evictions:
            self.evictions[reason] += 1


class CheckpointJournal:
    """``max_checkpoints`` on one path are allowed: the log says how many there are."""

    def __init__(self, max_checkpoints: int) -> None:
        self._max_checkpoints = max_checkpoints
        self.stats = CheckpointStats()

    def created(self, node: Node, checkpoint: Checkpoint) -> None:
        self.stats.n_created += 1
        self._log("created", node, checkpoint)

    def restored(self, node: Node, checkpoint: Checkpoint, how: str) -> None:
        self.stats.n_restored += 1
        self._log(f"restored ({how})", node, checkpoint)

    def dropped(self, node: Node, checkpoint: Checkpoint, reason: str) -> None:
        self.stats.n_dropped += 1
        self.stats.evicted(reason)
        self._log(f"dropped ({reason})", node, checkpoint)

    def quarantined(self, node: Node, reason: object) -> None:
        self.stats.n_quarantined += 1
        log.warning("checkpoint at %d tokens quarantined: %s", node.mark.n_tokens, reason)

    def _log(self, what: str, node: Node, checkpoint: Checkpoint) -> None:
        if log.isEnabledFor(logging.DEBUG):
            n = sum(1 for other in node.lineage() if other.checkpoint is not None)
            place = (n, self._max_checkpoints, node.mark.n_tokens, node.mark.pos)
            about = (checkpoint.size_bytes / _MIB, checkpoint.tiers, checkpoint.kind.value)
            log.debug("checkpoint %s: %d of %d, n_tokens %d, pos %d, %.3f MiB, %s, %s", what, *place, *about)
