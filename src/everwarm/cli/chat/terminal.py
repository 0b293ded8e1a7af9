"""Reading lines and showing replies: in a terminal with line editing, history and rendered Markdown; through pipes as plain
text, one message per line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from everwarm.cli.chat.chat_server import Piece
from everwarm.cli.chat.conversation import ReplyCost
from everwarm.cli.chat.markdown_blocks import settled

_REFRESH_PER_SECOND = 12


class ShownReply:
    """What has come of a reply; it is whole unless it was stopped."""

    def __init__(self) -> None:
        self.text = ""
        self.cost: ReplyCost | None = None
        self.is_stopped = False


class Terminal(Protocol):
    def ask(self, prefill: str = "") -> str | None:
        """The next message or command; None at the end."""

    def say(self, text: str, style: str | None = None) -> None: ...

    def show(self, pieces: Iterable[Piece]) -> ShownReply:
        """Shows a reply while it comes. Ctrl-C stops it."""


def history_file() -> Path:
    """What was typed, for the arrow keys; only its owner can read it."""
    path = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "everwarm" / "chat-history"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return path


class PipedTerminal:
    def ask(self, prefill: str = "") -> str | None:  # noqa: ARG002 - there is no one to edit it
        line = sys.stdin.readline()
        return line.strip() if line else None

    def say(self, text: str, style: str | None = None) -> None:  # noqa: ARG002 - pipes have no colours
        print(text, flush=True)

    def show(self, pieces: Iterable[Piece]) -> ShownReply:
        reply = ShownReply()
        for piece in pieces:
            reply.text += piece.text
            reply.cost = piece.cost or reply.cost
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        print()
        return reply


class InteractiveTerminal:
    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._session: PromptSession[str] = PromptSession(
            history=FileHistory(str(history_file())), multiline=True, key_bindings=_keys(), prompt_continuation="  "
        )

    def ask(self, prefill: str = "") -> str | None:
        """Enter sends; Alt-Enter begins a new line; what is pasted stays one message. Ctrl-C clears the line."""
        while True:
            try:
                return self._session.prompt("> ", default=prefill).strip()
            except KeyboardInterrupt:
                prefill = ""
                self.say("Ctrl-D or /quit ends", "dim")
            except EOFError:
                return None

    def say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def show(self, pieces: Iterable[Piece]) -> ShownReply:
        reply = ShownReply()
        n_shown = n_thought = 0
        with Live(
            console=self._console, transient=True, refresh_per_second=_REFRESH_PER_SECOND, vertical_overflow="crop"
        ) as live:
            try:
                for piece in pieces:
                    reply.cost = piece.cost or reply.cost
                    reply.text += piece.text
                    n_thought += len(piece.reasoning)
                    n_done = settled(reply.text)
                    if n_done > n_shown:
                        live.console.print(Markdown(reply.text[n_shown:n_done]))
                        n_shown = n_done
                    thinking = Text(f"thinking … {n_thought:,} characters", "dim")
                    live.update(_Tail(Markdown(reply.text[n_shown:])) if reply.text else thinking)
            except KeyboardInterrupt:
                reply.is_stopped = True
        if n_thought:
            self.say(f"(thought {n_thought:,} characters)", "dim")
        if reply.text[n_shown:].strip():
            self._console.print(Markdown(reply.text[n_shown:]))
        if reply.is_stopped:
            self.say("(stopped)", "dim")
        return reply


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class _Tail:
    """The last lines of something that may be higher than the screen."""

    def __init__(self, whole: Markdown) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()
