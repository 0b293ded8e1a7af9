"""Noise at the head of system text goes, everything else stays byte for byte."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.gateway.rewrite.rules import NOISE_PATTERNS, canonical, without_noise
from support.server import Server, metric, serving, words

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.{}; cc_entrypoint=cli; cch={};"
NOISE = st.sampled_from([HEADER.format("a1f", "8c3d2"), HEADER.format("000", "00000"), "cch=1f2e3d", "cch=abcdef01;\r"])
LINES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | NOISE, max_size=6).map("\n".join)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": LINES}) | LINES, max_size=4)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        "content": LINES | PARTS | st.none(),
    }
)
MESSAGES = st.lists(MESSAGE, max_size=4)


def is_noise(line: str) -> bool:
    return any(rule.fullmatch(line) for rule in NOISE_PATTERNS.values())


def texts(message: dict[str, Any]) -> list[str]:
    content = message["content"] or []
    parts = [content] if isinstance(content, str) else content
    return [part["text"] if isinstance(part, dict) else part for part in parts]


@given(LINES)
def test_only_whole_lines_at_the_head_vanish(text):
    rest, names = without_noise(text)
    assert text.endswith(rest)
    gone = text[: len(text) - len(rest)]
    lines = gone.removesuffix("\n").split("\n") if names else []
    assert len(lines) == len(names) and all(map(is_noise, lines)) and (gone == "" or names)
    assert gone.endswith("\n") or not rest or not names
    assert not rest or not is_noise(rest.split("\n")[0])


@given(MESSAGES)
def test_twice_is_once_and_others_are_not_touched(messages):
    before = copy.deepcopy(messages)
    once = canonical(messages)
    assert messages == before
    again = canonical(once.messages)
    assert again.messages == once.messages and again.rules == ()
    others = [message for message in before if message["role"] not in ("system", "developer")]
    assert [message for message in once.messages if message["role"] not in ("system", "developer")] == others
    said = [text for message in before if message["role"] in ("system", "developer") for text in texts(message)]
    kept = [text for message in once.messages if message["role"] in ("system", "developer") for text in texts(message)]
    expected = [(text, without_noise(text)) for text in said]
    assert kept == [rest for text, (rest, names) in expected if rest or not names]
    assert len(once.rules) == sum(len(names) for _, (_, names) in expected)


@pytest.mark.parametrize(
    "text",
    [
        "You are x-anthropic-billing-header: yes",
        " x-anthropic-billing-header: indented",
        "Rules:\nx-anthropic-billing-header: quoted further down",
        "cch=",
        "cch=12345 is an example",
        "\ncch=12345",
    ],
)
def test_what_only_looks_like_noise_stays(text):
    assert without_noise(text) == (text, [])


def test_a_message_of_nothing_but_noise_goes_and_an_empty_one_stays():
    noisy = {"role": "system", "content": HEADER.format("a", "b")}
    empty, user = {"role": "system", "content": ""}, {"role": "user", "content": HEADER.format("a", "b")}
    assert canonical([noisy, empty, user]).messages == [empty, user]
    assert canonical([noisy, empty, user]).rules == ("attribution",)


# over the wire


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def n_read(server: Server, n: int) -> int:
    """Prompt tokens processed for the same conversation under another header."""
    noise = HEADER.format(f"{n:03x}", f"{n * 7919:05x}")
    messages = [
        {"role": "system", "content": f"{noise}\nYou are a helpful assistant. {words(200, 77)}"},
        {"role": "user", "content": "Who are you?"},
    ]
    answer = server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "temperature": 0})
    return int(answer["timings"]["prompt_n"])


def test_headers_that_differ_share_a_prompt_and_are_counted(server):
    assert n_read(server, 1) > 200
    assert [n_read(server, n) for n in (2, 3)] == [0, 0]
    text = server.get("/metrics").data.decode()
    assert metric(text, 'everwarm_noise_lines_removed_total{rule="attribution"}') == 3


def test_it_can_be_left_off():
    with serving("--no-canonicalise") as plain:
        assert n_read(plain, 1) > 200
        assert n_read(plain, 2) > 200
        assert "everwarm_noise_lines_removed_total{" not in plain.get("/metrics").data.decode()
