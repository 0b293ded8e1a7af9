"""Whether a store is worth asking: after a failure nobody asks until somebody has tried again in the background. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_OPEN_S, MOST_OPEN_S = 2.0, 60.0
MOST_FAILURES = 3  # in a row; one is enough if somebody had to wait for it
JITTER = 0.25


@dataclass(slots=True)
class CircuitBreaker:
    is_open: bool = False
    n_failures: int = 0  # in a row
    _open_s: float = FIRST_OPEN_S

    def failed(self, *, slowly: bool, luck: float) -> float | None:
        """Something failed. Seconds after which to try again; None: go on. ``luck``: from 0 to 1, at random."""
        self.n_failures += 1
        if self.is_open or not (slowly or self.n_failures >= MOST_FAILURES):
            return None
        self.is_open = True
        return self._wait(luck)

    def failed_again(self, luck: float) -> float:
        """So did the trial. Seconds until the next."""
        self._open_s = min(MOST_OPEN_S, 2 * self._open_s)
        return self._wait(luck)

    def succeeded(self) -> None:
        """A store that answers has been repaired, whoever asked."""
        self.is_open, self.n_failures, self._open_s = False, 0, FIRST_OPEN_S

    def _wait(self, luck: float) -> float:
        return self._open_s * (1 + JITTER * (2 * luck - 1))
