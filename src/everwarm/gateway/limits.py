"""How much may be running and waiting, in requests and in prompt tokens. Asked before anything is tokenized."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from everwarm.errors import Draining, Overloaded
from everwarm.gateway.settings import ServerSettings

_BYTES_PER_TOKEN = 3  # a guess on the safe side


class Limits:
    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.n_requests = 0
        self.n_tokens = 0
        self.is_draining = False

    @contextlib.contextmanager
    def admitted(self, n_body_bytes: int) -> Iterator[None]:
        """Counted while inside; ``Overloaded`` if there is no room."""
        n_tokens = max(1, n_body_bytes // _BYTES_PER_TOKEN)
        if self.is_draining:
            raise Draining("the server is stopping; try another one or later")
        if self.n_requests >= self._settings.max_requests:
            raise Overloaded(f"{self.n_requests} requests are running or waiting already; try again later")
        if self.n_requests and self.n_tokens + n_tokens > self._settings.max_waiting_tokens:
            raise Overloaded(f"prompts of about {self.n_tokens} tokens are waiting already; try again later")
        self.n_requests += 1
        self.n_tokens += n_tokens
        try:
            yield
        finally:
            self.n_requests -= 1
            self.n_tokens -= n_tokens
