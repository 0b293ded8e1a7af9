"""llama-server from the same wheel, in a process of its own: the same kernels, so only the caching differs."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
from collections.abc import Iterator
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
    n_ctx_checkpoints: int = 32
    checkpoint_min_step: int = 8192
    slot_prompt_similarity: float = 0.1
    n_cache_reuse: int = 0
    cache_idle_slots: bool = True
    speculative: str | None = None  # one of its drafters, like NGRAM_SIMPLE
    n_draft: int | None = None  # tokens that it drafts at once
    synth_rates: tuple[float, ...] = ()  # of drafted tokens that it accepts, by their place, whatever they are
    pooling: int | None = None  # of an embedding model; -1: as its file says
    chat_template: str | None = None  # instead of the model's own
    kv_unified: bool = True


class Peer:
    def __init__(self, address: str, pid: int | None = None) -> None:
        self._host = address.split("//")[-1].rstrip("/")
        self.pid = pid

    @property
    def host(self) -> str:
        return self._host

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return post(Server("llama-server", self._host), path, body)

    def complete(self, tokens: list[int], n_predict: int, **more: Any) -> dict[str, Any]:
        """A greedy completion; ``timings`` in the answer are llama-server's own."""
        return self.post("/completion", {"prompt": tokens, "n_predict": n_predict, "temperature": 0, **more})


@contextlib.contextmanager
def llama_server(options: PeerOptions) -> Iterator[Peer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(options, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(120):
            raise RuntimeError("llama-server did not start within 120 s")
        yield Peer(ours.recv(), process.pid)
    finally:
        with contextlib.suppress(OSError):  # it may have been killed
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
    params.n_ctx_checkpoints = options.n_ctx_checkpoints
    params.checkpoint_min_step = options.checkpoint_min_step
    params.slot_prompt_similarity = options.slot_prompt_similarity
    params.n_cache_reuse = options.n_cache_reuse
    params.cache_idle_slots = options.cache_idle_slots
    params.kv_unified = options.kv_unified
    if options.pooling is not None:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type(options.pooling)
    if options.chat_template is not None:
        params.use_jinja, params.chat_template = True, options.chat_template
    params.port = 0
    params.verbosity = -1
    if options.speculative is not None:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{options.speculative}")]
    if options.n_draft is not None:
        params.speculative.draft.n_max = options.n_draft
    if options.synth_rates:
        params.speculative.synth_rates = list(options.synth_rates)
    if options.mmproj is not None:
        params.mmproj.path = str(options.mmproj)
    if options.slot_save_path:
        params.slot_save_path = options.slot_save_path
    server = xllamacpp.Server(params)
    pipe.send(server.listening_address)
    pipe.recv()
