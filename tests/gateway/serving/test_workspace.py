"""Which file a tool call names, how its result will look, and that nothing outside of the folder is ever opened."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.errors import BadRequest
from everwarm.gateway.access.auth import Key, own_namespace
from everwarm.gateway.chat.chat_template import CHATML, ChatTemplate
from everwarm.gateway.serving.prewarm import (
    MAX_ARGUMENTS,
    MAX_CALLS,
    MAX_FILE_BYTES,
    as_shown,
    file_names,
    latest_result,
    probable_results,
    read_below,
    workspace_of,
)
from everwarm.gateway.settings import ServerSettings
from support.fuzz import TEXT

KEY = Key("one", b"digest", "one")
OUTSIDE = "nobody may read this\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text(OUTSIDE)
    (tmp_path / "work" / "deep").mkdir(parents=True)
    (tmp_path / "work" / "a.txt").write_text("alpha\n")
    (tmp_path / "work" / "deep" / "b.txt").write_text("beta\n")
    return (tmp_path / "work").resolve()


def call(name: str = "read", **arguments: Any) -> dict[str, Any]:
    return {"id": "1", "function": {"name": name, "arguments": json.dumps(arguments)}}


# opening


def test_files_below_the_folder_are_read(root: Path) -> None:
    (root / "inner").symlink_to("deep/b.txt")
    (root / "folder").symlink_to("deep")
    for name in ("a.txt", "./deep/../a.txt", str(root / "a.txt")):
        assert read_below(str(root), name) == "alpha\n"
    for name in ("deep/b.txt", "inner", "folder/b.txt"):
        assert read_below(str(root), name) == "beta\n"


def test_nothing_outside_is_read(root: Path) -> None:
    secret = root.parent / "secret.txt"
    (root / "out.txt").symlink_to(secret)
    (root / "up").symlink_to(root.parent)
    (root / "twice").symlink_to("out.txt")
    (root / "loop").symlink_to("loop")
    assert read_below(str(root.parent), "secret.txt") == OUTSIDE, "else this would show nothing"
    for name in ("../secret.txt", str(secret), "out.txt", "up/secret.txt", "twice", "deep/../../secret.txt", "loop"):
        assert read_below(str(root), name) is None, name
    twin = root.parent / "work-too"
    twin.mkdir()
    (twin / "c.txt").write_text("gamma")
    assert read_below(str(root), str(twin / "c.txt")) is None, "a longer name of a folder is another folder"


def test_a_folder_that_becomes_a_link_is_not_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between resolving a path and opening it."""
    resolve = os.path.realpath

    def then_changed(path: str, **more: Any) -> str:
        found = resolve(path, **more)
        (root / "deep").rename(root.parent / "moved")
        (root / "deep").symlink_to(root.parent / "moved")
        return found

    monkeypatch.setattr(os.path, "realpath", then_changed)
    assert read_below(str(root), "deep/b.txt") is None
    assert (root / "deep" / "b.txt").read_text() == "beta\n", "to follow the link would have read it"


def test_only_regular_files_of_text_that_are_not_large(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "most.txt").write_bytes(b"a" * MAX_FILE_BYTES)
    (root / "large.txt").write_bytes(b"a" * (MAX_FILE_BYTES + 1))
    (root / "latin.txt").write_bytes(b"caf\xe9")
    (root / "binary").write_bytes(b"a\0b")
    assert len(read_below(str(root), "most.txt") or "") == MAX_FILE_BYTES
    for name in ("pipe", "large.txt", "latin.txt", "binary", "deep", ".", "gone.txt", "a.txt/b", "a" * 5000, "\ud800"):
        assert read_below(str(root), name) is None, name


