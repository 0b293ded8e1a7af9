"""What is done to one conversation as it grows. Its KV is 1,024 tokens that were read, put in again at later positions: how
long moving bytes takes does not depend on what they say."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.measure import EMBEDDED, least_cpu_s, median_s
from bench.scaling.fit import Curve, Growth
from everwarm.config import ContextOptions
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key
from everwarm.state.policy import CutKind
from everwarm.state.store.disk import Disk
from everwarm.state.store.object import ObjectHeader
from everwarm.state.tree import Checkpoint, Tree
from everwarm.types import START, Blob, SeqId

SIZES = tuple(1024 << i for i in range(9))  # to 262,144
N_TURN, N_CUTS, REPEATS = 512, 32, 7
SLOT, SPARE = SeqId(0), SeqId(1)
_CELLS_AT, _STATE_POS_AT, _WORDS = (
    16,
    12,
    6,
)  # where a blob of this architecture has its cells, and a state its position

WANTED: dict[str, tuple[Growth, str]] = {
    "match": ("linear", "every token is compared once"),
    "park": ("linear", "libllama puts each cell into an ordered set"),
    "capture the state": ("constant", "one state"),
    "restore in place": ("linear", "one state; libllama looks at each cell to trim"),
    f"capture the KV of {N_TURN} tokens": ("linear", f"{N_TURN} cells; libllama looks at each to find them"),
    "bring back all from RAM": ("linear", "all KV is copied, and each cell put into an ordered set"),
    f"save a turn of {N_TURN} tokens": ("linear", "its KV and one state; keys and items of the whole prompt"),
}


def curves(sizes: tuple[int, ...] = SIZES) -> list[Curve]:
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in WANTED}
    with Model(EMBEDDED) as model:
        for n in sizes:
            for name, seconds in _measure(model, n):
                points[name].append((float(n), seconds))
    return [Curve(name, *WANTED[name], tuple(points[name])) for name in WANTED]


def _measure(model: Model, n: int) -> Iterator[tuple[str, float]]:
    names = iter(WANTED)
    prompt = Prompt.of_tokens(np.random.default_rng(n).integers(12, 2000, n))
    yield next(names), _match_s(prompt)
    with Context(model, ContextOptions(n_ctx=n + 1024, n_seq_max=2)) as context:
        state = _fill(context, prompt)
        end, before = prompt.mark(n), prompt.mark(n - N_TURN)
        yield next(names), least_cpu_s(lambda: context.park(SLOT, SPARE), REPEATS, lambda: context.drop(SPARE))
        context.drop(SPARE)
        yield next(names), least_cpu_s(lambda: context.capture(SLOT), REPEATS)
        yield next(names), least_cpu_s(lambda: context.restore(SLOT, state, end, clean=True), REPEATS)
        yield next(names), least_cpu_s(lambda: context.capture_segment(SLOT, before, end), REPEATS)
        segment, turn = context.capture_segment(SLOT, START, end), context.capture_segment(SLOT, before, end)

        def bring() -> None:
            context.splice_segment(SLOT, segment, START, end, n_cells=n, clean=True)
            context.restore(SLOT, state, end, clean=True)

        yield next(names), least_cpu_s(bring, 3, lambda: context.drop(SLOT))
    yield next(names), _save_s(prompt, turn, state)


def _fill(context: Context, prompt: Prompt) -> Blob:
    """A conversation of this length in the slot; its state."""
    n_read = min(1024, len(prompt))
    context.decode([Feed(SLOT, prompt.codes[:n_read], START, wants_logits=False)])
    piece, state = context.capture_segment(SLOT, START, prompt.mark(n_read)), context.capture(SLOT)
    for at in range(n_read, len(prompt), n_read):
        stop = prompt.mark(at + n_read)
        context.splice_segment(SLOT, _moved(piece, n_read, at), prompt.mark(at), stop, n_cells=n_read, clean=True)
    last = state.copy()
    last[_STATE_POS_AT : _STATE_POS_AT + 4].view("<i4")[0] = len(prompt) - 1
    context.restore(SLOT, last, prompt.mark(len(prompt)), clean=True)
    return last


def _moved(piece: Blob, n_cells: int, by: int) -> Blob:
    """The same cells at later positions."""
    blob = piece.copy()
    cells = blob[_CELLS_AT : _CELLS_AT + 4 * _WORDS * n_cells].view("<i4").reshape(n_cells, _WORDS)
    cells[:, 0] += by
    return blob


def _match_s(prompt: Prompt) -> float:
    tree, n = Tree(), len(prompt)
    node, known = tree.root(""), Prompt(prompt.codes.copy())
    for at in range(n // N_CUTS, n + 1, n // N_CUTS):
        node = tree.grow(node, known, at)
        tree.set_checkpoint(node, Checkpoint(CutKind.EVERY, True, (), state=np.zeros(1, np.uint8)))
    return least_cpu_s(lambda: tree.match("", prompt, n), 15)


def _save_s(prompt: Prompt, turn: Blob, state: Blob) -> float:
    """What a turn that comes after all this has to make durable."""
    n, number = len(prompt), iter(range(1 << 20))
    items = np.ascontiguousarray(prompt.codes, "<i4").view(np.uint8)
    with tempfile.TemporaryDirectory(prefix="everwarm-scaling-") as name:
        disk = Disk(Path(name) / "states", 1 << 34)

        def save() -> None:
            root = root_key(f"{next(number):064x}", "")
            named = keys(root, prompt, (n - N_TURN, n))
            about = {"fingerprint": root, "clean": True, "chunks": ()}
            kv = ObjectHeader(kind="kv", start=named[n - N_TURN], key=named[n], n_start=n - N_TURN, n_items=n, **about)
            assert disk.put(kv, {"items": items[4 * (n - N_TURN) :], "kv": turn})
            end = ObjectHeader(kind="state", start=named[n], key=named[n], n_start=n, n_items=n, **about)
            assert disk.put(end, {"items": items, "state": state})

        seconds = median_s(save, REPEATS)  # most of it is waiting for the disk
        disk.close()
    return seconds
