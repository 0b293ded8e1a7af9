"""The part of the demo with an image, which is encoded once. It uses a tiny model with random weights, because the embedded
one takes no images: its replies mean nothing, but it reads and reuses what any model would."""

from __future__ import annotations

import tempfile
from pathlib import Path

import blake3
import numpy as np
from rich.console import Console
from rich.table import Table

from everwarm.config import GREEDY
from everwarm.demo.tiny import TinySpec, projector_path, write_tiny, write_tiny_vision
from everwarm.engine.engine import Engine
from everwarm.engine.images.image_prompt import ImagePrompt
from everwarm.engine.process import messages as m
from everwarm.engine.request import Result
from everwarm.engine.settings import EngineSettings

WIDTH = 320
HEIGHT = 224
_MARKER = "\0picture\0"
_SHOWN = f"<|im_start|>user\nLook at this: {_MARKER} What is it?<|im_end|>\n<|im_start|>assistant\n"
_NEXT = "It is a gradient.<|im_end|>\n<|im_start|>user\nAnd what colour?<|im_end|>\n<|im_start|>assistant\n"


def show_images(console: Console) -> None:
    with tempfile.TemporaryDirectory(prefix="everwarm-demo-") as name:
        model = Path(name) / "vision.gguf"
        spec = TinySpec(arch="qwen35", vision=True)
        write_tiny(model, spec)
        write_tiny_vision(projector_path(model), spec)
        settings = EngineSettings(n_slots=1, n_ctx=2048, mmproj=str(projector_path(model)), ram_bytes=1 << 28)
        with Engine(model, settings) as engine:
            _show(console, engine)


def _show(console: Console, engine: Engine) -> None:
    table = Table(title="\n5. An image and turns about it (a tiny model with random weights)", title_justify="left")
    for name in ("turn", "prompt", "cached", "processed", "images encoded"):
        table.add_column(name, justify="left" if name == "turn" else "right")
    first = _gradient(0)
    other = _gradient(1)
    turns = (
        ("the image is shown", _SHOWN, first),
        ("the next question", _SHOWN + _NEXT, first),
        ("the same again", _SHOWN, first),
    )
    for title, text, image in (*turns, ("another image instead", _SHOWN, other)):
        result = _ask(engine, text, image)
        images = engine.core.images
        n_encoded = 0 if images is None else images.n_encoded
        table.add_row(title, *map(str, (result.n_prompt, result.n_cached, result.n_processed, n_encoded)))
    console.print(table)


def _ask(engine: Engine, text: str, image: m.SentImage) -> Result:
    assert engine.core.images is not None
    message = m.Submit(0, text=text, marker=_MARKER, pictures=(image,))
    prompt, _, pixels = ImagePrompt(engine.core.images, engine.tokenizer).prompt(message, text)
    return engine.submit(prompt, GREEDY, max_tokens=8, ignore_eos=True, pictures=pixels).result()


def _gradient(seed: int) -> m.SentImage:
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    rgb = np.stack([x % 256, y % 256, (x + y + 85 * seed) % 256], axis=-1).astype(np.uint8).tobytes()
    return m.SentImage(blake3.blake3(rgb).digest(), WIDTH, HEIGHT, rgb)
