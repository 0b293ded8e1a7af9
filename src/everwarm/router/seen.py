"""Which pictures an engine probably knows, so that their pixels need not travel with every turn."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import msgspec

from everwarm.engine import messages as m

MAX_SEEN = 4096


class Seen:
    def __init__(self) -> None:
        self._digests: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def without_pixels(self, pictures: Sequence[m.Picture]) -> tuple[m.Picture, ...]:
        return tuple(msgspec.structs.replace(p, rgb=None) if p.digest in self._digests else p for p in pictures)

    def add(self, pictures: Sequence[m.Picture]) -> None:
        for picture in pictures:
            self._digests[picture.digest] = None
            self._digests.move_to_end(picture.digest)
        while len(self._digests) > MAX_SEEN:
            self._digests.popitem(last=False)
