"""KV that was joined or cut without libllama is byte for byte what libllama would have written, and goes on exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from everwarm.errors import StateRejected
from everwarm.llama.context import Context
from everwarm.types import START, Blob
from support.steps import SLOT, go_on, mark, open_context, read, restore, same_bits, text, wander

WITH_KV = ("qwen35", "jamba", "falcon-h1", "lfm2", "gemma3", "llama")
FORMS = (
    {},
    {"flash_attention": "off"},  # values lie in columns
    {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
)
CUTS = (40, 41, 100, 180)
TOKENS = text(400)

form = pytest.mark.parametrize("options", FORMS, ids=("plain", "columns", "q8_0"))


def parts(context: Context, cuts: Sequence[int] = CUTS) -> list[Blob]:
    ends = [START, *map(mark, cuts)]
    return [context.capture_segment(SLOT, a, b) for a, b in pairwise(ends)]


@form
@pytest.mark.parametrize("arch", WITH_KV)
def test_joined_segments_are_the_bytes_of_one_capture(arch: str, options: dict, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch), **options) as context:
        read(context, TOKENS, (CUTS[-1],))
        whole, pieces = context.capture_segment(SLOT, START, mark(CUTS[-1])), parts(context)
        assert context.join_segments(pieces).tobytes() == whole.tobytes()
        assert context.join_segments(pieces[::-1]).tobytes() != whole.tobytes()  # the control


@form
@pytest.mark.parametrize("arch", WITH_KV)
def test_a_cut_segment_is_the_bytes_of_a_capture_of_that_part(arch: str, options: dict, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch), **options) as context:
        read(context, TOKENS, (180,))
        whole = context.capture_segment(SLOT, START, mark(180))
        for start, stop in ((0, 180), (0, 1), (17, 90), (179, 180)):
            expected = context.capture_segment(SLOT, mark(start), mark(stop)).tobytes()
            assert context.cut_segment(whole, mark(start), mark(stop)).tobytes() == expected
        assert context.cut_segment(whole, mark(17), mark(91)).tobytes() != expected  # the control


@form
@pytest.mark.parametrize("arch", ["qwen35", "gemma3", "llama"])
def test_a_sequence_brought_back_from_a_joined_segment_goes_on_bit_for_bit(
    arch: str, options: dict, open_tiny: Callable
) -> None:
    with open_context(open_tiny(arch), **options) as context:
        saved = read(context, TOKENS, (180,))
        pieces = parts(context)
        cold_rows = go_on(context, SLOT, TOKENS)
        for blobs, is_right in ((pieces, True), ([*pieces[:2], _changed(pieces[2]), pieces[3]], False)):
            wander(context)
            context.drop(SLOT)
            joined = context.join_segments(blobs)
            context.splice_segment(SLOT, joined, START, mark(180), n_cells=180, clean=True)
            restore(context, SLOT, saved)
            assert context.is_clean(SLOT)
            assert same_bits(go_on(context, SLOT, TOKENS), cold_rows) is is_right


def _changed(blob: Blob) -> Blob:
    """Another number in the middle."""
    other = blob.copy()
    other[len(other) // 2 : len(other) // 2 + 64] ^= 0x11
    return other


@pytest.mark.parametrize("arch", WITH_KV)
def test_a_segment_that_reaches_beyond_the_splice_leaves_a_clean_sequence(arch: str, open_tiny: Callable) -> None:
    """What lies beyond is freed at once, and the next cell is again the first behind the sequence."""
    with open_context(open_tiny(arch)) as context:
        saved = read(context, TOKENS, (100,))
        cold_rows = go_on(context, SLOT, TOKENS)
        longer = context.capture_segment(SLOT, START, mark(150))
        context.drop(SLOT)
        context.splice_segment(SLOT, longer, START, mark(100), n_cells=150, clean=True)
        restore(context, SLOT, saved)
        assert context.is_clean(SLOT) and same_bits(go_on(context, SLOT, TOKENS), cold_rows)


def test_what_does_not_belong_together_is_refused(open_tiny: Callable) -> None:
    model = open_tiny("qwen35")
    with open_context(model) as context, open_context(model, cache_type_k="q8_0", cache_type_v="q8_0") as other:
        for each in (context, other):
            read(each, TOKENS, (60,))
        mine, theirs = parts(context, (60,))[0], parts(other, (60,))[0]
        for blobs in ([mine, theirs], [mine, mine[:-1]], [mine, np.zeros(500, np.uint8)], [mine, mine[:10]]):
            with pytest.raises(StateRejected):
                context.join_segments(blobs)
        with pytest.raises(StateRejected):
            context.cut_segment(mine, mark(60), mark(70))
