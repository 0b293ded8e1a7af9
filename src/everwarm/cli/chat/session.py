"""The loop of a chat: a line is a message or a command; after each reply it is shown what was reused. And the conversation
itself: its messages, and the file it is saved in.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everwarm.cli.chat.chat_server import ReplyCost, choose_model, own_server, stream
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
MAX_FILE_BYTES = 64 << 20
MAX_IMAGE_BYTES = 20 << 20
_ROLES = ("system", "user", "assistant")
_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


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


def summary(costs: list[ReplyCost]) -> str:
    """All replies so far, in one sentence."""
    if not costs:
        return "no replies yet"
    n_reused = sum(cost.n_reused for cost in costs)
    n_read = sum(cost.n_read for cost in costs)
    warm = 100 * n_reused / max(1, n_reused + n_read)
    n_written = sum(cost.n_written for cost in costs)
    mean_ms = 1e3 * sum(cost.first_s for cost in costs) / len(costs)
    n = "1 reply" if len(costs) == 1 else f"{len(costs)} replies"
    return (
        f"{n}: {n_reused:,} of {n_reused + n_read:,} prompt tokens reused ({warm:.0f} % warm), "
        f"{n_read:,} read, {n_written:,} written; first token after {mean_ms:,.0f} ms on average"
    )


@dataclass(slots=True)
class Conversation:
    system: str | None = None
    messages: list[Json] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # addresses that go with the next message

    def to_send(self) -> list[Json]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def ask(self, text: str) -> None:
        content: Any = text
        if self.images:
            images = [{"type": "image_url", "image_url": {"url": address}} for address in self.images]
            content = [*images, {"type": "text", "text": text}]
            self.images = []
        self.messages.append({"role": "user", "content": content})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def clear(self) -> None:
        self.messages, self.images = [], []

    def undo_reply(self) -> None:
        """Removes what follows the last question."""
        require(any(message["role"] == "user" for message in self.messages), "nothing was asked yet")
        while self.messages[-1]["role"] != "user":
            self.messages.pop()

    def take_back(self, number: int | None) -> str:
        """Removes a question, the last or the ``number``-th, and everything after it. Returns its text; its images go with
        the next question."""
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        require(bool(places), "nothing was asked yet")
        require(number is None or 1 <= number <= len(places), f"give a question from 1 to {len(places)}")
        place = places[-1 if number is None else number - 1]
        content = self.messages[place]["content"]
        del self.messages[place:]
        if isinstance(content, str):
            return content
        self.images = [part["image_url"]["url"] for part in content if part.get("type") == "image_url"]
        return "".join(part["text"] for part in content if part.get("type") == "text")

    def attach(self, path: Path) -> None:
        data = _read(path, MAX_IMAGE_BYTES)
        kind = next((kind for start, kind in _KINDS.items() if data.startswith(start)), None)
        require(kind is not None, f"{path} is not an image; give a PNG, JPEG, GIF or WebP file")
        self.images.append(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")

    def save(self, path: Path) -> None:
        """Replaces a saved chat, and no other file."""
        if path.exists():
            _parse(path)
        path.write_text(json.dumps({"system": self.system, "messages": self.messages}, ensure_ascii=False, indent=1))

    def load(self, path: Path) -> None:
        found = _parse(path)
        self.system = found["system"]
        self.messages = found["messages"]
        self.images = []


def _parse(path: Path) -> Json:
    try:
        found = json.loads(_read(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError):
        found = None
    good = isinstance(found, dict) and isinstance(found.get("system"), str | None)
    messages = found.get("messages") if good else None
    good = isinstance(messages, list) and all(_is_message(message) for message in messages)
    require(good, f"{path} is not a chat that /save wrote")
    return dict(found)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return False
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    image = part.get("image_url")
    is_image = part.get("type") == "image_url" and isinstance(image, dict) and isinstance(image.get("url"), str)
    return is_image or (part.get("type") == "text" and isinstance(part.get("text"), str))


def _read(path: Path, most: int) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}") from None
    require(len(data) <= most, f"{path} has more than {most >> 20} MiB")
    return data
