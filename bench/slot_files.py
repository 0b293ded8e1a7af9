"""Slot files of a long conversation: bytes, and seconds until each action is answered, also with a full RAM tier.

Nobody reads a prompt for it: KV and states of a few tokens are repeated at other positions, so that a file of a gigabyte is
made in seconds. In the engine's own process, beside llama-server that restores and saves the same main file. On a GPU
``bench/gpu.sh PATH/llama.cpp slot-files`` measures a real conversation over HTTP.
"""

from __future__ import annotations

import queue
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import model_file, table
from bench.peer import PeerOptions, llama_server
from everwarm.config import GREEDY, default_threads
from everwarm.demo.tiny import TinySpec
from everwarm.engine.core import Core
from everwarm.engine.engine import Engine
from everwarm.engine.process import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.engine.slotfile.slot_commands import SlotCommands
from everwarm.llama.blobs import finished, joined
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CutKind
from everwarm.state.store.slot_names import COMPANION
from everwarm.state.tree import Checkpoint
from everwarm.types import Blob

N_TOKENS, N_PIECE, N_POINTS = 12_288, 256, 16
WORDS = 3  # of a cell without M-RoPE: position, sequences, sequence
REPEATS = 3
GIB, MIB = 1 << 30, 1 << 20


def run() -> None:
    model = model_file(TinySpec(arch="falcon-h1", n_layers=16, width=2048, dtype="q8_0"))
    with tempfile.TemporaryDirectory(prefix="everwarm-bench-") as folder:
        rows = [_ours(model, Path(folder), is_full=is_full) for is_full in (False, True)]
        rows.append(_theirs(model, Path(folder)))
    head = ("", "save", "restore", "restore, and the same prompt", "files, MB")
    table(f"A slot of {N_TOKENS} tokens, milliseconds", head, rows)


def _ours(model: Path, folder: Path, *, is_full: bool) -> tuple[str, ...]:
    settings = EngineSettings(n_slots=1, n_ctx=N_TOKENS + 1024, n_spares=4, ram_bytes=GIB, speculate="off")
    path = folder / "ours.bin"
    with Engine(model, settings) as engine, _commands(engine) as act:
        prompt = Prompt.of_tokens(np.random.default_rng(1).integers(12, 250, N_TOKENS))
        engine.submit(prompt.first(N_PIECE), GREEDY, max_tokens=1, ignore_eos=True).result()
        engine.call(lambda core: _make_long(core, prompt))
        rows = []
        for i in range(REPEATS + 1):
            if is_full:
                engine.call(lambda core, i=i: _fill(core, seed=100 * (i + 1)))  # type: ignore[misc]
            engine.call(lambda core: core.cache.ram.flush())
            saved = act("save", path)
            act("erase", path)
            began = time.perf_counter()
            restored = act("restore", path)
            result = engine.submit(prompt, GREEDY, max_tokens=1, ignore_eos=True).result()
            assert result.n_processed <= 1, f"{result.n_processed} tokens were read"
            if i:  # the first one reads the model for its digest
                rows.append((saved, restored, time.perf_counter() - began))
            time.sleep(0.5)
    sizes = [file.stat().st_size / 1e6 for file in (path, path.with_name(path.name + COMPANION))]
    name = "Everwarm, a full RAM tier" if is_full else "Everwarm"
    return name, *_shown(rows), f"{sizes[0]:.0f} + {sizes[1]:.0f}"


def _theirs(model: Path, folder: Path) -> tuple[str, ...]:
    options = PeerOptions(model, N_TOKENS + 1024, 1, default_threads(), slot_save_path=f"{folder}/")
    prompt = np.random.default_rng(1).integers(12, 250, N_TOKENS).tolist()
    rows = []
    with llama_server(options) as peer:
        for _ in range(REPEATS):
            peer.post("/slots/0?action=erase", {})
            began = time.perf_counter()
            peer.post("/slots/0?action=restore", {"filename": "ours.bin"})
            restored = time.perf_counter() - began
            peer.complete([*prompt, 13], 1)  # it would read the end of the very same prompt again
            answered = time.perf_counter() - began
            began = time.perf_counter()
            peer.post("/slots/0?action=save", {"filename": "theirs.bin"})
            rows.append((time.perf_counter() - began, restored, answered))
    return "llama-server", *_shown(rows), f"{(folder / 'theirs.bin').stat().st_size / 1e6:.0f}"


