"""Responses in the background, with the real client: answered at once, polled, cancelled, bounded, and of one namespace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from everwarm.errors import Overloaded
from everwarm.gateway.responses.background_responses import (
    MAX_RUNNING,
    MAX_RUNNING_EACH,
    MAX_UNSTORED,
    BackgroundResponses,
)
from everwarm.types import Json
from support.openai_client import openai_client
from support.server import serving, until

ENDLESS = {"ignore_eos": True}


def begin(client: openai.OpenAI, **more: Any) -> Any:
    options = {"model": "any", "input": "Who are you?", "temperature": 0, "max_output_tokens": 200, "background": True}
    return client.responses.create(**options | more)


def polled(client: openai.OpenAI, id: str) -> Any:
    until(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"), "it is over")
    return client.responses.retrieve(id)


def test_a_response_is_polled_until_it_says_what_it_would_have_said_at_once(client):
    begun = begin(client)
    assert begun.status == "queued" and begun.background and begun.output == []
    over = polled(client, begun.id)
    whole = begin(client, background=False)
    assert over.status == "completed" and over.id == begun.id and over.output_text == whole.output_text
    again = client.responses.create(model="any", input="And?", previous_response_id=over.id, max_output_tokens=16)
    assert again.usage.input_tokens > over.usage.input_tokens, "it can be continued like any other"
    with pytest.raises(openai.BadRequestError, match="is over"):
        client.responses.cancel(over.id)


def test_cancelling_ends_it_and_frees_its_place(server, client):
    running = begin(client, max_output_tokens=4000, extra_body=ENDLESS)
    assert client.responses.retrieve(running.id).status == "in_progress"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="any", input="And?", previous_response_id=running.id)
    assert client.responses.cancel(running.id).status == "cancelled"
    assert client.responses.cancel(running.id).status == client.responses.retrieve(running.id).status == "cancelled"
    until(server.is_idle, "the engine does not write for nobody")
    gone = begin(client, max_output_tokens=4000, extra_body=ENDLESS)
    client.responses.delete(gone.id)
    until(server.is_idle, "a deleted one does not run on")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_000000000000000000000000")


def test_what_is_wrong_is_said_at_once_or_by_the_response(client):
    with pytest.raises(openai.BadRequestError):
        begin(client, input=[])
    with pytest.raises(openai.BadRequestError, match="leave stream"):
        begin(client, stream=True)
    failed = polled(client, begin(client, input="word " * 20_000).id)
    assert failed.status == "failed" and "context" in failed.error.message


def test_another_namespace_sees_none_of_it(client):
    own = begin(client, max_output_tokens=4000, extra_body={**ENDLESS, "cache_salt": "a"})
    for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(own.id)
    assert client.responses.retrieve(own.id, extra_query={"cache_salt": "a"}).status == "in_progress"
    assert client.responses.cancel(own.id, extra_query={"cache_salt": "a"}).status == "cancelled"


def test_an_engine_that_dies_fails_the_response():
    with serving() as server, openai_client(server) as client:
        running = begin(client, max_output_tokens=4000, extra_body=ENDLESS)
        until(lambda: not server.is_idle(), "it runs")
        server.kill_engine()
        assert polled(client, running.id).status in ("failed", "completed", "incomplete")


def test_a_server_that_stops_stores_what_it_ends(tmp_path: Path):
    flags = "--disk-cache", "1GiB", "--state-dir", str(tmp_path), "--grace", "0.1"
    with serving(*flags) as server, openai_client(server) as client:
        ids = [
            begin(client, max_output_tokens=4000, extra_body=ENDLESS, input=f"Number {i}", user="x" * 2_000_000).id
            for i in range(MAX_RUNNING_EACH)
        ]
    with serving(*flags) as server, openai_client(server) as client:
        assert {client.responses.retrieve(id).status for id in ids} <= {"failed", "cancelled"}


def test_one_that_is_over_is_stored_though_it_is_cancelled_meanwhile():
    async def test() -> None:
        running, kept = BackgroundResponses(), []

        async def work() -> Json:
            return {"status": "failed"}

        async def keep(response: Json) -> bool:
            await asyncio.sleep(0.02)
            kept.append(response["status"])
            return True

        def begin(id: str) -> None:
            running.start("n", id, lambda status: {"status": status}, work(), keep, lambda: None)

        begin("a")
        await asyncio.sleep(0.01)
        await asyncio.gather(running.cancel("n", "a"), running.cancel("n", "a"))
        assert kept == ["failed"] and running.find("n", "a") is None
        begin("b")
        await running.cancel("n", "b")
        assert kept == ["failed", "cancelled"], "also one that has not begun"
        begin("c")
        await asyncio.sleep(0.01)
        await running.close()
        assert kept == ["failed", "cancelled", "failed"]

    asyncio.run(test())


def test_only_so_many_run():
    async def test() -> None:
        running, n_over = BackgroundResponses(), 0

        async def keep(_: Json) -> bool:
            return True

        def over() -> None:
            nonlocal n_over
            n_over += 1

        for i in range(MAX_RUNNING):
            namespace = f"n{i // MAX_RUNNING_EACH}"
            running.require_room(namespace)
            running.start(namespace, str(i), lambda _: {}, asyncio.sleep(60, {}), keep, over)
        for full in ("n0", "new"):
            with pytest.raises(Overloaded):
                running.require_room(full)
        assert running.find("n0", "0") == {} and running.find("n1", "0") is None
        await running.cancel("n0", "0")
        running.require_room("new")
        await running.close()
        await asyncio.sleep(0)
        assert n_over == MAX_RUNNING, "also of those that were cancelled before they began"

    asyncio.run(test())


@pytest.mark.parametrize("how", ["stored", "refused", "raised"])
def test_one_that_cannot_be_stored_is_shown_from_memory(how):
    async def test() -> None:
        running = BackgroundResponses()

        async def work() -> Json:
            return {"status": "completed"}

        async def keep(_: Json) -> bool:
            if how == "raised":
                raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")
            return how == "stored"

        for i in range(MAX_UNSTORED + 1):
            running.start("n", str(i), lambda status: {"status": status}, work(), keep, lambda: None)
            await asyncio.sleep(0)
            await running.cancel("n", str(i))
        shown = [running.find("n", id) for id in ("0", "1")]
        assert shown == [None, None if how == "stored" else {"status": "completed"}], "the newest few"
        assert running.forget("n", "1") is (how != "stored") and running.find("n", "1") is None

    asyncio.run(test())


def test_what_is_discarded_is_neither_written_on_nor_stored():
    async def test() -> None:
        running, kept = BackgroundResponses(), []

        async def keep(response: Json) -> bool:
            kept.append(response)
            return False

        for namespace in ("a", "ab", "b"):
            running.start(namespace, "1", lambda status: {"status": status}, asyncio.sleep(60, {}), keep, lambda: None)
        await asyncio.sleep(0)
        assert await running.discard("a") == 2 and kept == []
        assert [running.find(namespace, "1") is None for namespace in ("a", "ab", "b")] == [True, True, False]
        await running.cancel("b", "1")
        assert len(kept) == 1 and await running.discard("b") == 1 and running.find("b", "1") is None

    asyncio.run(test())


def test_deleting_all_responses_ends_those_that_run(server, client):
    running = begin(client, max_output_tokens=4000, extra_body=ENDLESS)
    assert server.call("DELETE", "/cache?responses=true").json["responses"] >= 1
    until(server.is_idle, "it does not run on")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(running.id)
