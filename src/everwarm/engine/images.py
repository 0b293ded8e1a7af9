"""Images and sounds as the model gets them: encoded once and cached by identity, and texts with them as prompts.

The cache has a budget of bytes, and each namespace has its own: else response times would reveal which images others have
sent. A request that is restored past its images needs neither their pixels nor their embeddings. In a prompt every image
and every sound is one item; the text around them is tokenized by itself, as the model's own rule wants it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import blake3
import numpy as np

from everwarm.engine.process import messages as m
from everwarm.errors import PIXELS_MISSING, BadRequest
from everwarm.llama.media.media_model import Delimiters, Embedding, MediaModel, SoundEncoding
from everwarm.lru import NamespacedLru
from everwarm.prompt.prompt import MediaItem, Prompt
from everwarm.prompt.tokenizer import Tokenizer
from everwarm.types import Position, TokenCount

MAX_BYTES = 512 << 20
CUT_S = 0.01  # how long a step waits for a sound that is being cut into windows


class ImageCache:
    def __init__(self, media: MediaModel, max_bytes: int = MAX_BYTES) -> None:
        self.media = media
        self._known: NamespacedLru[Embedding] = NamespacedLru(max_bytes)
        self.n_encoded = 0
        self._cutter = ThreadPoolExecutor(1, "everwarm-sounds")
        self._heard: Future[SoundEncoding] | None = None  # the sound that is being encoded
        self._heard_key: tuple[str, bytes] | None = None

    def item(self, image: m.SentMedia) -> MediaItem:
        """An image or a sound as one item of a prompt. Its identity covers the projector, too."""
        identity = blake3.blake3(image.digest + self.media.fingerprint.encode()).digest()
        if isinstance(image, m.SentSound):
            self._require(self.media.sample_rate, "hears no sounds: it needs a projector with an audio encoder")
            shape = self.media.sound_shape(image.n_samples)
            return MediaItem(identity, TokenCount(shape.n_tokens), Position(shape.n_pos))
        self._require(self.media.sees, "sees no images: it needs a projector with a vision encoder")
        shape = self.media.shape(image.width, image.height)
        return MediaItem(identity, TokenCount(shape.n_tokens), Position(shape.n_pos), self.media.uses_mrope)

    def delimiters(self, image: m.SentMedia) -> Delimiters:
        return self.media.around_sound if isinstance(image, m.SentSound) else self.media.around_image

    def _require(self, is_able: object, otherwise: str) -> None:
        if not is_able:
            raise BadRequest(f"this model {otherwise} (--mmproj)")

    @property
    def n_bytes(self) -> int:
        return self._known.n_bytes

    def embedding(self, item: MediaItem, sent: Mapping[bytes, m.SentMedia], namespace: str = "") -> Embedding:
        """``PIXELS_MISSING``: the image is not cached any more and its pixels were not ``sent``."""
        while (found := self.advance(item, sent, namespace)) is None:
            pass
        return found

    def advance(self, item: MediaItem, sent: Mapping[bytes, m.SentMedia], namespace: str = "") -> Embedding | None:
        """The same, but of a sound only the next window is encoded; None: there are more, or it is still being cut into
        windows. One sound at a time: where another one is asked for in between, the first has to begin again."""
        known = self._known.get(namespace, item.digest)
        if known is not None:
            return known
        image = sent.get(item.digest)
        if image is None or image.data is None:
            raise BadRequest("an image or a sound is not known here any more; send it again", PIXELS_MISSING)
        if len(image.data) != image.n_bytes:
            raise BadRequest("an image or a sound has another number of bytes than its size says")
        if isinstance(image, m.SentSound):
            embedding = self._next_window(image.data, (namespace, item.digest))
        else:
            embedding = self.media.encode(image.data, image.width, image.height)
        if embedding is not None:
            self.n_encoded += 1
            self._known.put(namespace, item.digest, embedding, embedding.values.nbytes)
        return embedding

    def _next_window(self, pcm: bytes, key: tuple[str, bytes]) -> Embedding | None:
        """Cutting takes seconds for a long sound, so another thread does it."""
        if self._heard_key != key or self._heard is None:
            self._stop_hearing()
            self._heard, self._heard_key = self._cutter.submit(self.media.hear, pcm), key
        try:
            found = self._heard.result(CUT_S).step()
        except TimeoutError:
            return None
        except BaseException:
            self._stop_hearing()
            raise
        if found is not None:
            self._stop_hearing()
        return found

    def _stop_hearing(self) -> None:
        if self._heard is not None and not self._heard.cancel():
            self._heard.add_done_callback(_close_sound)
        self._heard = self._heard_key = None

    def close(self) -> None:
        self._stop_hearing()
        self._cutter.shutdown()
        self._known.clear()
        self.media.close()


def _close_sound(cut: Future[SoundEncoding]) -> None:
    if cut.exception() is None:
        cut.result().close()


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
) -> tuple[Prompt, m.CutHints, dict[bytes, m.SentMedia]]:
    """The prompt, its hints in items, and its images by the digest of their items."""
    runs = text.split(message.marker)
    if not message.marker or len(runs) != len(message.images) + 1:
        raise BadRequest("the text has another number of places for images and sounds than there are")
    items = [images.item(image) for image in message.images]
    around = [images.delimiters(image) for image in message.images]
    codes: list[np.ndarray] = []
    media: dict[int, MediaItem] = {}
    parts: list[PromptPart] = []
    n_items = 0
    for i, (at, run) in enumerate(_placed(runs, len(message.marker))):
        lead, tail = around[i - 1].end if i else "", around[i].begin if i < len(items) else ""
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
    by_digest: dict[bytes, m.SentMedia] = {}
    for item, image in zip(items, message.images, strict=True):
        if by_digest.get(item.digest) is None or image.data is not None:  # one that is there twice comes once
            by_digest[item.digest] = image
    return Prompt(np.concatenate(codes), MappingProxyType(media)), hints, by_digest


def _counts_at(count: Callable[..., list[int]], parts: list[PromptPart], ats: Sequence[int]) -> list[int]:
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


def _inside(parts: list[PromptPart], at: int) -> tuple[PromptPart, int]:
    part = next(part for part in reversed(parts) if part.at <= at or part is parts[0])
    return part, min(part.lead + at - part.at, len(part.text))


def _placed(runs: list[str], n_marker: int) -> Iterator[tuple[int, str]]:
    at = 0
    for run in runs:
        yield at, run
        at += len(run) + n_marker
