"""Weighing what is in RAM: what is stranded, what returns are expected, what a loss would cost."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CutKind, Entry, assumed_returns, choose, victims
from everwarm.state.ram_eviction import (
    COPIED,
    MAX_BRANCH,
    MAX_WEIGHED,
    N_LEAST,
    Hand,
    Part,
    WeighingFacts,
    is_worth_copying,
    least_parked,
    weigh,
)
from everwarm.state.tree import Checkpoint, Node, Segment, Tree
from everwarm.types import START, SeqId


class Grove:
    """A tree made by hand, and questions about its entries."""

    def __init__(self) -> None:
        self.tree = Tree()

    def node(self, *items: int) -> Node:
        return self.tree.grow(self.tree.root(""), Prompt.of_tokens(items), len(items))

    def state(self, *items: int, kind: CutKind = CutKind.BOUNDARY, n_bytes: int = 1000, **more: float) -> Node:
        node = self.node(*items)
        self.tree.set_checkpoint(node, Checkpoint(kind, True, (), state=np.zeros(n_bytes, np.uint8), **more))
        return node

    def kv(self, *items: int, n_bytes: int = 100) -> Node:
        node = self.node(*items)
        self.tree.set_segment(node, Segment(np.zeros(n_bytes, np.uint8), node.parent.mark, node.mark, True))
        return node

    def shared(self, *items: int, n_bytes: int) -> None:
        """One segment from the root to there."""
        node = self.node(*items)
        self.tree.set_segment(node, Segment(np.zeros(n_bytes, np.uint8), START, node.mark, True))

    def weigh(
        self,
        *,
        resident: tuple[Node, ...] = (),
        checkpoints: bool = True,
        kv: bool = True,
        expected: dict[int, float] | None = None,
        awaited: frozenset[int] = frozenset(),
    ) -> list[Entry]:
        self.nodes = list(self.tree.nodes())
        resident_ids = frozenset(map(id, resident))
        facts = WeighingFacts(1000.0, 0.5, checkpoints, kv, resident_ids, expected or {}, assumed_returns, awaited)
        return weigh(self.nodes, facts)

    def of(self, node: Node, entries: list[Entry], *, segment: bool = False) -> Entry | None:
        key = 2 * self.nodes.index(node) + segment
        return next((entry for entry in entries if entry.key == key), None)


def test_a_state_is_worth_the_way_from_the_nearest_state_above():
    grove = Grove()
    grove.kv(1, 2)
    upper = grove.state(1, 2)
    grove.kv(1, 2, 3, 4, 5)
    lower = grove.state(1, 2, 3, 4, 5, used_at=990.0, hits=3)
    entries = grove.weigh()
    assert grove.of(upper, entries).seconds_saved == 1.0
    entry = grove.of(lower, entries)
    assert (entry.seconds_saved, entry.age_s, entry.size_bytes) == (1.5, 10.0, 1000)


def test_a_state_whose_kv_lineage_is_broken_is_stranded():
    grove = Grove()
    upper = grove.state(1, 2)  # no KV
    grove.kv(1, 2, 3)
    lower = grove.state(1, 2, 3)
    entries = grove.weigh()
    assert grove.of(upper, entries).stranded and grove.of(lower, entries).stranded
    entries = grove.weigh(resident=(upper,))  # the control: the device has what is missing
    assert not grove.of(upper, entries).stranded and not grove.of(lower, entries).stranded
    entries = grove.weigh(kv=False)
    assert not grove.of(lower, entries).stranded


def test_returns_are_those_expected_and_else_assumed_of_ends_and_of_what_was_used_before():
    grove = Grove()
    inside, junction = grove.state(1), grove.state(1, 2)
    left, right = grove.state(1, 2, 3, hits=2), grove.state(1, 2, 4)
    entries = grove.weigh(kv=False, expected={right.id: 0.5})
    assumed = [assumed_returns(hits, 1000.0) for hits in (0, 2)]
    found = [grove.of(node, entries).returns for node in (inside, junction, left, right)]
    assert found == [0.0, *assumed, 0.5]


def test_after_a_restart_a_beginning_that_many_share_goes_last():
    grove = Grove()
    shared = grove.state(*range(50))
    ends = [grove.state(*range(50), 100 + i, 200 + i) for i in range(10)]
    entries = grove.weigh(kv=False)
    order = victims(entries, 10**9)
    assert order[-1] == grove.of(shared, entries).key and len(order) == len(ends) + 1


def test_what_a_suspended_request_continues_from_goes_after_the_rest():
    grove = Grove()
    awaited, other = grove.state(1, 2, used_at=0.0), grove.state(3, 4, 5, used_at=999.0, hits=9)
    entries = grove.weigh(kv=False)
    assert victims(entries, 1) == [grove.of(awaited, entries).key]  # the control: it is worth less
    entries = grove.weigh(kv=False, awaited=frozenset([awaited.id]))
    assert victims(entries, 1) == [grove.of(other, entries).key]


def test_a_state_leans_on_the_nearest_above_and_takes_its_own_kv_with_it():
    grove = Grove()
    grove.kv(1, n_bytes=10)
    upper = grove.state(1)
    grove.kv(1, 2, n_bytes=20)
    grove.kv(1, 2, 3, n_bytes=40)
    lower = grove.state(1, 2, 3)
    entries = grove.weigh()
    assert (grove.of(upper, entries).above, grove.of(upper, entries).kv_bytes) == (None, 10)
    assert (grove.of(lower, entries).above, grove.of(lower, entries).kv_bytes) == (grove.of(upper, entries).key, 60)


def test_pinned_entries_are_not_weighed_at_all():
    grove = Grove()
    grove.kv(1, 2)
    node = grove.state(1, 2)
    with grove.tree.pinned(node):
        assert grove.weigh() == []
    assert len(grove.weigh()) == 1


def test_a_segment_goes_only_when_no_state_in_ram_needs_it():
    grove = Grove()
    needed, useless = grove.kv(1), grove.kv(9, 9)
    grove.kv(1, 2)
    grove.state(1, 2)
    entries = grove.weigh()
    assert grove.of(needed, entries, segment=True) is None
    assert grove.of(useless, entries, segment=True).stranded


def test_a_parked_checkpoint_alone_needs_no_segment():
    grove = Grove()
    node = grove.kv(1)
    grove.tree.set_checkpoint(node, Checkpoint(CutKind.BOUNDARY, True, (), parked=SeqId(2)))
    assert grove.of(node, grove.weigh(), segment=True).stranded
    assert grove.of(node, grove.weigh()) is None  # nothing of it is in RAM


# what the device holds as well


def test_a_copy_of_a_parked_state_is_worth_little():
    grove = Grove()
    alone, parked = grove.state(1, 2, 3), grove.state(7, 8, 9, parked=SeqId(3))
    for node in (grove.kv(1, 2, 3), grove.kv(7, 8, 9)):
        assert node.segment is not None
    entries = grove.weigh(expected={alone.id: 0.4, parked.id: 0.4}, resident=(parked,))
    values = [grove.of(node, entries).returns for node in (alone, parked)]
    assert values == [0.4, COPIED * 0.4]


def test_kv_that_the_device_holds_goes_by_itself_and_is_no_part_of_what_a_state_weighs():
    grove = Grove()
    upper, lower = grove.kv(1, 2), grove.kv(1, 2, 3, 4)
    kept = grove.state(1, 2, 3, 4)
    entries = grove.weigh(resident=(upper, lower), expected={kept.id: 0.4})
    assert grove.of(kept, entries).kv_bytes == 0
    copies = [grove.of(node, entries, segment=True) for node in (upper, lower)]
    assert [copy.returns for copy in copies] == [COPIED * 0.4] * 2 and not any(copy.stranded for copy in copies)
    entries = grove.weigh(resident=(upper,), expected={kept.id: 0.4})
    assert grove.of(kept, entries).kv_bytes == 100, "the control: the device has only a part of it"
    assert grove.of(lower, entries, segment=True) is None


def test_kv_before_a_parked_state_without_a_copy_goes_with_the_next_state_in_ram():
    grove = Grove()
    for items in ((1, 2), (1, 2, 3, 4)):
        grove.kv(*items)
    parked, kept = grove.state(1, 2, parked=SeqId(3)), grove.state(1, 2, 3, 4)
    assert grove.of(kept, grove.weigh()).kv_bytes == 100
    grove.tree.drop_state(parked)
    assert grove.of(kept, grove.weigh()).kv_bytes == 200


def test_a_turn_is_copied_only_if_all_that_would_go_is_worth_less():
    turn, others = Entry(0, 1000, 1 / COPIED, 1.0), [Entry(1, 500, 0.1, 1.0), Entry(2, 500, 2.0, 1.0)]
    assert is_worth_copying(turn, others, 400) and not is_worth_copying(turn, others, 600)


def test_for_plain_attention_segments_go_from_the_end():
    grove = Grove()
    upper, lower, other = grove.kv(1), grove.kv(1, 2), grove.kv(5, 6)
    entries = grove.weigh(checkpoints=False)
    assert grove.of(upper, entries, segment=True) is None
    assert not grove.of(lower, entries, segment=True).stranded
    assert grove.of(other, entries, segment=True).seconds_saved == 1.0


def test_half_of_a_shared_segment_frees_nothing():
    grove = Grove()
    node = grove.kv(1, 2, 3)
    upper = grove.node(1, 2, 9).parent
    entries = grove.weigh(checkpoints=False)
    assert grove.of(node, entries, segment=True) is None
    assert grove.of(upper, entries, segment=True).size_bytes == 100  # both halves go together
    grove.kv(1, 2, 9)
    entries = grove.weigh(checkpoints=False)
    assert grove.of(upper, entries, segment=True) is None  # somebody else's KV lies behind it
    assert grove.of(node, entries, segment=True).size_bytes == 0


def test_kv_that_several_states_share_goes_with_the_first_of_them():
    grove = Grove()
    ends = [grove.state(1), grove.state(1, 2), grove.state(1, 2, 3)]
    grove.shared(1, 2, 3, n_bytes=500)
    entries = grove.weigh()
    assert [grove.of(node, entries).kv_bytes for node in ends] == [500, 0, 0]
    other = grove.state(7, used_at=990.0)  # goes last
    grove.kv(7)
    chosen = victims(grove.weigh(), 3500)
    assert len(chosen) == 3 and 2 * grove.nodes.index(other) not in chosen, "the shared KV counts as freed"


def test_kv_that_nobody_needs_counts_once_whoever_uses_it():
    grove = Grove()
    nodes = [grove.node(1), grove.node(1, 2), grove.node(1, 2, 3)]
    grove.shared(1, 2, 3, n_bytes=500)
    [entry] = grove.weigh()
    assert entry.stranded and entry.size_bytes == 500 and grove.nodes[entry.key // 2] is nodes[0]
    grove.tree.drop_segment(nodes[0])
    assert grove.tree.ram_bytes == 0 and not list(grove.tree.root("").children)


def test_stranded_states_are_the_first_victims_and_ends_of_conversations_the_last():
    grove = Grove()
    grove.kv(1)
    middle = grove.state(1, used_at=990.0)
    grove.kv(1, 2)
    end = grove.state(1, 2, used_at=990.0)
    stranded = grove.state(7, 8, 9, 9, 9, 9, 9)
    chosen = victims(grove.weigh(), 10**9)
    states = [grove.nodes[key // 2] for key in chosen if key % 2 == 0]
    assert states == [stranded, middle, end]


def test_weighing_changes_nothing():
    grove = Grove()
    grove.kv(1)
    grove.state(1)
    before = grove.tree.ram_bytes
    grove.weigh()
    grove.tree.check()
    assert grove.tree.ram_bytes == before


# large trees


def many(n_conversations: int, n_cuts: int = 8) -> Grove:
    """Conversations of some checkpoints with KV, half of them with a beginning in common."""
    grove = Grove()
    for i in range(n_conversations):
        first = 999 if i % 2 else 10_000_000 + i
        items = [first, *(1000 * i + k for k in range(1, 2 * n_cuts))]
        for n in range(2, 2 * n_cuts + 1, 2):
            grove.kv(*items[:n], n_bytes=10)
            grove.state(*items[:n], n_bytes=10, used_at=float(i % 900))
    return grove


def plain_scales(**more) -> WeighingFacts:
    return WeighingFacts(1000.0, 0.5, True, True, frozenset(), more.pop("expected", {}), assumed_returns, **more)


def test_a_small_tree_is_weighed_as_a_whole():
    grove = many(10)
    part = Hand(grove.tree).part()
    assert part.is_whole and part.nodes == list(grove.tree.nodes()) and part.share(10**9, []) == 10**9


@pytest.mark.parametrize("n_conversations", [200, 1500])
def test_a_sweep_of_a_large_tree_looks_at_as_many_nodes_whatever_its_size(monkeypatch, n_conversations):
    grove = many(n_conversations)
    hand, n_looked, below = Hand(grove.tree), 0, Node.below

    def counted(node: Node) -> Iterator[Node]:
        nonlocal n_looked
        for each in below(node):
            n_looked += 1
            yield each

    monkeypatch.setattr(Node, "below", counted)
    for _ in range(5):
        before = n_looked
        part = hand.part()
        entries = weigh(part.nodes, plain_scales())
        choice = choose(entries, part.share(10**9, entries), N_LEAST)
        hand.note_least(part.nodes[key // 2] for key in choice.next_keys)
        assert not part.is_whole and MAX_WEIGHED <= len(part.nodes) < MAX_WEIGHED + MAX_BRANCH
        assert n_looked - before < 16 * MAX_WEIGHED and 0 < len(choice.keys) < MAX_WEIGHED / 4


def test_a_part_is_weighed_as_it_is_within_the_whole():
    grove = many(300)
    whole = grove.weigh()
    part = Hand(grove.tree).part()
    entries = weigh(part.nodes, plain_scales())
    assert len(entries) > MAX_WEIGHED / 2
    for entry in entries:
        other = grove.of(part.nodes[entry.key // 2], whole, segment=entry.key % 2 == 1)
        assert entry._replace(key=0, above=None) == other._replace(key=0, above=None)


def test_rounds_reach_every_node_that_may_be_evicted():
    grove = many(200)
    hand, seen = Hand(grove.tree), set()
    for _ in range(2 * hand.n_parts + 2):
        seen.update(map(id, hand.part().nodes))
    assert seen >= {id(node) for node in grove.tree.nodes() if node.checkpoint is not None}


def test_rounds_go_on_while_nodes_come_and_go():
    grove, rng = many(200), random.Random(1)
    hand = Hand(grove.tree)
    for i in range(60):
        part = hand.part(grove.tree.root("") if i % 3 == 0 else None)
        assert part.nodes and all(map(grove.tree.has, part.nodes))
        for node in [node for node in part.nodes if node.checkpoint is not None and rng.random() < 0.1]:
            grove.tree.drop_checkpoint(node)
        grove.state(7, i, i + 1)
        hand.note_least(part.nodes[:N_LEAST])
    grove.tree.check()


def test_parts_give_up_what_is_worth_least_in_the_whole():
    """A tenth of the conversations is expected to come back: nearly all survive when two thirds of everything go."""
    grove = many(200)
    ends = [node for node in grove.tree.nodes() if node.checkpoint is not None and not node.children]
    awaited = ends[::10]
    expected = {node.id: 100.0 for node in awaited}
    sweep_until(grove, Hand(grove.tree), grove.tree.ram_bytes // 3, expected, ends[0])
    assert sum(node.checkpoint is not None for node in awaited) >= 0.95 * len(awaited)
    assert sum(node.checkpoint is not None for node in ends) < 0.8 * len(ends), "the control: much is gone"


def test_a_large_branch_is_not_weighed_alone():
    """A part always gives something up: of a branch that was a part by itself, its only state, whatever that was worth."""
    grove = many(200)
    long = [5_000_000, *range(5_000_001, 5_000_000 + MAX_BRANCH + 20)]
    for n in range(1, len(long) + 1):
        grove.kv(*long[:n], n_bytes=10)
    end = grove.state(*long, n_bytes=10)
    hand, goal = Hand(grove.tree), grove.tree.ram_bytes // 2
    n_met = sweep_until(grove, hand, goal, {end.id: 100.0}, end)
    assert n_met > 1 and end.checkpoint is not None


def sweep_until(grove: Grove, hand: Hand, goal: int, expected: dict[int, float], watched: Node) -> int:
    """Evicts as RAM does; returns in how many parts the watched node was."""
    n_met = 0
    while grove.tree.ram_bytes > goal:
        part = hand.part()
        n_met += watched in part.nodes
        entries = weigh(part.nodes, plain_scales(expected=expected))
        choice = choose(entries, part.share(grove.tree.ram_bytes - goal, entries), N_LEAST)
        hand.note_least(part.nodes[key // 2] for key in choice.next_keys)
        for key in choice.keys:
            node = part.nodes[key // 2]
            if key % 2 == 0 and node.checkpoint is not None:
                grove.tree.drop_checkpoint(node)
            elif key % 2 and node.segment is not None:
                grove.tree.drop_segment(node)
    return n_met


def test_a_choice_says_what_everything_was_worth_and_what_would_follow():
    entries = [Entry(key, 10, float(key), 1.0) for key in (3, 1, 2, 4)]
    choice = choose(entries, 20, 2)
    assert (choice.keys, choice.worths, choice.next_keys) == ((1, 2), (0.1, 0.2), (3, 4)) and choice.least_kept == 0.3
    assert choose(entries, 100).least_kept is None


# parked states and RAM's


def whole(grove: Grove) -> Part:
    return Part(list(grove.tree.nodes()), is_whole=True)


def parked_beside_ram(parked_returns: float, ram_returns: float, **more) -> tuple[Grove, Node, Node | None]:
    """One parked state of three items without a copy, and one in RAM; the one that a state of 1,000 bytes displaces."""
    grove = Grove()
    for first in (1, 7):
        grove.kv(first, first + 1, first + 2)
    in_ram, parked = grove.state(1, 2, 3), grove.node(7, 8, 9)
    grove.tree.set_checkpoint(parked, Checkpoint(more.pop("kind", CutKind.STABLE), True, (), parked=SeqId(3)))
    facts = plain_scales(expected={in_ram.id: ram_returns, parked.id: parked_returns}, **more)
    return grove, parked, least_parked([parked], whole(grove), facts, 1000, 0)


def test_a_parked_state_gives_way_if_ram_has_nothing_that_is_worth_less():
    _, parked, least = parked_beside_ram(0.1, 0.4)
    assert least is parked
    assert parked_beside_ram(0.4, 0.1)[2] is None, "the control: RAM gives way"


def test_no_parked_state_gives_way_while_ram_has_room():
    grove, parked, least = parked_beside_ram(0.1, 0.4)
    assert least is parked, "the control"
    assert least_parked([parked], whole(grove), plain_scales(), 1000, 1000) is None


def test_a_parked_state_that_is_not_weighed_stays():
    """In a large tree only a part is weighed, so that it takes as long whatever the size."""
    grove, parked, least = parked_beside_ram(0.1, 0.4)
    assert least is parked, "the control"
    facts = plain_scales(expected={node.id: 0.4 for node in grove.tree.nodes() if node is not parked})
    others = [node for node in grove.tree.nodes() if node is not parked]
    assert least_parked([parked], Part([*others, parked], is_whole=False), facts, 1000, 0) is parked
    assert least_parked([parked], Part(others, is_whole=False), facts, 1000, 0) is None


def test_a_parked_state_that_a_suspended_request_goes_on_from_never_gives_way():
    assert parked_beside_ram(0.1, 0.4, kind=CutKind.CANCEL)[2] is None
    grove, parked, least = parked_beside_ram(0.1, 0.4)
    assert least is parked, "the control"
    awaited = plain_scales(awaited=frozenset([parked.id]))
    assert least_parked([parked], whole(grove), awaited, 1000, 0) is None


def test_what_the_disk_gives_back_soon_is_missed_little():
    """Twice the returns are worth less if what they take from the disk comes at once."""
    assert parked_beside_ram(0.8, 0.4)[2] is None
    _, parked, least = parked_beside_ram(0.8, 0.4, load_s=lambda node, _: 0.01 if node.path.codes[0] == 7 else None)
    assert least is parked
