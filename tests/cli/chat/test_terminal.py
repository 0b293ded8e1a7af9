"""The chat in a real terminal: keys, pastes, Ctrl-C, wrapped words and rendered Markdown. A server whose replies are
written down beforehand answers, so that the screen is known."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.server import until
from support.tmux import Screen, needs_tmux, terminal

pytestmark = needs_tmux

TIMINGS = {"cache_n": 7, "prompt_n": 3, "predicted_n": 2, "predicted_per_second": 5.0}


class Scripted:
    """Answers with what it was asked; ``endless`` begins a reply that ends only when the client goes."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.has_left = threading.Event()
        self.reply = "It is **bold**."


def handler(scripted: Scripted) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(json.dumps({"data": [{"id": "scripted", "status": {"value": "loaded"}}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            scripted.asked.append(body["messages"])
            self.answer(b"")
            if body["messages"][-1]["content"] == "endless":
                self.endless()
            else:
                for word in scripted.reply.split(" "):
                    self.event({"choices": [{"delta": {"content": f"{word} "}}]})
                self.event({"choices": [], "timings": TIMINGS})

        def endless(self) -> None:
            try:
                self.event({"choices": [{"delta": {"content": "Once upon a time "}}]})
                while True:
                    self.event({"choices": []})
                    scripted.has_left.wait(0.05)
            except OSError:
                scripted.has_left.set()

        def event(self, value: object) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
            self.wfile.flush()

        def answer(self, data: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    script = Scripted()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(script))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield script, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def script(scripted) -> Scripted:
    return scripted[0]


@pytest.fixture
def screen(scripted, tmp_path) -> Iterator[Screen]:
    command = (sys.executable, "-m", "everwarm", "chat", scripted[1])
    with terminal(*command, folder=tmp_path, width=60, XDG_DATA_HOME=str(tmp_path)) as shown:
        shown.wait_for("\n>")
        yield shown


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_lines_are_edited_recalled_and_markdown_is_rendered(screen: Screen, script: Scripted, tmp_path: Path):
    assert "scripted at http://127.0.0.1:" in screen.text
    screen.type("hallo", "Left", "Left", "Left", "BSpace")
    screen.type("e", "Enter")
    screen.wait_for("reused 7, read 3 tokens")
    assert contents(script.asked[0]) == ["hello"]
    assert "It is bold." in screen.text and "**" not in screen.text
    screen.type("", "Up")
    screen.wait_for("> hello", 2)
    screen.type("!", "Enter")
    screen.wait_for("reused 7, read 3 tokens", 2)
    assert contents(script.asked[1])[-1] == "hello!" and len(script.asked[1]) == 3
    assert (tmp_path / "everwarm" / "chat-history").stat().st_mode & 0o077 == 0


def test_what_is_pasted_is_one_message(screen: Screen, script: Scripted):
    screen.paste("first line\nsecond line\n\nlast line")
    screen.wait_for("last line")
    assert script.asked == []
    screen.type("", "Enter")
    screen.wait_for("reused 7")
    assert contents(script.asked[0]) == ["first line\nsecond line\n\nlast line"]


def test_ctrl_c_stops_the_reply_and_not_the_program(screen: Screen, script: Scripted):
    screen.type("endless", "Enter")
    screen.wait_for("Once upon a time")
    screen.type("", "C-c")
    screen.wait_for("(stopped)")
    assert script.has_left.wait(60)
    screen.type("and then?", "Enter")
    screen.wait_for("reused 7")
    assert contents(script.asked[-1]) == ["endless", "Once upon a time ", "and then?"]
    screen.type("half a thought", "C-c")
    screen.wait_for("Ctrl-D or /quit ends")
    screen.type("", "C-d")
    until(lambda: screen.has_ended, "the chat has ended")


def test_words_are_not_split_and_a_question_is_edited_in_place(screen: Screen, script: Scripted):
    script.reply = " ".join(f"wonderful{i:02}" for i in range(40))
    screen.type("go", "Enter")
    screen.wait_for("reused 7")
    assert [f"wonderful{i:02}" for i in range(40)] == [w for w in screen.text.split() if w.startswith("wonderful")]
    screen.type("/edit", "Enter")
    screen.wait_for("> go", 2)
    screen.type(" on", "Enter")
    screen.wait_for("reused 7", 2)
    assert contents(script.asked[-1]) == ["go on"]
