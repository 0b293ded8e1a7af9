"""What is done to the tree as checkpoints become many: conversations of 32 checkpoints each. Blobs weigh nothing real."""

from __future__ import annotations

import time

import numpy as np

from bench.measure import least_cpu_s
from bench.scaling.fit import Curve, Growth
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CutKind, EvictionChoice, choose
from everwarm.state.ram_eviction import N_LEAST, Hand, WeighingFacts, weigh
from everwarm.state.returns import MAX_VISITS, Continuation, Returns
from everwarm.state.tree import Checkpoint, Node, Segment, Tree

N_CUTS, N_ITEMS, STATE_BYTES = 32, 2048, 64
SIZES = tuple(N_CUTS * n for n in (1, 4, 32, 320, 3200))  # whole conversations, so that all are equally deep
SWEEP = 0.03  # what one sweep gives up, so that not every checkpoint has to sweep

WANTED: dict[str, tuple[Growth, str]] = {
    "match": ("constant", "one way down"),
    "keep one more": ("constant", "one way down"),
    "give one up": ("constant", "one node"),
    "sweep: choose what to evict": ("constant", "of a large tree a part is weighed"),
}


def curves(sizes: tuple[int, ...] = SIZES) -> list[Curve]:
    rows = [(n, _measure(n)) for n in sizes]
    return [Curve(name, *WANTED[name], tuple((float(n), row[name]) for n, row in rows)) for name in WANTED]


def _measure(n: int) -> dict[str, float]:
    tree, prompt = _tree(n)
    fresh = Prompt(np.concatenate([prompt.codes, prompt.codes[:256]]))
    again = Prompt(prompt.codes.copy())
    grown: list[Node] = []

    def keep() -> None:
        node = tree.grow(tree.root(""), fresh, len(fresh))
        tree.set_checkpoint(node, _checkpoint())
        grown.append(node)

    def give_up() -> None:
        tree.drop_checkpoint(grown.pop())

    keep_s = least_cpu_s(keep, 25, lambda: [give_up() for _ in grown[:]])
    drop_s = least_cpu_s(give_up, 25, lambda: None if grown else keep())
    returns = _returns(tree)
    sweep_s = _sweep_s(tree, returns)
    names = iter(WANTED)
    match_s = least_cpu_s(lambda: tree.match("", again, 0), 25)
    found = (match_s, keep_s, drop_s, sweep_s)
    return dict(zip(names, found, strict=True))


def _returns(tree: Tree) -> Returns:
    """The last conversations were just visited."""
    returns = Returns(tree)
    ends = [node for node in tree.nodes() if node.parent is not None and not node.children]
    for end in ends[-MAX_VISITS:]:
        returns.leave(end, end.n_items, Continuation())
    return returns


def _sweep_s(tree: Tree, returns: Returns) -> float:
    """One part: what happens between two steps."""
    hand, to_free = Hand(tree), max(1, int(SWEEP * tree.ram_bytes))

    def sweep() -> EvictionChoice:
        part = hand.part()
        expected = returns.expected([], anywhere=False, among=part.among)
        facts = WeighingFacts(time.monotonic(), 1e-3, True, True, frozenset(), expected, returns.worth_unvisited)
        entries = weigh(part.nodes, facts)
        choice = choose(entries, part.share(to_free, entries), N_LEAST)
        hand.note_least(part.nodes[key // 2] for key in choice.next_keys)
        return choice

    return least_cpu_s(sweep, 9)


def _tree(n: int) -> tuple[Tree, Prompt]:
    rng, tree = np.random.default_rng(0), Tree()
    prompt = Prompt.of_tokens([0])
    for first in range(0, n, N_CUTS):
        prompt = Prompt(rng.integers(0, 1 << 30, N_ITEMS).astype(np.int32))
        node = tree.root("")
        for i in range(1, min(N_CUTS, n - first) + 1):
            node = tree.grow(node, prompt, i * (N_ITEMS // N_CUTS))
            tree.set_checkpoint(node, _checkpoint())
            assert node.parent is not None
            tree.set_segment(node, Segment(np.zeros(STATE_BYTES, np.uint8), node.parent.mark, node.mark, True))
    return tree, prompt


def _checkpoint() -> Checkpoint:
    return Checkpoint(CutKind.BOUNDARY, True, (), state=np.zeros(STATE_BYTES, np.uint8))
