"""How long drafts are: from what was accepted and what a step costs. No clock, no model."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from bench.acceptance import N_DRAFT
from bench.pacing import MACHINES, tokens_per_s

from everwarm.engine.speculation.draft_length import (
    LOOK_SHARE,
    N_CAUTIOUS,
    N_SHORT,
    ONE_KIND,
    TRY_AFTER,
    Pacing,
    Record,
    StepShape,
    best_length,
)
from everwarm.engine.speculation.lookup import (
    _ALL_AGREE,
    _MIN_OTHER,
    _N_AGREEMENTS,
    _NO_OTHER,
    _SOME_DIFFER,
    MAX_MATCH,
    MIN_MATCH,
    MOST_FAR,
    MOST_OTHERS,
    WINDOW,
    SuffixLookup,
    longest_match,
)
from everwarm.engine.speculation.speculator import _promise
from everwarm.engine.speculation.step_cost import N_SLOW, SLOPE, StepCost
from support.drafts import draft_of

ALONE = StepShape(n_rows=1, n_replies=1, n_cut=0, overhead_s=0.0)


def cost(slope: float):
    return lambda rows: 1.0 + slope * (rows - 1)


def tokens(*codes: int) -> np.ndarray:
    return np.array(codes, np.int32)


def test_what_costs_nothing_is_verified_whole_and_what_costs_as_much_as_decoding_is_not():
    assert best_length([0.9] * 8, ALONE, cost(0.0)) == 8
    assert best_length([0.9] * 8, ALONE, cost(1.0)) == 0


def test_unlikely_drafts_are_passed_over_and_likely_ones_are_longer():
    lengths = [best_length([chance] * 16, ALONE, cost(0.1)) for chance in (0.05, 0.5, 0.8, 0.95)]
    assert lengths[0] == 0 and lengths == sorted(lengths) and lengths[-1] > 2 * lengths[1]


def test_where_memory_is_cut_drafts_may_be_longer_because_nothing_is_decoded_again():
    cut = StepShape(1, 1, n_cut=inf, overhead_s=0.0)
    assert best_length([0.7] * 16, cut, cost(0.15)) >= best_length([0.7] * 16, ALONE, cost(0.15)) > 0


def test_beside_many_replies_a_row_must_bring_more():
    """With 32 rows a step is already as good as it gets: another row costs its full price."""
    crowded = StepShape(32, 32, n_cut=inf, overhead_s=0.0)
    assert best_length([0.5] * 4, crowded, lambda rows: rows) == 0


def test_the_overhead_of_verifying_counts():
    slow = StepShape(1, 1, n_cut=inf, overhead_s=5.0)
    assert best_length([0.9] * 4, slow, cost(0.05)) == 0


def test_a_doubtful_token_ends_a_draft_before_it():
    chances = [0.95, 0.95, 0.2, 0.95, 0.95]
    assert best_length(chances, ALONE, cost(0.1)) == 2
    chances[2] = 0.95
    assert best_length(chances, ALONE, cost(0.1)) == 5, "the control"


@pytest.mark.parametrize("accepted", [0, 4])
def test_a_record_moves_the_chance_to_what_was_seen(accepted):
    kind, other = 7, 8
    everyone = Record()
    record = Record(above=everyone)
    before = record.chance("lookup", kind, 0.5)
    for _ in range(8):
        record.note("lookup", [kind] * 4, accepted)
    after = record.chance("lookup", kind, 0.5)
    assert abs(after - accepted / 4) < 0.25 < abs(before - accepted / 4)
    assert record.chance("lookup", other, 0.5) == record.chance("tree", kind, 0.5) == 0.5
    assert Record(above=everyone).chance("lookup", kind, 0.5) != 0.5  # the next request knows it, too


def test_each_kind_of_token_has_its_own_record():
    """Of a draft whose last compared token was wrong: the kinds before it were right."""
    record, proposal = Record(above=Record()), draft_of([1, 2, 3, 4], 0.5)._replace(kinds=np.array([1, 1, 2, 3]))
    for _ in range(20):
        record.note(proposal.source, proposal.kinds[:3].tolist(), 2)
    first, second, third, fourth = record.chances(proposal, 4)
    assert first == second > 0.9 and third < 0.2 and fourth == 0.5


def test_what_a_reply_says_by_itself_shows_whether_a_passed_draft_was_right():
    record, proposal = Record(above=Record()), draft_of([5, 6, 7], 0.5)
    for token in (5, 6):  # right, and wrong
        for n in range(1, 30):
            record.pass_over(proposal, n)
            record.learn_from_passed(np.array([1] * n, np.int32))  # nothing was written since
            record.pass_over(proposal, n)
            record.learn_from_passed(np.array([1] * n + [token], np.int32))
            record.learn_from_passed(np.array([1] * n + [token], np.int32))  # it was learned from
        chance = record.chance(proposal.source, ONE_KIND, 0.5)
        assert chance > 0.85 if token == 5 else chance < 0.15
        assert (Record(above=record.above).chance(proposal.source, ONE_KIND, 0.5) > 0.5) == (token == 5)
        record = Record(above=Record())


def test_a_text_that_became_shorter_says_nothing_of_what_was_passed_over():
    """Its context was shifted: what stands at the draft's place later is another text."""
    record = Record(above=Record())
    record.pass_over(draft_of([5, 6], 0.5), 20)
    record.learn_from_passed(tokens(*[5] * 10))
    record.learn_from_passed(tokens(*[5] * 30))
    assert record.chance("scripted", ONE_KIND, 0.5) == 0.5
    record.pass_over(draft_of([5, 6], 0.5), 20)
    record.learn_from_passed(tokens(*[5] * 30))
    assert record.chance("scripted", ONE_KIND, 0.5) > 0.5, "the control"


