"""A reply split into thinking and answer while it streams.

A model thinks at the beginning of its reply, between two tags; the template may already have opened the first one in the
prompt. Everything after the closing tag is text, also if it looks like a tag. Whitespace around the tags belongs to
neither side. Pure: knows text; knows no tokens, no tool calls and no JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec


class Text(msgspec.Struct, frozen=True):
    """A piece of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of the thinking."""

    text: str


class ReasoningStyle(msgspec.Struct, frozen=True):
    """The tags around the thinking, and where the reply begins, by the end of the prompt."""

    opening: str
    closing: str
    begins: Literal[
        "before",  # no tag yet: the reply may open one
        "inside",  # the prompt opened the tag
        "within",  # the prompt has part of the thought
        "after",  # the prompt opened and closed it: thinking is off
    ] = "before"


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
    """The style of that name (a key of ``REASONING_TAGS``) for the reply to a prompt with this end."""
    opening, closing = REASONING_TAGS[name]
    end = prompt_tail.rstrip()
    if end.endswith(opening):
        return ReasoningStyle(opening, closing, "inside")
    if end.endswith(closing):
        return ReasoningStyle(opening, closing, "after")
    return ReasoningStyle(opening, closing)


def detect_reasoning(template_source: str, prompt_tail: str) -> ReasoningStyle | None:
    """The style of a model's template. ``prompt_tail``: the last characters of the rendered prompt, a tag's length or more.
    Some templates only strip the thinking from the history and so name no more than the closing tag."""
    end = prompt_tail.rstrip()
    for name, (opening, closing) in REASONING_TAGS.items():
        if closing in template_source or opening in template_source or end.endswith((opening, closing)):
            return reasoning_style(name, prompt_tail)
    return None


# opening: the next thing may be the opening tag; closed: only whitespace came after the closing tag
_State = Literal["opening", "thinking", "closed", "answering"]


class ReasoningParser:
    """Fed with text in order. Holds back whitespace and at most the beginning of one tag.

    An opening tag is swallowed once, even if the prompt has opened it: some models repeat it."""

    def __init__(self, style: ReasoningStyle) -> None:
        self._style = style
        self._state: _State = "opening"
        self._tail = ""  # may be the beginning of a tag
        self._spaces: list[str] = []  # dropped if a tag comes next
        self._has_thought = style.begins == "within"
        if self._has_thought:
            self._state = "thinking"

    def feed(self, text: str) -> list[Text | Reasoning]:
        return self._read(text, final=False)

    def finish(self) -> list[Text | Reasoning]:
        """What was held back, at the end of the reply."""
        return self._read("", final=True)

    def _read(self, text: str, *, final: bool) -> list[Text | Reasoning]:
        if self._tail:
            text, self._tail = self._tail + text, ""
        events: list[Text | Reasoning] = []
        if self._state == "opening":
            text = self._open(text, final=final)
        if self._state == "thinking":
            text = self._think(text, events, final=final)
        if self._state == "closed":
            text = text.lstrip()
            self._state = "answering" if text else "closed"
        if self._state == "answering" and (text or self._spaces):
            events.append(Text("".join((*self._spaces, text))))
            self._spaces.clear()
        return events

    def _open(self, text: str, *, final: bool) -> str:
        """Skips the opening tag, if there is one; returns the rest."""
        style = self._style
        rest = text.lstrip()
        if style.begins == "before" and len(rest) < len(text):
            self._spaces.append(text[: len(text) - len(rest)])
        if rest.startswith(style.opening):
            self._spaces.clear()
            self._state = "thinking"
            return rest[len(style.opening) :]
        if style.opening.startswith(rest) and not final:
            self._tail = rest
            return ""
        self._state = "thinking" if style.begins == "inside" else "answering"
        return rest

    def _think(self, text: str, events: list[Text | Reasoning], *, final: bool) -> str:
        closing = self._style.closing
        at = text.find(closing)
        if at >= 0:
            self._thought(text[:at], events)
            self._spaces.clear()
            self._state = "closed"
            return text[at + len(closing) :]
        n_certain = len(text) if final else len(text) - _n_begun(text, closing)
        self._thought(text[:n_certain], events)
        self._tail = text[n_certain:]
        if final and self._spaces:  # never closed: what was held back is part of the thinking
            events.append(Reasoning("".join(self._spaces)))
            self._spaces.clear()
        return ""

    def _thought(self, text: str, events: list[Text | Reasoning]) -> None:
        """Emits the text; holds back whitespace at its end and drops whitespace at the beginning of the thinking."""
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
    """How many characters at the end of the text may begin the tag. A tag contains its first character once."""
    at = text.rfind(tag[0], -len(tag))
    return len(text) - at if at >= 0 and tag.startswith(text[at:]) else 0
