"""E0, E1, E2: what is restored is byte for byte what was there, and goes on bit for bit as if never interrupted."""

import os
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from everwarm.llama.context import Context, Logits
from everwarm.llama.model import MemoryKind
from everwarm.types import Blob, SeqId, heap
from support.layouts import LAYOUTS, Layout
from support.steps import (
    KINDS,
    N_UBATCH,
    OTHER,
    SLOT,
    SPARE,
    THIRD,
    WAYS,
    WITH_KV,
    WITH_STATE,
    Saved,
    Way,
    go_on,
    half_kept_half_spliced,
    load,
    mark,
    open_context,
    read,
    read_to,
    reloaded,
    restored_in_place,
    same_bits,
    segment_of,
    splice,
    text,
    unparked,
    wander,
    wipe,
)

TOKENS = text(700)
CUTS = (
    (1,),
    (2,),
    (N_UBATCH - 1,),
    (N_UBATCH,),
    (N_UBATCH + 1,),
    (1, 2, 3, 31, 2 * N_UBATCH - 1, 2 * N_UBATCH, 2 * N_UBATCH + 1),  # past the sliding window, and cut inside it
)
LONG_CUTS = (20, 300)  # windows past the window, and past the 256 cells that libllama pads to
N_CONV = 4  # a convolution looks back this far: from here on nothing of an empty state is left
ARCHS = tuple(KINDS)
CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
JOURNEYS = [
    pytest.param(arch, way, cuts, id=f"{arch}-{way.__name__}-{cuts}")
    for arch in ARCHS
    for way in WAYS[KINDS[arch]]
    for cuts in (CUTS if CAMPAIGN or way in (unparked, reloaded, restored_in_place) else CUTS[1::2])
]

Uninterrupted = Callable[..., tuple[Saved, list[Logits]]]


@pytest.fixture(scope="module")
def uninterrupted(open_tiny: Callable) -> Uninterrupted:
    """The cold run that nobody disturbs: what is saved at its last cut, and the logits that follow."""

    @cache
    def run(arch: str, cuts: Sequence[int], **options: object) -> tuple[Saved, list[Logits]]:
        with open_context(open_tiny(arch), **options) as context:
            saved = read(context, TOKENS, cuts)
            rows = go_on(context, SLOT, TOKENS)
            assert context.is_clean(SLOT)
            return saved, rows

    return run


def comes_back(context: Context, way: Way, cuts: Sequence[int]) -> list[Logits]:
    """Read, leave, come back this way and go on; still clean at the end."""
    saved = read(context, TOKENS, cuts)
    seq = way(context, saved)
    context.check()
    assert context.is_clean(seq)
    rows = go_on(context, seq, TOKENS)
    context.check()
    assert context.is_clean(seq)
    return rows


# E1


@pytest.mark.parametrize(("arch", "way", "cuts"), JOURNEYS)
def test_a_sequence_that_came_back_goes_on_bit_for_bit(
    arch: str, way: Way, cuts: tuple[int, ...], open_tiny: Callable, uninterrupted: Uninterrupted
) -> None:
    with open_context(open_tiny(arch)) as context:
        assert same_bits(comes_back(context, way, cuts), uninterrupted(arch, cuts)[1])


@pytest.mark.parametrize(
    "options",
    [{}, {"flash_attention": "off"}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}],
    ids=["as-usual", "no-flash-attention", "q8_0-cache"],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_long_prompt_comes_back_exactly_in_every_kind_of_context(
    arch: str, options: dict, open_tiny: Callable, uninterrupted: Uninterrupted
) -> None:
    way = half_kept_half_spliced if arch in WITH_KV else reloaded
    with open_context(open_tiny(arch), **options) as context:
        assert same_bits(comes_back(context, way, LONG_CUTS), uninterrupted(arch, LONG_CUTS, **options)[1])


def test_coming_back_is_exact_with_two_threads(open_tiny: Callable) -> None:
    """From 512 cells on, flash attention of a single token is split between the threads."""
    with open_context(open_tiny("qwen35"), n_threads=2, n_threads_batch=2) as context:
        saved = read(context, TOKENS, (260,))
        cold = go_on(context, SLOT, TOKENS, (1,))
        wipe(context)
        load(context, SLOT, saved)
        assert same_bits(go_on(context, SLOT, TOKENS, (1,)), cold)


@pytest.mark.parametrize("arch", ARCHS)
def test_one_saved_state_can_be_come_back_to_many_times(
    arch: str, open_tiny: Callable, uninterrupted: Uninterrupted
) -> None:
    cuts = (20, 130)
    with open_context(open_tiny(arch)) as context:
        saved = read(context, TOKENS, cuts)
        for way in WAYS[KINDS[arch]]:
            if way not in (restored_in_place, half_kept_half_spliced):
                wipe(context)
                load(context, SLOT, saved)
            seq = way(context, saved)
            assert same_bits(go_on(context, seq, TOKENS), uninterrupted(arch, cuts)[1]), way.__name__
            wipe(context)
            load(context, SLOT, saved)


