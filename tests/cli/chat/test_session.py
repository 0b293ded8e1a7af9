"""A chat through pipes: it remembers, shows what was reused, obeys commands, and says what is wrong."""

import json
import re
import subprocess
import sys

import pytest

from everwarm.cli.chat.chat_server import ReplyCost
from everwarm.cli.chat.session import Conversation, summary
from everwarm.cli.chat.terminal import settled
from everwarm.errors import BadRequest
from support.server import run_cli, serving


@pytest.fixture(scope="module")
def server():
    with serving("--alias", "tiny") as running:
        yield running


def talk(server, *lines: str, **env: str) -> str:
    done = run_cli("chat", server.url, "--temperature", "0", "--max-tokens", "64", text="\n".join(lines) + "\n", **env)
    assert done.returncode == 0 and done.stderr == "", done
    return done.stdout


def reused(output: str) -> list[int]:
    return [int(n) for n in re.findall(r"reused (\d+), read \d+ tokens", output)]


def test_a_chat_remembers_and_shows_what_was_reused(server):
    output = talk(
        server, "My secret code is 48213.", "", "What is my secret code?", "/new", "Hello!", "/quit", "never sent"
    )
    assert len(reused(output)) == 3 and reused(output)[1] > 0 and "48213" in output


def test_commands(server, tmp_path):
    output = talk(
        server,
        "/help",
        "/stats",
        "/system You are a helpful assistant.",
        "What is the capital of France?",
        "/regen",
        "/edit",
        "What is the capital of Italy?",
        f"/save {tmp_path / 'chat.json'}",
        "/nonsense",
        "//etc is a folder.",
        "/stats",
    )
    assert "/regen" in output and "no replies yet" in output and "system: You are a helpful assistant." in output
    assert "there is no command /nonsense; /help lists them" in output and "4 replies: " in output
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [message["content"] for message in saved["messages"]][:1] == ["What is the capital of Italy?"]
    assert len(saved["messages"]) == 2 and saved["system"] == "You are a helpful assistant."
    later = talk(server, f"/load {tmp_path / 'chat.json'}", "What is 2 + 3?")
    assert "2 messages" in later and reused(later)[0] > 0


def test_what_is_refused_is_said_and_the_chat_goes_on(server, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("mine")
    lines = ("/regen", "/edit x", "/load", f"/load {other}", f"/save {other}", "/image missing.png", f"/image {other}")
    output = talk(server, *lines, "Hello!")
    for sentence in (
        "nothing was asked yet",
        "'x' is not a number",
        "give the name of a file",
        "is not a chat that /save wrote",
        "missing.png cannot be read",
        "is not an image",
        "reused",
    ):
        assert sentence in output
    assert other.read_text() == "mine"


def test_a_reply_that_fails_takes_its_question_back(server, tmp_path):
    image = tmp_path / "x.png"
    image.write_bytes(b"\x89PNG" + bytes(100))
    output = talk(server, f"/image {image}", "What is this?", "What is 2 + 3?", f"/save {tmp_path / 'c.json'}")
    assert "image" in output and len(json.loads((tmp_path / "c.json").read_text())["messages"]) == 2


def test_a_server_that_does_not_answer_is_said_before_the_first_question():
    done = run_cli("chat", "http://127.0.0.1:1", text="Hello!\n")
    assert done.returncode == 1 and "no answer from http://127.0.0.1:1" in done.stderr and done.stdout == ""


def test_a_wrong_key_and_a_wrong_model_are_said_before_the_first_question(server):
    with serving("--api-key", "right") as locked:
        wrong = run_cli("chat", locked.url, "--api-key", "wrong", text="Hello!\n")
        right = run_cli("chat", f"{locked.url}/v1", "--api-key", "right", text="Hello!\n")
    assert wrong.returncode == 1 and "a valid API key is required" in wrong.stderr
    assert right.returncode == 0 and "reused" in right.stdout
    other = run_cli("chat", server.url, "--model", "other", text="Hello!\n")
    assert other.returncode == 1 and "has no model 'other'; it has tiny" in other.stderr


def test_a_chat_with_the_embedded_model_brings_its_own_server_and_stops_it():
    done = run_cli("chat", "--demo", "--temperature", "0", text="Hello!\n")
    assert done.returncode == 0 and "reused 0, read" in done.stdout


def test_its_own_server_is_for_this_machine_and_called_with_the_key_of_the_environment(monkeypatch):
    """As in the container, whose server listens on all addresses."""
    monkeypatch.setenv("EVERWARM_SERVE_HOST", "0.0.0.0")
    without = run_cli("chat", "--demo", text="Hello!\n")
    monkeypatch.setenv("EVERWARM_SERVE_API_KEY", "a key that is long enough")
    with_key = run_cli("chat", "--demo", text="Hello!\n")
    assert (without.returncode, with_key.returncode) == (0, 0)
    assert "reused 0, read" in without.stdout and "reused 0, read" in with_key.stdout


def test_a_chat_with_a_file_that_is_none_says_why_once(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model")
    done = run_cli("chat", str(path))
    assert done.returncode == 1 and done.stderr.count("broken.gguf") == 1 and "\n" not in done.stderr.strip()


def test_a_server_of_its_own_does_not_outlive_a_chat_that_is_ended(tmp_path):
    command = [sys.executable, "-m", "everwarm", "chat", "--demo"]
    chat = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert chat.stdin is not None and chat.stdout is not None
    chat.stdin.write("/stats\n")
    chat.stdin.flush()
    assert "no replies yet" in chat.stdout.readline()
    chat.terminate()
    assert chat.wait(60) == 1  # it has waited for its server
    chat.stdin.close()
    chat.stdout.close()


# the parts


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("", ""),
        ("one line", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\n", "one\n\ntwo\n\n"),
        ("a\n\n```py\nx\n\ny", "a\n\n"),
        ("```py\nx\n\ny\n```\n\nend", "```py\nx\n\ny\n```\n\n"),
        ("````\n```\n\n````\n\nx", "````\n```\n\n````\n\n"),
        ("~~~\n\n```\n\n~~~\n\n", "~~~\n\n```\n\n~~~\n\n"),
    ],
)
def test_finished_blocks_end_at_a_blank_line_outside_of_fences(text, done):
    assert text[: settled(text)] == done


def test_an_edit_takes_back_what_followed_and_keeps_images(tmp_path):
    image = tmp_path / "x.png"
    image.write_bytes(b"\x89PNG....")
    chat = Conversation("be kind")
    chat.attach(image)
    chat.ask("first")
    chat.answer("1")
    chat.ask("second")
    chat.answer("2")
    assert chat.take_back(1) == "first" and chat.messages == [] and len(chat.images) == 1
    with pytest.raises(BadRequest, match="nothing was asked"):
        chat.take_back(None)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"system": 1, "messages": []}', '{"system": null, "messages": [{"role": "x"}]}', "[" * 10**5],
)
def test_a_file_that_is_no_chat_is_refused(tmp_path, text):
    path = tmp_path / "chat.json"
    path.write_text(text)
    with pytest.raises(BadRequest, match="is not a chat"):
        Conversation().load(path)


def test_what_was_reused_is_added_up():
    assert summary([ReplyCost(90, 10, 5, 0.1, 10.0)]).startswith("1 reply: 90 of 100")
    assert summary([ReplyCost(90, 10, 5, 0.1, 10.0), ReplyCost(99, 1, 5, 0.3, 10.0)]) == (
        "2 replies: 189 of 200 prompt tokens reused (94 % warm), 11 read, 10 written; first token after 200 ms on average"
    )
