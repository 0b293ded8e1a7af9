"""What to keep: where prompts are cut, which checkpoints are thinned, what is evicted, who sits where."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everwarm.state.policy import (
    GUARD,
    HALF_LIFE_S,
    MAX_BREAKPOINTS,
    NEAR_END,
    SHORT,
    Cut,
    CutKind,
    Entry,
    Seat,
    Spacing,
    assumed_returns,
    cuts,
    has_other_place,
    score,
    seat,
    thin,
    victims,
)
from support.campaign import by_chance

DENSE = Spacing(max_checkpoints=32, every_n_tokens=100, min_tokens=0, min_gap=0)
WORTHLESS = lambda _slot: 0.0  # noqa: E731
END_KINDS = (CutKind.NEAR_END, CutKind.STABLE)

spacings = st.builds(
    Spacing,
    max_checkpoints=st.integers(1, 40),
    every_n_tokens=st.sampled_from([-1, 0, 1, 7, 50, 256]),
    min_tokens=st.sampled_from([0, 0, 5, 64]),
    min_gap=st.sampled_from([0, 0, 3, 64]),
)


@st.composite
def prompts(draw, min_size: int = 0) -> dict:
    n = draw(st.integers(min_size, 700))
    inside = st.integers(-3, n + 3)
    return {
        "n_items": n,
        "boundaries": draw(st.lists(inside, max_size=12)),
        "stable": draw(st.none() | inside),
        "branch": draw(st.none() | inside),
        "stables": draw(st.lists(inside, max_size=3)),
        "n_ubatch": draw(st.sampled_from([1, 32, 512])),
    }


def places(found: tuple[Cut, ...]) -> list[int]:
    return [cut.at for cut in found]


# cuts


@by_chance(100, 3000)
@given(prompts(), spacings)
def test_cuts_lie_inside_the_prompt_and_ascend_without_repeating(prompt, spacing):
    found = places(cuts(spacing=spacing, **prompt))
    assert all(0 < at < prompt["n_items"] for at in found)
    assert all(a < b for a, b in pairwise(found))


@by_chance(100, 3000)
@given(prompts(min_size=2), spacings)
def test_an_identical_prompt_always_finds_a_cut_near_its_end(prompt, spacing):
    found = places(cuts(spacing=spacing, **prompt))
    assert found and prompt["n_items"] - found[-1] <= GUARD


@by_chance(40, 1000)
@given(prompts(), spacings)
def test_zero_checkpoints_means_no_cuts_at_all(prompt, spacing):
    off = Spacing(0, spacing.every_n_tokens, spacing.min_tokens, spacing.min_gap)
    assert cuts(spacing=off, **prompt) == ()


@by_chance(100, 3000)
@given(prompts(), spacings, st.integers(0, 300), st.lists(st.integers(0, 300), max_size=8), st.data())
def test_extending_a_prompt_never_moves_an_earlier_cut(prompt, spacing, n_more, more, data):
    assume(spacing.every_n_tokens > 0)
    n = prompt["n_items"]
    longer = dict(prompt)
    longer["n_items"] = n + n_more
    longer["boundaries"] = [b for b in prompt["boundaries"] if b < n] + [n + b for b in more]
    longer["stable"] = data.draw(st.none() | st.integers(n, n + n_more))
    longer["stables"] = []
    longer["branch"] = data.draw(st.none() | st.integers(n, n + n_more))
    before = steady(cuts(spacing=spacing, **prompt), n)
    after = set(places(cuts(spacing=spacing, **longer)))
    assert before <= after
    steady_after = steady(cuts(spacing=spacing, **longer), n)
    assert steady_after <= set(places(cuts(spacing=spacing, **prompt)))


def steady(found: tuple[Cut, ...], below: int) -> set[int]:
    return {cut.at for cut in found if cut.at < below and cut.kind in (CutKind.EVERY, CutKind.BOUNDARY)}


@by_chance(100, 3000)
@given(prompts(), spacings)
def test_the_first_checkpoint_and_the_gaps_are_honoured_by_all_but_the_end_cuts(prompt, spacing):
    found = cuts(spacing=spacing, **(prompt | {"branch": None}))
    inner = [cut.at for cut in found if cut.kind not in END_KINDS]
    assert all(at >= spacing.min_tokens for at in inner)
    assert all(b - a >= spacing.min_gap for a, b in pairwise([0, *inner]))


@by_chance(70, 2000)
@given(prompts(), spacings)
def test_a_branch_is_not_taken_before_the_first_allowed_token(prompt, spacing):
    found = cuts(spacing=spacing, **prompt)
    assert all(cut.at >= spacing.min_tokens for cut in found if cut.kind is CutKind.BRANCH)


def test_a_branch_is_not_taken_closer_than_the_gap_to_the_cut_before_it():
    spacing = Spacing(32, 256, 64, 64)
    found = cuts(400, spacing, n_ubatch=512, boundaries=[100], branch=110)
    assert 110 not in places(found)


@by_chance(70, 2000)
@given(prompts(min_size=2), spacings)
def test_without_spacing_only_the_end_the_stable_point_and_the_branch_remain(prompt, spacing):
    sparse = Spacing(spacing.max_checkpoints, 0, spacing.min_tokens, spacing.min_gap)
    found = cuts(spacing=sparse, **prompt)
    near = prompt["n_items"] - NEAR_END - prompt["n_ubatch"]
    assert all(cut.at >= near or cut.kind in (CutKind.STABLE, CutKind.BRANCH) for cut in found)
    assert not any(cut.kind is CutKind.EVERY for cut in found)


def test_long_messages_are_cut_evenly_from_their_own_start():
    found = cuts(700, DENSE, n_ubatch=512, boundaries=[250])
    assert places(found) == [100, 200, 250, 350, 450, 550, 650, 696]
    assert [cut.kind for cut in found if cut.at == 250] == [CutKind.BOUNDARY]


def test_no_two_cuts_are_farther_apart_than_the_spacing():
    found = places(cuts(10_000, DENSE, n_ubatch=512, boundaries=[37, 999, 5000]))
    assert max(b - a for a, b in pairwise([0, *found, 10_000])) <= 100


@pytest.mark.parametrize("stable", [1, 50, 380, 399])
def test_the_stable_point_is_always_kept(stable):
    wide = Spacing(1, 8192, 64, 64)
    assert Cut(stable, CutKind.STABLE) in cuts(400, wide, n_ubatch=512, stable=stable)


def test_every_stable_point_is_kept_and_the_last_one_may_guard_the_end():
    wide = Spacing(32, 8192, 64, 64)
    found = cuts(400, wide, n_ubatch=512, stable=90, stables=(90, 100, 395))
    assert found == tuple(Cut(at, CutKind.STABLE) for at in (90, 100, 395))


@by_chance(70, 2000)
@given(prompts(), spacings, st.lists(st.integers(-3, 703), max_size=40))
def test_breakpoints_are_taken_wherever_they_are_and_the_last_ones_count(prompt, spacing, breakpoints):
    n = prompt["n_items"]
    without, found = cuts(spacing=spacing, **prompt), cuts(spacing=spacing, **prompt, breakpoints=breakpoints)
    wanted = sorted({at for at in breakpoints if 0 < at < n})[-MAX_BREAKPOINTS:]
    assert set(places(found)) == set(places(without)) | set(wanted)
    assert sum(cut.kind is CutKind.BREAKPOINT for cut in found) <= MAX_BREAKPOINTS


def test_a_stable_point_close_to_the_end_guards_it_alone():
    found = cuts(400, Spacing(32, 8192, 0, 0), n_ubatch=512, stable=400 - GUARD)
    assert found == (Cut(400 - GUARD, CutKind.STABLE),)
    farther = cuts(400, Spacing(32, 8192, 0, 0), n_ubatch=512, stable=400 - GUARD - 1)
    assert places(farther) == [400 - GUARD - 1, 400 - NEAR_END]


def test_a_short_turn_is_read_in_one_go_from_the_checkpoint_before_it():
    wide = {"spacing": Spacing(32, 8192, 0, 0, n_unguarded=SHORT), "n_ubatch": 512}
    assert cuts(400, **wide, kept=400 - SHORT) == ()
    assert places(cuts(400, Spacing(32, 8192, 0, 0), n_ubatch=512, kept=399)) == [400 - NEAR_END], "not on a GPU"
    assert places(cuts(400, **wide, kept=400 - SHORT - 1)) == [400 - NEAR_END]
    assert places(cuts(40, **wide)) == [40 - NEAR_END], "without a checkpoint before it, it has a guard"
    assert places(cuts(400, **wide, kept=380, stable=390)) == [390], "where next turns differ is cut all the same"


@pytest.mark.parametrize("useless", [0, 400, -1, 401])
def test_a_stable_point_outside_the_prompt_changes_nothing(useless):
    wide = Spacing(32, 8192, 0, 0)
    assert cuts(400, wide, n_ubatch=512, stable=useless) == cuts(400, wide, n_ubatch=512)


def test_a_branch_is_cut_unless_something_is_there_already():
    wide = Spacing(32, 8192, 0, 0)
    assert Cut(123, CutKind.BRANCH) in cuts(400, wide, n_ubatch=512, branch=123)
    assert Cut(123, CutKind.BOUNDARY) in cuts(400, wide, n_ubatch=512, branch=123, boundaries=[123])
    for outside in (0, 400, 500):
        assert places(cuts(400, wide, n_ubatch=512, branch=outside)) == [396]


@pytest.mark.parametrize(("n", "expected"), [(0, []), (1, []), (2, [1]), (4, [1]), (5, [1]), (6, [2]), (31, [27])])
def test_short_prompts_are_cut_too(n, expected):
    assert places(cuts(n, Spacing(32, 256, 0, 0), n_ubatch=512)) == expected


def test_guesses_are_taken_behind_other_cuts_and_joints_only_to_make_them_closer():
    given = {"n_ubatch": 32, "boundaries": (200,), "volatile": (50, 60, 199, 210), "joints": (20, 35, 90, 130, 240)}
    found = {cut.at: cut.kind for cut in cuts(1000, Spacing(32, 300, 0, 0), **given)}
    guesses = [at for at, kind in found.items() if kind is CutKind.GUESS]
    assert guesses == [50, 199], "90 and 130 are less than a third of the spacing behind 50, 210 and 240 near 200"
    assert cuts(1000, Spacing(32, 0, 0, 0), n_ubatch=32, volatile=(50,)) == cuts(
        1000, Spacing(32, 0, 0, 0), n_ubatch=32
    )


@by_chance(60, 2000)
@given(st.lists(st.integers(-3, 700), max_size=12), st.lists(st.integers(-3, 700), max_size=12), st.integers(100, 700))
def test_extending_a_prompt_moves_no_guess(volatile, joints, n_items):
    def guesses(n: int) -> list[int]:
        found = cuts(n, DENSE, n_ubatch=32, volatile=volatile, joints=joints)
        return [cut.at for cut in found if cut.kind is CutKind.GUESS and cut.at < n_items - 2 * NEAR_END]

    assert guesses(n_items) == guesses(n_items + 100)


# thinning

kinds = st.sampled_from(list(CutKind))


@st.composite
def paths(draw) -> list[Cut]:
    ends = sorted(draw(st.sets(st.integers(1, 5000), max_size=60)))
    return [Cut(end, draw(kinds)) for end in ends]


@by_chance(100, 3000)
@given(paths(), st.integers(1, 40))
def test_thinning_leaves_exactly_the_allowed_number(path, most):
    given_up = thin(path, most)
    assert len(given_up) == len(set(given_up)) == max(0, len(path) - most)
    assert set(given_up) <= {kept.at for kept in path}


@by_chance(100, 3000)
@given(paths(), st.integers(1, 40))
def test_thinning_never_takes_the_newest_two_nor_the_last_one(path, most):
    given_up = thin(path, most)
    newest = [kept.at for kept in path[-min(2, most) :]]
    assert not set(newest) & set(given_up)


@by_chance(70, 2000)
@given(paths(), st.integers(2, 40))
def test_boundaries_outlive_evenly_spaced_ones(path, most):
    given_up = set(thin(path, most))
    lost = [kept for kept in path[:-2] if kept.at in given_up]
    survived = [kept for kept in path[:-2] if kept.at not in given_up]
    if any(kept.kind is CutKind.BOUNDARY for kept in lost):
        assert not any(kept.kind is CutKind.EVERY for kept in survived)


def test_nothing_is_thinned_while_there_is_room():
    path = [Cut(n, CutKind.EVERY) for n in (10, 20, 30)]
    assert thin(path, 3) == [] and thin(path, 100) == [] and thin([], 5) == []


def test_a_long_conversation_thinned_as_it_grows_is_spaced_geometrically():
    kept: list[int] = []
    for end in range(100, 100_001, 100):
        kept.append(end)
        kept = [n for n in kept if n not in thin([Cut(n, CutKind.EVERY) for n in kept], 16)]
    gaps = [b - a for a, b in pairwise([0, *kept])]
    assert len(kept) == 16 and kept[-2:] == [99_900, 100_000]
    assert gaps[-1] <= 200 and max(gaps) >= 8_000  # dense at the end, wide at the beginning
    distances = [kept[-1] - n for n in kept[:-2]]
    assert all(far <= 6 * near for far, near in pairwise(distances))  # no hole that would undo the halving


def test_evenly_spaced_thinning_would_fail_the_geometric_test():
    """The control: dropping every other one leaves as wide a hole at the end as at the beginning."""
    evenly = list(range(6250, 100_001, 6250))
    assert evenly[-1] - evenly[-2] > 200


# eviction

entries = st.lists(
    st.builds(
        Entry,
        key=st.integers(0, 10**6),
        size_bytes=st.integers(0, 1000),
        seconds_saved=st.floats(0, 100),
        returns=st.floats(0, 2),
        age_s=st.floats(0, 10_000),
        stranded=st.booleans(),
        pinned=st.booleans(),
        is_ahead=st.just(False),  # the rest as by default
        above=st.none(),
        kv_bytes=st.just(0),
        load_s=st.one_of(st.just(math.inf), st.floats(0.0, 1e3)),  # never less than nothing, and a number
    ),
    max_size=30,
    unique_by=lambda e: e.key,
)


@by_chance(100, 3000)
@given(entries, st.integers(0, 20_000))
def test_victims_free_enough_or_everything(listed, wanted):
    by_key = {e.key: e for e in listed}
    chosen = victims(listed, wanted)
    freed = sum(by_key[key].size_bytes for key in chosen)
    assert len(set(chosen)) == len(chosen)
    assert freed >= wanted or len(chosen) == len(listed)
    if chosen:  # and not one more than needed
        assert freed - by_key[chosen[-1]].size_bytes < max(wanted, 1)


@by_chance(100, 3000)
@given(entries, st.integers(0, 20_000))
def test_stranded_entries_go_first_and_pinned_ones_last(listed, wanted):
    chosen = set(victims(listed, wanted))
    left = [e for e in listed if e.key not in chosen]
    gone = [e for e in listed if e.key in chosen]
    if any(e.stranded for e in left):
        assert all(e.stranded for e in gone)
    if any(not e.pinned and not e.stranded for e in left):
        assert not any(e.pinned and not e.stranded for e in gone)


@by_chance(70, 2000)
@given(entries, st.integers(0, 20_000))
def test_within_a_class_nobody_dies_for_one_worth_less(listed, wanted):
    chosen = set(victims(listed, wanted))
    for stranded in (False, True):
        for pinned in (False, True):
            alike = [e for e in listed if (e.stranded, e.pinned) == (stranded, pinned)]
            gone, left = [e for e in alike if e.key in chosen], [e for e in alike if e.key not in chosen]
            if gone and left:
                assert max(map(score, gone)) <= min(map(score, left))


def test_a_score_rises_with_what_is_saved_and_with_returns_and_falls_with_size():
    base = Entry(1, 1000, 2.0, 0.1)
    better = [Entry(1, 1000, 4.0, 0.1), Entry(1, 1000, 2.0, 0.2), Entry(1, 500, 2.0, 0.1)]
    assert all(score(e) == pytest.approx(2 * score(base)) for e in better)


def test_where_nothing_was_learned_hits_count_and_the_chance_falls_with_the_age():
    assert assumed_returns(1, 100.0) > assumed_returns(0, 100.0)
    assert assumed_returns(0, 200.0 + HALF_LIFE_S) == pytest.approx(assumed_returns(0, 100.0) / 2)


def test_asking_for_nothing_evicts_nothing():
    assert victims([Entry(1, 10, 0.0, 0.0, stranded=True)], 0) == []


# seats


def test_a_request_sits_where_its_own_conversation_is():
    assert seat([Seat(0, 100, 20, 9.0), Seat(1, 100, 90, 1.0), Seat(2, 0, 0, 0.0)], WORTHLESS) == 1


def test_a_small_common_beginning_is_not_worth_throwing_a_long_conversation_out():
    assert seat([Seat(0, 1000, 20, 1.0), Seat(1, 0, 0, 9.0)], WORTHLESS) == 1
    assert seat([Seat(0, 1000, 500, 1.0), Seat(1, 0, 0, 9.0)], WORTHLESS) == 0  # half of it is


def test_a_stranger_takes_an_empty_slot_then_the_one_used_longest_ago():
    assert seat([Seat(0, 50, 0, 1.0), Seat(1, 0, 0, 9.0)], WORTHLESS) == 1
    assert seat([Seat(0, 50, 0, 5.0), Seat(1, 60, 0, 2.0)], WORTHLESS) == 1


def test_a_stranger_takes_the_slot_that_is_least_likely_to_be_continued():
    worth = [0.1, 0.01].__getitem__
    assert seat([Seat(0, 50, 0, 1.0), Seat(1, 60, 0, 9.0)], worth) == 1
    assert seat([Seat(0, 50, 0, 1.0), Seat(1, 6000, 0, 9.0)], worth) == 0, "it would have to be read again"


def test_of_two_equal_conversations_the_shorter_slot_is_taken():
    assert seat([Seat(0, 100, 60, 0.0), Seat(1, 80, 60, 0.0)], WORTHLESS) == 1


def test_a_conversation_leaves_the_device_for_ram_with_room_or_for_a_disk_that_is_much_faster_than_reading():
    assert has_other_place(10, 10, load_s=math.inf, read_s=1.0)
    assert not has_other_place(11, 10, load_s=math.inf, read_s=1.0), "no disk"
    assert has_other_place(11, 10, load_s=0.2, read_s=1.0)
    assert not has_other_place(11, 10, load_s=0.9, read_s=1.0), "loading takes nearly as long"
    assert not has_other_place(11, 10, load_s=2.0, read_s=1.0), "it would never be loaded"
    assert has_other_place(11, 10, load_s=0.0, read_s=0.0), "all is loaded that is there"


def test_what_leans_on_a_victim_is_worth_more_at_once():
    """Four states in a row, each close to the one before: without another look all of them would go before the lone one."""
    chain = [Entry(i, 10, 1.0, 1.0, above=i - 1 if i else None) for i in range(4)]
    lone = Entry(9, 10, 1.5, 1.0)
    assert victims([*chain, lone], 30) == [0, 2, 9]
    apart = [Entry(i, 10, 1.0, 1.0) for i in range(4)]  # the control: nothing leans on anything
    assert victims([*apart, lone], 30) == [0, 1, 2]


def test_the_returns_of_a_victim_resume_from_the_entry_above_it():
    upper, lower = Entry(0, 10, 5.0, 0.1), Entry(1, 10, 0.1, 2.0, above=0)
    other = Entry(2, 10, 2.0, 1.0)
    assert victims([upper, lower, other], 20) == [1, 2], "the upper one is what is left to resume from"
    assert victims([upper, Entry(1, 10, 0.1, 2.0), other], 20) == [1, 0]  # the control: it is not above


def test_kv_goes_only_with_the_last_state_that_needs_it():
    upper, lower = Entry(0, 10, 1.0, 1.0, kv_bytes=100), Entry(1, 10, 5.0, 1.0, above=0, kv_bytes=100)
    assert victims([upper, lower], 10) == [1]  # 110 bytes for 5 seconds are less worth than 10 for 1
    assert victims([upper, lower], 111) == [1, 0]
    assert victims([upper, Entry(1, 10, 50.0, 1.0, above=0, kv_bytes=100)], 11) == [0, 1]
