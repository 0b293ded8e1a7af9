"""Counting what happens to checkpoints, and why they went."""

from __future__ import annotations

from dataclasses import dataclass, field

# Why something that was good went: no room in RAM, too many on one path, no spare on the device.
EVICTIONS = ("ram_budget", "thinning", "capacity")


@dataclass(slots=True)
class CheckpointStats:
    n_created: int = 0
    n_restored: int = 0
    n_dropped: int = 0
    n_quarantined: int = 0
    n_prewarms_used: int = 0
    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVICTIONS, 0))

    def dropped(self, reason: str) -> None:
        """A checkpoint went; whatever is no eviction is only dropped."""
        self.n_dropped += 1
        self.evicted(reason)

    def evicted(self, reason: str) -> None:
        if reason in self.evictions:
            self.evictions[reason] += 1
