"""llama-server from the same wheel, in a process of its own: the same kernels, so only the caching differs."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.server import Server, post


@dataclass(frozen=True, slots=True)
class PeerOptions:
    model: Path
    n_ctx: int
    n_parallel: int
    n_threads: int
    n_ubatch: int = 512
    n_batch: int = 2048
    cache_ram_mib: int = 8192
    slot_save_path: str = ""
    mmproj: Path | None = None


class Peer:
    def __init__(self, address: str) -> None:
        self._host = address.split("//")[-1].rstrip("/")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return post(Server("llama-server", self._host), path, body)

    def complete(self, tokens: list[int], n_predict: int, **more: Any) -> dict[str, Any]:
        """A greedy completion; ``timings`` in the answer are llama-server's own."""
        return self.post("/completion", {"prompt": tokens, "n_predict": n_predict, "temperature": 0, **more})


@contextmanager
def llama_server(options: PeerOptions) -> Iterator[Peer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(options, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(120):
            raise RuntimeError("llama-server did not start within 120 s")
        yield Peer(ours.recv())
    finally:
        ours.send("stop")
        process.join(10)
        if process.is_alive():
            process.kill()


def _serve(options: PeerOptions, pipe: multiprocessing.connection.Connection) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.n_ctx = options.n_ctx
    params.n_parallel = options.n_parallel
    params.n_batch = options.n_batch
    params.n_ubatch = options.n_ubatch
    params.cpuparams.n_threads = options.n_threads
    params.cpuparams_batch.n_threads = options.n_threads
    params.cache_ram_mib = options.cache_ram_mib
    params.kv_unified = True
    params.port = 0
    params.verbosity = -1
    if options.mmproj is not None:
        params.mmproj.path = str(options.mmproj)
    if options.slot_save_path:
        params.slot_save_path = options.slot_save_path
    server = xllamacpp.Server(params)
    pipe.send(server.listening_address)
    pipe.recv()
