"""Lossless packing of KV and states: bytes as they are and in planes, with zstd and lz4 (``pip install zstandard lz4``).

What the embedded model keeps of 3,000 tokens of talk: attention KV (half floats), and the recurrent states
at eight points (floats). One thread; the rate is of the unpacked bytes.
"""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable

import numpy as np

from bench.measure import EMBEDDED, table
from bench.workload.text import prose
from everwarm.config import ContextOptions
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.types import START, SeqId

N_TOKENS, N_POINTS = 3000, 8
TALK = ("Tell me a short story.", "What is the capital of France?", "My code is 48213.", "What is 3 + 4?")
SEQ = SeqId(0)
MIB = 1 << 20

Codec = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def run() -> None:
    kv, states = _kept()
    rows = [_row(name, data, width, codec, planes) for name, data, width in (("KV", kv, 2), ("states", states, 4))
            for codec in _codecs().items() for planes in (False, True)]  # fmt: skip
    head = ["of", "bytes", "codec", "packed to", "packs MiB/s", "unpacks MiB/s"]
    table("Lossless packing", head, rows)


def _codecs() -> dict[str, Codec]:
    try:
        zstd, lz4 = importlib.import_module("zstandard"), importlib.import_module("lz4.frame")
    except ImportError as error:
        raise SystemExit(f"this benchmark needs packages that nothing else does: {error}") from None
    found: dict[str, Codec] = {"lz4": (lz4.compress, lz4.decompress)}
    for level in (1, 3, 9):
        found[f"zstd {level}"] = (zstd.ZstdCompressor(level=level).compress, zstd.ZstdDecompressor().decompress)
    return found


def _kept() -> tuple[bytes, bytes]:
    rng, states = random.Random(5), []
    with Model(EMBEDDED) as model, Context(model, ContextOptions(n_ctx=4096, n_threads=1)) as context:
        while (end := context.end(SEQ)).n_tokens < N_TOKENS:
            asked = f"{rng.choice(TALK)} {prose(rng, 40)}"
            text = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
            context.decode([Feed(SEQ, model.vocab.tokenize(text, add_special=False, parse_special=True), end, False)])
            if end.n_tokens >= len(states) * N_TOKENS // N_POINTS:
                states.append(context.capture(SEQ).tobytes())
        return context.capture_segment(SEQ, START, context.end(SEQ)).tobytes(), b"".join(states)


def _row(name: str, data: bytes, width: int, codec: tuple[str, Codec], planes: bool) -> list[str]:
    label, (compress, decompress) = codec
    began = time.thread_time()
    packed = compress(_planes(data, width) if planes else data)
    middle = time.thread_time()
    again = decompress(packed)
    again = _whole(again, width) if planes else again
    ended = time.thread_time()
    assert again == data
    rates = [f"{len(data) / MIB / max(1e-6, s):.0f}" for s in (middle - began, ended - middle)]
    return [name, "in planes" if planes else "as they are", label, f"{len(packed) / len(data):.0%}", *rates]


def _planes(data: bytes, width: int) -> bytes:
    whole = len(data) // width * width
    return np.frombuffer(data[:whole], np.uint8).reshape(-1, width).T.tobytes() + data[whole:]


def _whole(data: bytes, width: int) -> bytes:
    whole = len(data) // width * width
    return np.frombuffer(data[:whole], np.uint8).reshape(width, -1).T.tobytes() + data[whole:]
