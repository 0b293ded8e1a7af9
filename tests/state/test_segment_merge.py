"""Which segments become one: few of them, each byte seldom copied, and apart where conversations part."""

from __future__ import annotations

import math

import numpy as np
import pytest

from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CutKind
from everwarm.state.segment_merge import MOST, merged, runs, to_join
from everwarm.state.tree import Checkpoint, Node, Segment, SegmentPiece, Tree, pin

ITEMS = list(range(20_000))


class Grove:
    """One long lineage, and what hangs on it."""

    def __init__(self) -> None:
        self.tree = Tree()

    def node(self, n: int, kind: CutKind | None = None, items: list[int] = ITEMS) -> Node:
        node = self.tree.grow(self.tree.root(""), Prompt.of_tokens(items[:n]), n)
        if kind is not None:
            self.tree.set_checkpoint(node, Checkpoint(kind, True, (), state=np.zeros(1, np.uint8)))
        return node

    def kv(self, n: int, *, clean: bool = True, chunks=((1, 1 << 20),), **more) -> Node:
        node = self.node(n)
        segment = Segment(np.zeros(node.n_items - node.start, np.uint8), node.parent.mark, node.mark, clean, chunks)
        self.tree.set_segment(node, segment)
        for name, value in more.items():
            setattr(segment, name, value)
        return node


def ends(found) -> list[list[int]]:
    return [[node.n_items for node in run] for run in found]


def joins(end: Node, n_settled: int = 1 << 30) -> list[list[tuple[int, int]]]:
    return [[(stretch.start, stretch.stop) for stretch in group] for group in to_join(end, n_settled)]


# what is saved at once


def test_what_a_turn_adds_is_saved_in_one_run():
    grove = Grove()
    nodes = [grove.node(100), grove.node(104, CutKind.END), grove.node(300, CutKind.REPLY)]
    assert ends(runs(nodes, lambda _: True)) == [[100, 104, 300]]


@pytest.mark.parametrize(
    "kind", [CutKind.STABLE, CutKind.BOUNDARY, CutKind.BREAKPOINT, CutKind.BRANCH, CutKind.NEAR_END]
)
def test_a_run_ends_where_the_next_turn_may_part(kind):
    grove = Grove()
    nodes = [grove.node(100), grove.node(104, kind), grove.node(300), grove.node(310)]
    assert ends(runs(nodes, lambda _: True)) == [[100, 104], [300, 310]]


def test_a_run_ends_at_branches_and_pins_and_where_a_node_between_needs_nothing():
    grove = Grove()
    nodes = [grove.node(n) for n in (10, 20, 30, 40, 50, 60)]
    grove.node(30, items=[*ITEMS[:20], *ITEMS[500:520]])
    pin(nodes[3])
    assert ends(runs(nodes, lambda _: True)) == [[10, 20], [30, 40], [50, 60]]
    assert ends(runs([n for n in nodes if n.n_items != 50], lambda _: True)) == [[10, 20], [30, 40], [60]]


def test_a_run_is_of_one_kind_of_reading_and_of_bounded_size():
    grove = Grove()
    nodes = [grove.node(n) for n in (10, 20, 5000, 5010, 9000, 9200)]
    assert ends(runs(nodes, lambda n: n.n_items > 10, 4096)) == [[10], [20], [5000], [5010, 9000], [9200]]


# which sizes become one


def turns(n: int, size: int) -> list[int]:
    """What is left of so many turns, each joined when it ended."""
    left: list[int] = []
    for _ in range(n):
        left.append(size)
        left = [sum(left[i] for i in span) for span in merged(left)]
    return left


@pytest.mark.parametrize("size", [1, 80, 1000, 5000])
@pytest.mark.parametrize("n", [1, 10, 40, 100, 1000])
def test_the_number_of_segments_is_logarithmic_up_to_the_bound_and_linear_in_tokens_beyond(n, size):
    left = turns(n, size)
    assert sum(left) == n * size
    assert len(left) <= 2 * n * size / MOST + math.log2(MOST) + 1
    assert all(part <= MOST or part == size for part in left)


