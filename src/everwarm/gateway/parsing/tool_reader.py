"""The text of a reply while it is searched for tool calls: what arrived, what was taken, and the events that are certain.

All text that is taken ends up in exactly one place: in a call's ``raw`` or in a ``Text``. Pure: knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

import msgspec

from everwarm.gateway.parsing.reasoning import Text

T = TypeVar("T")
Reading = Generator[None, None, T]

_SPACES = re.compile(r"[ \t\r\n]*")


class NotACall(Exception):
    """The text is no tool call, or an incomplete one. Never leaves the parser."""


class CallBegun(msgspec.Struct, frozen=True):
    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments; together the pieces of a complete call are one JSON object."""

    index: int
    json_fragment: str


class CallEnded(msgspec.Struct, frozen=True):
    """``raw`` is the call as the model wrote it, with markup. A call that is not ``complete`` broke off or became invalid
    after it began: its arguments are not valid JSON."""

    index: int
    raw: str
    complete: bool = True


Event = Text | CallBegun | CallArguments | CallEnded


Kind = frozenset[str]  # the JSON types that a tool's schema allows for an argument; empty where it does not say


def is_string(kind: Kind) -> bool:
    """Whether it can only be a string, so that it can be emitted before its end is known."""
    return not kind or kind == {"string"}


class ToolReader:
    """The text that was not taken yet, and the events to emit. ``_raw`` was taken: its first ``_n_shown`` pieces are part
    of a call, the others are emitted as text if there is no call."""

    def __init__(self, kinds: Mapping[str, Mapping[str, Kind]], new_id: Callable[[], str]) -> None:
        self.text, self.at, self.final = "", 0, False
        self._events: list[Event] = []
        self._pieces: list[str] = []  # of the next event: arguments while a call is begun, otherwise text
        self._kinds, self._new_id = kinds, new_id
        self._raw: list[str] = []
        self._n_shown = 0
        self._n_begun = 0
        self.begun = self._whole = self._just_ended = False

    def kind(self, tool: str, argument: str) -> Kind:
        return self._kinds.get(tool, {}).get(argument, frozenset())

    # input

    def add(self, text: str) -> None:
        self.text, self.at = self.text[self.at :] + text, 0

    def more(self) -> Reading[None]:
        if self.final:
            raise NotACall
        yield

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, end: int) -> str:
        taken = self.text[self.at : end]
        self._raw.append(taken)
        self.at = end
        return taken

    def take_one(self, of: str) -> str:
        """The next character, which must be one of these."""
        c = self.peek()
        if not c or c not in of:
            raise NotACall
        return self.take(self.at + 1)

    def spaces(self, emit: Callable[[str], object] | None = None) -> Reading[str]:
        """Skips whitespace, which goes to ``emit``, if given; returns the character after it, "" at the reply's end."""
        while True:
            match = _SPACES.match(self.text, self.at)
            if match and match.end() > self.at:
                space = self.take(match.end())
                if emit:
                    emit(space)
            if self.at < len(self.text) or self.final:
                return self.peek()
            yield

    def word(self, *words: str) -> Reading[str | None]:
        """Takes the one of these words that comes next; None: none of them."""
        while True:
            for word in words:
                if self.text.startswith(word, self.at):
                    return self.take(self.at + len(word))
            rest = self.text[self.at : self.at + 32]
            if self.final or not any(word.startswith(rest) for word in words):
                return None
            yield

    def match(self, pattern: re.Pattern[str], max_chars: int) -> Reading[str]:
        """Takes all that matches the pattern."""
        while True:
            match = pattern.match(self.text, self.at)
            end = match.end() if match else self.at
            if end - self.at > max_chars or (end == self.at < len(self.text)):
                raise NotACall
            if end < len(self.text):
                return self.take(end)
            yield from self.more()

    # output

    def text_until(self, end: int) -> None:
        """Emits text without the whitespace at its end, which belongs to a call if one comes next."""
        text = self.text[self.at : end]
        visible = text.rstrip()
        if visible:
            self._emit_text("".join((*self._raw, visible)))
            self._raw = [text[len(visible) :]] if len(visible) < len(text) else []
        elif text:
            self._raw.append(text)
        self.at = end

    def text_ended(self) -> None:
        """The reply is over. Whitespace after a call is no text."""
        if not self._just_ended:
            self._emit_text("".join(self._raw))
        self._raw = []

    def drain(self) -> list[Event]:
        """All events since the last time."""
        self._flush()
        events, self._events = self._events, []
        return events

    def begin(self, name: str) -> None:
        self._flush()
        self._events.append(CallBegun(self._n_begun, self._new_id(), name))
        self._n_begun += 1
        self._n_shown = len(self._raw)
        self.begun = True

    def emit(self, fragment: str) -> None:
        """Emits a piece of the arguments."""
        self._n_shown = len(self._raw)
        self._pieces.append(fragment)

    def whole(self) -> None:
        """The arguments are complete; only markup may follow."""
        self._n_shown = len(self._raw)
        self._whole = True

    def end(self) -> None:
        """Ends the call: all that was taken is part of it."""
        self.whole()
        self.give_up()

    def give_up(self) -> None:
        """Ends the call as it is; what did not become part of it is text."""
        held = self._raw[self._n_shown :]
        if self.begun:
            self._flush()
            raw = "".join(self._raw[: self._n_shown])
            self._events.append(CallEnded(self._n_begun - 1, raw, self._whole))
            self._just_ended = True
        self._raw = []
        self._n_shown = 0
        self.begun = False
        self._whole = False
        self._emit_text("".join(held))

    def _emit_text(self, text: str) -> None:
        if text:
            self._just_ended = False
            self._pieces.append(text)

    def _flush(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._events.append(CallArguments(self._n_begun - 1, text) if self.begun else Text(text))
            self._pieces = []
