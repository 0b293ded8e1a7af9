"""A core whose model sees or hears, and requests with images and sounds for it."""

from __future__ import annotations

import os
from contextlib import contextmanager

import blake3
import msgspec
import numpy as np

from everwarm.config import GREEDY
from everwarm.engine.build import assemble
from everwarm.engine.process.messages import SentImage, SentSound
from everwarm.engine.request import Ask, Result
from everwarm.engine.settings import EngineSettings
from support.drive import drain, with_hints
from support.items import prompt_of
from support.models import tiny_audio, tiny_vision


@contextmanager
def seeing_core(arch="qwen35", *, memory=None, mmproj=None, mtp=False, audio=False, vision=False, **settings):
    """``mmproj``: a projector other than the model's own file; ``mtp``: the model has an MTP head; ``audio``: it hears, and
    sees only with ``vision``."""
    model, own = tiny_audio(arch, vision=vision) if audio else tiny_vision(arch, mtp=mtp)
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
    """``parts`` are token lists, images and sounds."""
    items, images = [], {}
    for part in parts:
        if isinstance(part, SentImage | SentSound):
            item = core.images.item(part)
            images[item.digest] = part if with_pixels else msgspec.structs.replace(part, data=None)
            items.append(item)
        else:
            items += part
    options = {"sampling": GREEDY, "ignore_eos": True} | with_hints(more)
    return core.submit(Ask(prompt_of(items), max_tokens=max_tokens, images=images, **options))


def answered(core, parts: list, **more) -> Result:
    """The same, read to its end; an error is raised."""
    request = ask(core, parts, **more)
    result = drain(core)[request.id]
    if result.error is not None:
        raise result.error
    core.context.check()
    return result


def n_items(parts: list) -> int:
    return sum(len(part) if isinstance(part, list) else 1 for part in parts)


def bits(core, n: int) -> bytes:
    """The state of the slot that has read so many items."""
    slot = next(slot for slot in core.slots if slot.n_fed == n)
    return core.context.capture(slot.seq).tobytes()
