"""How fast this engine reads prompts and writes replies, as measured: what a checkpoint saves, whether a load pays, and how
long a new request waits depend on it."""

from __future__ import annotations

import threading

MIN_TOKENS = 32  # of a step that tells how fast prompts are read: a shorter one costs as much as a reply's token
FIRST_GUESS_S = 1e-3  # for a token of a prompt, until it is measured
FIRST_REPLY = 256.0  # tokens of a reply, until one has ended
_READ_MEMORY, _REPLY_MEMORY = 0.8, 0.8
_WRITE_MEMORY = 0.99  # single steps are often disturbed


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
