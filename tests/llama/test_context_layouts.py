"""In company: warm runs stay within what cold runs differ by, and only what can be reproduced is called clean."""

from collections.abc import Callable

import pytest

from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from support.layouts import ALONE, BOUND, CUTS, LAYOUTS, TOKENS, Layout, cold, cold_spread, distance, warm
from support.steps import (
    HYBRIDS,
    KINDS,
    OTHER,
    SLOT,
    SPARE,
    WITH_KV,
    WITHOUT_TRIM,
    go_on,
    load,
    mark,
    open_context,
    read,
    read_to,
    restore,
    same_bits,
    segment_of,
    text,
    wander,
)

ARCHS = tuple(KINDS)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_warm_run_in_company_stays_within_the_spread_of_cold_ones(arch: str, open_tiny: Callable) -> None:
    model = open_tiny(arch)
    alone = cold(model, ALONE)
    for layout in LAYOUTS:
        assert distance(warm(model, layout, alone.saved), alone.rows) <= BOUND * cold_spread(model), layout.name


@pytest.mark.parametrize("arch", ARCHS)
def test_a_state_captured_in_company_stays_within_the_spread_when_alone(arch: str, open_tiny: Callable) -> None:
    model = open_tiny(arch)
    alone = cold(model, ALONE)
    for layout in LAYOUTS:
        rows = warm(model, ALONE, cold(model, layout).saved)
        assert distance(rows, alone.rows) <= BOUND * cold_spread(model), layout.name


@pytest.mark.parametrize("arch", WITH_KV)
def test_the_layout_of_the_cells_shows_in_the_bits(arch: str, open_tiny: Callable) -> None:
    """A negative control for ``is_clean``: there is something for it to tell."""
    runs = [cold(open_tiny(arch), layout).rows for layout in (ALONE, *LAYOUTS) if not layout.same_batch]
    assert not all(same_bits(rows, runs[0]) for rows in runs)


def test_a_purely_recurrent_model_does_not_care_about_company(open_tiny: Callable) -> None:
    assert cold_spread(open_tiny("mamba2")) == 0.0


# clean or not


@pytest.mark.parametrize("arch", ARCHS)
def test_a_sequence_alone_is_clean(arch: str, open_tiny: Callable) -> None:
    assert cold(open_tiny(arch), ALONE).clean


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("arch", WITH_KV)
def test_a_sequence_in_company_is_not_clean(arch: str, layout: Layout, open_tiny: Callable) -> None:
    assert not cold(open_tiny(arch), layout).clean


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_recurrent_sequence_is_clean_unless_batched(layout: Layout, open_tiny: Callable) -> None:
    assert cold(open_tiny("mamba2"), layout).clean == (not layout.same_batch)


