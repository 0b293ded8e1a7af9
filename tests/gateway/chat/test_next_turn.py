"""Idle time goes to the next turn: over HTTP, the next message is all that is read, with thinking stripped in between."""

from __future__ import annotations

from typing import Any

from support.server import GUARD, Server, metric, serving, until, words

LONG = words(300, seed=5)
QUESTIONS = ("Tell me a story about a river.", "Tell me a story about a dog.", "Tell me a story about a lamp.")


def chat(server: Server, messages: list[dict[str, Any]], path: str = "/v1/chat/completions", **more: Any) -> Any:
    return server.ask(path, {"messages": messages, "temperature": 0, "max_tokens": 150, **more})


def n_prewarms(server: Server) -> float:
    return metric(server.get("/metrics").data.decode(), "everwarm_prewarms_total")


def talk(server: Server, *, waits: bool) -> list[tuple[int, int]]:
    """For each later turn: what was read, and what of that is the new message with its markup."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": LONG}]
    read = []
    for i, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        n_before = n_prewarms(server)
        answer = chat(server, messages)
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"], "without thinking nothing is stripped"
        if i:
            read.append((answer["timings"]["prompt_n"], server.n_tokens(question) + 8))
        messages.append({"role": "assistant", "content": message["content"]})
        if waits:
            until(lambda n=n_before: n_prewarms(server) > n, "the next turn is read on idle")
    return read


def test_the_next_turn_reads_only_its_own_message():
    with serving() as server:
        for n_read, n_message in talk(server, waits=True):
            assert n_read <= n_message + GUARD
        text = server.get("/metrics").data.decode()
        assert metric(text, "everwarm_prewarms_used_total") == len(QUESTIONS) - 1
        assert metric(text, "everwarm_prewarm_tokens_total") > 0
        assert server.get("/cache").json["prewarm"]["turns"] == len(QUESTIONS)


def test_without_it_the_answer_is_read_again():
    """The control: that is what was saved above."""
    with serving("--no-prewarm") as server:
        assert any(n_read > n_message + GUARD for n_read, n_message in talk(server, waits=False))
        assert n_prewarms(server) == 0


def test_what_is_not_to_be_kept_or_has_no_one_next_turn_is_not_read_ahead():
    with serving() as server:
        for more in ({"deterministic": True}, {"cache_prompt": False}, {"n": 2}):
            chat(server, [{"role": "user", "content": QUESTIONS[0]}], **more)
        chat(server, [{"role": "user", "content": QUESTIONS[1]}])
        until(lambda: n_prewarms(server) > 0, "the last is read ahead")
        assert n_prewarms(server) == 1
        for slot in server.get("/slots").json:
            assert slot["is_processing"] is False and slot["is_prewarming"] is False
