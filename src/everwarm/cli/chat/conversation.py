"""The messages of a chat and what its replies cost. Knows files, no terminal and no network."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everwarm.config import require
from everwarm.errors import BadRequest
from everwarm.types import Json

MAX_FILE_BYTES = 64 << 20
MAX_IMAGE_BYTES = 20 << 20
_ROLES = ("system", "user", "assistant")
_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@dataclass(frozen=True, slots=True)
class ReplyCost:
    """What one reply took."""

    n_reused: int
    n_read: int
    n_written: int
    first_s: float
    tokens_per_second: float

    def text(self) -> str:
        return (
            f"reused {self.n_reused:,}, read {self.n_read:,} tokens · first token after {1e3 * self.first_s:,.0f} ms · "
            f"{self.tokens_per_second:.1f} tokens/s"
        )


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
        """Back to the last question."""
        require(any(message["role"] == "user" for message in self.messages), "nothing was asked yet")
        while self.messages[-1]["role"] != "user":
            self.messages.pop()

    def take_back(self, number: int | None) -> str:
        """Back to before a question, the last or the ``number``-th. Returns its text; its images go with the next one."""
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