def test_where_drafts_are_alike_one_token_says_more_of_a_head_than_of_a_kind_of_lookup():
    everyone = Record(is_steady=True)
    for kind in (ONE_KIND, 7):
        Record(above=everyone).note("any", [kind], 0)
    assert everyone.chance("any", ONE_KIND, 0.8) == pytest.approx(0.4)
    assert everyone.chance("any", 7, 0.8) == pytest.approx(0.64)


def test_the_beginning_of_a_proposal_is_one():
    first = draft_of([5, 6, 7], 0.5)._replace(confidences=np.array([0.1, 0.2, 0.3]), kinds=np.array([1, 2, 3])).first(2)
    assert (first.tokens.tolist(), first.confidences.tolist(), first.kinds.tolist()) == ([5, 6], [0.1, 0.2], [1, 2])


def test_of_two_drafts_the_one_with_more_tokens_that_are_likely_right_promises_more():
    short, long = draft_of([1, 2], 0.9), draft_of(range(8), 0.5)
    assert _promise(short) == pytest.approx(0.9 + 0.81) and _promise(long) < 1.0
    doubtful = long._replace(confidences=np.array([0.5, *[0.99] * 7]))
    assert _promise(long) < _promise(short) < _promise(doubtful)


def test_passed_over_for_long_a_draft_is_tried_again():
    pacing, record = Pacing(), Record()
    for _ in range(50):
        pacing.cost.learn(1, 1.0)
        pacing.cost.learn(3, 3.0)
    proposal = draft_of([1, 2, 3], 0.4)
    lengths = [pacing.length(proposal, record, ALONE) for _ in range(TRY_AFTER)]
    assert set(lengths[:-1]) == {0} and lengths[-1] == 2
    pacing.judge(proposal, record, 2, 0)
    assert pacing.length(proposal, record, ALONE) == 0


