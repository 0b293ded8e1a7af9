"""What a connection may cost before anybody is asked for a key: real sockets, a bare application, short limits."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from everwarm.gateway import server as serving
from everwarm.gateway.http.connection import (
    PIECE_BYTES,
    SEND_BUFFER_BYTES,
    Connection,
    ConnectionLimits,
    ConnectionTable,
    network_of,
)
from everwarm.gateway.settings import ServerSettings

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
LATER = 20.0  # more than any test takes


class Counted(Connection):
    """It knows how many bytes its parser was given."""

    n_fed = 0

    def _feed(self, piece: bytes) -> None:
        Counted.n_fed += len(piece)
        super()._feed(piece)


@dataclass
class World:
    """An application that answers with the length of a body, and what it was asked."""

    port: int = 0
    table: ConnectionTable = field(default_factory=lambda: ConnectionTable(64))
    asked: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    n_sent: int = 0
    n_left: int = 0  # clients that were found to have gone
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append({**scope, "headers": scope["headers"]})
        if scope["path"] == "/wait":
            return await self._until_gone_or_told(receive, send)
        if scope["path"] == "/endless":
            return await self._endless(receive, send)
        if scope["path"] != "/early":
            body, more = b"", True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.n_left += 1
                    return None
                body, more = body + message["body"], message["more_body"]
            self.bodies.append(body)
        return await self._answer(send)

    async def _answer(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _until_gone_or_told(self, receive: Any, send: Any) -> None:
        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.n_left += 1

        gone, told = asyncio.ensure_future(left()), asyncio.ensure_future(self.go_on.wait())
        await asyncio.wait({gone, told}, return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            await self._answer(send)
        gone.cancel()
        told.cancel()

    async def _endless(self, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def pour() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
                self.n_sent += 10_000
                await asyncio.sleep(0)

        pouring = asyncio.create_task(pour())
        while (await receive())["type"] != "http.disconnect":
            pass
        pouring.cancel()
        self.n_left += 1


@contextlib.asynccontextmanager
async def world(**limits: Any) -> AsyncIterator[World]:
    made = World(table=ConnectionTable(limits.get("max_connections", 64)))
    quick = {"head_timeout_s": LATER, "client_timeout_s": LATER} | limits
    config, state = (
        uvicorn.Config(made.app, interface="asgi3", access_log=False, log_level="critical", ws="none"),
        ServerState(),
    )
    config.load()
    Counted.n_fed = 0
    make = partial(Counted, config, state, {}, limits=ConnectionLimits(**quick), table=made.table)
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0.01)
        assert made.table.n_open == 0 and not made.table._idle, "somebody is counted who has gone"


def running(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args), 10))  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def said_to(port: int, data: bytes) -> bytes:
    """All that is answered until the server closes, or has answered and has nothing more to say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        with contextlib.suppress(OSError):
            await writer.drain()
        return await heard(reader)
    finally:
        writer.transport.abort()


async def heard(reader: asyncio.StreamReader) -> bytes:
    got = b""
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            got += piece
    return got


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


# heads


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"X-A: " + b"A" * (4 << 20), 431),
        (HEAD + b"".join(b"h%d: x\r\n" % i for i in range(200_000)), 431),
        (HEAD + b"A" * (1 << 20), 431),
        (b"GET /" + b"a" * (1 << 20), 414),
        (b"G" * (1 << 20), 400),
        (b"\r\n" * (1 << 20), 431),
    ],
    ids=["one header", "many headers", "a name", "an address", "a method", "empty lines"],
)
def test_of_a_head_without_an_end_little_is_read(data, status):
    @running
    async def run() -> None:
        async with world() as there:
            answer = await said_to(there.port, data)
            assert status_of(answer) == status
            assert Counted.n_fed <= ConnectionLimits().max_head_bytes + 3 * PIECE_BYTES < len(data)
            assert there.asked == []

    run()


@running
async def test_headers_within_the_limit_pass_and_one_more_does_not() -> None:
    async with world(max_headers=20, max_head_bytes=4096) as there:

        def with_headers(n: int, n_bytes: int = 1) -> bytes:
            lines = b"".join(b"h%d: %s\r\n" % (i, b"v" * n_bytes) for i in range(n))
            return b"GET / HTTP/1.1\r\nConnection: close\r\n" + lines + b"\r\n"

        assert status_of(await said_to(there.port, with_headers(19))) == 200
        assert len(there.asked[0]["headers"]) == 20
        answer = await said_to(there.port, with_headers(20))
        assert status_of(answer) == 431 and b"20 headers of 4,096 bytes" in answer and b"connection: close" in answer
        assert status_of(await said_to(there.port, with_headers(4, 900))) == 200
        assert status_of(await said_to(there.port, with_headers(5, 900))) == 431
        long = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 9000)
        assert status_of(await said_to(there.port, long)) == 414 and len(there.asked) == 2


