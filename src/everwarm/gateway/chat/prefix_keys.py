"""Keys of the prefixes of a request at its message boundaries, from its body alone: no template, no tokens.

Two requests that begin with the same tools, system text and messages have the same first keys, in every process. A key
tells which replica has probably read a prompt, never what may be reused: the engine decides that, token by token. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from blake3 import blake3

from everwarm.gateway.rewrite.rules import canonical
from everwarm.types import Json

MAX_BOUNDARIES = 256  # of one request; of more, the first and the last ones are kept
BLOCK_CHARACTERS = 1024  # a prompt without messages is cut into such pieces
BLOCK_TOKENS = 256
MARKS = ("cache_control", "prompt_cache_breakpoint")  # breakpoints of the client; they move from turn to turn


_encode = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class Prefixes:
    """``keys[i]`` stands for the first ``ends[i]`` bytes of the request. ``bound``: only a server with it can answer."""

    keys: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    bound: int | None = None

    @property
    def n_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0


NOTHING = Prefixes()


def prefixes_of(body: Any, namespace: str = "") -> Prefixes:
    """The prefixes of a decoded request body in any dialect. A body that is no request has none; nothing is refused."""
    if not isinstance(body, dict):
        return NOTHING
    before = body.get("previous_response_id")
    chain = blake3(_encoded([namespace, body.get("cache_salt"), before])).digest(8)
    keys, ends, at = [], [], 0
    for piece in _pieces(body):
        data = _encoded(piece)
        chain = blake3(chain + data).digest(8)
        at = at + len(data)
        keys.append(int.from_bytes(chain, "little"))
        ends.append(at)
    if len(keys) > MAX_BOUNDARIES:
        half = MAX_BOUNDARIES // 2
        keys = keys[:half] + keys[-half:]
        ends = ends[:half] + ends[-half:]
    return Prefixes(tuple(keys), tuple(ends), response_key(before) if isinstance(before, str) else None)


def response_key(id: str) -> int:
    """The key of a stored response, which only one server has."""
    return int.from_bytes(blake3(b"response:" + id.encode("utf-8", "replace")).digest(8), "little")


def _encoded(piece: Any) -> bytes:
    try:
        return _encode(piece)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return b"?"  # JSON that cannot be encoded again; routing only gets worse


def _pieces(body: Json) -> Iterator[Any]:
    if body.get("tools"):
        yield _unmarked(body["tools"])
    for name in ("system", "instructions"):
        if body.get(name):
            yield from _messages([{"role": "system", "content": body[name]}])
    for name in ("messages", "input", "prompt"):
        content = body.get(name)
        if isinstance(content, str):
            yield from _blocks(content, BLOCK_CHARACTERS)
        elif isinstance(content, list):
            yield from _listed(content)


def _listed(items: list[Any]) -> Iterator[Any]:
    if items and all(isinstance(each, dict) for each in items):
        yield from _messages(items)
    elif items and isinstance(items[0], int):
        yield from _blocks(items, BLOCK_TOKENS)
    elif items:
        yield items


def _messages(messages: list[Json]) -> Iterator[Any]:
    for message in canonical(messages).messages:
        content = _unmarked(message.get("content"))
        if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict) and "text" in content[0]:
            content = content[0]["text"]  # two ways to write the same
        yield {name: content if name == "content" else value for name, value in message.items() if name not in MARKS}


def _unmarked(parts: Any) -> Any:
    if not isinstance(parts, list):
        return parts
    return [{k: v for k, v in p.items() if k not in MARKS} if isinstance(p, dict) else p for p in parts]


def _blocks(content: Any, size: int) -> Iterator[Any]:
    marks = [*range(0, len(content), size), len(content)]
    yield from (content[start:stop] for start, stop in pairwise(marks))
