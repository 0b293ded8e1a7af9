"""A trace: requests in the order of their arrival, read from JSON lines and written to them.

Two formats, distinguished by their fields. Everwarm's: ``tokens`` (ids) or ``blocks`` (pairs of an id and a length),
with hints, images and what happened. Mooncake's: ``timestamp`` in milliseconds and ``hash_ids``, each the hash of a
prefix that ends with a block of 512 tokens. Every number from a file is bounded. Pure: text in, requests out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from everwarm.config import require
from everwarm.errors import BadRequest
from everwarm.prompt.prompt import Codes, MediaItem, Prompt
from everwarm.types import Position, TokenCount

MOONCAKE_BLOCK = 512
MAX_ITEMS = 1 << 22  # of one prompt, and of one reply
MAX_CODE = int(np.iinfo(np.int32).max)
_NOTHING = np.zeros(0, np.int32)

Happening = Literal["", "kill", "swap"]


@dataclass(frozen=True, slots=True, eq=False)
class TraceTurn:
    """One request. ``reply`` ends with the token that ends it, which is never decoded."""

    conversation: str
    prompt: Prompt
    reply: Codes = field(default_factory=lambda: _NOTHING)
    at_s: float = 0.0
    boundaries: tuple[int, ...] = ()
    stable: int | None = None
    users: tuple[int, ...] = ()  # where messages of the user begin
    stop_at: int | None = None  # cancelled when so many items were read
    before: Happening = ""  # the engine was killed, or another model had its place

    @property
    def n_stop(self) -> int:
        """How many items of the prompt are read."""
        return len(self.prompt) if self.stop_at is None else min(self.stop_at, len(self.prompt))

    @property
    def path(self) -> Prompt:
        """Everything that has been read or written and decoded when it is over."""
        return self.path_from(0)

    def path_from(self, n_restored: int) -> Prompt:
        """The same, if prefill starts after so many items: a request is not cancelled before that."""
        if self.stop_at is not None:
            return self.prompt.first(max(self.n_stop, n_restored))
        if len(self.reply) < 2:
            return self.prompt
        return self.prompt.followed_by(len(self.prompt), Prompt(self.reply[:-1]))


class _Media(msgspec.Struct, frozen=True, array_like=True):
    index: int
    digest: str
    n_tokens: int
    n_pos: int


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    conversation: str = ""
    at_s: float = 0.0
    tokens: list[int] | None = None
    blocks: list[tuple[int, int]] | None = None
    reply: list[int] = []
    boundaries: list[int] = []
    stable: int | None = None
    users: list[int] = []
    stop_at: int | None = None
    before: Happening = ""
    media: list[_Media] = []


class _Mooncake(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_ours = msgspec.json.Decoder(_Line)
_mooncake = msgspec.json.Decoder(_Mooncake)
_encoder = msgspec.json.Encoder()


def parse(lines: Iterable[str | bytes]) -> Iterator[TraceTurn]:
    """The turns of a trace; a line that makes no sense is an error that names it."""
    last = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turn = _parse_line(line, number)
            require(turn.at_s >= last, f"time goes back from {last:g} s to {turn.at_s:g} s; give them in their order")
        except (BadRequest, msgspec.MsgspecError, UnicodeError) as error:
            raise BadRequest(f"line {number} of the trace: {error}") from None
        last = turn.at_s
        yield turn


def _parse_line(line: str | bytes, number: int) -> TraceTurn:
    is_mooncake = b"hash_ids" in line if isinstance(line, bytes) else "hash_ids" in line
    return _of_mooncake(_mooncake.decode(line), number) if is_mooncake else _of_line(_ours.decode(line))


def _of_line(line: _Line) -> TraceTurn:
    require((line.tokens is None) != (line.blocks is None), "give either tokens or blocks")
    codes = _codes(line.tokens) if line.tokens is not None else _expanded(line.blocks or [])
    require(0 < len(codes) <= MAX_ITEMS, f"the prompt has {len(codes)} items; give 1 to {MAX_ITEMS}")
    media = {m.index: _image(m, len(codes)) for m in line.media}
    n = len(codes)
    hints = (*line.boundaries, *line.users, *(h for h in (line.stable, line.stop_at) if h is not None))
    bad = next((hint for hint in hints if not 0 <= hint <= n), None)
    require(bad is None, f"a hint is at {bad}; the prompt has {n} items")
    require(0 <= line.at_s < 1e12, f"at_s is {line.at_s:g}; give seconds from 0 on")
    codes = codes.copy()
    for index, item in media.items():
        codes[index] = item.code
    return TraceTurn(
        line.conversation,
        Prompt(codes, media),
        _codes(line.reply),
        line.at_s,
        tuple(sorted(line.boundaries)),
        line.stable,
        tuple(sorted(line.users)),
        line.stop_at,
        line.before,
    )


def _codes(tokens: list[int]) -> Codes:
    require(len(tokens) <= MAX_ITEMS, f"{len(tokens)} tokens; give at most {MAX_ITEMS}")
    bad = next((t for t in (min(tokens, default=0), max(tokens, default=0)) if not 0 <= t <= MAX_CODE), None)
    require(bad is None, f"token {bad} is out of range; give 0 to {MAX_CODE}")
    return np.array(tokens, np.int32)


def _expanded(blocks: list[tuple[int, int]]) -> Codes:
    lengths = [n for _, n in blocks]
    require(min(lengths, default=1) > 0 and sum(lengths) <= MAX_ITEMS, f"blocks need 1 to {MAX_ITEMS} tokens together")
    return np.repeat(_codes([code for code, _ in blocks]), lengths)


def _image(media: _Media, n_items: int) -> MediaItem:
    require(0 <= media.index < n_items, f"an image is at {media.index}; the prompt has {n_items} items")
    require(0 < media.n_tokens <= MAX_ITEMS and 0 < media.n_pos <= MAX_ITEMS, "an image needs tokens and positions")
    try:
        digest = bytes.fromhex(media.digest)
    except ValueError:
        raise BadRequest(f"{media.digest!r} is not a digest; give at least 32 hexadecimal digits") from None
    return MediaItem(digest, TokenCount(media.n_tokens), Position(media.n_pos))


def _of_mooncake(line: _Mooncake, number: int) -> TraceTurn:
    n = line.input_length
    n_blocks = len(line.hash_ids)
    require(0 < n <= MAX_ITEMS, f"input_length is {n}; give 1 to {MAX_ITEMS}")
    require(0 <= line.output_length <= MAX_ITEMS, f"output_length is {line.output_length}; give 0 to {MAX_ITEMS}")
    need = -(-n // MOONCAKE_BLOCK)
    require(n_blocks == need, f"{n_blocks} hash_ids for {n} tokens; {need} blocks of {MOONCAKE_BLOCK} are needed")
    require(0 <= line.timestamp < 1e15, f"timestamp is {line.timestamp:g}; give milliseconds from 0 on")
    codes = np.repeat(_codes(line.hash_ids), MOONCAKE_BLOCK)[:n]
    reply = np.full(line.output_length, MAX_CODE - number % (1 << 24), np.int32)  # the trace does not contain it
    return TraceTurn(f"line {number}", Prompt(codes), reply, line.timestamp / 1e3)


def to_line(turn: TraceTurn) -> bytes:
    """A turn as one line of Everwarm's format."""
    rows = [_Media(i, d.hex(), n, p) for i, d, n, p, _ in turn.prompt.rows(0, len(turn.prompt))]
    line = _Line(
        conversation=turn.conversation,
        at_s=turn.at_s,
        tokens=[max(0, code) for code in turn.prompt.codes.tolist()],
        reply=turn.reply.tolist(),
        boundaries=list(turn.boundaries),
        stable=turn.stable,
        users=list(turn.users),
        stop_at=turn.stop_at,
        before=turn.before,
        media=rows,
    )
    return _encoder.encode(line) + b"\n"
