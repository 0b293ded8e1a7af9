"""The prefix tree, one sentence at a time. Random operations are in test_tree_machine."""

import random

import numpy as np
import pytest

from everwarm.prompt.prompt import MediaItem, Prompt
from everwarm.state.policy import CutKind
from everwarm.state.tree import Checkpoint, Node, Segment, Tree
from everwarm.types import Mark, Position, SeqId, TokenCount
from support.items import prompt_of
from support.tree_oracle import snapshot

CAT = MediaItem(b"same" + b"cat" * 4, TokenCount(60), Position(8))
DOG = MediaItem(b"same" + b"dog" * 4, TokenCount(60), Position(8))


def prompt(*items: int | MediaItem) -> Prompt:
    return prompt_of(items)


def grown(tree: Tree, *items: int | MediaItem, n: int | None = None, namespace: str = "") -> Node:
    return tree.grow(tree.root(namespace), prompt(*items), len(items) if n is None else n)


def checkpoint(state_bytes: int | None = 10, parked: int | None = None) -> Checkpoint:
    state = None if state_bytes is None else np.zeros(state_bytes, np.uint8)
    return Checkpoint(CutKind.BOUNDARY, True, (), None if parked is None else SeqId(parked), state)


def with_state(tree: Tree, node: Node, **what: int | None) -> Node:
    tree.set_checkpoint(node, checkpoint(**what))
    return node


def with_kv(tree: Tree, node: Node, n_bytes: int = 100) -> Node:
    tree.set_segment(node, Segment(np.zeros(n_bytes, np.uint8), node.parent.mark, node.mark, True))
    return node


def test_match_finds_the_deepest_checkpoint_with_its_whole_kv():
    tree = Tree()
    upper = with_kv(tree, with_state(tree, grown(tree, 1, 2, 3)))
    lower = with_kv(tree, with_state(tree, grown(tree, 1, 2, 3, 4, 5)))
    match = tree.match("", prompt(1, 2, 3, 4, 5, 6), 0)
    assert match.usable == (lower, upper) and match.n_shared == match.n_kv == 5


def test_all_nodes_of_a_lineage_have_the_path_of_the_newest():
    """So that a walk compares one path, and the prompts of earlier turns are not kept for ever."""
    tree = Tree()
    nodes = [grown(tree, *range(1, n)) for n in (3, 5, 9)]
    aside = grown(tree, 1, 2, 3, 7)
    assert nodes[0].path is nodes[0].parent.children[1].path is aside.path
    assert nodes[1].path is nodes[2].path is not aside.path
    tree.check()


def test_match_ignores_checkpoints_whose_kv_is_gone_but_not_parked_ones():
    tree = Tree()
    with_state(tree, grown(tree, 1, 2, 3))
    lower = with_kv(tree, with_state(tree, grown(tree, 1, 2, 3, 4, 5)))
    assert tree.match("", prompt(1, 2, 3, 4, 5), 0).usable == ()
    lower.checkpoint.parked = SeqId(1)
    assert tree.match("", prompt(1, 2, 3, 4, 5), 0).usable == (lower,)


def test_kv_on_the_device_counts_and_may_end_inside_a_segment():
    tree = Tree()
    with_state(tree, grown(tree, 1, 2))
    lower = with_kv(tree, with_state(tree, grown(tree, 1, 2, 3, 4)))
    assert tree.match("", prompt(1, 2, 3, 4), 1).n_kv == 1
    match = tree.match("", prompt(1, 2, 3, 4), 3)
    assert match.n_kv == 4 and match.usable[0] is lower


def test_a_checkpoint_beyond_the_shared_part_is_never_offered():
    tree = Tree()
    with_kv(tree, with_state(tree, grown(tree, 1, 2, 3, 4)))
    match = tree.match("", prompt(1, 2, 3, 9), 4)
    assert match.usable == () and match.n_shared == 3


def test_without_kv_a_state_alone_is_enough():
    tree = Tree()
    node = with_state(tree, grown(tree, 1, 2))
    assert tree.match("", prompt(1, 2, 3), 0, needs_kv=False).usable == (node,)
    assert tree.match("", prompt(1, 2, 3), 0, needs_kv=True).usable == ()  # the control


def test_namespaces_share_nothing():
    tree = Tree()
    node = with_kv(tree, with_state(tree, grown(tree, 1, 2, namespace="mine")))
    assert tree.match("mine", prompt(1, 2, 3), 0).usable == (node,)
    for other in ("", "yours", "min"):
        match = tree.match(other, prompt(1, 2, 3), 0)
        assert match.n_shared == 0 and match.usable == () and match.path == ()


def test_asking_for_an_unknown_namespace_does_not_create_it():
    tree = Tree()
    tree.match("never seen", prompt(1), 0)
    assert list(tree.nodes()) == []


def test_images_are_told_apart_by_digest_and_counted_in_cells():
    tree = Tree()
    cat = with_kv(tree, with_state(tree, grown(tree, 1, CAT, 2)))
    assert CAT.code == DOG.code  # the control: codes alone would mix them up
    assert cat.mark == Mark(62, 10)
    assert tree.match("", prompt(1, CAT, 2, 3), 0).usable == (cat,)
    match = tree.match("", prompt(1, DOG, 2, 3), 0)
    assert match.usable == () and match.n_shared == 1
    dog = grown(tree, 1, DOG, 2)
    assert dog.parent is cat.parent and dog.parent.n_items == 1
    tree.check()