@pytest.mark.parametrize("arch", WITH_STATE)
def test_an_earlier_cut_can_be_come_back_to_as_well(
    arch: str, open_tiny: Callable, uninterrupted: Uninterrupted
) -> None:
    early, rows = uninterrupted(arch, (30, 70))
    with open_context(open_tiny(arch)) as context:
        read(context, TOKENS, (30, 70, 150, 220))
        context.restore(SLOT, early.state, mark(70), clean=True)
        assert same_bits(go_on(context, SLOT, TOKENS), rows)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_continuation_may_be_another_one(arch: str, open_tiny: Callable) -> None:
    """An edited message: same prefix, other tokens after the cut."""
    cuts, edited = (20, 130), np.concatenate([TOKENS[:130], text(300, seed=5)])
    with open_context(open_tiny(arch)) as context:
        read(context, edited, cuts)
        cold = go_on(context, SLOT, edited)
    with open_context(open_tiny(arch)) as context:
        saved = read(context, TOKENS, cuts)
        go_on(context, SLOT, TOKENS)
        wipe(context)
        load(context, SLOT, saved)
        assert same_bits(go_on(context, SLOT, edited), cold)


# E2


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_cold_replay_in_a_used_context_gives_the_same_bytes(
    arch: str, cuts: tuple[int, ...], open_tiny: Callable, uninterrupted: Uninterrupted
) -> None:
    saved, rows = uninterrupted(arch, cuts)
    with open_context(open_tiny(arch)) as context:
        read_to(context, OTHER, text(90, seed=4), 90)
        wander(context)
        wipe(context)
        replayed = read(context, TOKENS, cuts)
        assert replayed.clean
        if cuts[-1] >= N_CONV:
            assert same_bits(parts(replayed), parts(saved))
        assert same_bits(go_on(context, SLOT, TOKENS), rows)


@pytest.mark.parametrize("arch", ["qwen35", "mamba2"])
def test_a_cold_replay_of_a_very_short_prompt_differs_in_the_sign_of_zeroes_only(
    arch: str, open_tiny: Callable, uninterrupted: Uninterrupted
) -> None:
    """libllama empties a used recurrent cell by multiplying it with 0, so some zeroes are negative."""
    saved, _ = uninterrupted(arch, (1,))
    with open_context(open_tiny(arch)) as context:
        wander(context)
        wipe(context)
        for again, first in zip(parts(read(context, TOKENS, (1,))), parts(saved), strict=True):
            np.testing.assert_array_equal(unsigned_zeroes(again), unsigned_zeroes(first))


