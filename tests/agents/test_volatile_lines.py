"""A client that changes a line of its system text at every start, on a real server: cured by a rule, reported without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server import Server, run_cli, serving, words

RULE = "[[rule]]\nname = 'date'\nmatch = 'Today is .*'\naction = 'end'\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("rules") / "rules.toml"
    path.write_text(RULE)
    with serving("--rewrite", str(path)) as server:
        yield server


def start(server: Server, day: str, folder: str, question: str) -> dict[str, Any]:
    """A new session of the client: a long system text after the lines that it changes."""
    system = f"You are an agent.\nToday is {day}.\nFolder: {folder}\n{words(300)}\nEnd."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    timings: dict[str, Any] = server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1})["timings"]
    return timings


def test_a_rule_cures_what_it_matches_and_the_rest_is_reported(server):
    first = start(server, "Monday", "/home/a", "one")
    cured = start(server, "Tuesday", "/home/a", "two")
    control = start(server, "Tuesday", "/home/b", "three")
    n_read = first["prompt_n"]
    assert cured["prompt_n"] < n_read / 4 and control["prompt_n"] > n_read / 2
    assert cured["cache"]["rewritten"] == ["date"]
    found = server.get("/cache/volatile").json
    (line,) = found["lines"]
    assert found["rules"] == ["date"]
    assert (line["line"], line["before"], line["n_changes"]) == (2, "Folder: ", 1)
    assert line["n_tokens"] == control["prompt_n"]
    shown = run_cli("explain", "--session", "--url", server.url)
    assert "line 2 of the system text was changed once" in shown.stdout and 'match = "Folder: .*"' in shown.stdout


def test_the_prompt_is_shown_as_it_is_read(server):
    system = "Today is Friday."
    messages = [{"role": "system", "content": f"{system}\nBe brief."}, {"role": "user", "content": "hi"}]
    prompt = server.ask("/apply-template", {"messages": messages})["prompt"]
    assert prompt.index("Be brief.") < prompt.index("hi") < prompt.index(system)


def test_forgetting_forgets_the_lines(server):
    start(server, "Monday", "/home/c", "four")
    assert server.get("/cache/volatile").json["lines"]
    assert server.call("DELETE", "/cache").status == 200
    assert server.get("/cache/volatile").json["lines"] == []


def test_without_a_rule_nothing_is_changed_and_strangers_see_no_text(server):
    body = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_tokens": 1,
    }
    assert "rewritten" not in server.ask("/v1/chat/completions", body)["timings"]["cache"]
    for folder in ("/a", "/b"):
        salted = {"role": "system", "content": f"Folder: {folder}\nBe brief.\nEnd."}
        server.ask("/v1/chat/completions", {**body, "messages": [salted, body["messages"][1]], "cache_salt": "other"})
    seen = server.get("/cache/volatile").json["lines"]
    (line,) = (line for line in seen if line["line"] == 1)
    assert line["before"] is None and line["rule"] is None and line["n_changes"] == 1
    (line,) = server.get("/cache/volatile?cache_salt=other").json["lines"]
    assert line["before"] == "Folder: "
