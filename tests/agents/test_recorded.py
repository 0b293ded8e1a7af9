"""What real clients sent, replayed: every request is served, and one that goes on from another reads only what is new.

``recorded/*.json``: the client, the path, and its requests in order; ``follows`` is the one whose conversation goes on.
Claude Code's are written by hand, in the shapes of what it sends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.prompts import anthropic_tokens, chat_tokens, n_common, responses_tokens
from support.server import GUARD, Server, metric, serving

RECORDED = Path(__file__).parents[1] / "support" / "recorded"
FILES = sorted(RECORDED.glob("*.json"))
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


RENDERED = {
    "/v1/chat/completions": chat_tokens,
    "/v1/messages?beta=true": anthropic_tokens,
    "/v1/responses": lambda server, body: responses_tokens(server, body, []),
}


class Replay:
    """One client's requests against one server, each measured."""

    def __init__(self, server: Server, recording: dict[str, Any]) -> None:
        self._server = server
        self._path: str = recording["path"]
        self.requests: list[dict[str, Any]] = recording["requests"]

    def send(self, i: int, **more: Any) -> tuple[int, int]:
        """How many prompt tokens were read, and how many of them somebody had read before."""
        body, before = self.requests[i]["body"], self._counts()
        short = {name: 8 for name in LIMITS if name in body}
        headers = {name.replace("-", "_"): value for name, value in self.requests[i]["headers"].items()}
        reply = self._server.post(self._path, body | short | more, **headers)
        assert reply.status == 200, reply.data
        n_read, n_again = self._counts()
        return n_read - before[0], n_again - before[1]

    def _counts(self) -> tuple[int, int]:
        text = self._server.get("/metrics").data.decode()
        return int(metric(text, "llamacpp:prompt_tokens_total")), int(metric(text, "everwarm_tokens_read_again_total"))

    def others(self, i: int) -> list[int]:
        """Beginnings of other conversations."""
        first = i
        while self.requests[first]["follows"] is not None:
            first = self.requests[first]["follows"]
        return [j for j in range(i) if self.requests[j]["follows"] is None and j != first]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_client_reads_only_what_is_new(path):
    recording = json.loads(path.read_text())
    with serving("--no-prewarm", n_ctx=24576) as server:  # what idle time adds depends on the clock
        replay = Replay(server, recording)
        for i, request in enumerate(replay.requests):
            if request["follows"] is None:
                n_read, n_again = replay.send(i)
                assert n_read > n_again + GUARD
                continue
            for other in replay.others(i):  # what comes in between costs nothing
                assert replay.send(other)[0] <= GUARD
            n_read, n_again = replay.send(i)
            assert n_again <= GUARD
            before = replay.requests[request["follows"]]["body"]
            prompt, known = (RENDERED[recording["path"]](server, body) for body in (request["body"], before))
            assert n_read <= len(prompt) - n_common(prompt, known) + GUARD < len(prompt) / 2


def test_the_same_request_of_somebody_else_is_read_as_a_whole():
    """The control: what is measured above is reuse."""
    recording = json.loads((RECORDED / "opencode.json").read_text())
    with serving() as server:
        replay = Replay(server, recording)
        title = recording["requests"][0]["body"]
        n_prompt = len(chat_tokens(server, title))
        assert n_prompt > 500
        assert replay.send(0)[0] == n_prompt
        assert replay.send(0)[0] <= GUARD
        assert replay.send(0, cache_salt="x")[0] == n_prompt
