"""What is learned from returns: how soon, from where, and what a checkpoint is worth by that."""

from __future__ import annotations

import random

import numpy as np
import pytest

from everwarm.prompt.prompt import Prompt
from everwarm.state import returns as module
from everwarm.state.policy import CutKind, Spacing
from everwarm.state.returns import GUARD, MAX_VISITS, Continuation, ReturnOutcome, Returns, ReturnTimes
from everwarm.state.tree import Checkpoint, Node, Tree

SPACING = Spacing(32, 2000, 0, 0)


class Grove:
    """A tree, and requests that leave and come back to it."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.returns = Returns(self.tree)
        self.now = 0.0

    def request(self, prompt: list[int], reply: list[int], *, keeps: tuple[int, ...] = (), namespace: str = "") -> Node:
        """Reads a prompt, writes a reply, and keeps states after so many items."""
        self.now += 1.0
        path = Prompt.of_tokens([*prompt, *reply])
        match = self.tree.match(namespace, Prompt.of_tokens(prompt), 0)
        continuation = self.returns.arrive(match, self.now)
        node = self.tree.root(namespace)
        for n_items in sorted({*keeps, len(path)}):
            node = self.tree.grow(node, path, n_items)
            if n_items in keeps and node.checkpoint is None:
                self.tree.set_checkpoint(node, Checkpoint(CutKind.BOUNDARY, True, (), state=np.zeros(8, np.uint8)))
        self.returns.leave(node, len(prompt), continuation)
        return node

    def expected(self, *, anywhere: bool = False) -> dict[int, float]:
        return self.returns.expected([], anywhere=anywhere)


def conversation(number: int, n_turns: int) -> list[int]:
    return [number * 100_000 + i for i in range(100 * n_turns)]


def take_turns(grove: Grove, n_conversations: int, n_rounds: int) -> list[Node]:
    """Conversations that go on one after the other; returns their ends, the oldest first."""
    ends = []
    for turn in range(1, n_rounds + 1):
        ends = [grove.request(conversation(i, turn)[:-20], conversation(i, turn)[-20:]) for i in range(n_conversations)]
    return ends


def test_what_comes_back_in_turn_is_worth_most_shortly_before_its_turn():
    grove = Grove()
    ends = take_turns(grove, 6, 12)
    worths = [grove.returns.worth(end, 1.0) for end in ends]
    assert worths == sorted(worths, reverse=True) and worths[0] > 2 * worths[-1]


def test_what_comes_back_in_bursts_is_worth_most_right_after_its_use():
    grove = Grove()
    ends = []
    rng = random.Random(1)
    for i in range(30):
        for turn in range(1, rng.randrange(2, 12)):
            end = grove.request(conversation(i, turn)[:-20], conversation(i, turn)[-20:])
        ends.append(end)
    assert grove.returns.worth(ends[-1], 1.0) > 5 * grove.returns.worth(ends[-3], 1.0)


def test_what_never_came_back_is_expected_ever_less():
    grove = Grove()
    first = grove.request(conversation(0, 1), [])
    before = grove.returns.worth(first, 1.0)
    for i in range(1, 40):
        grove.request(conversation(i, 1), [])
    assert grove.returns.worth(first, 1.0) < before / 20


def test_a_return_is_expected_where_earlier_ones_resumed():
    """All turns rewrite the last reply: the state before it is worth more than the one after it, and turns that continue
    after the reply are the control."""
    for rewrites in (True, False):
        grove = Grove()
        history: list[int] = []
        for turn in range(20):
            prompt = [*history, *(turn * 1000 + i for i in range(100))]
            reply = [turn * 1000 + 500 + i for i in range(50)]
            keeps = (len(prompt) - 4, len(prompt) + len(reply))
            end = grove.request(prompt, reply, keeps=keeps)
            history = prompt if rewrites else [*prompt, *reply]
        expected = grove.expected()
        before = next(n for n in end.lineage() if n.n_items == keeps[0])
        assert (expected[before.id] > 5 * expected.get(end.id, 0.0)) is rewrites


def test_returns_between_two_kept_points_resume_from_the_upper_one():
    grove = Grove()
    end = grove.request(conversation(0, 10), [], keeps=(500, 996))
    upper = next(n for n in end.lineage() if n.n_items == 500)
    shares = grove.expected()
    lower = next(n for n in end.lineage() if n.n_items == 996)
    assert 0 < shares[upper.id] < shares[lower.id]
    grove.tree.drop_checkpoint(lower)
    assert grove.expected()[upper.id] == pytest.approx(shares[upper.id] + shares[lower.id], rel=1e-6)


def test_plain_attention_resumes_anywhere_so_every_node_above_is_worth_its_returns():
    grove = Grove()
    end = grove.request(conversation(0, 10), [], keeps=(500,))
    shares = grove.expected(anywhere=True)
    values = [shares[node.id] for node in end.lineage()]
    assert values == sorted(values, reverse=True) and values[-1] > 0


def test_a_shared_beginning_that_others_leave_is_worth_their_arrivals():
    grove = Grove()
    head = list(range(1000))
    kept = 1000
    for i in range(10):
        end = grove.request([*head, *conversation(i + 1, 1)], [], keeps=(kept,))
    junction = next(n for n in end.lineage() if n.n_items == kept)
    alone = grove.request(conversation(99, 10), [], keeps=(500, 1000))
    within = next(n for n in alone.lineage() if n.n_items == 500)
    assert grove.expected()[junction.id] > 3 * grove.expected()[within.id]


def test_cuts_are_learned_where_prompts_are_left():
    grove = Grove()
    assert grove.returns.places(10_000, SPACING) == [], "nothing is known yet"
    history = list(range(5000))
    for turn in range(30):
        prompt = [*history, *(10_000 * (turn + 1) + i for i in range(300))]
        grove.request(prompt, [])
        history = prompt[: len(prompt) - 200]  # each next turn leaves 200 items before the end
    places = grove.returns.places(10_000, SPACING)
    assert places and min(abs(10_000 - at - 200) for at in places) < 64 and all(at <= 9_800 for at in places[:1])


def test_surprises_are_never_ruled_out():
    grove = Grove()
    points = grove.returns.resumed
    for _ in range(500):
        points.note(0)
    assert 0.9 < points.within(GUARD) < 1.0 and points.within(1 << 20) == pytest.approx(1.0)


def test_a_density_is_the_best_of_all_times_to_wait():
    times = ReturnTimes((0.1,))
    for _ in range(200):
        times.note(0, 8, returned=True)
    times.refresh(1, [])
    assert times.density(0, 4) < times.density(0, 7) and times.density(0, 8) > 0.2
    times = ReturnTimes((0.1,))
    for _ in range(200):
        times.note(0, 8, returned=False)
    times.refresh(1, [])
    assert times.density(0, 1) < 0.01, "the control: nothing came back"


def test_what_is_forgotten_leaves_nothing_behind():
    grove = Grove()
    head = list(range(100))
    ends = [grove.request([*head, *conversation(i + 1, 1)], [], keeps=(100,)) for i in range(3)]
    shared = next(n for n in ends[0].lineage() if n.n_items == 100)
    assert grove.expected()
    grove.tree.drop_checkpoint(shared)
    grove.returns.forget([shared, *ends])
    assert not grove.tree.by_id and not grove.expected(anywhere=True)


def test_branches_of_which_nothing_is_kept_can_be_forgotten_alone():
    grove = Grove()
    head = list(range(100))
    empty = grove.request([*head, 1, 2], [])
    kept = grove.request([*head, 3, 4], [], keeps=(102,))
    grove.returns.forget_empty(kept.lineage())
    assert empty not in grove.returns.visits and kept in grove.returns.visits
    assert not grove.tree.has(empty) and grove.tree.has(kept)


def test_a_visit_keeps_no_more_than_its_own_items():
    grove = Grove()
    large = np.arange(100_000, dtype=np.int32)
    node = grove.tree.grow(grove.tree.root(""), Prompt(large[:50]), 50)
    assert node.path.codes.base is large  # the control
    grove.returns.leave(node, 50, Continuation())
    assert node.path.codes.base is None and node.path.codes.tolist() == list(range(50))
    grove.tree.check()


def test_turns_of_one_conversation_count_once():
    grove = Grove()
    for turn in range(1, 30):
        grove.request(conversation(0, turn)[:-20], conversation(0, turn)[-20:])
    other = grove.request(conversation(1, 1), [])
    assert grove.returns.n_items == 29 * 100 + 100 and other in grove.returns.visits


def test_what_is_remembered_is_bounded_and_can_be_forgotten(monkeypatch):
    grove = Grove()
    ends = [grove.request(conversation(i, 1), []) for i in range(MAX_VISITS + 10)]
    assert sum(end in grove.returns.visits for end in ends) == MAX_VISITS
    assert len(grove.tree.by_id) == MAX_VISITS + 1, "what is not remembered any more is pruned"
    grove.returns.forget(ends)
    assert not grove.tree.by_id
    monkeypatch.setattr(module, "MAX_ITEMS", 1000)
    ends = [grove.request(conversation(i, 1), []) for i in range(20)]
    assert sum(end in grove.returns.visits for end in ends) == 10
    grove.tree.check()


def test_how_many_turns_step_back_is_counted_among_all_returns():
    """Half of the turns go on after the reply, half of them from the end of the turn before: none leaves elsewhere."""
    grove = Grove()
    history: list[list[int]] = [[]]
    for turn in range(60):
        if turn % 2:
            history.pop()
        prompt = [*history[-1], *(turn * 1000 + i for i in range(100))]
        reply = [turn * 1000 + 500 + i for i in range(50)]
        grove.request(prompt, reply, keeps=(len(prompt) + len(reply),))
        history.append([*prompt, *reply])
    assert grove.returns.share(ReturnOutcome.STEP) == pytest.approx(0.5, abs=0.1)
    end = grove.request([*history[-1], 7, 8, 9], [10], keeps=(len(history[-1]) + 4,))
    back = next(n for n in reversed(end.lineage()) if n.n_items == len(history[-1]))
    expected = grove.expected()
    assert expected[back.id] > 0.25 * expected[end.id], "the end of the turn before serves those that step back"


@pytest.mark.parametrize("chance", [0.05, 0.2, 0.5])
def test_a_density_is_the_chance_per_request_whatever_the_age(chance):
    """What comes back with the same chance at every request has that density at every age."""
    times, rng = ReturnTimes((0.1,)), random.Random(3)
    for _ in range(20_000):
        age = 1
        while rng.random() >= chance:
            age += 1
        times.note(0, age, returned=True)
    times.refresh(1, [])
    ages = [age for age in (1, 2, 3, 4, 5, 8, 13) if (1 - chance) ** age > 0.02]
    assert [times.density(0, age) for age in ages] == pytest.approx([chance] * len(ages), rel=0.15)


def test_every_age_has_a_class_of_its_own_or_shares_one():
    classes = [module._age_class(age) for age in range(1, 8192)]
    assert sorted(set(classes)) == list(range(module.N_AGES)), "no class is without an age"
    assert [classes.count(kind) for kind in range(module.N_AGES)] == module._WIDTHS.tolist()


def test_junctions_that_are_given_up_count_as_not_returned():
    def part_at(grove: Grove, number: int) -> Node:
        ends = [grove.request([*conversation(number, 1), i], [], keeps=(100,)) for i in range(2)]
        return next(n for n in ends[0].lineage() if n.n_items == 100)

    def worth_of_another(grove: Grove) -> float:
        junction = part_at(grove, 99)
        grove.returns.forget(list(grove.returns.visits))  # only what parts there counts
        return grove.expected()[junction.id]

    fresh, tried = Grove(), Grove()
    for number in range(20):
        gone = part_at(tried, number)
        tried.tree.drop_checkpoint(gone)
        tried.returns.forget(list(tried.returns.visits))
    assert worth_of_another(tried) < 0.6 * worth_of_another(fresh)


def test_many_requests_of_one_namespace_do_not_push_out_anothers(monkeypatch):
    grove = Grove()
    few = [grove.request(conversation(i, 1), [], namespace="few") for i in range(5)]
    for i in range(600):
        grove.request([i, 1, 2], [], namespace="many")
    assert all(end in grove.returns.visits for end in few) and len(grove.returns.visits) == MAX_VISITS
    monkeypatch.setattr(module, "MAX_ITEMS", grove.returns.n_items + 900)
    for i in range(5):
        grove.request(conversation(i, 5), [], namespace="large")
    assert sum(visit.root is grove.tree.root("few") for visit in grove.returns.visits.values()) == 5
    grove.tree.check()


def test_what_all_returns_resume_from_is_found_in_one_walk_of_the_tree(monkeypatch):
    """A conversation of 400 turns whose replies are rendered anew: every visit ends on a branch of its own."""
    grove, history, ends = Grove(), [], []
    for turn in range(400):
        prompt = [*history, *(turn * 100 + i for i in range(10))]
        keeps = (len(prompt) - 1,) if turn % 16 == 0 else ()
        ends.append(grove.request(prompt, [turn * 100 + 50], keeps=keeps))
        history = prompt
    walked, nearest = [], module._nearest

    def counted(node: Node, is_it, known) -> Node | None:
        before = len(known)
        found = nearest(node, is_it, known)
        walked.append(1 + len(known) - before)
        return found

    monkeypatch.setattr(module, "_nearest", counted)
    assert grove.expected()
    assert sum(walked) < 8 * len(grove.tree.by_id), "each edge once for checkpoints, once for ends"


@pytest.mark.parametrize("seed", range(4))
def test_returns_to_kept_checkpoints_are_added_up_as_if_one_by_one(seed):
    grove, rng = Grove(), random.Random(seed)
    histories: list[list[int]] = [[]]
    for turn in range(60):
        history = rng.choice(histories)
        kept = rng.randint(0, len(history)) if rng.random() < 0.4 else len(history)
        prompt = [*history[:kept], *(turn * 1000 + i for i in range(rng.randint(1, 900)))]
        keeps = tuple(rng.sample(range(1, len(prompt) + 2), k=min(3, len(prompt))))
        grove.request(prompt, [turn * 1000 + 999], keeps=keeps)
        histories.append([*prompt, turn * 1000 + 999])
    assert grove.expected() == {key: pytest.approx(value) for key, value in slowly(grove.returns).items()}
    branch = set(rng.choice([node for node in grove.tree.nodes() if node.parent is not None]).below())
    part = grove.returns.expected([], anywhere=False, among=branch)
    whole = grove.expected()
    assert {node.id: part.get(node.id, 0.0) for node in branch} == {
        node.id: pytest.approx(whole.get(node.id, 0.0)) for node in branch
    }


def slowly(returns: Returns) -> dict[int, float]:
    """Every lineage from its end up, one node after the other."""
    found: dict[int, float] = {}

    def add(node: Node, amount: float) -> None:
        found[node.id] = found.get(node.id, 0.0) + amount

    stepping, steps = returns.share(ReturnOutcome.STEP), returns._step_shares()
    for visit, density in returns._sources([]):
        n_turns, stepped, served = 0, 0.0, 0.0
        for node in reversed(visit.node.lineage()):
            if node is not visit.node and node in returns.visits:
                n_turns += 1
                stepped += steps[n_turns] if n_turns < module.MAX_STEPS else 0.0
            if node.checkpoint is not None:
                distance, habit = max(-1, visit.n_prompt - node.n_items), visit.habit
                reached = (2 * returns.resumed.within(distance) + sum(d <= distance for d in habit)) / (2 + len(habit))
                add(node, density * (stepping * stepped + (1 - stepping) * (reached - served)))
                stepped, served = 0.0, reached
    for node, junction in returns._junctions.items():
        kept = next((n for n in reversed(node.lineage()) if n.checkpoint is not None), None)
        if kept is not None:
            add(kept, returns._junction_times.density(junction.kind, returns._age(junction.at)))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_returns_to_plain_attention_are_added_up_as_if_one_by_one(seed):
    grove, rng = Grove(), random.Random(seed)
    histories: list[list[int]] = [[]]
    for turn in range(80):
        history = rng.choice(histories)
        prompt = [*history[: rng.randint(0, len(history))], *(turn * 1000 + i for i in range(rng.randint(1, 900)))]
        grove.request(prompt, [turn * 1000 + 999])
        histories.append([*prompt, turn * 1000 + 999])
    returns, one_by_one = grove.returns, dict[int, float]()
    found = grove.expected(anywhere=True)
    for visit, density in returns._sources([]):
        for at in visit.node.lineage():
            share = returns.resumed.within(max(-1, visit.n_prompt - at.start - 1))
            one_by_one[at.id] = one_by_one.get(at.id, 0.0) + density * share
    for node, junction in returns._junctions.items():
        density = returns._junction_times.density(junction.kind, returns._age(junction.at))
        one_by_one[node.id] = one_by_one.get(node.id, 0.0) + density
    assert {key: pytest.approx(value, rel=1e-3) for key, value in one_by_one.items()} == found


def test_a_turn_that_was_read_ahead_returns_to_its_conversation():
    """The next turn as it will be rendered was read ahead: nothing has ended there, but the conversation comes back."""
    grove = Grove()
    prompt = conversation(0, 1)
    grove.request(prompt, [1, 2, 3], keeps=(100,))
    ahead = grove.tree.grow(grove.tree.root(""), Prompt.of_tokens([*prompt, 4, 5, 6]), 103)
    kept = Checkpoint(CutKind.PREWARM, True, (), state=np.zeros(8, np.uint8))
    grove.tree.set_checkpoint(ahead, kept)
    end = grove.request([*prompt, 4, 5, 6, 7, 8], [9])
    assert grove.returns.visits[end].hits == 1
    other = grove.request(conversation(1, 1), [])
    assert grove.returns.visits[other].hits == 0, "the control: another conversation"
