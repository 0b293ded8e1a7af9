"""Who is admitted: what a request counts and for how long, and that one client cannot keep out another."""

import asyncio
import contextlib
import http.client
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from everwarm.engine.process import messages as m
from everwarm.errors import EngineStopped, Overloaded
from everwarm.gateway.access.limits import AdmissionLimits, AdmittedRequest
from everwarm.gateway.admin.request_log import Caller, RequestLog
from everwarm.gateway.parsing.output_parser import OutputParser
from everwarm.gateway.serving.generate import generate
from everwarm.gateway.settings import ServerSettings
from everwarm.router.supervise.pending import (
    MAX_ALL_UNREAD_BYTES,
    MAX_UNREAD_BYTES,
    Pending,
    unread_limit,
    weight_of,
)
from support.server import Server, serving, until


def limits(clock: Callable[[], float] = time.monotonic, **settings: Any) -> AdmissionLimits:
    settings = {"max_requests": 4, "max_waiting_tokens": 1000} | settings
    return AdmissionLimits(ServerSettings(**settings), clock=clock)


# what a request counts


def test_a_request_counts_its_body_until_its_prompt_is_known_and_nothing_when_the_engine_is_done():
    found = limits()
    with found.admitted(2400) as place:
        assert (found.n_requests, found.n_tokens) == (1, 800)
        with pytest.raises(Overloaded, match="about 800 tokens"), found.admitted(900):
            pass
        place.recount(7)
        assert found.n_tokens == 7
        with found.admitted(900):
            assert found.n_tokens == 307
        place.release()
        place.release()
        place.recount(500)
        assert (found.n_requests, found.n_tokens) == (0, 0)
    assert (found.n_requests, found.n_tokens) == (0, 0)


def test_no_prompt_counts_more_than_the_context_holds():
    found = limits()
    with found.admitted(13 << 20, n_context=512), found.admitted(900, n_context=512):
        assert found.n_tokens == 812
    with found.admitted(13 << 20), pytest.raises(Overloaded), found.admitted(900):  # the control
        pass


def test_a_lone_request_is_never_too_long_and_nobody_is_admitted_when_stopping():
    found = limits()
    with found.admitted(1 << 30):
        assert found.n_requests == 1
    found.is_draining = True
    with pytest.raises(EngineStopped, match="stopping"), found.admitted(1):
        pass
    assert found.n_requests == found.n_tokens == 0


# who keeps out whom


@contextlib.contextmanager
def full(found: AdmissionLimits, client: str, n: int = 4, **more: Any) -> Iterator[list[AdmittedRequest]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(found.admitted(1, client, **more)) for _ in range(n)]


def test_a_client_with_all_places_gets_no_more_and_keeps_out_no_other():
    found = limits(max_requests=16)
    with full(found, "a", 16):
        with pytest.raises(Overloaded, match="16 requests"), found.admitted(1, "a"):
            pass
        with found.admitted(1, "b"):
            with pytest.raises(Overloaded), found.admitted(1, "b"):
                pass
            with found.admitted(1, "c"), pytest.raises(Overloaded), found.admitted(1, "d"):
                pass  # two places are reserved, and no more
        with found.admitted(1, "d"):
            assert found.n_requests == 17
    assert found.n_requests == 0 and not found._n_of_client


def test_long_prompts_of_one_client_keep_out_no_other_either():
    found = limits()
    with found.admitted(3000, "a"):
        with pytest.raises(Overloaded, match="tokens"), found.admitted(3, "a"):
            pass
        with found.admitted(3, "b"):
            assert found.n_tokens == 1001


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_who_takes_nothing_of_his_answer_leaves_when_somebody_needs_the_place():
    clock = Clock()
    found, cut = limits(clock), []
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(found.admitted(1, "a", cut_off=lambda i=i: cut.append(i))) for i in range(4)]
        for i in (2, 1):
            places[i].note_sending()
            clock.now += 0.4
        with pytest.raises(Overloaded), found.admitted(1, "a"):  # nobody has been stalled for a second
            pass
        clock.now += 0.5
        with found.admitted(1, "a"):
            assert cut == [2] and not places[2].is_held and found.n_requests == 4
            with pytest.raises(Overloaded), found.admitted(1, "a"):
                pass
            clock.now += 1.0
            with found.admitted(1, "a"):
                assert cut == [2, 1]
        with found.admitted(1, "a"), found.admitted(1, "a"):  # and there is room again without anybody leaving
            assert cut == [2, 1]


def test_who_reads_or_cannot_be_cut_off_stays():
    clock = Clock()
    found = limits(clock)
    with full(found, "a", cut_off=pytest.fail) as places:
        places[0].note_sending()
        clock.now += 10
        places[0].note_sent()
        with pytest.raises(Overloaded), found.admitted(1, "a"):
            pass
    with full(found, "a") as places:
        places[0].note_sending()
        clock.now += 10
        with pytest.raises(Overloaded), found.admitted(1, "a"):
            pass