def test_looking_takes_a_small_share_of_short_steps():
    pacing = Pacing()
    pacing.cost.learn(1, 1e-3)
    for _ in range(200):
        pacing.has_looked(1e-4, has_found=False)
    looked = sum(pacing.may_look(1) for _ in range(1000))
    assert looked * 1e-4 / (1000 * 1e-3) * 1000 >= 1 and looked * 1e-4 <= 1.1 * LOOK_SHARE * 1000 * 1e-3


def test_the_cost_of_steps_is_learned_by_rows():
    known = StepCost()
    assert known.seconds(1) is None
    known.learn(1, 1.0)
    assert known.seconds(5) == pytest.approx(1 + 4 * SLOPE)
    for _ in range(100):
        known.learn(5, 2.0)
    assert known.seconds(5) == pytest.approx(2.0, rel=0.01)
    assert known.seconds(3) == pytest.approx(1.5, rel=0.01)
    assert known.seconds(9) == pytest.approx(2.0 + 4 * SLOPE, rel=0.02), "the slope so far is 0.25"
    known.learn(5, 100.0)  # disturbed
    assert known.seconds(5) < 2.5


def test_rows_beyond_those_measured_cost_what_rows_of_prompts_do():
    known = StepCost()
    known.learn_reading(512, 200.0)
    known.learn_reading(8, 100.0)  # too short to tell
    known.learn(1, 1.0)
    for _ in range(50):
        known.learn(2, 2.6)
    assert known.seconds(18) == pytest.approx(2.6 + 16 * 200 / 512, rel=0.02)


def test_a_dear_second_row_does_not_keep_long_drafts_from_being_tried():
    """As on a CPU, where two rows take longer than two decodes, and 24 as long as twelve."""
    pacing, record = Pacing(), Record()
    for _ in range(20):
        pacing.cost.learn(1, 1.0)
        pacing.cost.learn(2, 2.6)
    sure = draft_of(range(32), 0.98)
    assert pacing.length(sure, record, ALONE) == N_CAUTIOUS
    assert pacing.length(draft_of(range(32), 0.4), record, ALONE) == 0, "the control: what is not sure is not tried"
    for _ in range(20):
        for n_rows in range(2, 34):
            pacing.cost.learn(n_rows, 2.0 * n_rows)
    assert pacing.length(sure, record, ALONE) == 0, "measured, and not worth it"


def test_the_first_drafts_of_a_request_are_short():
    """Chances are those of other texts, and a long draft that is wrong is dear."""
    record = Record()
    assert record.n_most == N_CAUTIOUS
    record.grow(N_CAUTIOUS, N_CAUTIOUS)
    assert record.n_most == 2 * N_CAUTIOUS
    record.grow(3, 3)
    assert record.n_most == 2 * N_CAUTIOUS, "a shorter one says nothing of longer ones"
    for _ in range(8):
        record.grow(N_CAUTIOUS, 1)
    assert record.n_most == N_SHORT < N_CAUTIOUS


def test_where_looking_pays_every_step_looks():
    pacing, record = Pacing(), Record()
    pacing.cost.learn(1, 1e-3)
    pacing.cost.learn(9, 2e-3)
    proposal = draft_of(range(8), 0.9)
    for _ in range(50):
        pacing.has_looked(1e-4, has_found=False)
    assert sum(pacing.may_look(1) for _ in range(20)) <= 1
    pacing.judge(proposal._replace(is_computed=True), record, 8, 8)
    assert sum(pacing.may_look(1) for _ in range(20)) <= 1, "what was computed says nothing about looking"
    pacing.judge(proposal, record, 8, 8)
    assert all(pacing.may_look(1) for _ in range(20))
    for _ in range(100):
        pacing.has_looked(1e-4, has_found=False)
    assert sum(pacing.may_look(1) for _ in range(20)) <= 1


# the lookup


def own_match(history: np.ndarray) -> tuple[int, int] | None:
    found = longest_match(history, history)
    return None if found is None else (found.at, found.n_same)