def unsigned_zeroes(part: np.ndarray) -> np.ndarray:
    words = np.ascontiguousarray(part).view(np.uint8)
    words = words[: len(words) // 4 * 4].view(np.uint32).copy()
    words[words == 0x80000000] = 0
    return words


def parts(saved: Saved) -> list[np.ndarray]:
    state = [] if saved.state is None else [saved.state]
    return [segment.blob for segment in saved.segments] + state


def test_a_window_that_has_gone_round_its_ring_leaves_no_trace(
    open_tiny: Callable, uninterrupted: Uninterrupted
) -> None:
    saved, rows = uninterrupted("gemma3", (20, 130))
    with open_context(open_tiny("gemma3")) as context:
        read_to(context, SLOT, text(900, seed=4), 900)
        context.drop(SLOT)
        assert same_bits(parts(read(context, TOKENS, (20, 130))), parts(saved))
        assert same_bits(go_on(context, SLOT, TOKENS), rows)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_one_process_saved_another_goes_on_with(
    arch: str, open_tiny: Callable, uninterrupted: Uninterrupted
) -> None:
    """Another context, and blobs in read-only memory, as they come from a file."""
    saved, rows = uninterrupted(arch, (20, 130))
    with open_context(open_tiny(arch)) as context:
        load(context, SLOT, read_only(saved))
        assert context.is_clean(SLOT)
        assert same_bits(go_on(context, SLOT, TOKENS), rows)


def read_only(saved: Saved) -> Saved:
    for blob in parts(saved):
        blob.flags.writeable = False
    return saved


@pytest.mark.parametrize("arch", WITH_KV)
def test_other_chunks_show_in_the_bits(arch: str, open_tiny: Callable, uninterrupted: Uninterrupted) -> None:
    """A negative control: the comparison sees that a prompt was read in other pieces."""
    with open_context(open_tiny(arch)) as context:
        for cut in range(10, 131, 10):
            read_to(context, SLOT, TOKENS, cut)
        assert not same_bits(go_on(context, SLOT, TOKENS), uninterrupted(arch, (20, 130))[1])


# E0


def in_layout(context: Context, layout: Layout) -> None:
    """Others in the cells before, between and after the slot's own."""
    layout.before(context)
    for cut in (40, 77, 200):
        read_to(context, SLOT, TOKENS, cut)
        read_to(context, THIRD, text(cut, seed=3), cut // 3)


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("arch", WITH_STATE)
def test_a_state_reads_back_as_it_was_written(arch: str, layout: Layout, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        in_layout(context, layout)
        state, end = context.capture(SLOT), context.end(SLOT)
        wander(context)
        assert context.capture(SLOT).tobytes() != state.tobytes()
        context.restore(SLOT, state, end, clean=False)
        assert context.capture(SLOT).tobytes() == state.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("arch", WITH_KV)
def test_a_segment_reads_back_as_it_was_written(arch: str, layout: Layout, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch)) as context:
        in_layout(context, layout)
        segments = [segment_of(context, SLOT, mark(a), mark(b)) for a, b in ((0, 33), (33, 34), (34, 150), (150, 200))]
        context.drop(SLOT)
        read_to(context, SPARE, text(50, seed=4), 50)
        for segment in segments:
            splice(context, SLOT, segment)
        for segment in segments:
            again = context.capture_segment(SLOT, segment.start, segment.stop)
            assert again.tobytes() == segment.blob.tobytes()
        assert context.capture_segment(SLOT, mark(0), mark(33)).tobytes() != segments[1].blob.tobytes()


@pytest.mark.parametrize("arch", WITH_STATE)
def test_a_state_survives_a_stay_in_another_sequence(arch: str, open_tiny: Callable) -> None:
    """There and back again: a blob names the sequence it was read from, so only the way home gives the same bytes."""
    with open_context(open_tiny(arch)) as context:
        saved = read(context, TOKENS, (30, 120))
        load(context, OTHER, saved)
        elsewhere = context.capture(OTHER)
        context.drop(SLOT)
        load(context, SLOT, saved)
        context.restore(SLOT, elsewhere, saved.end, clean=True)
        assert context.capture(SLOT).tobytes() == saved.state.tobytes()


@pytest.mark.parametrize("arch", WITH_KV)
def test_a_segment_has_the_same_bytes_with_and_without_an_empty_sequence_at_hand(
    arch: str, open_tiny: Callable
) -> None:
    """And a hybrid's state, which may be many times as large, is not read along with it only to be cut off."""
    with open_context(open_tiny(arch)) as context:
        read_to(context, SLOT, TOKENS, 100)
        roomy = context.capture_segment(SLOT, mark(10), mark(60))
        for seq in (SPARE, OTHER, THIRD):
            read_to(context, seq, text(9, seed=3), 9)
        placed: list[int] = []

        def place(n_bytes: int) -> Blob:
            placed.append(n_bytes)
            return heap(n_bytes)

        context.place = place
        assert context.capture_segment(SLOT, mark(10), mark(60)).tobytes() == roomy.tobytes()
        assert context.kind.has_window or placed == [len(roomy)]


@pytest.mark.parametrize("arch", WITH_KV)
def test_capturing_a_segment_changes_nothing(arch: str, open_tiny: Callable) -> None:
    rows = []
    for captures in (False, True):
        with open_context(open_tiny(arch)) as context:
            read_to(context, SLOT, TOKENS, 150)
            if captures:
                for start, stop in ((0, 150), (0, 1), (60, 90), (149, 150)):
                    context.capture_segment(SLOT, mark(start), mark(stop))
                context.check()
                assert context.is_clean(SLOT)
            rows.append(go_on(context, SLOT, TOKENS))
    assert same_bits(*rows)


@pytest.mark.parametrize("arch", [arch for arch in WITH_STATE if KINDS[arch] is not MemoryKind.WINDOW])
def test_capturing_a_state_changes_nothing_but_a_window(arch: str, open_tiny: Callable) -> None:
    rows = []
    for captures in (False, True):
        with open_context(open_tiny(arch)) as context:
            read_to(context, SLOT, TOKENS, 150)
            if captures:
                context.capture(SLOT)
                context.touch(SLOT)
            rows.append(go_on(context, SLOT, TOKENS))
    assert same_bits(*rows)


def test_touching_a_window_seats_it_as_capturing_does(open_tiny: Callable) -> None:
    rows = []
    for seat in ("capture", "touch", "end"):
        with open_context(open_tiny("gemma3")) as context:
            read_to(context, SLOT, TOKENS, 210)
            getattr(context, seat)(SLOT)
            rows.append(go_on(context, SLOT, TOKENS))
    captured, touched, left_alone = rows
    assert same_bits(captured, touched)
    assert not same_bits(captured, left_alone), "the seat does not show here: the test above proves nothing"


# long


@pytest.mark.skipif(not CAMPAIGN, reason="campaign only")
@pytest.mark.parametrize("arch", ARCHS)
def test_every_single_cut_is_exact(arch: str, open_tiny: Callable, uninterrupted: Uninterrupted) -> None:
    for cut in range(1, 2 * N_UBATCH + 2):
        for way in WAYS[KINDS[arch]]:
            with open_context(open_tiny(arch)) as context:
                assert same_bits(comes_back(context, way, (cut,)), uninterrupted(arch, (cut,))[1]), (way.__name__, cut)


def test_the_table_of_ways_covers_every_kind() -> None:
    assert set(WAYS) == set(KINDS.values())
    assert {SeqId(0), SeqId(1), SeqId(2), SeqId(3)} == {SLOT, SPARE, OTHER, THIRD}
