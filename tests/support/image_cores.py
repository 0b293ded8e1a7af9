"""A core whose model sees, and requests with images for it."""

from __future__ import annotations

import os
from contextlib import contextmanager

import blake3
import numpy as np

from everwarm.config import GREEDY
from everwarm.engine.build import assemble
from everwarm.engine.process.messages import SentImage
from everwarm.engine.request import Ask
from everwarm.engine.settings import EngineSettings
from support.items import prompt_of
from support.models import tiny_vision


@contextmanager
def seeing_core(arch="qwen35", *, memory=None, mmproj=None, mtp=False, **settings):
    """``mmproj``: a projector other than the model's own file; ``mtp``: the model has an MTP head."""
    model, own = tiny_vision(arch, mtp=mtp)
    usual = {"n_slots": 2, "n_ctx": 4096, "n_spares": 0, "n_threads": 1, "ram_bytes": 256 << 20, "speculate": "off"}
    wanted = usual | settings
    given = None if memory is None else os.dup(memory)
    core = assemble(model, EngineSettings(mmproj=str(mmproj or own), **wanted), memory=given)
    try:
        yield core
    finally:
        core.close()


def make_image(seed: int, width: int = 96, height: int = 64) -> SentImage:
    rgb = np.random.default_rng(seed).integers(0, 256, 3 * width * height, np.uint8).tobytes()
    return SentImage(blake3.blake3(rgb + bytes([width % 256, height % 256])).digest(), width, height, rgb)


def ask(core, parts: list, *, max_tokens: int = 4, with_pixels: bool = True, **more):
    """``parts`` are token lists and images."""
    items, images = [], {}
    for part in parts:
        if isinstance(part, SentImage):
            item = core.images.item(part)
            images[item.digest] = part if with_pixels else SentImage(part.digest, part.width, part.height)
            items.append(item)
        else:
            items += part
    options = {"sampling": GREEDY, "ignore_eos": True} | more
    return core.submit(Ask(prompt_of(items), max_tokens=max_tokens, images=images, **options))
