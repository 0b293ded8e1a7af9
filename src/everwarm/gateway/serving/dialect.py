"""What an API adds to a streamed reply: how it writes events, errors and signs of life."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from everwarm.errors import EverwarmError
from everwarm.gateway.http.sse import SSE_KEEP_ALIVE, sse, sse_loading
from everwarm.gateway.serving.generate import ReplyEvent
from everwarm.types import Json


class Dialect(abc.ABC):
    """The encoder of one reply. Frames are sent one by one, in order. What most dialects share is here."""

    media_type = "text/event-stream"
    keep_alive: bytes = SSE_KEEP_ALIVE  # sent when nothing else was for long

    @abc.abstractmethod
    def encode(self, event: ReplyEvent) -> Sequence[bytes]:
        """The frames that an event is worth."""

    def loading(self, model: str, fraction: float) -> Sequence[bytes]:
        """While the model is not in memory yet."""
        return [sse_loading(model, fraction)]

    async def finish(self) -> Sequence[bytes]:
        """After all choices have ended."""
        return ()

    def error(self, error: EverwarmError, body: Json) -> bytes:  # noqa: ARG002 - for those whose words are not the path's
        """``body``: the error in the words of the request's path."""
        return sse(body)
