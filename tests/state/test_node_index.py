"""Numbers of nodes, and pins: what is pinned stays so through splits, is given up last, and goes with its node."""

from __future__ import annotations

import numpy as np

from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import Cut, CutKind, Entry, assumed_returns, thin, victims
from everwarm.state.ram_eviction import WeighingFacts, weigh
from everwarm.state.tree import Checkpoint, Node, Tree, pin, unpin

SCALES = WeighingFacts(100.0, 1.0, True, False, frozenset(), {}, assumed_returns)


def keep(tree: Tree, tokens: list[int], used_at: float = 0.0) -> Node:
    prompt = Prompt.of_tokens(tokens)
    node = tree.grow(tree.root("n"), prompt, len(prompt))
    state = np.zeros(100, np.uint8)
    tree.set_checkpoint(node, Checkpoint(CutKind.REPLY, True, (), state=state, used_at=used_at))
    return node


def test_a_number_is_never_given_twice_and_every_change_is_seen():
    tree = Tree()
    node = keep(tree, [1, 2, 3])
    before = tree.version
    tree.drop_checkpoint(node)
    assert tree.version > before and node.id not in tree.by_id
    again = keep(tree, [1, 2, 3])
    assert again.id > node.id and tree.by_id[again.id] is again
    assert again.id < 1 << 53, "JavaScript must be able to say it"
    tree.check()


def test_a_pin_covers_the_whole_way_also_where_it_is_split_later():
    tree = Tree()
    end = keep(tree, [1, 2, 3, 4])
    pin(end)
    other = keep(tree, [1, 2, 9])
    assert end.parent is other.parent and end.parent is not None and end.parent.n_pinned == 1
    assert end.n_pinned == 1 and other.n_pinned == 0
    pin(end)
    pin(other)
    unpin(end)
    assert end.n_pinned == 0 and end.parent.n_pinned == 1
    tree.check()
    tree.drop_checkpoint(other)
    assert end.parent.n_pinned == 0, "a pin goes with its node"
    tree.check()


def test_what_is_pinned_goes_when_nothing_else_can():
    tree = Tree()
    pinned, other = keep(tree, [1, 2, 3], used_at=0.0), keep(tree, [4, 5, 6], used_at=99.0)
    pin(pinned)
    nodes = list(tree.nodes())
    entries = weigh(nodes, SCALES)
    assert [nodes[key // 2] for key in victims(entries, 1)] == [other]
    assert [nodes[key // 2] for key in victims(entries, 101)] == [other, pinned]
    unpin(pinned)
    assert [nodes[key // 2] for key in victims(weigh(nodes, SCALES), 1)] == [pinned]
    useless = Entry(1, 10, 9.0, 1.0, stranded=True, pinned=True)
    assert victims([useless, Entry(2, 10, 0.0, 1.0)], 1) == [1], "what nobody can use is kept for nobody"


def test_thinning_passes_over_what_is_pinned():
    path = [Cut(n, CutKind.EVERY) for n in range(100, 1100, 100)]
    (first,) = thin(path, 9)
    assert first not in thin(path, 5, {first}) and len(thin(path, 5, {first})) == 5