# replies that nobody takes


def piece(n_top: int = 0) -> m.TextPiece:
    prob = m.TokenProb(1, b"x", -0.5, [(i, b"word", -1.0) for i in range(n_top)])
    return m.TextPiece(1, "word", [1], [prob] if n_top else None)


def test_what_waits_for_a_client_is_weighed_and_given_back():
    async def run() -> None:
        pending = Pending(1, b"")
        for n_top in (0, 20):
            pending.put(piece(n_top))
        assert pending.n_unread == weight_of(piece()) + weight_of(piece(20)) > 3000
        await pending.get()
        await pending.get()
        assert pending.n_unread == 0 == weight_of(m.Failed(1, 408, "", ""))

    asyncio.run(run())


def test_the_more_replies_wait_the_less_each_may_be_behind():
    assert unread_limit(1) == unread_limit(4) == MAX_UNREAD_BYTES
    assert unread_limit(100) * 100 <= MAX_ALL_UNREAD_BYTES
    assert unread_limit(100_000) == MAX_UNREAD_BYTES // 16


class Tireless:
    """Stands in for an engine that writes as fast as it is read."""

    def __init__(self) -> None:
        self.n_taken = 0

    async def stream(self, _submit: m.Submit, _lend: object) -> AsyncGenerator[m.ToGateway, None]:
        while True:
            self.n_taken += 1
            yield piece()
            await asyncio.sleep(0)


def test_of_many_choices_nothing_is_taken_that_the_client_does_not_take():
    async def run() -> None:
        engine = Tireless()
        follow = partial(RequestLog().follow, Caller("r", "m", "/", True))
        heard = generate(engine, [m.Submit(0)] * 4, OutputParser, follow)  # type: ignore[arg-type]
        async with contextlib.aclosing(heard):
            await anext(heard)
            for _ in range(200):
                await asyncio.sleep(0)
            assert 4 <= engine.n_taken <= 12, "else it would pile up in the gateway"
            for _ in range(100):
                await anext(heard)
            assert engine.n_taken > 100

    asyncio.run(run())


# a real server


ENDLESS = {"prompt": "hi", "n_predict": 3500, "ignore_eos": True, "stream": True, "n_probs": 100}
SHORT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
FOUR = 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--max-requests", str(FOUR), "--client-timeout", "20") as server:
        yield server


def unread(server: Server, body: Any) -> socket.socket:
    """A request whose answer nobody reads."""
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def test_clients_that_read_nothing_keep_out_nobody_for_long(server):
    with contextlib.ExitStack() as stack:
        for _ in range(FOUR):
            stack.enter_context(unread(server, ENDLESS))
        until(lambda: any(slot["is_processing"] for slot in server.get("/slots").json), "they run")

        def answered() -> bool:
            return server.post("/v1/chat/completions", SHORT).status == 200

        until(answered, "somebody else is answered while they are connected", 15)
        for _ in range(3):
            assert answered()
    until(server.is_idle, "their slots are free")


def test_a_field_that_nobody_reads_is_no_prompt(server):
    with unread(server, ENDLESS | {"junk": "x" * (13 << 20)}):
        until(lambda: any(slot["is_processing"] for slot in server.get("/slots").json), "it runs")
        for _ in range(3):
            assert server.post("/v1/chat/completions", SHORT).status == 200
    until(server.is_idle, "its slot is free")


def test_a_reply_that_is_taken_too_slowly_is_ended_and_says_so(server):
    with unread(server, ENDLESS) as sock:
        until(lambda: any(slot["is_processing"] for slot in server.get("/slots").json), "it runs")
        until(server.is_idle, "the engine does not write for nobody")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        sock.settimeout(30)
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            more = sock.recv(1 << 20)
            assert more, got[-300:]
            got += more
    assert b'"reason":"client_too_slow"' in got and b"bytes behind" in got and 10 < got.count(b"data: ") < 3000
    assert server.get("/ready").json["restarts"] == 0


def tokenized_from(server: Server, address: str) -> int:
    """The status that a client at that address gets."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30, source_address=(address, 0))
    try:
        connection.request("POST", "/tokenize", b'{"content": "hi"}', {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_client_that_has_taken_all_places_keeps_out_no_other(server):
    with contextlib.ExitStack() as stack:
        for _ in range(FOUR):
            stack.enter_context(unread(server, ENDLESS | {"stream": False, "n_probs": 0}))
        until(lambda: tokenized_from(server, "127.0.0.1") == 429, "every place is taken")
        assert tokenized_from(server, "127.0.0.2") == 200
        assert tokenized_from(server, "127.0.0.1") == 429
    until(server.is_idle, "their slots are free")
