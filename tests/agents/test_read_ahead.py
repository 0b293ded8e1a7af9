"""With ``--workspace``, the file that a tool call names is read while the client runs the tool.

The server and the engine are real; what the model says is scripted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server import GUARD, Server, metric, until, words

END = "and there the note ends."
NOTE = f"{words(300, 11)}\n{words(60, 12)} {END}\n"
OTHER = f"{words(360, 13)} {END}\n"  # another note, about as long
N_MARKUP = 24  # tokens around a result, and what opens the next reply
FILES = {"the note": "note.txt", "the link": "link.txt"}
CALL = 'I look.\n</think>\n\n<tool_call>\n{"name": "read", "arguments": {"path": "PATH"}}\n</tool_call>'
SCRIPT = [
    *({"when": f"Look at {name}.", "say": CALL.replace("PATH", path)} for name, path in FILES.items()),
    {"when": END, "say": "I see.\n</think>\n\nIt is a note."},
]
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": PARAMETERS}}]
SEEDS = itertools.count(100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "note.txt").write_text(NOTE)
    (tmp_path / "outside.txt").write_text(NOTE)
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    return folder


@pytest.fixture
def server(scripted: Any, folder: Path) -> Iterator[Server]:
    with scripted(SCRIPT, 8192, "--workspace", str(folder)) as server:
        yield server


def counted(server: Server, what: str) -> float:
    return metric(server.get("/metrics").data.decode(), f"everwarm_{what}_total")


def asked(
    server: Server, name: str, *, reads_ahead: bool = True, question: str | None = None, **more: Any
) -> dict[str, Any]:
    """A turn that ends with a call, until the server has read ahead what it will; the body of the next turn, for a
    result to be added. Nothing but a question of its own is shared with other conversations."""
    body: dict[str, Any] = {"tools": TOOLS, "temperature": 0, "max_tokens": 200, "speculative.n_max": 0, **more}
    content = question or f"{words(20, next(SEEDS))} Look at {name}."
    messages: list[Any] = [{"role": "user", "content": content}]
    n_before = counted(server, "prewarms")
    message = server.ask("/v1/chat/completions", body | {"messages": messages})["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["path"]
    if reads_ahead:
        until(lambda: counted(server, "prewarms") > n_before, "what is probable is read")
    until(lambda: server.is_settled("everwarm-tiny"), "there was time to read ahead")
    return body | {"messages": [*messages, message]}


def with_result(body: dict[str, Any], result: str) -> list[Any]:
    id = body["messages"][-1]["tool_calls"][0]["id"]
    return [*body["messages"], {"role": "tool", "tool_call_id": id, "content": result}]


def gave(server: Server, body: dict[str, Any], result: str, **more: Any) -> Any:
    answer = server.ask("/v1/chat/completions", body | {"messages": with_result(body, result)} | more)
    assert answer["choices"][0]["message"]["content"] == "It is a note."
    return answer


def n_read(answer: Any) -> int:
    return int(answer["timings"]["prompt_n"])


def probs(answer: Any) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


def test_the_file_was_read_before_its_result_came(server: Server) -> None:
    for n, result in enumerate((NOTE, NOTE.rstrip(), f"{NOTE}(So {END})"), 1):
        assert n_read(gave(server, asked(server, "the note"), result)) <= GUARD + N_MARKUP
        assert counted(server, "prewarms_used") == n


def test_numbered_lines_are_expected_after_numbered_lines(server: Server) -> None:
    first = asked(server, "the note")
    numbered = "".join(f"{i:>6}\t{line}\n" for i, line in enumerate(NOTE.splitlines(), 1))
    messages = with_result(first, numbered)
    messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Look at the note."}]
    n_before = counted(server, "prewarms")
    message = server.ask("/v1/chat/completions", first | {"messages": messages})["choices"][0]["message"]
    until(lambda: counted(server, "prewarms") > n_before, "what is probable is read")
    assert n_read(gave(server, first | {"messages": [*messages, message]}, numbered)) <= GUARD + N_MARKUP


def test_another_result_costs_what_it_always_cost(server: Server, scripted: Any) -> None:
    """The model reads what was given, not what was guessed, and the guess is not quoted."""
    n_other, body = server.n_tokens(OTHER), asked(server, "the note")
    wrong = gave(server, body, OTHER, logprobs=True, prompt_cache_diagnostics=True)
    assert n_other < n_read(wrong) <= n_other + GUARD + N_MARKUP
    assert wrong["prompt_cache_diagnostics"]["diverged"]["at"] > 0
    pages = [server.get(path).data.decode() for path in ("/cache/tree", "/cache/requests", "/slots", "/cache")]
    beginning = " ".join(NOTE.split()[:2])
    assert not any(beginning in text for text in (json.dumps(wrong), server.log, *pages))
    right = gave(server, body, NOTE, logprobs=True)
    with scripted(SCRIPT, 8192) as usual:
        same = asked(usual, "the note", reads_ahead=False, question=body["messages"][0]["content"])
        expected = gave(usual, same, OTHER, logprobs=True)
    assert n_read(wrong) <= n_read(expected) and probs(wrong) == probs(expected)
    assert probs(right) != probs(expected), "else this would show nothing"


def test_nothing_else_is_read_ahead(server: Server) -> None:
    """No link that leaves the folder, nothing for other namespaces or for requests without a cache."""
    others: tuple[dict[str, Any], ...] = ({"cache_salt": "other"}, {"deterministic": True}, {"cache_prompt": False})
    for name, more in (("the link", {}), *(("the note", each) for each in others)):
        body = asked(server, name, reads_ahead=False, **more)
        assert n_read(gave(server, body, NOTE)) > server.n_tokens(NOTE), (name, more)


def test_without_the_flag_names_are_ignored(scripted: Any, folder: Path) -> None:
    with scripted(SCRIPT, 8192) as server:
        assert (folder / "note.txt").exists()
        body = asked(server, "the note", reads_ahead=False)
        assert n_read(gave(server, body, NOTE)) > server.n_tokens(NOTE)
        assert counted(server, "prewarm_tokens") < server.n_tokens(NOTE)