@pytest.mark.parametrize("arch", ARCHS)
def test_one_batch_in_company_is_enough_to_be_unclean_for_good(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        read_to(context, SLOT, TOKENS, 30)
        guest = Feed(OTHER, text(1), context.end(OTHER), wants_logits=False)
        context.decode([Feed(SLOT, TOKENS[30:31], context.end(SLOT), wants_logits=False), guest])
        context.drop(OTHER)
        assert not context.is_clean(SLOT)
        read_to(context, SLOT, TOKENS, 60)
        assert not context.is_clean(SLOT)
        context.drop(SLOT)
        read_to(context, SLOT, TOKENS, 60)
        assert context.is_clean(SLOT)


@pytest.mark.parametrize("arch", [*HYBRIDS, "llama"])
def test_a_parked_copy_adds_no_cells_and_so_leaves_the_other_clean(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        read_to(context, SLOT, TOKENS, 30)
        context.park(SLOT, SPARE)
        read_to(context, SLOT, TOKENS, 60)
        assert context.is_clean(SLOT) and context.is_clean(SPARE)
        read_to(context, SPARE, TOKENS, 40)
        assert not context.is_clean(SPARE), "the slot's own 30 cells lie between"


@pytest.mark.parametrize("arch", WITHOUT_TRIM)
def test_an_unclean_state_makes_a_sequence_and_its_parked_copy_unclean(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        saved = read(context, TOKENS, (30,))
        assert context.is_clean(SLOT)
        context.restore(SLOT, saved.state, saved.end, clean=False)
        context.park(SLOT, SPARE)
        assert not context.is_clean(SLOT) and not context.is_clean(SPARE)
        context.restore(SLOT, saved.state, saved.end, clean=True)
        assert context.is_clean(SLOT) and not context.is_clean(SPARE)


@pytest.mark.parametrize("arch", WITH_KV)
def test_an_unclean_state_or_segment_stays_unclean_when_it_comes_back(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        LAYOUTS[1].before(context)
        saved = read(context, TOKENS, CUTS)
        context.drop(OTHER)
        context.drop(SLOT)
        load(context, SLOT, saved)
        assert not saved.clean and not context.is_clean(SLOT)


def come_and_go(context: Context, n: int) -> None:
    """Somebody else uses the context while the slot rests."""
    read_to(context, OTHER, text(n, seed=5), n)
    context.drop(OTHER)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "gemma3"])
def test_a_guest_who_has_left_leaves_no_trace(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        read_to(context, SLOT, TOKENS, 100)
        cold_rows = go_on(context, SLOT, TOKENS)
    with open_context(open_tiny(arch)) as context:
        read_to(context, SLOT, TOKENS, 100)
        come_and_go(context, 150)
        rows = go_on(context, SLOT, TOKENS)
        assert context.is_clean(SLOT)
        assert same_bits(rows, cold_rows)


def test_a_guest_who_has_left_leaves_no_trace_in_a_window_or_it_is_not_clean(open_tiny: Callable) -> None:
    tokens = text(500)
    with open_context(open_tiny("gemma3")) as context:
        read_to(context, SLOT, tokens, 300)
        cold_rows = go_on(context, SLOT, tokens)
    with open_context(open_tiny("gemma3")) as context:
        read_to(context, SLOT, tokens, 300)
        come_and_go(context, 300)
        rows = go_on(context, SLOT, tokens)
        assert same_bits(rows, cold_rows) or not context.is_clean(SLOT)


@pytest.mark.parametrize("arch", ["qwen35", "gemma3", "llama"])
def test_a_segment_that_begins_before_the_splice_is_exact_or_not_clean(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        saved = read(context, TOKENS, (100,))
        whole = segment_of(context, SLOT, mark(0), mark(100))
        cold_rows = go_on(context, SLOT, TOKENS)
        context.keep_kv(SLOT, mark(30))
        context.splice_segment(SLOT, whole.blob, mark(30), mark(100), n_cells=100, clean=True)
        restore(context, SLOT, saved)
        rows = go_on(context, SLOT, TOKENS)
        assert same_bits(rows, cold_rows) or not context.is_clean(SLOT)


@pytest.mark.parametrize("arch", WITH_KV)
def test_a_segment_that_reaches_beyond_the_splice_is_exact(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        saved = read(context, TOKENS, (100,))
        cold_rows = go_on(context, SLOT, TOKENS)
        longer = segment_of(context, SLOT, mark(0), mark(150))
        wander(context)
        context.drop(SLOT)
        context.splice_segment(SLOT, longer.blob, mark(0), mark(100), n_cells=150, clean=True)
        restore(context, SLOT, saved)
        assert context.is_clean(SLOT) and same_bits(go_on(context, SLOT, TOKENS), cold_rows)


@pytest.mark.parametrize("arch", WITH_KV)
def test_what_is_spliced_behind_a_segment_that_reached_too_far_is_exact(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        saved = read(context, TOKENS, (100,))
        first, longer, last = (segment_of(context, SLOT, mark(a), mark(b)) for a, b in ((0, 30), (30, 90), (60, 100)))
        cold_rows = go_on(context, SLOT, TOKENS)
        wander(context)
        context.drop(SLOT)
        context.splice_segment(SLOT, first.blob, mark(0), mark(30), n_cells=30, clean=True)
        context.splice_segment(SLOT, longer.blob, mark(30), mark(60), n_cells=60, clean=True)
        context.splice_segment(SLOT, last.blob, mark(60), mark(100), n_cells=40, clean=True)
        restore(context, SLOT, saved)
        assert context.is_clean(SLOT) and same_bits(go_on(context, SLOT, TOKENS), cold_rows)


@pytest.mark.parametrize("arch", WITH_KV)
def test_a_state_restored_beside_a_guest_who_then_leaves_is_exact(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        saved = read(context, TOKENS, (100,))
        cold_rows = go_on(context, SLOT, TOKENS)
    with open_context(open_tiny(arch)) as context:
        read(context, TOKENS, (100,))
        read_to(context, OTHER, text(40, seed=5), 40)
        wander(context)
        restore(context, SLOT, saved)
        context.drop(OTHER)
        rows = go_on(context, SLOT, TOKENS)
        assert same_bits(rows, cold_rows)