@running
async def test_a_head_in_single_bytes_is_read_like_another() -> None:
    async with world() as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        for byte in POST + b"Content-Length: 3\r\nConnection: close\r\n\r\nabc":
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert status_of(await heard(reader)) == 200 and there.bodies == [b"abc"]
        writer.close()


@running
async def test_who_takes_too_long_for_a_head_is_told_and_who_says_nothing_is_not() -> None:
    async with world(head_timeout_s=0.5) as there:
        answer = await said_to(there.port, HEAD + b"X-Slow: ")
        assert status_of(answer) == 408 and there.asked == []
        assert await said_to(there.port, b"") == b""
        kept = await said_to(there.port, HEAD + b"\r\n" + HEAD)  # the second one without an end
        assert kept.count(b"HTTP/1.1") >= 1 and len(there.asked) == 1


# bodies


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
        b"Content-Length: 3, 4\r\n",
        b"Content-Length: -3\r\n",
        b"Content-Length: +3\r\n",
        b"Content-Length: 0x3\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Content-Length : 3\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"X: a\r\n Content-Length: 3\r\n",
        b"X: a\0b\r\n",
        b"X: a\nContent-Length: 3\r\n",
    ],
)
def test_a_body_whose_length_can_be_read_in_two_ways_is_refused(head):
    @running
    async def run() -> None:
        async with world() as there:
            answer = await said_to(there.port, POST + head + b"\r\nabcGET /second HTTP/1.1\r\nHost: x\r\n\r\n")
            assert status_of(answer) == 400 and answer.count(b"content-length") == 1, answer
            assert there.bodies == [] and all(asked["path"] == "/" for asked in there.asked)

    run()


CHUNKED = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


@running
async def test_chunks_with_a_little_around_them_are_a_body_and_trailers_change_no_header() -> None:
    async with world() as there:
        body = b"3;name=value\r\nabc\r\n2\r\nde\r\n0\r\nAuthorization: Bearer stolen\r\n\r\n"
        assert status_of(await said_to(there.port, CHUNKED + body)) == 200
        assert there.bodies == [b"abcde"] and b"authorization" not in dict(there.asked[0]["headers"])


@pytest.mark.parametrize(
    "body",
    [
        b"3;" + b"e" * (1 << 20),
        b"3\r\nabc\r\n0\r\nT: " + b"t" * (1 << 20),
        b"3\r\nabc\r\n0\r\n" + b"".join(b"t%d: x\r\n" % i for i in range(100_000)),
        b"1;aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\nx\r\n" * 30_000,
        b"1\r\nx\r\n" * 200_000,
    ],
    ids=["an extension", "a trailer", "trailers", "extensions", "tiny chunks"],
)
def test_what_stands_around_a_body_is_bounded(body):
    @running
    async def run() -> None:
        async with world() as there:
            answer = await said_to(there.port, CHUNKED + body)
            assert status_of(answer) in (400, 431) and there.bodies == []
            assert Counted.n_fed <= 4 * ConnectionLimits().max_head_bytes < len(body)
            await until(lambda: there.n_left == 1)

    run()


@running
async def test_a_body_that_does_not_come_is_not_awaited_for_ever() -> None:
    async with world(client_timeout_s=0.1) as there:
        answer = await said_to(there.port, POST + b"Content-Length: 9000\r\n\r\nabc")
        assert status_of(answer) == 408 and b"4096 bytes of the body" in answer
        await until(lambda: there.n_left == 1)
        assert there.bodies == []


@running
async def test_an_answer_before_the_body_leaves_the_connection_usable() -> None:
    async with world() as there:
        first = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 400000\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        writer.write(first)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"x" * 400_000 + HEAD + b"Connection: close\r\n\r\n")
        assert status_of(await heard(reader)) == 200 and there.bodies == [b""]
        writer.close()


# one request at a time


@running
async def test_a_pipelined_request_is_left_to_be_sent_again_and_nothing_piles_up() -> None:
    async with world() as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /second HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000)
        await until(lambda: there.asked)
        n_fed = Counted.n_fed
        writer.write(b"GET /third HTTP/1.1\r\nHost: x\r\n\r\n" * 100_000)
        await writer.drain()
        there.go_on.set()
        answer = await heard(reader)
        assert answer.count(b"HTTP/1.1 200") == 1 and [asked["path"] for asked in there.asked] == ["/wait"]
        assert Counted.n_fed <= n_fed + PIECE_BYTES
        writer.close()


