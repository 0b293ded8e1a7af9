"""One client's TCP connection, with limits on the number of connections, the size of headers and slow clients.

A request's head is counted while it is parsed, so that a client without a key cannot use much memory or time. One request
at a time: a request pipelined behind one that is being answered gets no answer, and the client sends it again. A client
that neither sends nor reads anything for a stated time is cut off. Knows HTTP's framing; knows no paths, keys or bodies.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

PIECE_BYTES = 16 << 10  # fed to the parser between two checks of the limits
LINGER_S = 2.0  # after a refusal: time for the client to read it
SEND_BUFFER_BYTES = 256 << 10  # of the kernel, for each connection
MAX_IGNORED_BYTES = 64 << 20  # of a body that arrives after its answer
MIN_BODY_BYTES = 4096  # within one client_timeout_s; a slower body is refused


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int = 1024
    max_head_bytes: int = 64 << 10  # request line and headers, or trailers
    max_headers: int = 128
    max_url_bytes: int = 8 << 10
    head_timeout_s: float = 10.0  # from its first byte, or from the start of the connection
    client_timeout_s: float = 30.0  # without sending an awaited body, or without reading the answer


def refusal(status: HTTPStatus, message: str) -> bytes:
    """An error answer that this module sends; the request does not reach the application."""
    code = status.phrase.lower().replace(" ", "_").replace("-", "_")
    kind = "invalid_request_error" if status < 500 else "server_error"
    about = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": about}, ensure_ascii=False).encode()
    retry = "retry-after: 1\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body


INVALID = refusal(HTTPStatus.BAD_REQUEST, "this is not a valid HTTP/1.1 request")


Sending = Literal["nothing", "head", "body"]  # what a client is sending


class ConnectionTable:
    """All open connections. When the table is full, the longest idle connection of the address with the most idle ones is
    closed; if every connection is being answered, the new one is refused."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._idle: dict[str, dict[Connection, None]] = {}  # by address, longest idle first
        self.n_open = 0

    def has_room(self) -> bool:
        """Whether a connection can be added; closes an idle one if that is needed."""
        if self.n_open < self._max_connections:
            return True
        if not self._idle:
            return False
        most = max(self._idle.values(), key=len)
        next(iter(most)).cut_off()
        return True

    def add_idle(self, connection: Connection) -> None:
        """Adds it as the most recently idle one."""
        mates = self._idle.setdefault(connection.address, {})
        mates.pop(connection, None)
        mates[connection] = None

    def drop_idle(self, connection: Connection) -> None:
        mates = self._idle.get(connection.address, {})
        mates.pop(connection, None)
        if not mates:
            self._idle.pop(connection.address, None)


