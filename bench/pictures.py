"""A conversation about an image, turn by turn, beside llama-server with the same projector.

Target: from the second turn on only new text is read, and no image is encoded again.
"""

from __future__ import annotations

import base64
import io
import time
from typing import Any

import numpy as np
from PIL import Image

from bench.measure import model_file, table
from bench.peer import PeerOptions, llama_server
from bench.server import Server, everwarm, post
from everwarm.config import default_threads
from everwarm.demo.tiny import TinySpec, projector_path, write_tiny_projector

N_TURNS = 5
SPEC = TinySpec(arch="qwen35", n_layers=8, width=960, dtype="q8_0", vision=True)


def run() -> None:
    model = model_file(SPEC)
    mmproj = projector_path(model)
    if not mmproj.exists():
        write_tiny_projector(mmproj, SPEC)
    threads = default_threads()
    flags = ("--mmproj", str(mmproj), "-np", "1", "-c", "8192", "-t", str(threads), "--disk-cache", "0")
    with (
        llama_server(PeerOptions(model, 8192, 1, threads, mmproj=mmproj)) as peer,
        everwarm(str(model), *flags) as ours,
    ):
        servers = (ours, Server("llama-server", peer._host))
        rows = _talk(servers)
    head = ("turn", "prompt", "Everwarm read", "ms", "llama-server read", "ms", "")
    table(f"An image of 640×448 pixels and {N_TURNS - 1} turns about it, 102 MB", head, rows)


def _talk(servers: tuple[Server, Server]) -> list[tuple[str, ...]]:
    rows = []
    messages: list[dict[str, Any]] = [{"role": "user", "content": [_text("Look at this."), _image(), _text("?")]}]
    for turn in range(N_TURNS):
        (n_prompt, n_ours, ours_s), (_, n_theirs, theirs_s) = (_ask(server, messages) for server in servers)
        times = f"{1e3 * ours_s:.0f}", str(n_theirs), f"{1e3 * theirs_s:.0f}"
        rows.append((str(turn + 1), str(n_prompt), str(n_ours), *times, f"{theirs_s / ours_s:.1f}× sooner"))
        messages += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": f"And number {turn}?"}]
    return rows


def _ask(server: Server, messages: list[dict[str, Any]]) -> tuple[int, int, float]:
    began = time.perf_counter()
    answer = post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "temperature": 0})
    seconds = time.perf_counter() - began
    return answer["usage"]["prompt_tokens"], answer["timings"]["prompt_n"], seconds


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image() -> dict[str, Any]:
    pixels = np.random.default_rng(0).integers(0, 255, (448, 640, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