def test_a_text_that_is_shorter_than_the_longest_match_is_searched_to_its_beginning():
    """As texts of other conversations are: the match ends two tokens into a text of 21."""
    text = np.array([7, 8, *range(100, 119)])
    history = np.array([*range(200, 240), 7, 8])
    found = longest_match(text, history)
    assert found is not None and (found.at, found.n_same) == (2, 2)


def test_the_longest_match_wins_and_of_equals_the_latest():
    assert own_match(tokens(1, 2, 3, 9, 2, 3, 8, 1, 2, 3)) == (3, 3)
    assert own_match(tokens(2, 3, 7, 2, 3, 8, 2, 3)) == (5, 2)


def test_of_long_matches_the_longest_wins_too():
    passage = list(range(100, 200))
    history = tokens(*passage, 1, *passage[20:], 2, *passage)
    assert own_match(history) == (100, 100), "the later place has only 80 tokens of it"


def test_of_many_long_matches_only_the_last_are_compared_to_their_beginning():
    passage = list(range(100, 200))
    for n_later, n_same in ((MOST_FAR - 1, 100), (MOST_FAR, 40)):
        later = [code for i in range(n_later) for code in (i, *passage[60:])]
        found = own_match(tokens(*passage, *later, 99, *passage))
        assert found is not None and found[1] == n_same


@pytest.mark.parametrize("history", [(), (5,), (5, 6), (5, 5), (5, 6, 7, 5), (1, 2, 3, 4)])
def test_too_short_a_match_proposes_nothing(history):
    assert SuffixLookup().propose(tokens(*history), 4, "") is None


@pytest.mark.parametrize(
    ("history", "drafted"),
    [((5, 5, 5), [5] * 7), ((1, 2, 3, 1, 2, 3, 1, 2, 3), [1, 2, 3, 1, 2, 3, 1]), ((4, 5, 4, 5), [4, 5, 4, 5, 4, 5, 4])],
)
def test_a_text_that_repeats_itself_is_continued_beyond_its_end(history, drafted):
    found = SuffixLookup().propose(tokens(*history), 7, "")
    assert found is not None and found.tokens.tolist() == drafted
    assert len(found.confidences) == len(found.kinds) == 7


def test_an_image_is_no_part_of_a_draft():
    image = -77
    found = SuffixLookup().propose(tokens(1, 2, 3, 8, 9, image, 4, 1, 2, 3), 5, "")
    assert found is not None and found.tokens.tolist() == [8, 9] and len(found.kinds) == 2
    assert SuffixLookup().propose(tokens(1, 2, 3, image, 4, 1, 2, 3), 5, "") is None
    found = SuffixLookup().propose(tokens(2, 3, 8, 1, 2, 3, image, 4, 1, 2, 3), 1, "")
    assert found is not None and found.tokens.tolist() == [8], "a shorter match that goes on with a token"


@pytest.mark.parametrize("period", [1, 2, 40])
def test_a_search_is_bounded_in_a_text_that_repeats_itself(period):
    history = (np.arange(WINDOW + 100) % period).astype(np.int32)
    found = longest_match(history, history)
    assert found is not None and found.n_same == MAX_MATCH and len(found.others) == MOST_OTHERS
    proposal = SuffixLookup().propose(history, 32, "")
    assert proposal is not None and proposal.tokens.tolist() == [(len(history) + i) % period for i in range(32)]
    assert proposal.confidences.min() > 0.99


def confidences(*history: int, n: int = 1) -> list[float]:
    found = SuffixLookup().propose(tokens(*history), n, "")
    assert found is not None and len(found.tokens) == n
    return found.confidences.tolist()


def test_the_more_of_the_text_before_a_token_is_the_same_the_surer_it_is():
    passage = list(range(100, 160))
    found = [confidences(*passage, 1, *passage[20 - n : 20])[0] for n in range(MIN_MATCH, 20)]
    assert found == sorted(found) and found[0] < found[-1] < 1.0
    along = confidences(*passage, 1, *passage[:4], n=30)
    assert along == sorted(along) and along[0] < along[-1] < 1.0


