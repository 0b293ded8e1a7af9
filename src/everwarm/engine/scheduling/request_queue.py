"""The requests that wait to start or to continue, and the numbers of those that were admitted."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from everwarm.engine.request import Request


class RequestQueue:
    def __init__(self) -> None:
        self._waiting: collections.deque[Request] = collections.deque()
        self._n_admitted = 0  # requests, each once

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    @property
    def n_suspended_alone(self) -> int:
        """Deterministic requests that have started and wait for their next turn."""
        return sum(request.ask.deterministic and request.admitted is not None for request in self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def add_again(self, request: Request) -> None:
        """Queues a request that was admitted before: ahead of those that never were, in the order of admission. A
        deterministic one goes to the end of the queue, so that each of them has its turn."""
        assert request.admitted is not None
        together = [] if request.ask.deterministic else [r for r in self._waiting if not r.ask.deterministic]
        younger = (r for r in together if r.admitted is None or r.admitted > request.admitted)
        first = next(younger, None)
        self._waiting.insert(len(self._waiting) if first is None else self._waiting.index(first), request)

    def admit(self, request: Request) -> None:
        """Removes a request that starts now, or continues. It keeps the number that it got the first time."""
        self._waiting.remove(request)
        if request.admitted is None:
            self._n_admitted += 1
            request.admitted = self._n_admitted

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)
