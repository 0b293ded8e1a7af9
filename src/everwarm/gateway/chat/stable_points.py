"""How much of a prompt the next turn will share, found by rendering likely next turns.

Pure: texts and messages in, characters out; the template is passed in as a function. A guess changes speed, never results.

Breakpoints that clients set in content and tools are found in the text of a prompt in the same way. A breakpoint is
never part of a prompt or of a key; it changes speed only.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everwarm.gateway.chat.content import Message, breakpoints_of_messages, breakpoints_of_tools, with_text_at
from everwarm.gateway.chat.jinja_template import Layout
from everwarm.state.policy import MAX_BREAKPOINTS

Tools = Sequence[Mapping[str, Any]]
_SIGNS = [f"\ue0d5{chr(0xE100 + i)}" for i in range(MAX_BREAKPOINTS)]  # private characters: no text has them by chance


def in_messages(text: str, marked: Sequence[Message], plain: Sequence[Message], render: Render) -> set[int]:
    """The ends of the parts with a breakpoint in ``marked``, as characters of the text that ``plain`` renders to."""
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
    """The ends of the tools with a breakpoint in ``marked``: what prompts with no later tools, or with others, share."""
    ends = set()
    for n in breakpoints_of_tools(marked)[-MAX_BREAKPOINTS:]:
        before = list(plain or ())[:n]
        after = list(plain or ())[n:]
        texts = [render([*before, _other(before[-1]), *after]), render(before) if after else None]
        shared = [common_prefix(text, other) for other in texts if other is not None]
        ends.add(min(shared, default=0))
    return {end for end in ends if 0 < end < len(text)}


def _other(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy of a tool that differs from it as early as possible."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {**tool, "function": {**function, "name": _SIGNS[0]}}
    return {**tool, "name": _SIGNS[0]}


Render = Callable[[list[Message]], str | None]  # None: the template refuses such messages

WORDS = ("so it goes", "Yes, 7 of 9")  # stand for unknown text: two texts without a common prefix
_BLOCK = 1 << 18  # characters
_MIN_LEFT_OUT = 16  # messages; fewer are not worth leaving out


def common_prefix(a: str, b: str) -> int:
    """Compares block by block: one comparison of megabytes would hold the GIL and stop all other threads."""
    n = min(len(a), len(b))
    low = next((at for at in range(0, n, _BLOCK) if a[at : at + _BLOCK] != b[at : at + _BLOCK]), n)
    high = min(low + _BLOCK, n)
    if a[low:high] == b[low:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


# likely next turns


NextTurn = Callable[[Sequence[Message]], list[Message]]  # from a conversation to the one with a possible next turn


def _followed_by(*turn: Message) -> NextTurn:
    return lambda messages: [*messages, *turn]


def _continued_with(*turn: Message) -> NextTurn:
    """The model goes on with the last message."""
    return lambda messages: [*messages[:-1], with_text_at(messages[-1], None, WORDS[0]), *turn]


def likely_next(messages: Sequence[Message], *, with_tools: bool) -> list[NextTurn]:
    """A reply and another question; with tools also a call and its result; thinking sent back or not."""
    replies = [_reply(), _reply(reasoning_content=WORDS[0])]
    user = _user(WORDS[0])
    found = [_followed_by(reply, user) for reply in replies]
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant":
        found.append(_continued_with(user))
        if last.get("tool_calls"):
            found.append(_followed_by(*results_of(last, WORDS[0])))
    if with_tools:
        calls = [{**reply, "content": "", "tool_calls": [_CALL]} for reply in replies]
        found += [_followed_by(call, *results_of(call, WORDS[0])) for call in calls]
    return found


def results_of(reply: Message, text: str) -> Iterator[Message]:
    """A result for each tool call of a reply."""
    calls = reply.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        fields = call if isinstance(call, dict) else {}
        function = fields.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        yield {"role": "tool", "tool_call_id": fields.get("id"), "name": name, "content": text}


_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def _reply(**more: Any) -> Message:
    return {"role": "assistant", "content": WORDS[0], **more}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


# the stable points of a prompt


def stable_points(
    layout: Layout, messages: Sequence[Message], render: Render, *, end: int, with_tools: bool
) -> tuple[int, ...]:
    """Where the likely next turns diverge from this text, ascending. After ``end``, the end of the last message, comes only
    the generation prompt, so no stable point lies beyond ``end``."""
    quote = Quote.of(layout, messages)
    likely = likely_next(messages, with_tools=with_tools)
    shared = list(_shared(layout, messages, quote, likely, render))
    if all(n is None for n in shared):
        shared = list(_shared(layout, messages, quote, [_followed_by(_reply())], render))
    return tuple(sorted({min(n, end) for n in shared if n}))


def _shared(
    layout: Layout, messages: Sequence[Message], quote: Quote | None, likely: Sequence[NextTurn], render: Render
) -> Iterator[int | None]:
    """How much of this text each of the next turns shares; None: the template refuses it."""
    is_faithful = False
    for turn in likely:
        found = None if quote is None else quote.shared_with(render(turn(quote.messages)))
        if quote is not None and found is not None and found < quote.end and not is_faithful:
            is_faithful = quote.is_faithful(render)
            if not is_faithful:
                quote = found = None
        if found is None:
            text = render(turn(messages))
            found = None if text is None else common_prefix(layout.text, text)
        yield found


def after_reply(messages: Sequence[Message], reply: Message, render: Render) -> str | None:
    """The text that the next request is sure to begin with after this reply."""
    silent = {k: v for k, v in reply.items() if k != "reasoning_content"}
    texts = []
    for sent, answer in itertools.product([reply] if silent == reply else [reply, silent], WORDS):
        following = list(results_of(reply, answer)) or [_user(answer)]
        text = render([*messages, sent, *following])
        if text is not None:
            texts.append(text)
    if not texts:
        return None
    return texts[0][: min(common_prefix(texts[0], text) for text in texts)] or None


def after_results(
    messages: Sequence[Message], reply: Message, calls: Message, results: Sequence[str], render: Render
) -> str | None:
    """The text that the next request begins with, if the first calls of a reply have these results. ``calls``: the reply
    with its calls, where ``reply`` has them as text. More may follow the last result, or less white space."""
    texts = []
    for ending in ("", *WORDS):
        last = results[-1] + ending if ending else results[-1].rstrip()
        known = [*results[:-1], last]
        following = [
            {**message, "content": known[i] if i < len(known) else ending or WORDS[0]}
            for i, message in enumerate(results_of(calls, ""))
        ]
        text = render([*messages, reply, *following])
        if text is None:
            return None
        texts.append(text)
    return texts[0][: min(common_prefix(texts[0], text) for text in texts)] or None


# long conversations


@dataclass(frozen=True, slots=True)
class Quote:
    """A conversation without turns that are like others, and its text according to the layout of the whole.

    How a template renders a message depends on its kind and its place, rarely on its words. So a quote keeps the first turn
    of every kind, where a change would show first, and the last turns. If the template renders a quote differently from the
    whole, or a change may begin in an omitted turn, the quote gives no answer, and the whole has to be rendered.
    """

    messages: list[Message]
    text: str
    offsets: list[int]  # where its pieces begin
    places: list[int]  # where these are in the whole text
    end: int  # of the last message, in the whole text
    bridges: frozenset[int]  # pieces before which something was left out; 0 precedes all messages

    @classmethod
    def of(cls, layout: Layout, messages: Sequence[Message]) -> Quote | None:
        """None: too little would be left out, or the places of the messages are not known."""
        first = layout.starts[0][0] if layout.starts else 0
        if layout.end is None or len(layout.starts) != len(messages) - first or len(messages) < 2 * _MIN_LEFT_OUT:
            return None
        kept = _kept(messages)
        if len(messages) - len(kept) < _MIN_LEFT_OUT or kept[:first] != list(range(first)):
            return None
        at = [*(start for _, start in layout.starts), layout.end]
        pieces, bridges, before = [(0, at[0])], {0}, first - 1
        for i in kept[first:]:
            if i != before + 1:
                bridges.add(len(pieces))
            pieces.append((at[i - first], at[i - first + 1]))
            before = i
        pieces.append((layout.end, len(layout.text)))
        offsets = [0, *itertools.accumulate(stop - start for start, stop in pieces)][:-1]
        text = "".join(layout.text[start:stop] for start, stop in pieces)
        places = [start for start, _ in pieces]
        return cls([messages[i] for i in kept], text, offsets, places, layout.end, frozenset(bridges))

    def is_faithful(self, render: Render) -> bool:
        """Whether the quote is rendered as in the whole, up to the end of the last message."""
        text = render(self.messages)
        return text is not None and common_prefix(self.text, text) >= self.offsets[-1]

    def shared_with(self, text: str | None) -> int | None:
        """How much of the whole text the quote's next turn shares; None: a quote cannot decide it."""
        if text is None:
            return None
        n = common_prefix(self.text, text)
        piece = bisect.bisect_right(self.offsets, n) - 1
        return None if piece in self.bridges else self.places[piece] + n - self.offsets[piece]


