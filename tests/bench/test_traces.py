"""Recordings in both public forms, what a replay counts, and a small one on a real server that is killed in the midst."""

import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from bench.suite.servers import Setup, runner
from bench.traces import sample
from bench.traces.recorded import parse
from bench.traces.replay import Answered, Played, Replay

from everwarm.errors import BadRequest


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_line_with_messages_is_a_turn_of_its_session() -> None:
    history = [{"role": "user", "content": "hello"}]
    rows = ({"session_id": "a", "messages": history, "output_length": 3}, {"session_id": "b", "messages": history})
    (first, second) = parse(lines(*rows, {"session_id": "a", "messages": history, "delay": 1500, "tools": [{"x": 1}]}))
    assert [first.name, second.name] == ["a", "b"]
    assert [turn.n_reply for turn in first.turns] == [3, 1]
    assert first.turns[1].body == {"messages": history, "tools": [{"x": 1}]}
    assert first.turns[1].delay_s == 1.5


def test_the_same_hash_is_the_same_text_within_its_scope() -> None:
    def trace(name: str, scope: str) -> dict[str, Any]:
        inner = [{"t": 0, "type": "n", "in": 128, "out": 2, "hash_ids": [1, 9]}]
        requests = [{"t": 0, "type": "n", "in": 128, "out": 2, "hash_ids": [1, 2]}]
        requests.append({"t": 0, "type": "subagent", "agent_id": "s", "requests": inner})
        return {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": requests}

    def text(recording: str, at: int) -> str:
        return str(parse(recording)[at].turns[0].body["messages"][0]["content"])

    subagent, main, *others = (text(lines(trace("a", "local"), trace("b", "local")), i) for i in range(4))
    head = main.split("\n")[0]
    assert subagent.startswith(head) and subagent != main
    assert not others[1].startswith(head)
    assert text(json.dumps(trace("a", "global")), 1) == text(json.dumps(trace("b", "global")), 1)


@pytest.mark.parametrize(
    ("recording", "wrong"),
    [
        ('{"timestamp": 1}\n', "neither messages nor hash_ids"),
        ('{"hash_ids": []}\n{"hash_ids": [1]}\n', "needs 1 to"),
        ('{"messages": "x"}\n{"messages": []}\n', "list of objects"),
        ('{"messages": [], "output_length": -1}\n', "output_length is -1"),
        ('{"messages": [], "delay": 1e300}\n', "delay is 1e+300"),
        ('{"messages": []}\nnonsense\n', "line 2"),
        ('{"requests": [1]}', "list of at most"),
        ('{"requests": [], "block_size": 1e9}', "block_size"),
    ],
)
def test_a_recording_that_makes_no_sense_says_where(recording: str, wrong: str) -> None:
    with pytest.raises(BadRequest, match=wrong.replace("+", r"\+")):
        parse(recording)


def test_samples_depend_on_their_seed_alone_and_share_their_head() -> None:
    assert sample.messages_recording(1) == sample.messages_recording(1) != sample.messages_recording(2)
    assert sample.blocks_recording(1) == sample.blocks_recording(1) != sample.blocks_recording(2)
    sessions = {session.name: session for session in parse(sample.messages_recording())}
    systems = {sessions[f"session-{i}"].turns[0].body["messages"][0]["content"].split("<env>")[0] for i in range(3)}
    assert len(systems) == 1
    title = sessions["session-0/title"].turns[0].body
    assert "tools" not in title and "title" in title["messages"][0]["content"]
    assert len(parse(sample.blocks_recording())) == 2  # the subagent has turns of its own


def test_regret_is_what_an_infinite_cache_would_have_had() -> None:
    played = Played([Answered(100, 0, 0, 1.0, 2.0, 4), Answered(120, 60, 100, 0.5, 1.0, 4)], seconds=4.0)
    assert played.regret == 40
    assert played.cached_percent == pytest.approx(100 * 60 / 220)
    assert (played.first_s(0.5), played.first_s(0.95), played.requests_per_s) == (0.5, 1.0, 0.5)
    assert Played([Answered(100, 0, None, 1.0, 2.0, 4)], 1.0).regret is None


def test_of_two_side_by_side_neither_reads_again_what_both_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = parse(lines(*({"session_id": name, "messages": []} for name in ("a", "b", "a"))))
    tokens = {turn: [*range(50), 50 + i] for i, turn in enumerate(turn for each in sessions for turn in each.turns)}
    both, calls = threading.Barrier(2), itertools.count()

    def asked(*_: object) -> Answered:
        if next(calls) < 2:
            both.wait(30)  # neither is answered before both are sent
        return Answered(51, 0, None, 1.0, 2.0, 1)

    monkeypatch.setattr("bench.traces.replay.asked", asked)
    played = Replay(lambda: "", tokens).play(sessions, 2)
    assert sorted(answer.n_known or 0 for answer in played.answers) == [0, 0, 50]
    assert played.regret == 50, "the third was sent when the others were answered"


@pytest.fixture
def foreign_server() -> Iterator[str]:
    """Some OpenAI server: it streams a word and its usage, and tells nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert body["stream"] and body["stream_options"] == {"include_usage": True}
            usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
            words = {"choices": [{"delta": {"content": "word"}}]}
            chunks = [words, {"choices": [], "usage": usage}]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_any_openai_server_can_be_asked(foreign_server: str) -> None:
    sessions = parse(lines(*({"session_id": str(i), "messages": [], "output_length": 5} for i in range(4))))
    played = Replay(lambda: foreign_server, {}).play(sessions, 2)
    assert [(answer.n_prompt, answer.n_cached, answer.n_reply) for answer in played.answers] == [(7, 0, 5)] * 4


def test_after_a_kill_in_the_midst_little_is_read_again() -> None:
    (session, *_) = parse(sample.messages_recording(size=0.2))
    server = runner("Everwarm", Setup(n_ctx=8192, n_threads=1))
    server.start()
    try:
        tokens = {turn: server.tokens(turn.body) for turn in session.turns}
        played = Replay(lambda: server.host, tokens).play([session], 1, [server.kill])
    finally:
        server.stop()
    assert len(played.answers) == len(session.turns)
    assert [answer.n_prompt for answer in played.answers] == [len(tokens[turn]) for turn in session.turns]
    after = played.answers[len(session.turns) // 2]
    assert after.n_cached > 0.5 * after.n_prompt