def test_siblings_that_begin_with_colliding_images_live_side_by_side():
    tree = Tree()
    cat, dog = grown(tree, CAT, 1), grown(tree, DOG, 1)
    assert cat.parent is dog.parent is tree.root("") and len(tree.root("").children) == 2


def test_splitting_an_edge_shares_its_segment_and_copies_nothing():
    tree = Tree()
    node = with_kv(tree, grown(tree, 1, 2, 3, 4), 100)
    upper = grown(tree, 1, 2, 9).parent
    assert upper.n_items == 2 and upper.segment is node.segment and node.segment.n_users == 2
    assert tree.ram_bytes == 100
    tree.drop_segment(node)
    assert tree.ram_bytes == 100 and upper.segment is not None
    tree.drop_segment(upper)
    assert tree.ram_bytes == 0
    tree.check()


def test_growing_to_a_known_point_gives_the_same_node():
    tree = Tree()
    node = grown(tree, 1, 2, 3)
    assert grown(tree, 1, 2, 3, 4, n=3) is node
    assert tree.grow(node, prompt(1, 2, 3), 3) is node


def test_a_dropped_leaf_takes_its_bare_ancestors_along():
    tree = Tree()
    with_state(tree, grown(tree, 1, 2))
    deep = with_state(tree, grown(tree, 1, 2, 3, 4))
    fork = with_state(tree, grown(tree, 1, 2, 3, 5))
    assert deep.parent.n_items == 3
    tree.drop_checkpoint(deep)
    tree.drop_checkpoint(fork)
    assert [items for _, items in snapshot(tree)] == [(1, 2)]


def test_what_is_held_or_pinned_is_not_pruned():
    tree = Tree()
    node = grown(tree, 1, 2)
    tree.hold(node)
    with tree.pinned(node):
        with_state(tree, node)
        tree.drop_checkpoint(node)
        tree.release(node)
        assert snapshot(tree)
    assert not snapshot(tree)


def test_dropping_only_the_ram_copy_keeps_the_parked_one():
    tree = Tree()
    node = with_state(tree, grown(tree, 1), state_bytes=10, parked=3)
    assert node.checkpoint.tiers == "device+ram"
    tree.drop_state(node)
    assert tree.ram_bytes == 0 and node.checkpoint.tiers == "device"
    tree.set_state(node, np.zeros(7, np.uint8))
    assert tree.ram_bytes == 7


@pytest.mark.parametrize("break_it", ["ledger", "users", "mark", "key"])
def test_the_self_check_notices_what_is_wrong(break_it):
    """The control of every ``tree.check()``: it can fail."""
    tree = Tree()
    node = with_kv(tree, with_state(tree, grown(tree, 1, 2)))
    tree.check()
    if break_it == "ledger":
        tree.ram_bytes += 1
    elif break_it == "users":
        node.segment.n_users = 2
    elif break_it == "mark":
        node.mark = Mark(9, 9)
    else:
        tree.root("").children[7] = tree.root("").children.pop(1)
    with pytest.raises(AssertionError):
        tree.check()


# nodes that have nothing


def talk_for_long(tree: Tree, n_requests: int, most_kept: int) -> list[int]:
    """Conversations that go on, part and end, with so many states at a time; returns how many nodes there were."""
    rng, kept, counts = random.Random(7), [], []
    talk: tuple[int, ...] = ()
    for _ in range(n_requests):
        talk = (
            ()
            if rng.random() < 0.1 or len(talk) > 400
            else talk[: rng.randrange(len(talk) + 1)]
            if rng.random() < 0.2
            else talk
        )
        talk = (*talk, *(rng.randrange(50) for _ in range(rng.randrange(2, 8))))
        prompt, root = Prompt.of_tokens(talk), tree.root("")
        for n_items in {len(talk) // 2 + 1, len(talk) - 1, len(talk)}:
            node = tree.grow(root, prompt, n_items)
            if node.checkpoint is None:
                tree.set_checkpoint(node, Checkpoint(CutKind.EVERY, True, (), state=np.zeros(1, np.uint8)))
                kept.append(node)
        while len(kept) > most_kept:
            tree.drop_checkpoint(kept.pop(rng.randrange(len(kept) // 2)))
        counts.append(len(list(tree.nodes())))
    tree.check()
    assert all(tree.match("", node.path.first(node.n_items), 0, needs_kv=False).usable[0] is node for node in kept)
    return counts


def test_after_thousands_of_requests_there_are_no_more_nodes_than_before():
    counts = talk_for_long(Tree(), 3000, 60)
    assert max(counts) <= 2 * 60 + 1, "each node has something, or two children"
    assert max(counts[2000:]) <= max(counts[:1000]) * 1.2


def test_nodes_that_have_nothing_would_pile_up(monkeypatch):
    """The control."""
    monkeypatch.setattr(Tree, "_merge", lambda _tree, _node: None)
    assert max(talk_for_long(Tree(), 3000, 60)) > 2 * 60 + 1


def test_a_node_that_is_pinned_or_held_is_not_merged_and_is_afterwards():
    tree = Tree()
    prompt = Prompt.of_tokens(range(30))
    middle, end = (tree.grow(tree.root(""), prompt, n) for n in (10, 30))
    for node in (middle, end):
        tree.set_checkpoint(node, Checkpoint(CutKind.EVERY, True, (), state=np.zeros(1, np.uint8)))
    tree.hold(middle)
    tree.drop_checkpoint(middle)
    assert tree.has(middle) and end.parent is middle
    tree.release(middle)
    assert not tree.has(middle) and end.parent is tree.root("") and end.start == 0
    tree.check()
