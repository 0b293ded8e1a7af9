"""Images as the model sees them: encoded once and cached by identity, and texts with images in them as prompts.

The cache has a budget of bytes, and each namespace has its own: else response times would reveal which images others have
sent. A request that is restored past its images needs neither their pixels nor their embeddings. In a prompt every image
is one item; the text before, between and after them is tokenized by itself, as the model's own rule wants it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import blake3
import numpy as np

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest, PixelsMissing
from everwarm.llama.media.media_model import Embedding, MediaModel
from everwarm.lru import NamespacedLru
from everwarm.prompt.prompt import MediaItem, Prompt
from everwarm.prompt.tokenizer import Tokenizer
from everwarm.types import Position, TokenCount

MAX_BYTES = 512 << 20


class ImageCache:
    def __init__(self, media: MediaModel, max_bytes: int = MAX_BYTES) -> None:
        self.media = media
        self._known: NamespacedLru[Embedding] = NamespacedLru(max_bytes)
        self.n_encoded = 0

    def item(self, image: m.SentImage) -> MediaItem:
        """An image as one item of a prompt. Its identity covers the projector: another one sees another image."""
        shape = self.media.shape(image.width, image.height)
        identity = blake3.blake3(image.digest + self.media.fingerprint.encode()).digest()
        return MediaItem(identity, TokenCount(shape.n_tokens), Position(shape.n_pos), self.media.uses_mrope)

    @property
    def n_bytes(self) -> int:
        return self._known.n_bytes

    def embedding(self, item: MediaItem, sent: Mapping[bytes, m.SentImage], namespace: str = "") -> Embedding:
        """``PixelsMissing``: the image is not cached any more and its pixels were not ``sent``."""
        known = self._known.get(namespace, item.digest)
        if known is not None:
            return known
        image = sent.get(item.digest)
        if image is None or image.rgb is None:
            raise PixelsMissing("a picture is not known here any more; send it again")
        if len(image.rgb) != 3 * image.width * image.height:
            raise BadRequest("a picture has another number of bytes than its size says")
        embedding = self.media.encode(image.rgb, image.width, image.height)
        self.n_encoded += 1
        self._known.put(namespace, item.digest, embedding, embedding.values.nbytes)
        return embedding

    def close(self) -> None:
        self._known.clear()
        self.media.close()


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A run of text. ``at`` is where it begins in the whole text, ``lead`` what was put before it."""

    at: int
    lead: int
    text: str
    n_before: int  # items before it
    add_special: bool


def image_prompt(
    images: ImageCache, tokenizer: Tokenizer, message: m.Submit, text: str
) -> tuple[Prompt, m.CutHints, dict[bytes, m.SentImage]]:
    """The prompt, its hints in items, and its images by the digest of their items."""
    runs = text.split(message.marker)
    if not message.marker or len(runs) != len(message.images) + 1:
        raise BadRequest("the text has another number of places for pictures than there are pictures")
    items = [images.item(image) for image in message.images]
    codes: list[np.ndarray] = []
    media: dict[int, MediaItem] = {}
    parts: list[PromptPart] = []
    n_items = 0
    for i, (at, run) in enumerate(_placed(runs, len(message.marker))):
        lead, tail = images.media.end if i else "", images.media.begin if i < len(items) else ""
        part = PromptPart(at, len(lead), lead + run + tail, n_items, message.add_special and i == 0)
        tokens = tokenizer.tokenize(part.text, add_special=part.add_special).codes
        codes.append(tokens)
        parts.append(part)
        n_items += len(tokens)
        if i < len(items):
            media[n_items] = items[i]
            codes.append(np.array([items[i].code], np.int32))
            n_items += 1
    count, sure = partial(_counts_at, tokenizer.count_at, parts), partial(_counts_at, tokenizer.sure_counts_at, parts)
    hints = message.hints.counted(count, sure)
    by_digest: dict[bytes, m.SentImage] = {}
    for item, image in zip(items, message.images, strict=True):
        if by_digest.get(item.digest) is None or image.rgb is not None:  # one that is there twice comes once
            by_digest[item.digest] = image
    return Prompt(np.concatenate(codes), MappingProxyType(media)), hints, by_digest


def _counts_at(count: _CountAt, parts: list[PromptPart], ats: Sequence[int]) -> list[int]:
    """Items before characters of the whole text; inside a marker: before the image. ``count``: a tokenizer's."""
    inside: defaultdict[int, list[int]] = defaultdict(list)  # which of them, by their part
    places = [_inside(parts, at) for at in ats]
    for i, (part, _) in enumerate(places):
        inside[part.at].append(i)
    counts = [0] * len(ats)
    for own in inside.values():
        part = places[own[0]][0]
        found = count(part.text, [places[i][1] for i in own], add_special=part.add_special)
        for i, n_items in zip(own, found, strict=True):
            counts[i] = part.n_before + n_items
    return counts


class _CountAt(Protocol):
    def __call__(self, text: str, offsets: Sequence[int], *, add_special: bool) -> list[int]: ...


def _inside(parts: list[PromptPart], at: int) -> tuple[PromptPart, int]:
    part = next(part for part in reversed(parts) if part.at <= at or part is parts[0])
    return part, min(part.lead + at - part.at, len(part.text))


def _placed(runs: list[str], n_marker: int) -> Iterator[tuple[int, str]]:
    at = 0
    for run in runs:
        yield at, run
        at += len(run) + n_marker
