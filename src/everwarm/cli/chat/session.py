"""The loop of a chat: a line is a message or a command; after each reply it is shown what was reused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from everwarm.cli.chat.chat_server import choose_model, own_server, stream
from everwarm.cli.chat.conversation import Conversation, ReplyCost, summary
from everwarm.cli.chat.terminal import InteractiveTerminal, PipedTerminal, Terminal
from everwarm.config import require
from everwarm.errors import BadRequest, EverwarmError
from everwarm.gateway.client import Client
from everwarm.types import Json

_HELP = """/help           this list
/new            start over
/regen          write the last reply again
/edit [N]       change the last question, or the N-th, and ask it
/system [TEXT]  change the system message; without a text, show it
/image FILE     send an image with the next message
/save FILE      write the chat to a file
/load FILE      continue a saved chat
/stats          what all replies so far reused and read
/quit           end (or Ctrl-D)
Enter sends, Alt-Enter begins a new line, Ctrl-C stops a reply; a line that begins with // is sent with one /"""


def chat_locally(serve: list[str], system: str | None, temperature: float, max_tokens: int) -> int:
    """Chat with a server of one's own, started with these arguments of ``serve``."""
    with own_server(serve) as client:
        return chat_with(client, None, system, temperature, max_tokens)


def chat_with(client: Client, model: str | None, system: str | None, temperature: float, max_tokens: int) -> int:
    """Chat until the end of input. The server must answer before the first question is asked."""
    model = choose_model(client, model)
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    terminal: Terminal = InteractiveTerminal() if is_interactive else PipedTerminal()
    body: Json = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    if is_interactive:
        terminal.say(f"{model} at {client.url} · /help lists the commands", "dim")
    return _Chat(client, body, terminal, Conversation(system)).run()


class _Chat:
    def __init__(self, client: Client, body: Json, terminal: Terminal, conversation: Conversation) -> None:
        self._client = client
        self._body = body
        self._terminal = terminal
        self._conversation = conversation
        self._costs: list[ReplyCost] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: terminal.say(_HELP),
            "new": lambda _: conversation.clear(),
            "regen": self._regenerate,
            "edit": self._edit,
            "system": self._system,
            "image": self._image,
            "save": lambda text: conversation.save(_path(text)),
            "load": self._load,
            "stats": lambda _: terminal.say(summary(self._costs)),
        }

    def run(self) -> int:
        while (line := self._terminal.ask()) is not None:
            name, _, rest = line.partition(" ")
            if name in ("/quit", "/exit", "/bye"):
                return 0
            try:
                if name.startswith("/") and not name.startswith("//"):
                    command = self._commands.get(name[1:])
                    require(command is not None, f"there is no command {name}; /help lists them")
                    assert command is not None
                    command(rest.strip())
                elif line:
                    self._ask(line.removeprefix("/"))
            except (OSError, EverwarmError) as error:
                self._terminal.say(str(error), "red")
        return 0

    def _ask(self, text: str) -> None:
        self._conversation.ask(text)
        self._reply()

    def _reply(self) -> None:
        """The reply to the last question. If there is none, the question is taken back."""
        body = {**self._body, "messages": self._conversation.to_send()}
        try:
            reply = self._terminal.show(stream(self._client, body))
        except (OSError, EverwarmError):
            self._conversation.take_back(None)
            self._conversation.images = []  # they may be the reason
            raise
        self._conversation.answer(reply.text)
        if reply.cost is not None:
            self._costs.append(reply.cost)
            self._terminal.say(reply.cost.text(), "dim")

    def _regenerate(self, _: str) -> None:
        self._conversation.undo_reply()
        self._reply()

    def _edit(self, text: str) -> None:
        require(text == "" or text.isdecimal(), f"{text!r} is not a number; give the number of a question, or none")
        before = list(self._conversation.messages)
        old = self._conversation.take_back(int(text[:9]) if text else None)
        new = self._terminal.ask(old)
        if new:
            self._ask(new)
        else:
            self._conversation.messages = before

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        self._terminal.say(f"system: {self._conversation.system or 'none'}", "dim")

    def _image(self, text: str) -> None:
        self._conversation.attach(_path(text))
        self._terminal.say("the image goes with the next message", "dim")

    def _load(self, text: str) -> None:
        self._conversation.load(_path(text))
        self._terminal.say(f"{len(self._conversation.messages)} messages", "dim")


def _path(text: str) -> Path:
    if not text:
        raise BadRequest("give the name of a file")
    return Path(text).expanduser()