def test_random_sizes_keep_to_the_same_bound():
    rng = np.random.default_rng(1)
    for _ in range(50):
        left: list[int] = []
        for size in rng.integers(1, 3000, 200).tolist():
            left.append(size)
            left = [sum(left[i] for i in span) for span in merged(left)]
        assert len(left) <= 2 * sum(left) / MOST + math.log2(MOST) + 1


def test_no_byte_is_copied_more_often_than_a_logarithm():
    left, copied = [], 0
    for _ in range(1000):
        left.append(10)
        spans = merged(left)
        copied += sum(left[i] for span in spans if len(span) > 1 for i in span)
        left = [sum(left[i] for i in span) for span in spans]
    assert copied <= 10_000 * math.log2(MOST)


# which neighbours may


def chain(grove: Grove, *stops: int, **more) -> Node:
    return [grove.kv(n, **more) for n in stops][-1]


def test_neighbours_of_like_size_are_joined_as_far_as_they_are_settled():
    grove = Grove()
    end = chain(grove, 80, 160, 240, 320)
    for n in (80, 160, 240):
        grove.node(n, CutKind.STABLE)
    assert joins(end) == [[(0, 80), (80, 160), (160, 240), (240, 320)]]
    assert joins(end, 240) == [[(0, 80), (80, 160), (160, 240)]]
    assert joins(end, 239) == [[(0, 80), (80, 160)]]
    assert joins(end, 159) == []
    assert joins(chain(Grove(), 1000, 1080)) == [], "nor is a large one copied for a small one"


def test_pieces_of_one_reading_are_joined_before_they_are_settled_but_not_across_an_end():
    grove = Grove()
    end = chain(grove, 80, 160, 240, 320)
    grove.node(160, CutKind.STABLE)
    grove.node(240, CutKind.EVERY)
    assert joins(end, 0) == [[(0, 80), (80, 160)], [(160, 240), (240, 320)]]


def test_readings_that_differ_stay_apart():
    grove = Grove()
    chain(grove, 80, clean=False)
    assert joins(chain(grove, 160)) == []
    grove = Grove()
    chain(grove, 80, chunks=((40, 2),))
    assert joins(chain(grove, 160)) == []
    assert joins(chain(grove, 240)) == [[(80, 160), (160, 240)]]  # the control
    grove = Grove()
    chain(grove, 80, clean=False, chunks=None)
    assert joins(chain(grove, 160, clean=False, chunks=None)) == [[(0, 80), (80, 160)]]


def test_what_is_written_is_not_joined_with_what_is_not():
    grove = Grove()
    chain(grove, 80, pieces=(SegmentPiece(0, 80, "a", 1),))
    assert joins(chain(grove, 160)) == []
    assert joins(chain(grove, 160, pieces=(SegmentPiece(80, 160, "b", 1),))) == [[(0, 80), (80, 160)]]


def test_a_system_prompt_a_breakpoint_and_a_pin_stay_by_themselves():
    for kind in (CutKind.BOUNDARY, CutKind.BREAKPOINT):
        grove = Grove()
        grove.kv(100)
        grove.node(100, kind)
        assert joins(chain(grove, 200, 300)) == [[(100, 200), (200, 300)]]
    grove = Grove()
    pin(grove.kv(100))
    assert joins(chain(grove, 200)) == []


def test_a_turn_left_aside_is_crossed_and_another_conversation_is_not():
    aside = [*ITEMS[:100], *ITEMS[5000:9000]]
    grove = Grove()
    end = chain(grove, 100, 200)
    for n in (150, 160, 170, 180):
        grove.node(n, items=aside)
        assert joins(end) == [[(0, 100), (100, 200)]]
    grove.node(190, items=aside)
    assert joins(end) == []


def test_of_a_segment_that_was_left_in_the_middle_the_used_part_is_joined():
    grove = Grove()
    grove.kv(100)
    grove.kv(200)
    branch = [*ITEMS[:150], *ITEMS[5000:9000]]
    end = grove.node(250, items=branch)
    grove.tree.set_segment(end, Segment(np.zeros(1, np.uint8), end.parent.mark, end.mark, True, ((1, 1 << 20),)))
    assert joins(end) == [[(0, 100), (100, 150), (150, 250)]]
