"""Where the breakpoints that clients set in content and tools lie in the text of a prompt.

Pure, like the search for stable points: the template is a function that is given. A breakpoint is never part of a prompt or
of a key, and it changes speed only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everwarm.gateway.chat.content import Message, breakpoints_of_messages, breakpoints_of_tools, with_text_at
from everwarm.gateway.chat.stable_points import Render, common_prefix
from everwarm.state.policy import MAX_BREAKPOINTS

Tools = Sequence[Mapping[str, Any]]
_SIGNS = [f"\ue0d5{chr(0xE100 + i)}" for i in range(MAX_BREAKPOINTS)]  # private characters: no text has them by chance


def in_messages(text: str, marked: Sequence[Message], plain: Sequence[Message], render: Render) -> set[int]:
    """The ends of the parts that ``said`` marks, as characters of the text that ``plain`` gave."""
    found = breakpoints_of_messages(marked)[-MAX_BREAKPOINTS:]
    if not found:
        return set()
    together = list(plain)
    for (i, n_parts), sign in reversed(list(zip(found, _SIGNS, strict=False))):  # the last first: places stay right
        together[i] = with_text_at(together[i], n_parts, sign)
    ends = _between_signs(text, render(together), _SIGNS[: len(found)])
    if ends is None:  # white space at the ends of parts is trimmed, or the template looks at the text itself
        ends = {_end_of_part(text, plain, i, n_parts, render) for i, n_parts in found}
    return {end for end in ends if 0 < end < len(text)}


def _between_signs(text: str, signed: str | None, signs: Sequence[str]) -> set[int] | None:
    """None: the signs changed more than their own places."""
    if signed is None:
        return None
    ends = set()
    for sign in signs:
        before, found, after = signed.partition(sign)
        if not found or sign in after:
            return None
        ends.add(len(before))
        signed = before + after
    return ends if signed == text else None


def _end_of_part(text: str, plain: Sequence[Message], i: int, n_parts: int | None, render: Render) -> int:
    signed = render([*plain[:i], with_text_at(plain[i], n_parts, _SIGNS[0]), *plain[i + 1 :]])
    return 0 if signed is None else common_prefix(text, signed)


def in_tools(text: str, marked: Tools | None, plain: Tools | None, render: Callable[[Tools], str | None]) -> set[int]:
    """The ends of the tools that ``said`` marks: what prompts without the later tools, or with others there, share."""
    ends = set()
    for n in breakpoints_of_tools(marked)[-MAX_BREAKPOINTS:]:
        before, after = list(plain or ())[:n], list(plain or ())[n:]
        texts = [render([*before, _other(before[-1]), *after]), render(before) if after else None]
        shared = [common_prefix(text, other) for other in texts if other is not None]
        ends.add(min(shared, default=0))
    return {end for end in ends if 0 < end < len(text)}


def _other(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool like another one, that begins differently as early as it can."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {**tool, "function": {**function, "name": _SIGNS[0]}}
    return {**tool, "name": _SIGNS[0]}
