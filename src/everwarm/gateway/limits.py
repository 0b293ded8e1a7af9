"""How much may be running and waiting, in requests and in prompt tokens. Asked before anything is tokenized."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from everwarm.engine.messages import Backlog
from everwarm.errors import Draining, Overloaded
from everwarm.gateway.retry_after import Told, retry_after_s
from everwarm.gateway.settings import ServerSettings

_BYTES_PER_TOKEN = 3  # a guess on the safe side


class Limits:
    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.n_requests = 0
        self.n_tokens = 0
        self.is_draining = False
        self.backlogs: Callable[[], Sequence[Backlog]] = tuple  # of the engines that run
        self._told = Told()

    @contextlib.contextmanager
    def admitted(self, n_body_bytes: int) -> Iterator[None]:
        """Counted while inside; ``Overloaded`` if there is no room."""
        n_tokens = max(1, n_body_bytes // _BYTES_PER_TOKEN)
        if self.is_draining:
            raise Draining("the server is stopping; try another one or later")
        if self.n_requests >= self._settings.max_requests:
            raise self._overloaded(f"{self.n_requests} requests are running or waiting already")
        if self.n_requests and self.n_tokens + n_tokens > self._settings.max_waiting_tokens:
            raise self._overloaded(f"prompts of about {self.n_tokens} tokens are waiting already")
        self.n_requests += 1
        self.n_tokens += n_tokens
        try:
            yield
        finally:
            self.n_requests -= 1
            self.n_tokens -= n_tokens

    def _overloaded(self, why: str) -> Overloaded:
        now = time.monotonic()
        wait_s = retry_after_s(self.backlogs(), self.n_requests, self.n_tokens, self._told.n_ahead(now))
        self._told.add(now, wait_s)
        return Overloaded(f"{why}; try again in about {wait_s} s", wait_s)