def _shown(rows: list[tuple[float, float, float]]) -> list[str]:
    def shown(times: tuple[float, ...]) -> str:
        least, middle, most = (1e3 * t for t in (min(times), statistics.median(times), max(times)))
        return f"{middle:.0f} ({least:.0f}…{most:.0f})"

    return [shown(times) for times in zip(*rows, strict=True)]


@dataclass
class _Actions:
    files: SlotCommands
    engine: Engine
    answers: queue.SimpleQueue[m.Message]

    def __call__(self, action: str, path: Path) -> float:
        began = time.perf_counter()
        self.files.handle(m.SlotAction(7, 0, action, str(path)), self.engine._loop)  # type: ignore[arg-type]
        answer: Any = self.answers.get()
        assert isinstance(answer, m.Answer), answer
        return time.perf_counter() - began


@contextmanager
def _commands(engine: Engine) -> Iterator[_Actions]:
    answers: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    yield _Actions(SlotCommands(engine.core, answers.put), engine, answers)


# a long conversation out of a short one


def _make_long(core: Core, prompt: Prompt) -> None:
    """Slot 0 holds the prompt, with checkpoints, as if it had been read."""
    slot = core.slots[0]
    short = slot.items
    kv = core.context.capture_segment(slot.seq, short.mark(0), short.mark(N_PIECE))
    state = core.context.capture(slot.seq)
    logits = np.random.default_rng(2).normal(size=core.model.vocab.n_tokens).astype(np.float32)
    core.cache.room.clear()
    pieces = [_moved(kv, at) for at in range(0, N_TOKENS, N_PIECE)]
    whole = finished(joined(pieces, core.context._n_tail, core.context.place))
    slot.hold(prompt.first(0), core.cache.tree.root(""), ())
    ends = [N_TOKENS * (i + 1) // N_POINTS for i in range(N_POINTS)]
    start, end = prompt.mark(0), prompt.mark(N_TOKENS)
    core.context.splice_segment(slot.seq, whole, start, end, n_cells=N_TOKENS, clean=False)
    core.context.restore(slot.seq, _at(state, N_TOKENS), end, clean=False)
    slot.hold(prompt, core.cache.tree.root(""), ())
    slot.remember("")
    for n_items in ends:
        node = core.cache.tree.grow(core.cache.tree.root(""), prompt, n_items)
        place = core.cache.ram.place(len(state))
        place[:] = _at(state, n_items)
        kind = CutKind.STABLE if n_items == ends[-2] else CutKind.EVERY
        point = Checkpoint(kind, False, (), state=place, used_at=time.monotonic())
        point.logits = logits if n_items == N_TOKENS else None
        core.cache.tree.set_checkpoint(node, point)
    core.cache.checkpointer.mark_end(slot)


def _moved(kv: Blob, by: int) -> Blob:
    moved = kv.copy()
    moved[16 : 16 + 4 * WORDS * N_PIECE].view("<i4").reshape(N_PIECE, WORDS)[:, 0] += by
    return moved


def _at(state: Blob, n_items: int) -> Blob:
    """The state with the position of its last token: magic, sequence, cells, position."""
    moved = state.copy()
    struct.pack_into("<i", moved.data, 12, n_items - 1)
    return moved


def _fill(core: Core, seed: int) -> None:
    """States of other conversations, until RAM is full."""
    rng, size = np.random.default_rng(seed), core.sizes.shape.state_bytes
    root = core.cache.tree.root("")
    while core.cache.ram_budget.n_free > size:
        node = core.cache.tree.grow(root, Prompt.of_tokens(rng.integers(12, 250, 64)), 64)
        blob = core.cache.ram.place(size)
        blob[:] = seed % 251
        core.cache.tree.set_checkpoint(
            node, Checkpoint(CutKind.STABLE, False, (), state=blob, used_at=time.monotonic())
        )


if __name__ == "__main__":
    run()