def test_where_other_places_go_on_differently_a_token_is_less_sure():
    same, parted = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8]
    alone = confidences(*same, 0, *same[:5], n=2)
    agreed = confidences(*same, 9, *same, 0, *same[:5], n=2)
    doubtful = confidences(*parted, 9, *same, 0, *same[:5], n=2)
    assert alone[0] < agreed[0] == doubtful[0] and doubtful[1] < alone[1] < agreed[1]


def test_a_match_is_what_a_plain_search_finds():
    for history in random_histories(200):
        assert own_match(history) == searched(history.tolist())


def test_whether_other_places_agree_is_what_a_plain_search_finds():
    seen: dict[int, int] = {}
    for history in random_histories(400):
        proposal = SuffixLookup().propose(history, 9, "")
        if proposal is not None:
            found = (proposal.kinds % _N_AGREEMENTS).tolist()
            assert found == agreements(history.tolist(), proposal.tokens.tolist())
            seen |= {agreement: seen.get(agreement, 0) + 1 for agreement in found}
    assert min(seen[agreement] for agreement in (_NO_OTHER, _ALL_AGREE, _SOME_DIFFER)) > 20


def random_histories(n: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(3)
    for _ in range(n):
        history = rng.integers(0, 4, rng.integers(1, 40)).astype(np.int32)
        if rng.random() < 0.5:  # matches of more than NEAR tokens
            history = np.concatenate([history, history, history])
        yield history


def agreements(history: list[int], drafted: list[int]) -> list[int]:
    """For each token of a draft, by what stands behind all other places where the text was like this."""
    match = searched(history)
    assert match is not None
    at, n_same = match
    need = min(_MIN_OTHER, n_same)
    places = [i for i in range(need, len(history)) if i != at and history[i - need : i] == history[-need:]]
    found = []
    for i, token in enumerate(drafted):
        nexts = {history[p + i] for p in places if p + i < len(history) and history[p : p + i] == drafted[:i]}
        found.append(_SOME_DIFFER if nexts - {token} else _ALL_AGREE if nexts else _NO_OTHER)
    return found


def searched(history: list[int]) -> tuple[int, int] | None:
    best = None
    for end in range(1, len(history)):
        n = 0
        while n < min(end, MAX_MATCH) and history[end - 1 - n] == history[-1 - n]:
            n += 1
        if n >= MIN_MATCH and (best is None or n >= best[1]):
            best = end, n
    return best


def test_at_first_a_step_with_one_row_is_not_taken_to_cost_more_than_one_with_more():
    known = StepCost()
    known.learn(1, 0.030)  # the engine has just started
    known.learn(4, 0.017)
    assert known.seconds(1) == 0.017
    known.learn(1, 0.014)
    assert 0.014 <= known.seconds(1) < 0.017


def test_later_steps_of_a_short_conversation_say_nothing_of_a_long_one():
    known = StepCost()
    for _ in range(N_SLOW):
        known.learn(1, 0.030)
    known.learn(4, 0.017)  # of the short one
    assert known.seconds(1) == pytest.approx(0.030)


@pytest.mark.parametrize("slow_start", [0.0, 15.0])
def test_text_that_cannot_be_guessed_is_written_plainly_also_after_a_slow_start(slow_start):
    """Every later step was drafted in vain once, because the first plain ones had seemed dear."""
    machine = replace(MACHINES["H200"], slow_start=slow_start)
    speeds = [tokens_per_s(machine, lambda _: 0.0, seed, Pacing(N_DRAFT)) for seed in range(8)]
    plain = 1e3 / machine.one_row
    assert min(min(later) for _, *later in speeds) > 0.94 * plain
