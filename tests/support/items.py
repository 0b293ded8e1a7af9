"""Prompts from items: token ids, and images between them."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

import numpy as np

from everwarm.prompt.prompt import MediaItem, Prompt


def prompt_of(items: Iterable[int | MediaItem]) -> Prompt:
    listed = list(items)
    media = {i: item for i, item in enumerate(listed) if isinstance(item, MediaItem)}
    codes = [item.code if isinstance(item, MediaItem) else item for item in listed]
    return Prompt(np.array(codes, np.int32), MappingProxyType(media))
