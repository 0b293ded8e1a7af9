"""Admission of every request: reads its body, gives it a place, bounds its time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from everwarm.errors import BadRequest
from everwarm.gateway.access.auth import principal_of
from everwarm.gateway.access.limits import AdmissionLimits, AdmittedRequest
from everwarm.gateway.http.connection import network_of
from everwarm.gateway.http.request_body import BodyReader
from everwarm.gateway.http.sse import unless_gone, within
from everwarm.gateway.openai.schema import read, unknown_fields
from everwarm.router.pool import Pool

T = TypeVar("T")
Parse = Callable[[bytes | bytearray], T]


@dataclass(frozen=True, slots=True)
class RequestGate:
    pool: Pool
    limits: AdmissionLimits
    bodies: BodyReader
    timeout_s: float | None  # of a whole request; None: any
    strict: bool = False  # refuse a body with fields that are not known

    async def read(self, request: Request, kind: type[T]) -> tuple[T, int]:
        """The request's body and its bytes, if there is room to read it and it is valid."""
        return await self.bodies.read(request, self.noting(request, kind, lambda data: read(data or b"{}", kind)))

    def noting(self, request: Request, kind: type[Any], parse: Parse[T]) -> Parse[T]:
        """``parse``, which then also notes the fields that ``kind`` does not have."""

        def noted(data: bytes | bytearray) -> T:
            body = parse(data)
            self.note_ignored(request, unknown_fields(data or b"{}", kind))
            return body

        return noted

    def note_ignored(self, request: Request, names: list[str]) -> None:
        """Fields that a client sent and nothing uses: an error, or named in a header of the answer."""
        if not names:
            return
        if self.strict:
            shown = ", ".join(name[:64] for name in names[:8])
            raise BadRequest(f"this server does not know {shown}; leave it out, or start it without --strict")
        request.state.ignored = [*getattr(request.state, "ignored", ()), *names]

    @contextlib.contextmanager
    def admitted(self, request: Request, n_body_bytes: int) -> Iterator[AdmittedRequest]:
        """A place for a request: until its answer is over or, if that is earlier, the engine is done with it."""
        n_context = max((spec.settings.n_ctx for spec in self.pool.catalog.specs.values()), default=None)
        cut_off = getattr(request.state, "abort", None)
        with self.limits.admitted(n_body_bytes, _client(request), n_context=n_context, cut_off=cut_off) as place:
            request.state.place = place
            yield place

    async def within_time(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Cancels the work when the client disconnects or its time is over."""
        async with within(self.timeout_s):
            return await unless_gone(request.receive, work)


def place_of(request: Request) -> AdmittedRequest | None:
    """The place that an admitted request has."""
    place: AdmittedRequest | None = getattr(request.state, "place", None)
    return place


def _client(request: Request) -> str:
    """The client, as far as it is known: its address, and the owner of its key."""
    address = network_of(request.client.host if request.client is not None else "")
    return f"{address} {principal_of(request).namespace(None)}"
