"""Images as the model sees them: encoded once, and cached by identity within a budget of bytes. Each namespace has its
own cache: else response times would reveal which images others have sent.

A request that is restored past its images needs neither their pixels nor their embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping

import blake3

from everwarm.engine.process.messages import SentImage
from everwarm.errors import BadRequest, PixelsMissing
from everwarm.llama.media.media_model import Embedding, MediaModel
from everwarm.lru import NamespacedLru
from everwarm.prompt.prompt import MediaItem
from everwarm.types import Position, TokenCount

MAX_BYTES = 512 << 20


class ImageCache:
    def __init__(self, media: MediaModel, max_bytes: int = MAX_BYTES) -> None:
        self.media = media
        self._known: NamespacedLru[Embedding] = NamespacedLru(max_bytes)
        self.n_encoded = 0

    def item(self, image: SentImage) -> MediaItem:
        """An image as one item of a prompt. Its identity covers the projector: another one sees another image."""
        shape = self.media.shape(image.width, image.height)
        identity = blake3.blake3(image.digest + self.media.fingerprint.encode()).digest()
        return MediaItem(identity, TokenCount(shape.n_tokens), Position(shape.n_pos), self.media.uses_mrope)

    @property
    def n_bytes(self) -> int:
        return self._known.n_bytes

    def embedding(self, item: MediaItem, sent: Mapping[bytes, SentImage], namespace: str = "") -> Embedding:
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