class Connection(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        table: ConnectionTable,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = limits
        self.address = ""
        self._table = table
        self._is_counted = False
        self._sending: Sending = "nothing"
        self._ignores_input = False  # nothing more is parsed: the connection ends after the current answer
        self._wrong: bytes | None = None  # the answer to what cannot be parsed
        self._n_fed = self._n_head = self._n_headers = 0  # bytes fed of this head; bytes and headers found in it
        self._n_body = self._n_framing = self._n_silent = (
            0  # bytes of this body, of its framing, and since its last byte
        )
        self._n_body_before = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # opening and closing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = network_of(self.client[0] if self.client else "")
        bound_send_buffer(transport)
        if not self._table.has_room():
            message = "every connection that this server allows is in use; try again later"
            transport.write(refusal(HTTPStatus.SERVICE_UNAVAILABLE, message))
            self._ignores_input = True
            return transport.close()
        self._is_counted = True
        self._table.n_open += 1
        self._table.add_idle(self)
        self._await_client(self.limits.head_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def cut_off(self) -> None:
        """Closes at once; unsent data is lost."""
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        self._ignores_input = True
        self._stop_timers()
        self._table.drop_idle(self)
        self._table.n_open -= self._is_counted
        self._is_counted = False

    def _refuse(self, answer: bytes) -> None:
        """Sends the answer, then reads and ignores input for ``LINGER_S``: on an immediate close, a client that is still
        sending would lose the answer."""
        self._ignores_input = True
        self._unset_keepalive_if_required()
        if self._is_answering:
            self.cycle.keep_alive = False
            if self.cycle.response_started:
                return self.cut_off()
            self.cycle.disconnected = True  # its handler sees a disconnected client
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return None
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        return self._await_client(LINGER_S, self.cut_off)

    # reading

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for at in range(0, len(data), PIECE_BYTES):
            if self._ignores_input:
                return
            self._feed(data[at : at + PIECE_BYTES])

    def _feed(self, piece: bytes) -> None:
        before, n_body = self._sending, self._n_body
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # not supported: the request is answered without it, and is the last one
            self._ignores_input = True
            if self._is_answering:
                self.cycle.keep_alive = False
            return
        except httptools.HttpParserError:
            if not self._ignores_input:
                self._refuse(self._wrong or INVALID)
            return
        if self._sending == "head" or self._sending == before == "nothing":  # empty lines may stand before a head
            self._n_fed += len(piece)
            if self._n_fed > self.limits.max_head_bytes + PIECE_BYTES:
                self._refuse(self._too_long())
        elif self._sending == before == "body":
            n_new = self._n_body - n_body
            self._n_framing += len(piece) - n_new
            self._n_silent = 0 if n_new else self._n_silent + len(piece)
            most = self.limits.max_head_bytes
            if self._n_silent > most or self._n_framing > most + self._n_body:
                message = (
                    f"chunk extensions and trailers may have {most:,} bytes, and no more than the body beside them"
                )
                self._refuse(refusal(HTTPStatus.BAD_REQUEST, message))

    def _too_long(self) -> bytes:
        if self._sending == "head" and not self._n_headers and len(self.url) > self.limits.max_url_bytes:
            most = f"the address of a request may have {self.limits.max_url_bytes:,} bytes"
            return refusal(HTTPStatus.REQUEST_URI_TOO_LONG, most)
        most = f"a request may have {self.limits.max_headers} headers of {self.limits.max_head_bytes:,} bytes together"
        return refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, most)

    # the parser's callbacks; an exception ends the parsing

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort"] = self.cut_off
        self._sending = "head"
        self._n_fed = self._n_head = self._n_headers = 0
        self._n_body = self._n_framing = self._n_silent = self._n_body_before = 0
        if not self._is_answering:
            self._await_client(self.limits.head_timeout_s, self._head_is_late)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_url_bytes:
            self._stop_parsing(self._too_long())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._n_headers += 1
        self._n_head += len(name) + len(value) + 4
        if self._n_headers > self.limits.max_headers or self._n_head > self.limits.max_head_bytes:
            self._stop_parsing(self._too_long())
        if self._sending == "head":  # trailers do not change the headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_answering:  # pipelined: this answer is the connection's last
            self.cycle.keep_alive = False
            self._ignores_input = True
            self._stop_parsing(INVALID)
        self._sending = "body"
        self._table.add_idle(self)  # it counts as idle until its body is complete
        self._await_client(self.limits.client_timeout_s, self._body_is_late)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._n_body += len(body)
        if self.cycle.response_complete and self._n_body > MAX_IGNORED_BYTES:
            self._stop_parsing(INVALID)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._sending = "nothing"
        self._n_fed = 0
        self._stop_reading_timer()
        super().on_message_complete()
        if self._is_answering:
            self._table.drop_idle(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_counted:
            self._table.add_idle(self)
        if self._sending == "head":
            self._await_client(self.limits.head_timeout_s, self._head_is_late)
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self.pause_writing()

    def _stop_parsing(self, wrong: bytes) -> None:
        self._wrong = wrong
        raise ValueError("the request is refused")  # ends the parser's call

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # waiting for the client

    def _await_client(self, limit_s: float, late: Callable[[], None]) -> None:
        self._stop_reading_timer()
        self._read_timer = self.loop.call_later(limit_s, late)

    def _head_is_late(self) -> None:
        if self._sending == "nothing":
            return self.cut_off()
        limit_s = self.limits.head_timeout_s
        return self._refuse(refusal(HTTPStatus.REQUEST_TIMEOUT, f"the headers took longer than {limit_s:g} s"))

    def _body_is_late(self) -> None:
        """Refuses a body that is too slow, unless reading is paused on our side."""
        limit_s = self.limits.client_timeout_s
        n_new = self._n_body - self._n_body_before
        self._n_body_before = self._n_body
        if self.flow.read_paused or n_new >= MIN_BODY_BYTES:
            return self._await_client(limit_s, self._body_is_late)
        message = f"less than {MIN_BODY_BYTES} bytes of the body came within {limit_s:g} s"
        return self._refuse(refusal(HTTPStatus.REQUEST_TIMEOUT, message))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.client_timeout_s, self.cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Cuts off a client that has not read its last answer: a normal close would wait for it."""
        if self.transport.get_write_buffer_size():
            self.cut_off()
        else:
            super().timeout_keep_alive_handler()

    def _stop_timers(self) -> None:
        self._stop_reading_timer()
        self._stop_writing_timer()

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_writing_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def network_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((ip, 64), strict=False))


def bound_send_buffer(transport: asyncio.Transport) -> None:
    """Limits the kernel's send buffer, which otherwise grows to megabytes for a client that does not read."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
