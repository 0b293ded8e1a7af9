"""Reading images: each whole and by itself, between two steps of text. It has embeddings instead of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from everwarm.engine.images.image_cache import ImageCache
from everwarm.engine.request import Request
from everwarm.engine.slots import Slot
from everwarm.llama.context import Context
from everwarm.prompt.prompt import MediaItem


class ImageFeed(NamedTuple):
    """An image that comes next in a slot."""

    slot: Slot
    request: Request
    item: MediaItem

    @property
    def wants_logits(self) -> bool:
        """Whether the prompt ends with it, so that the reply follows."""
        return self.slot.n_fed + 1 == self.request.n_items


def next_image(oldest_first: Iterable[Slot]) -> ImageFeed | None:
    """The next image of the oldest request whose next item is one."""
    for slot in oldest_first:
        request = slot.request
        item = None if request is None else request.media_at(slot.n_fed)
        if request is not None and item is not None:
            return ImageFeed(slot, request, item)
    return None


def read_image(context: Context, images: ImageCache, feed: ImageFeed) -> None:
    """Encode the image unless it is known, and append it to the slot's sequence. ``ContextFull``: nothing changed;
    ``DecodeFailed``: the sequence is lost; ``PixelsMissing`` or ``BadRequest``: it cannot be encoded."""
    ask = feed.request.ask
    embedding = images.embedding(feed.item, ask.images, ask.namespace)
    end = ask.prompt.mark(feed.slot.n_fed + 1)
    context.see(feed.slot.seq, images.media, embedding, end, wants_logits=feed.wants_logits)
