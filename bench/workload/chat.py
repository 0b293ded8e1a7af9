"""From messages to tokens, with the hints a server would give: message ends, stable point, where the user speaks.

A template like those of the hybrid families: earlier thinking is dropped once the user speaks again, unless it is kept. The
tokenizer cuts text into short pieces and names each by a hash: the numbers are like a real one's, the ids are not.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everwarm.prompt.prompt import Codes, MediaItem, Prompt
from everwarm.simulate.trace import Happening, TraceTurn
from everwarm.types import Position, TokenCount

Message = Mapping[str, Any]
_PIECES = re.compile(r"<[^<>\s]{1,14}>|\n| ?[A-Za-z]{1,5}|\d{1,3}|[^\sA-Za-z\d]| ")


@dataclass(frozen=True, slots=True)
class Step:
    """What a client asks next, what it is answered, and what happens: the engine is killed or a model swapped before, or
    the client hangs up when a share of the newest message is read."""

    conversation: str
    messages: tuple[Message, ...]
    reply: Message
    at_s: float
    tools: tuple[Mapping[str, Any], ...] = ()
    keeps_thinking: bool = False
    before: Happening = ""
    stops_at: float | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """A rendered conversation."""

    prompt: Prompt
    boundaries: tuple[int, ...]
    users: tuple[int, ...]
    stable: int


@dataclass(slots=True)
class _Writer:
    parts: list[Codes] = field(default_factory=list)
    media: dict[int, MediaItem] = field(default_factory=dict)
    n_items: int = 0

    def text(self, text: str, n_vocab: int) -> None:
        self._add(tokenize(text, n_vocab))

    def image(self, item: MediaItem) -> None:
        self.media[self.n_items] = item
        self._add(np.array([item.code], np.int32))

    def _add(self, codes: Codes) -> None:
        self.parts.append(codes)
        self.n_items += len(codes)


@functools.lru_cache(maxsize=4096)
def tokenize(text: str, n_vocab: int) -> Codes:
    codes = np.array([zlib.crc32(piece.encode()) % n_vocab for piece in _PIECES.findall(text)], np.int32)
    codes.setflags(write=False)
    return codes


def to_turn(step: Step, n_vocab: int = 150_000) -> TraceTurn:
    tokens = render(step, n_vocab)
    n, start = len(tokens.prompt), tokens.boundaries[-2] if len(tokens.boundaries) > 1 else 1
    return TraceTurn(
        step.conversation,
        tokens.prompt,
        tokenize(_said(step.reply, with_thinking=True), n_vocab),
        step.at_s,
        tokens.boundaries,
        tokens.stable,
        tokens.users,
        None if step.stops_at is None else start + int((n - start) * step.stops_at),
        step.before,
    )


def render(step: Step, n_vocab: int) -> Tokens:
    thinks = "reasoning_content" in step.reply
    out, ends, users = _Writer(), [], []
    last_user = max((i for i, m in enumerate(step.messages) if m["role"] == "user"), default=0)
    for i, message in enumerate(step.messages):
        if message["role"] == "user":
            users.append(out.n_items)
        shown = step.keeps_thinking or i > last_user
        _write(out, message, step.tools if i == 0 else (), shown, n_vocab)
        ends.append(out.n_items)
    out.text("<|im_start|>assistant\n" + ("<think>\n" if thinks else ""), n_vocab)
    codes = np.concatenate(out.parts)
    return Tokens(Prompt(codes, out.media), tuple(ends), tuple(users), ends[-1])


def _write(out: _Writer, message: Message, tools: Sequence[Any], with_thinking: bool, n_vocab: int) -> None:
    role = message["role"]
    if role == "assistant":
        thinks = with_thinking and "reasoning_content" in message
        text = "<|im_start|>assistant\n" + ("<think>\n" if thinks else "") + _said(message, thinks) + "\n"
        return out.text(text, n_vocab)
    out.text(f"<|im_start|>{role}\n", n_vocab)
    if tools:
        out.text("# Tools\n" + "\n".join(json.dumps(tool) for tool in tools) + "\n\n", n_vocab)
    content = message["content"]
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] == "text":
            out.text(part["text"], n_vocab)
        else:
            out.text("<|vision_start|>", n_vocab)
            out.image(image(part["image_url"]["url"]))
            out.text("<|vision_end|>", n_vocab)
    out.text("<|im_end|>\n", n_vocab)


def _said(message: Message, with_thinking: bool) -> str:
    """What the assistant writes, as the template shows it, up to the token that ends it."""
    thinking = message.get("reasoning_content") if with_thinking else None
    calls = (json.dumps(call["function"]) for call in message.get("tool_calls", ()))
    called = "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)
    return (f"{thinking}\n</think>\n\n" if thinking is not None else "") + message["content"] + called + "<|im_end|>"


def image(name: str) -> MediaItem:
    """An image by name: its digest, and cells that depend only on the name."""
    digest = hashlib.sha256(name.encode()).digest()
    side = 8 + digest[0] % 24
    return MediaItem(digest, TokenCount(side * side), Position(side))
