"""Finding a 100k-token prompt in a tree of 10,000 checkpoints. Wanted: at most 5 ms."""

from __future__ import annotations

import numpy as np

from bench.measure import median_s, table
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CutKind
from everwarm.state.tree import Checkpoint, Tree

N_ITEMS, N_CHECKPOINTS = 100_000, 10_000


def run() -> None:
    rows = []
    for name, n_paths in (("312 conversations of 32 checkpoints", 312), ("one path of 10,000 checkpoints", 1)):
        tree, prompt = _tree(n_paths, N_CHECKPOINTS // n_paths)
        seconds = median_s(lambda t=tree, p=prompt: t.match("", p, N_ITEMS), 15)
        rows.append((name, f"{1e3 * seconds:.2f} ms", tree.match("", prompt, N_ITEMS).n_shared))
    table("Match of a 100k-item prompt", ("tree", "time", "items shared"), rows)


def _tree(n_paths: int, n_cuts: int) -> tuple[Tree, Prompt]:
    rng, tree = np.random.default_rng(0), Tree()
    shared = rng.integers(0, 150_000, N_ITEMS // 2).astype(np.int32)
    state = np.zeros(1, np.uint8)
    prompt = Prompt(shared)
    for _ in range(n_paths):
        prompt = Prompt(np.concatenate([shared, rng.integers(0, 150_000, N_ITEMS // 2).astype(np.int32)]))
        node = tree.root("")
        for at in np.linspace(N_ITEMS // n_cuts, N_ITEMS, n_cuts).astype(int):
            node = tree.grow(node, prompt, int(at))
            if node.checkpoint is None:
                tree.set_checkpoint(node, Checkpoint(CutKind.EVERY, True, (), state=state))
    return tree, Prompt(prompt.codes.copy())
