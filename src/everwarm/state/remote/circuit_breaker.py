"""Whether the remote store is asked at all: after a failure it is not until a trial in the background succeeds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_OPEN_S, MOST_OPEN_S = 2.0, 60.0
MOST_FAILURES = 3  # in a row; one is enough if a request had to wait for it
JITTER = 0.25


@dataclass(slots=True)
class CircuitBreaker:
    is_open: bool = False
    n_failures: int = 0  # in a row
    _open_s: float = FIRST_OPEN_S

    def failed(self, *, slowly: bool, luck: float) -> float | None:
        """A request failed. Returns the seconds until the first trial; None: go on. ``luck`` is random, from 0 to 1."""
        self.n_failures += 1
        if self.is_open or not (slowly or self.n_failures >= MOST_FAILURES):
            return None
        self.is_open = True
        return self._wait(luck)

    def failed_again(self, luck: float) -> float:
        """A trial failed, too. Returns the seconds until the next."""
        self._open_s = min(MOST_OPEN_S, 2 * self._open_s)
        return self._wait(luck)

    def succeeded(self) -> None:
        """The store has answered, to a trial or to a request."""
        self.is_open, self.n_failures, self._open_s = False, 0, FIRST_OPEN_S

    def _wait(self, luck: float) -> float:
        return self._open_s * (1 + JITTER * (2 * luck - 1))
