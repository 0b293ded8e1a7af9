"""A reply split into what the model thought and what it said, while it is being written.

A model thinks at the beginning of its reply, between two tags; the template may already have opened the first one in the
prompt. Whatever comes after the closing tag is text, also if it looks like a tag. Whitespace around the tags belongs to
neither side. Pure: knows text; knows no tokens, no tool calls and no JSON.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class Text(msgspec.Struct, frozen=True):
    """Something the model said."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Something the model thought."""

    text: str


class Begins(enum.Enum):
    """What the end of the prompt says about the beginning of the reply."""

    BEFORE = "before"  # no tag yet: the reply may open one
    INSIDE = "inside"  # the prompt opened the tag
    AFTER = "after"  # the prompt opened and closed it: thinking is off


class ReasoningStyle(msgspec.Struct, frozen=True):
    opening: str
    closing: str
    begins: Begins = Begins.BEFORE


REASONING_TAGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "think": ("<think>", "</think>"),
        "start-thinking": ("<|START_THINKING|>", "<|END_THINKING|>"),
        "thinking": ("<thinking>", "</thinking>"),
        "bracket-think": ("[THINK]", "[/THINK]"),
        "seed-think": ("<seed:think>", "</seed:think>"),
    }
)


def reasoning_style(name: str, prompt_tail: str) -> ReasoningStyle:
    """The style of that name (a key of ``REASONING_TAGS``) for the reply to a prompt that ends so."""
    opening, closing = REASONING_TAGS[name]
    end = prompt_tail.rstrip()
    if end.endswith(opening):
        return ReasoningStyle(opening, closing, Begins.INSIDE)
    if end.endswith(closing):
        return ReasoningStyle(opening, closing, Begins.AFTER)
    return ReasoningStyle(opening, closing)


def detect_reasoning(template_source: str, prompt_tail: str) -> ReasoningStyle | None:
    """The style of a model's template. ``prompt_tail``: the last characters of the rendered prompt, a tag's length or more.
    Some templates only strip the thinking from the history and so name no more than the closing tag."""
    end = prompt_tail.rstrip()
    for name, (opening, closing) in REASONING_TAGS.items():
        if closing in template_source or opening in template_source or end.endswith((opening, closing)):
            return reasoning_style(name, prompt_tail)
    return None


class _State(enum.Enum):
    OPENING = "opening"  # the next thing may be the opening tag
    THINKING = "thinking"
    CLOSED = "closed"  # only whitespace came after the closing tag
    SAYING = "saying"


class ReasoningParser:
    """Fed with text in order. Holds back whitespace and at most the beginning of one tag.

    An opening tag is swallowed once, even if the prompt has opened it: some models repeat it."""

    def __init__(self, style: ReasoningStyle) -> None:
        self._style = style
        self._state = _State.OPENING
        self._tail = ""  # may be the beginning of a tag
        self._spaces: list[str] = []  # dropped if a tag comes next
        self._has_thought = False

    def feed(self, text: str) -> list[Text | Reasoning]:
        return self._read(text, final=False)

    def finish(self) -> list[Text | Reasoning]:
        """What was held back, when the reply ends."""
        return self._read("", final=True)

    def _read(self, text: str, *, final: bool) -> list[Text | Reasoning]:
        if self._tail:
            text, self._tail = self._tail + text, ""
        events: list[Text | Reasoning] = []
        if self._state is _State.OPENING:
            text = self._open(text, final=final)
        if self._state is _State.THINKING:
            text = self._think(text, events, final=final)
        if self._state is _State.CLOSED:
            text = text.lstrip()
            self._state = _State.SAYING if text else _State.CLOSED
        if self._state is _State.SAYING and (text or self._spaces):
            events.append(Text("".join((*self._spaces, text))))
            self._spaces.clear()
        return events

    def _open(self, text: str, *, final: bool) -> str:
        """Past the opening tag, if there is one; what remains to be read."""
        style = self._style
        rest = text.lstrip()
        if style.begins is Begins.BEFORE and len(rest) < len(text):
            self._spaces.append(text[: len(text) - len(rest)])
        if rest.startswith(style.opening):
            self._spaces.clear()
            self._state = _State.THINKING
            return rest[len(style.opening) :]
        if style.opening.startswith(rest) and not final:
            self._tail = rest
            return ""
        self._state = _State.THINKING if style.begins is Begins.INSIDE else _State.SAYING
        return rest

    def _think(self, text: str, events: list[Text | Reasoning], *, final: bool) -> str:
        closing = self._style.closing
        at = text.find(closing)
        if at >= 0:
            self._thought(text[:at], events)
            self._spaces.clear()
            self._state = _State.CLOSED
            return text[at + len(closing) :]
        n_certain = len(text) if final else len(text) - _n_begun(text, closing)
        self._thought(text[:n_certain], events)
        self._tail = text[n_certain:]
        if final and self._spaces:  # never closed: what was held back is part of the thought
            events.append(Reasoning("".join(self._spaces)))
            self._spaces.clear()
        return ""

    def _thought(self, text: str, events: list[Text | Reasoning]) -> None:
        """Says it but for the whitespace at its end, and for that at the very beginning."""
        if not self._has_thought:
            text = text.lstrip()
        visible = text.rstrip()
        if not visible:
            self._spaces += [text] if text else []
            return
        self._has_thought = True
        events.append(Reasoning("".join((*self._spaces, visible))))
        self._spaces = [text[len(visible) :]] if len(visible) < len(text) else []


def _n_begun(text: str, tag: str) -> int:
    """How many characters at the end of the text may begin the tag. A tag's first character stands in it once."""
    at = text.rfind(tag[0], -len(tag))
    return len(text) - at if at >= 0 and tag.startswith(text[at:]) else 0