def test_no_file_stays_open(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a.txt", "deep/b.txt", "deep", ".", "gone.txt"):
        read_below(str(root), name)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cache_text": True}, "cache_text"),
        ({"keys": (KEY,)}, "API key"),
        ({"workspace": "gone"}, "a folder that exists"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(root: Path, more: Any, message: str) -> None:
    ServerSettings(workspace=str(root), keys=(KEY,), api_key="k" * 16)
    with pytest.raises(BadRequest, match=message):
        ServerSettings(**{"workspace": str(root), **more})


# names


def test_texts_among_the_arguments_may_be_names() -> None:
    assert file_names('{"path": "a.txt", "all": true, "more": null, "list": ["b"]}') == ["a.txt"]
    assert file_names('{"path": "a.txt", "old": "two\\nlines", "nul": "\\u0000"}') == ["a.txt"]
    for wrong in ('{"path": "a.txt", "offset": 3}', '["a.txt"]', "{", "", "[" * 9000, '"a.txt"', '{"path": ""}'):
        assert file_names(wrong) == [], wrong
    assert file_names(json.dumps({"path": "a.txt", "text": "a" * MAX_ARGUMENTS})) == []


@given(TEXT)
def test_no_arguments_are_an_accident(arguments: str) -> None:
    assert all(isinstance(name, str) for name in file_names(arguments))


def test_the_first_calls_are_guessed_as_far_as_they_name_files(root: Path) -> None:
    a, b, other = call(path="a.txt"), call(path="deep/b.txt"), call("grep", pattern="x")
    assert probable_results(str(root), [], [a, b, other, a]) == ["alpha\n", "beta\n"]
    assert probable_results(str(root), [], [other, a]) == [] == probable_results(str(root), [], [])
    assert len(probable_results(str(root), [], [a] * 9)) == MAX_CALLS


def test_only_requests_of_the_main_key_may_read_them() -> None:
    assert workspace_of("work", "key", own_namespace("key")) == "work"
    assert workspace_of("work", "key", own_namespace("key2")) is None
    assert workspace_of(None, "key", own_namespace("key")) is None


# how a result looks


@pytest.mark.parametrize("separator", ["\t", "→"])
@pytest.mark.parametrize("pad", ["     ", ""])
def test_lines_have_numbers_if_they_had_before(separator: str, pad: str) -> None:
    shown = as_shown("x\n\ny\n", f"{pad}1{separator}only line\n")
    assert shown == f"{pad}1{separator}x\n{pad}2{separator}\n{pad}3{separator}y"


@pytest.mark.parametrize("earlier", [None, "", "text", "1. first\n2. second", "1\tdata\n7\tdata", "12\tlate"])
def test_else_they_have_none(earlier: str | None) -> None:
    assert as_shown("x\ny\n", earlier) == "x\ny\n"


@given(st.text(alphabet="ab \n\t", max_size=40))
def test_numbers_change_nothing_else(text: str) -> None:
    lines = as_shown(text, "     1\tx\n     2\ty").split("\n")
    assert "\n".join(line.partition("\t")[2] for line in lines) == text.removesuffix("\n")


def test_the_latest_result_of_the_same_tool_counts() -> None:
    def turn(id: str, name: str, content: Any) -> list[dict[str, Any]]:
        asked = {"role": "assistant", "tool_calls": [{"id": id, "function": {"name": name, "arguments": "{}"}}]}
        return [asked, {"role": "tool", "tool_call_id": id, "content": content}]

    parts = [{"type": "text", "text": "second"}]
    messages = [*turn("1", "read", "first"), *turn("2", "read", parts), *turn("3", "list", "third")]
    assert latest_result(messages, "read") == "second"
    assert latest_result(messages, "write") is None
    odd = [{"role": "tool", "tool_call_id": 5}, {"role": "assistant", "tool_calls": ["x", {"function": 3}]}]
    assert latest_result([*messages, *odd], "read") == "second"


# the next prompt


def test_the_next_prompt_is_shared_up_to_the_first_result_that_is_not_known() -> None:
    template = ChatTemplate(CHATML, bos="", eos="")
    question = [{"role": "user", "content": "Look."}]
    calls = [{**call(path=name), "id": name, "type": "function"} for name in ("a", "b", "c")]
    reply = {"role": "assistant", "content": "So:", "tool_calls": calls}

    def sent(*results: str) -> str:
        told = [
            {"role": "tool", "tool_call_id": name, "content": text} for name, text in zip("abc", results, strict=True)
        ]
        return template.render([*question, reply, *told])

    two = template.after_results(question, reply, reply, ["one\n", "two\n"])
    assert two and two.endswith("two") and "one" in two
    for results in (("one\n", "two\n", "3"), ("one\n", "two", "4"), ("one\n", "two\nand more", "5")):
        assert sent(*results).startswith(two)
    assert not sent("other", "two\n", "3").startswith(two)