def _kept(messages: Sequence[Message]) -> list[int]:
    """The messages to quote: those before all turns, the first turn of every kind, and the last ones."""
    kinds = [_kind(message) for message in messages]
    *earlier, last = _turns(messages) or [[]]
    turns = [*(_varied(steps, kinds) for steps in earlier), _varied(last, kinds, n_last=2)]
    before = range(turns[0][0] if turns[0] else len(messages))
    return [*before, *_varied(turns, kinds, n_last=2)]


def _varied(groups: list[list[int]], kinds: list[tuple[Any, ...]], n_last: int = 0) -> list[int]:
    """The first group of every kind, and the last ``n_last`` groups."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for i, group in enumerate(groups):
        kind = tuple(kinds[at] for at in group)
        if kind not in seen or i >= len(groups) - n_last:
            kept += group
        seen.add(kind)
    return kept


def _turns(messages: Sequence[Message]) -> list[list[list[int]]]:
    """Turns, from a user's message to before the next one, in steps: a message of a user or assistant and what follows."""
    turns: list[list[list[int]]] = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if role == "user":
            if turns and messages[turns[-1][-1][0]].get("role") == "user":
                turns[-1].append([i])  # two in a row
            else:
                turns.append([[i]])
        elif turns and role == "assistant":
            turns[-1].append([i])
        elif turns:
            turns[-1][-1].append(i)
    return turns


def _kind(message: Message) -> tuple[Any, ...]:
    content = message.get("content")
    calls = message.get("tool_calls")
    kinds: Any = _kind_of_text(content)
    if isinstance(content, list):
        kinds = tuple(_kind_of_text(part.get("text") if isinstance(part, dict) else part) for part in content)
    n_calls = len(calls) if isinstance(calls, list) else 0
    return (message.get("role"), kinds, n_calls, *[key for key, value in message.items() if value])


def _kind_of_text(text: Any) -> int:
    if not isinstance(text, str):
        return -1 if text is None else -2
    return (not text or text.isspace()) + 2 * (text[:1] == "<") + 4 * ("</think>" in text) + 8 * ("/no_think" in text)
