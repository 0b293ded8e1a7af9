"""Reading lines and showing replies: in a terminal with line editing, history and rendered Markdown; through pipes as plain
text, one message per line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from everwarm.cli.chat.chat_server import Piece

_REFRESH_PER_SECOND = 12
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


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

    def show(self, pieces: Iterable[Piece]) -> Piece:
        """All of them as one."""
        text, cost = "", None
        for piece in pieces:
            text += piece.text
            cost = piece.cost or cost
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        print()
        return Piece(text, cost=cost)


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

    def show(self, pieces: Iterable[Piece]) -> Piece:
        """All that came until Ctrl-C, as one."""
        text, cost = "", None
        n_shown = n_thought = 0
        is_stopped = False
        with Live(
            console=self._console, transient=True, refresh_per_second=_REFRESH_PER_SECOND, vertical_overflow="crop"
        ) as live:
            try:
                for piece in pieces:
                    cost = piece.cost or cost
                    text += piece.text
                    n_thought += len(piece.reasoning)
                    n_done = settled(text)
                    if n_done > n_shown:
                        live.console.print(Markdown(text[n_shown:n_done]))
                        n_shown = n_done
                    thinking = Text(f"thinking … {n_thought:,} characters", "dim")
                    live.update(_Tail(Markdown(text[n_shown:])) if text else thinking)
            except KeyboardInterrupt:
                is_stopped = True
        if n_thought:
            self.say(f"(thought {n_thought:,} characters)", "dim")
        if text[n_shown:].strip():
            self._console.print(Markdown(text[n_shown:]))
        if is_stopped:
            self.say("(stopped)", "dim")
        return Piece(text, cost=cost)


Terminal = PipedTerminal | InteractiveTerminal


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


def settled(text: str) -> int:
    """How many characters of an unfinished Markdown text are finished blocks: up to the last blank line that is not inside
    a fenced block. They will not change any more."""
    end = start = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        start += len(line)
        found = _FENCE.match(line)
        if fence:
            if found is not None and found[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif found is not None:
            fence = found[1]
        elif not line.strip() and line.endswith("\n"):
            end = start
    return end
