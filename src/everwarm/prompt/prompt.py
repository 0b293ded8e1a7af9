"""A prompt as a sequence of items, with both of its counters.

An item is a text token, or one media chunk as a whole. Items are compared as integer codes: a token is its own id, a media
item a negative number drawn from its digest, and where codes agree the digests themselves decide. This is the only module
that turns a count of items into token counts and positions. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from everwarm.errors import BadRequest
from everwarm.types import ItemCount, Mark, Position, TokenCount

Codes = NDArray[np.int32]

_MAX_TOKEN = int(np.iinfo(np.int32).max)
_BAD_TOKEN = f"a token id is out of range; give 0 to {_MAX_TOKEN}"
_PEEK = 256  # most prompts that differ do so early: look there before comparing a hundred thousand items


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or a sound: one item, many cells. ``digest`` covers kind, size, bytes, preprocessing and projector."""

    digest: bytes
    n_tokens: TokenCount
    n_pos: Position
    at_once: bool = False  # all its cells share one position (M-RoPE)

    def __post_init__(self) -> None:
        if len(self.digest) < 16 or self.n_tokens < 1 or self.n_pos < 1:
            raise BadRequest("a media item needs a digest of 16 bytes or more, and at least one token and one position")

    @property
    def code(self) -> int:
        return -1 - (int.from_bytes(self.digest[:4], "little") & 0x7FFFFFFF)


MediaRow = tuple[int, bytes, int, int, bool]  # an item's index, digest, cells, positions, and whether those are one


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    codes: Codes
    media: Mapping[int, MediaItem] = field(default_factory=lambda: MappingProxyType({}))  # by item index

    def __post_init__(self) -> None:
        assert self.codes.dtype == np.int32 and self.codes.ndim == 1
        self.codes.setflags(write=False)

    @classmethod
    def of_tokens(cls, tokens: Iterable[int] | NDArray[np.integer]) -> Prompt:
        try:
            array = tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, np.int64)
        except OverflowError:
            raise BadRequest(_BAD_TOKEN) from None
        if array.size and (int(array.min()) < 0 or int(array.max()) > _MAX_TOKEN):
            raise BadRequest(_BAD_TOKEN)
        return cls(np.array(array, np.int32))

    @classmethod
    def of_rows(cls, codes: Codes, rows: Iterable[MediaRow]) -> Prompt | None:
        """What ``rows`` gave, read back from elsewhere; None: the two do not belong together."""
        media: dict[int, MediaItem] = {}
        for index, digest, n_tokens, n_pos, at_once in rows:
            if len(digest) < 16 or n_tokens < 1 or n_pos < 1:
                return None
            media[index] = MediaItem(digest, TokenCount(n_tokens), Position(n_pos), at_once)
        if set(media) != set(np.flatnonzero(codes < 0).tolist()):
            return None
        if any(item.code != int(codes[index]) for index, item in media.items()):
            return None
        return cls(np.array(codes, np.int32), MappingProxyType(media))

    def rows(self, start: int, stop: int) -> tuple[MediaRow, ...]:
        """The media items of an interval, their indices counted from its start."""
        found = ((index, item) for index, item in sorted(self.media.items()) if start <= index < stop)
        return tuple((i - start, m.digest, int(m.n_tokens), int(m.n_pos), m.at_once) for i, m in found)

    def followed_by(self, start: int, other: Prompt) -> Prompt:
        """The first ``start`` items of this, then all of another."""
        media = {i: item for i, item in self.media.items() if i < start}
        media |= {start + i: item for i, item in other.media.items()}
        return Prompt(np.concatenate([self.codes[:start], other.codes]).astype(np.int32), MappingProxyType(media))

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def n_items(self) -> ItemCount:
        return ItemCount(len(self.codes))

    @property
    def end(self) -> Mark:
        return self.mark(self.n_items)

    def mark(self, n_items: int) -> Mark:
        """Both counters after the first ``n_items`` items."""
        assert 0 <= n_items <= len(self.codes)
        n_tokens = n_pos = n_items
        for index, item in self.media.items():
            if index < n_items:
                n_tokens += item.n_tokens - 1
                n_pos += item.n_pos - 1
        last = self.media.get(n_items - 1)
        lag = last.n_pos - 1 if last is not None and last.at_once else 0
        return Mark(TokenCount(n_tokens), Position(n_pos), lag)

    @property
    def tokens(self) -> Codes:
        """The text tokens alone."""
        return self.codes[self.codes >= 0] if self.media else self.codes

    @property
    def cells(self) -> Codes:
        """The token of every cell; -1 where an image lies."""
        if not self.media:
            return self.codes
        widths = np.ones(len(self.codes), np.int64)
        for index, item in self.media.items():
            widths[index] = item.n_tokens
        return np.repeat(np.maximum(self.codes, -1), widths)

    def n_tokens(self, n_items: int) -> int:
        """The cells that the first ``n_items`` items take."""
        return int(self.mark(n_items).n_tokens) if self.media else n_items

    def next_media(self, n_items: int) -> int | None:
        """The first media item at or after ``n_items``."""
        return min((index for index in self.media if index >= n_items), default=None)

    def common_prefix(self, other: Prompt, start: int = 0) -> ItemCount:
        """How many items both begin with, known to agree up to ``start``."""
        return ItemCount(_first_difference(self, other, start))

    def part(self, start: int, stop: int) -> Prompt:
        """The items from ``start`` to before ``stop``, as far as there are any."""
        media = {i - start: item for i, item in self.media.items() if start <= i < stop}
        return Prompt(self.codes[start:stop], MappingProxyType(media))

    def first(self, n_items: int) -> Prompt:
        media = {i: item for i, item in self.media.items() if i < n_items}
        return Prompt(self.codes[:n_items], MappingProxyType(media))


def _first_difference(a: Prompt, b: Prompt, start: int) -> int:
    stop = min(len(a), len(b))
    for low, high in ((start, min(start + _PEEK, stop)), (start + _PEEK, stop)):
        if low < high:
            differ = a.codes[low:high] != b.codes[low:high]
            at = int(differ.argmax())
            if differ[at]:
                stop = low + at
                break
    return _first_different_media(a, b, start, stop)


def _first_different_media(a: Prompt, b: Prompt, start: int, stop: int) -> int:
    """A code is only a hash: where codes agree, the items themselves decide."""
    for index in sorted(a.media.keys() | b.media.keys()):
        if start <= index < stop and a.media.get(index) != b.media.get(index):
            return index
    return stop
