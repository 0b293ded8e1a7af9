"""How fast this engine reads prompts, as measured: what a checkpoint saves and whether a load pays depend on it."""

from __future__ import annotations

import threading

MIN_TOKENS = 32  # of a step that teaches a speed: a shorter one costs as much as a reply's token
FIRST_GUESS_S = 1e-3  # for a token, until it is measured
_MEMORY = 0.8


class ReadSpeed:
    """Safe to use from any thread: the loop measures, and the disk's thread brings what an earlier engine measured."""

    def __init__(self, seconds_per_token: float = FIRST_GUESS_S) -> None:
        self.seconds_per_token = seconds_per_token
        self.n_measured = 0  # steps
        self._lock = threading.Lock()

    def learn(self, n_tokens: int, seconds: float) -> None:
        """Records the speed of a step. The first measurement replaces the guess."""
        with self._lock:
            memory = min(_MEMORY, 1 - 1 / (self.n_measured + 1))
            self.seconds_per_token = memory * self.seconds_per_token + (1 - memory) * seconds / n_tokens
            self.n_measured += 1

    def assume(self, seconds_per_token: float) -> None:
        """What an earlier engine measured, until this one has."""
        with self._lock:
            if not self.n_measured:
                self.seconds_per_token = seconds_per_token
