"""How a template writes thinking, found by rendering a thought and looking at what stands around it, and by turning
thinking off and on. Pure but for the template, which is passed in."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from everwarm.gateway.chat.content import Message
from everwarm.gateway.chat.template_family import Thinking

Render = Callable[..., str]  # messages, and the template's other arguments; may raise anything
_THOUGHT, _ANSWER = "a8f3c1 hm well 1c3f8a", "b7e2d0 yes indeed 0d2e7b"
_MARK = r"(?:<[^>]*>|\[[^\]]*\])"
_AROUND = re.compile(rf"({_MARK}\s*){_THOUGHT}(\s*{_MARK}\s*)")
_AFTER = re.compile(rf"{_THOUGHT}\s*({_MARK}\s*)")
_N_TAIL = 64  # characters
_OLD_SPLIT = "content.split('</think>')"  # templates that strip thinking from the history and never write any


def find_thinking(source: str, render: Render) -> Thinking:
    found = _beside_a_thought(render)
    if not (found.opening and found.closing):
        found = _by_switching(render, found)
    if not (found.opening or found.closing) and _OLD_SPLIT in source and "reasoning_content" not in source:
        return Thinking("<think>", "</think>")
    return found


def _beside_a_thought(render: Render) -> Thinking:
    asked: Message = {"role": "user", "content": "a"}
    reply: Message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    text = _tried(render, [asked, reply])
    if match := _AROUND.search(text):
        return Thinking(match[1], match[2])
    match = _AFTER.search(text)
    return Thinking("", match[1]) if match else Thinking()


def _by_switching(render: Render, known: Thinking) -> Thinking:
    """Some templates open thinking at the end of the prompt, or close it there where it is switched off."""
    asked: Message = {"role": "user", "content": "a"}
    off, on = (_tried(render, [asked], enable_thinking=thinks, add_generation_prompt=True) for thinks in (False, True))
    n = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(off, on, strict=False)))
    only_off, only_on = off[n:], on[n:]
    if not only_off.strip() and only_on.strip():
        return Thinking(known.opening or only_on, known.closing)
    marks = re.findall(_MARK, only_off)
    if not only_on.strip() and marks and not known.closing:
        before = re.findall(_MARK, off[:n])
        return Thinking(marks[0] if len(marks) > 1 else before[-1] if before else "", marks[-1])
    for base, longer in ((on, off), (off, on)):  # other texts differ too, so only the ends are compared
        marks = _marks_after(base[-_N_TAIL:], longer)
        if len(marks) == 2:
            return Thinking(known.opening or marks[0], known.closing or marks[1])
    return known


def _marks_after(tail: str, text: str) -> list[str]:
    """The marks that follow the last place of the tail, if nothing else does."""
    at = text.rfind(tail) if tail else -1
    rest = text[at + len(tail) :].strip() if at >= 0 else ""
    marks = re.findall(_MARK, rest)
    return marks if "".join(marks) == "".join(rest.split()) else []


def _tried(render: Render, messages: Sequence[Message], **more: Any) -> str:
    try:
        return render(messages, **more)
    except Exception:  # noqa: BLE001 - a template that refuses this says nothing about thinking
        return ""
