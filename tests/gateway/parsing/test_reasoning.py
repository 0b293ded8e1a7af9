"""Thinking told from saying while a reply is written, however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everwarm.gateway.parsing.reasoning import (
    REASONING_TAGS,
    Reasoning,
    ReasoningParser,
    ReasoningStyle,
    Text,
    detect_reasoning,
    reasoning_style,
)
from support.pieces import cut

THINK = ReasoningStyle("<think>", "</think>")
OPENED = ReasoningStyle("<think>", "</think>", "inside")
OFF = ReasoningStyle("<think>", "</think>", "after")
STYLES = [
    pytest.param(ReasoningStyle(*tags, begins), id=f"{name} {begins}")
    for name, tags in REASONING_TAGS.items()
    for begins in ("before", "inside", "within", "after")
]


def merged(events: Iterable[Text | Reasoning]) -> list[Text | Reasoning]:
    done: list[Text | Reasoning] = []
    for event in events:
        assert event.text, "an empty event says nothing"
        if done and type(done[-1]) is type(event):
            done[-1] = type(event)(done[-1].text + event.text)
        else:
            done.append(event)
    return done


def parsed(style: ReasoningStyle, pieces: Sequence[str], kind=ReasoningParser) -> list[Text | Reasoning]:
    parser = kind(style)
    return merged([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def replies(style: ReasoningStyle) -> st.SearchStrategy[str]:
    """Text made of tags, their pieces, whitespace and words."""
    tags = [style.opening, style.closing, style.opening[:-1], style.closing[:3], style.opening[:1], style.closing[1:]]
    words = st.sampled_from([*tags, " ", "\n", "\n\n", "\t", "word", "é", "🙂", "<", "/", ">"]) | st.text(max_size=4)
    return st.lists(words, max_size=12).map("".join)


@pytest.mark.parametrize(
    ("style", "reply", "expected"),
    [
        (THINK, "<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Text("Yes.")]),
        (THINK, "\n<think>Hm.</think>Yes.", [Reasoning("Hm."), Text("Yes.")]),
        (OPENED, "\nHm.\n\nOh.\n</think>\n\nYes.\n", [Reasoning("Hm.\n\nOh."), Text("Yes.\n")]),
        (OPENED, "<think>\nHm.</think>Yes.", [Reasoning("Hm."), Text("Yes.")]),
        (OPENED, "\n\n</think>\n\nYes.", [Text("Yes.")]),
        (OPENED, "Hm. It goes on\n", [Reasoning("Hm. It goes on\n")]),
        (OPENED, "Hm.</thi", [Reasoning("Hm.</thi")]),
        (OPENED, "a <think> b </thunk> c </think> d", [Reasoning("a <think> b </thunk> c"), Text("d")]),
        (OFF, "\n\nYes.", [Text("Yes.")]),
        (OFF, "<think>Hm.</think>Yes.", [Reasoning("Hm."), Text("Yes.")]),
        (THINK, "  Yes. <think> is a tag, </think> another.", [Text("  Yes. <think> is a tag, </think> another.")]),
        (THINK, "<thi", [Text("<thi")]),
        (THINK, " \n", [Text(" \n")]),
        (THINK, "", []),
        (OPENED, "", []),
        (THINK, "<think>a</think>b<think>c</think>", [Reasoning("a"), Text("b<think>c</think>")]),
    ],
)
def test_thinking_is_told_from_saying(style, reply, expected):
    assert parsed(style, [reply]) == expected
    assert parsed(style, list(reply)) == expected


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_cutting_gives_the_same(style, data):
    reply = data.draw(replies(style))
    sizes = data.draw(st.lists(st.integers(0, 7), max_size=30))
    whole = parsed(style, [reply])
    assert parsed(style, cut(reply, sizes)) == whole
    assert parsed(style, list(reply)) == whole


def losses(style: ReasoningStyle, reply: str, kind=ReasoningParser) -> bool:
    """Whether more than the tags at the beginning and whitespace were lost."""

    def squeezed(text: str) -> str:
        return "".join(text.split())

    message = squeezed("".join(event.text for event in parsed(style, list(reply), kind)))
    rest = squeezed(reply)
    kept = {rest, rest.replace(style.closing, "", 1), rest.removeprefix(style.opening)}
    kept.add(rest.removeprefix(style.opening).replace(style.closing, "", 1))
    return message not in kept


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_nothing_but_tags_and_whitespace_is_lost(style, data):
    assert not losses(style, data.draw(replies(style)))


class Impatient(ReasoningParser):
    """Broken: holds no beginning of a tag back."""

    def feed(self, text):
        events = super().feed(text)
        tail, self._tail = self._tail, ""
        return [*events, *([Reasoning(tail)] if tail else [])]


class Forgetful(ReasoningParser):
    """Broken: does not say what it held back."""

    def finish(self):
        return []


def test_broken_parsers_would_be_caught():
    reply = "Hm.</think>Yes."
    assert parsed(OPENED, list(reply), Impatient) != parsed(OPENED, [reply], Impatient)
    assert losses(OPENED, "Hm.</thi", Forgetful) and not losses(OPENED, "Hm.</thi")


def test_no_half_tag_is_ever_said():
    parser = ReasoningParser(OPENED)
    message = [parser.feed(piece) for piece in ("Hm. <", "/th", "ink", ">", "\n", "Yes")]
    assert message == [[Reasoning("Hm.")], [], [], [], [], [Text("Yes")]]


@pytest.mark.parametrize(
    ("template", "tail", "expected"),
    [
        ("…{{ '<think>\\n' }}", "assistant\n<think>\n", OPENED),
        ("…<think>\\n\\n</think>…", "assistant\n<think>\n\n</think>\n\n", OFF),
        ("… content.split('</think>')[-1] …", "<|im_start|>assistant\n", THINK),
        ("no thinking here", "assistant\n", None),
        ("no thinking here", "assistant\n<think>", OPENED),
        ("…<|START_THINKING|>…", "x", ReasoningStyle("<|START_THINKING|>", "<|END_THINKING|>")),
        ("…[THINK]…[/THINK]…", "[/INST][THINK]", ReasoningStyle("[THINK]", "[/THINK]", "inside")),
        ("…<thinking>…", "x<thinking>\n", ReasoningStyle("<thinking>", "</thinking>", "inside")),
    ],
)
def test_the_style_is_known_from_the_template_and_the_end_of_the_prompt(template, tail, expected):
    assert detect_reasoning(template, tail) == expected


def test_a_style_can_be_named():
    assert reasoning_style("think", "<think>\n") == OPENED


def test_the_embedded_model_thinks_inside_the_tag_its_prompt_opened(embedded_model):
    assert detect_reasoning(embedded_model.chat_template, "<|im_start|>assistant\n<think>\n") == OPENED
