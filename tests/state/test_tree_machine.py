"""Random operations on the prefix tree against a dictionary of everything that is kept."""

import os
from contextlib import ExitStack

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everwarm.prompt.prompt import MediaItem
from everwarm.state.policy import CutKind
from everwarm.state.tree import Checkpoint, Node, Segment, Tree
from everwarm.types import Position, SeqId, TokenCount
from support.items import prompt_of
from support.tree_oracle import Key, Oracle, common, items_of, snapshot

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
TWINS = [MediaItem(b"twin" + bytes([i]) * 12, TokenCount(60), Position(8)) for i in (1, 2)]

items = st.lists(st.sampled_from([0, 1, 2, *TWINS]), min_size=1, max_size=9).map(tuple)
namespaces = st.sampled_from(["", "other"])
sizes = st.integers(0, 50)


def blob(n: int) -> np.ndarray:
    return np.zeros(n, np.uint8)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree, self.oracle = Tree(), Oracle()
        self.grown: set[Key] = set()
        self.pinned: list[tuple[ExitStack, Key, list[Key]]] = []

    # finding things

    def node(self, key: Key) -> Node:
        namespace, wanted = key
        return next(n for n in self.tree.root(namespace).below() if items_of(n.path, n.n_items) == wanted)

    def pick(self, data, **having) -> Key | None:
        """Any node for which all of these questions have these answers."""
        questions = {
            "checkpoint": lambda kept: kept.checkpoint is not None,
            "state": lambda kept: kept.checkpoint is not None and kept.checkpoint.state is not None,
            "segment": lambda kept: kept.segment is not None,
            "held": lambda kept: kept.holders > 0,
        }
        fitting = [
            key
            for key, kept in self.oracle.nodes.items()
            if all(questions[name](kept) == answer for name, answer in having.items())
        ]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    # changes

    @rule(namespace=namespaces, prompt=items, data=st.data())
    def grow(self, namespace, prompt, data):
        n = data.draw(st.integers(1, len(prompt)))
        on_the_way = list(self.oracle.lineage((namespace, prompt[:n])))
        above = data.draw(st.sampled_from([None, *on_the_way]))
        start = self.tree.root(namespace) if above is None else self.node(above)
        node = self.tree.grow(start, prompt_of(prompt), n)
        self.oracle.grow((namespace, prompt[:n]))
        self.grown.add((namespace, prompt[:n]))
        assert items_of(node.path, node.n_items) == prompt[:n]

    @rule(data=st.data(), size=sizes, where=st.sampled_from(["ram", "parked", "both"]), logits=st.booleans())
    def set_checkpoint(self, data, size, where, logits):
        key = self.pick(data, checkpoint=False)
        if key is not None:
            checkpoint = Checkpoint(CutKind.EVERY, True, ())
            checkpoint.state = None if where == "parked" else blob(size)
            checkpoint.parked = None if where == "ram" else SeqId(3)
            checkpoint.logits = np.zeros(5, np.float32) if logits else None
            self.tree.set_checkpoint(self.node(key), checkpoint)
            self.oracle.nodes[key].checkpoint = checkpoint

    @rule(data=st.data(), size=sizes)
    def set_state(self, data, size):
        key = self.pick(data, checkpoint=True, state=False)
        if key is not None:
            self.tree.set_state(self.node(key), blob(size))

    @rule(data=st.data())
    def drop_state(self, data):
        key = self.pick(data, checkpoint=True)
        if key is not None:
            self.tree.drop_state(self.node(key))

    @rule(data=st.data())
    def drop_checkpoint(self, data):
        key = self.pick(data, checkpoint=True)
        if key is not None:
            dropped = self.tree.drop_checkpoint(self.node(key))
            assert dropped is self.oracle.nodes[key].checkpoint
            self.oracle.nodes[key].checkpoint = None
            self.oracle.prune(key)

    @rule(data=st.data(), size=sizes)
    def set_segment(self, data, size):
        key = self.pick(data)
        if key is not None:
            lineage = self.oracle.lineage(key)
            users = lineage[data.draw(st.integers(0, len(lineage) - 1)) :]
            above, node = self.node(users[0]).parent, self.node(key)
            items = above.n_items, node.n_items
            segment = Segment(blob(size), above.mark, node.mark, True, items=items)
            self.tree.set_segment(node, segment)
            for user in users:
                self.oracle.nodes[user].segment = segment

    @rule(data=st.data())
    def drop_segment(self, data):
        key = self.pick(data, segment=True)
        if key is not None:
            self.tree.drop_segment(self.node(key))
            self.oracle.drop_segment(key)

    @rule(data=st.data())
    def hold(self, data):
        key = self.pick(data)
        if key is not None:
            self.tree.hold(self.node(key))
            self.oracle.nodes[key].holders += 1

    @rule(data=st.data())
    def release(self, data):
        key = self.pick(data, held=True)
        if key is not None:
            self.tree.release(self.node(key))
            self.oracle.nodes[key].holders -= 1
            self.oracle.prune(key)

    @rule(data=st.data())
    def pin(self, data):
        key = self.pick(data)
        if key is not None:
            stack = ExitStack()
            stack.enter_context(self.tree.pinned(self.node(key)))
            lineage = self.oracle.lineage(key)
            for above in lineage:
                self.oracle.nodes[above].pins += 1
            self.pinned.append((stack, key, lineage))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        self.let_go(data.draw(st.integers(0, len(self.pinned) - 1)))

    def let_go(self, index: int) -> None:
        stack, key, lineage = self.pinned.pop(index)
        stack.close()
        for above in lineage:
            self.oracle.nodes[above].pins -= 1
        self.oracle.prune(key)
        for above in reversed(lineage[:-1]):
            if above in self.oracle.nodes:
                self.oracle.merge(above)

    # questions

    @rule(namespace=namespaces, prompt=items, data=st.data(), needs_kv=st.booleans())
    def match(self, namespace, prompt, data, needs_kv):
        n_resident = data.draw(st.integers(0, len(prompt)))
        before = snapshot(self.tree)
        match = self.tree.match(namespace, prompt_of(prompt), n_resident, needs_kv=needs_kv)
        assert snapshot(self.tree) == before
        assert match.n_shared == self.oracle.n_shared(namespace, prompt)
        covered = self.oracle.has_kv(namespace, prompt, n_resident if needs_kv else len(prompt))
        assert [items_of(n.path, n.n_items) for n in match.usable] == self.usable(namespace, prompt, covered)
        if needs_kv:
            whole = covered.index(False) if False in covered else len(covered)
            assert match.n_kv == max(whole, n_resident)

    def usable(self, namespace, prompt, covered) -> list:
        """True prefixes with a checkpoint that is parked, or in RAM with the KV of its whole lineage; deepest first."""
        found = []
        for ns, known in self.oracle.nodes:
            checkpoint = self.oracle.nodes[ns, known].checkpoint
            if ns == namespace and checkpoint is not None and common(known, prompt) == len(known):
                whole = checkpoint.state is not None and all(covered[: len(known)])
                if checkpoint.parked is not None or whole:
                    found.append(known)
        return sorted(found, key=len, reverse=True)

    # what always holds

    @invariant()
    def agrees_with_the_dictionary(self):
        expected = {k: (v.checkpoint, v.segment, v.holders, v.pins) for k, v in self.oracle.nodes.items()}
        assert snapshot(self.tree) == expected

    @invariant()
    def what_has_something_outnumbers_what_has_not(self):
        """Of those that something was done to: a node that only grew is not looked at."""
        grown = {key for key in self.grown if key in self.oracle.nodes and self.oracle.nodes[key].is_bare}
        n_bare = sum(kept.is_bare for kept in self.oracle.nodes.values())
        assert n_bare <= 2 * (len(self.oracle.nodes) - n_bare + len(grown))

    @invariant()
    def checks_itself(self):
        self.tree.check()

    @invariant()
    def the_ledger_is_the_sum_of_its_parts(self):
        checkpoints = [v.checkpoint for v in self.oracle.nodes.values() if v.checkpoint is not None]
        segments = {id(v.segment): v.segment for v in self.oracle.nodes.values() if v.segment is not None}
        weights = [c.size_bytes for c in checkpoints] + [s.blob.nbytes for s in segments.values()]
        assert self.tree.ram_bytes == sum(weights)

    def teardown(self):
        """Letting go of everything leaves nothing."""
        while self.pinned:
            self.let_go(0)
        for node in [n for n in self.tree.nodes() if n.parent is not None]:
            self.tree.hold(node)
            if node.checkpoint is not None:
                self.tree.drop_checkpoint(node)
            if node.segment is not None:
                self.tree.drop_segment(node)
            while node.holders:
                self.tree.release(node)
        assert snapshot(self.tree) == {} and self.tree.ram_bytes == 0


TreeMachine.TestCase.settings = settings(
    max_examples=2000 if CAMPAIGN else 60, stateful_step_count=40, deadline=None, derandomize=not CAMPAIGN
)
TestTreeMachine = TreeMachine.TestCase