@running
async def test_who_pipelines_and_leaves_is_noticed() -> None:
    async with world() as there:
        _, writer = await asyncio.open_connection("127.0.0.1", there.port)
        writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        await until(lambda: there.asked)
        writer.transport.abort()
        await until(lambda: there.n_left == 1)


@running
async def test_one_after_the_other_they_share_a_connection() -> None:
    async with world() as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        for i in range(5):
            writer.write(b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab" % i)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert [asked["path"] for asked in there.asked] == [f"/{i}" for i in range(5)] and there.table.n_open == 1
        writer.close()


@running
async def test_http_1_0_is_answered_once_and_an_upgrade_is_not_made() -> None:
    async with world() as there:
        old = await said_to(there.port, b"GET / HTTP/1.0\r\n\r\n" + HEAD + b"\r\n")
        assert status_of(old) == 200 and old.count(b"HTTP/1.1 200") == 1
        for name in (b"h2c", b"websocket"):
            upgrade = HEAD + b"Connection: Upgrade\r\nUpgrade: %s\r\n\r\n" % name
            answer = await said_to(there.port, upgrade + b"GET /second HTTP/1.1\r\nHost: x\r\n\r\n")
            assert status_of(answer) == 200 and b"connection: close" in answer
        assert [asked["path"] for asked in there.asked] == ["/", "/", "/"]


# many connections


@running
async def test_connections_that_ask_for_nothing_make_room_for_one_that_does() -> None:
    async with world(max_connections=8) as there:
        idle = []
        for i in range(30):
            idle.append(await asyncio.open_connection("127.0.0.1", there.port))
            idle[-1][1].write(b"GET / HTTP/1.1\r\n" if i % 2 else POST + b"Content-Length: 100\r\n\r\nx")
            await asyncio.sleep(0.002)
            assert there.table.n_open <= 8
        assert status_of(await said_to(there.port, HEAD + b"Connection: close\r\n\r\n")) == 200
        assert await heard(idle[0][0]) == b"", "the oldest went first"
        for _, writer in idle:
            writer.transport.abort()


@running
async def test_when_everybody_is_being_answered_a_newcomer_is_told_to_come_again() -> None:
    async with world(max_connections=8) as there:
        busy = [await asyncio.open_connection("127.0.0.1", there.port) for _ in range(8)]
        for _, writer in busy:
            writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: len(there.asked) == 8)
        answer = await said_to(there.port, HEAD + b"\r\n")
        assert status_of(answer) == 503 and b"retry-after" in answer and len(there.asked) == 8
        there.go_on.set()
        for reader, _ in busy:
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert status_of(await said_to(there.port, HEAD + b"Connection: close\r\n\r\n")) == 200
        for _, writer in busy:
            writer.transport.abort()


def test_the_address_with_most_idle_connections_gives_one_up():
    class Idle:
        def __init__(self, address: str) -> None:
            self.address, self.was_cut_off = address, False

        def cut_off(self) -> None:
            self.was_cut_off = True

    table = ConnectionTable(4)
    everybody = [Idle("10.0.0.1"), Idle("10.0.0.2"), Idle("10.0.0.2"), Idle("10.0.0.2")]
    for one in everybody:
        table.add_idle(one)  # type: ignore[arg-type]
    table.n_open = 3
    assert table.has_room() and not any(one.was_cut_off for one in everybody)
    table.n_open = 4
    assert table.has_room() and [one.was_cut_off for one in everybody] == [False, True, False, False]


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_address_is_one_client_or_a_whole_network_where_they_are_cheap(address, network):
    assert network_of(address) == network


@pytest.mark.parametrize(
    ("soft", "hard", "n_connections", "raised"),
    [(1024, 4096, 1024, 1152), (256, 512, 384, 512), (200, 200, 72, 200), (4096, 4096, 1024, 4096), (-1, -1, 1024, -1)],
)
def test_some_files_stay_for_engines(monkeypatch, soft, hard, n_connections, raised):
    now = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _what: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _what, limits: now.append(limits))
    assert serving.connection_limits(ServerSettings()).max_connections == n_connections
    assert now[-1][0] == raised


# clients that do not read


@running
async def test_who_reads_nothing_is_cut_off_and_little_was_kept_for_him() -> None:
    async with world(client_timeout_s=0.3) as there:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", there.port))
            await asyncio.get_running_loop().sock_sendall(sock, b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: there.n_left == 1)
        assert 0 < there.n_sent <= 4 * SEND_BUFFER_BYTES


@running
async def test_who_reads_slowly_is_not_cut_off() -> None:
    async with world(client_timeout_s=0.9) as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port, limit=1 << 14)
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(20):
            assert len(await reader.readexactly(100_000)) == 100_000
            await asyncio.sleep(0.05)
        assert there.n_left == 0
        writer.transport.abort()
        await until(lambda: there.n_left == 1)
