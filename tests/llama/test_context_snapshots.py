"""Sequences that keep snapshots of their last tokens: what a decode appended is taken back, and the state is right."""

import numpy as np
import pytest

from everwarm.config import ContextOptions
from everwarm.errors import BadRequest, TrimRefused
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.types import Mark, Position, SeqId, TokenCount
from support.drive import NEAR_TIE, text
from support.models import tiny_model

WITH_SNAPSHOTS = ("qwen35", "nemotron_h", "lfm2")
N = 3
A, B, C = SeqId(0), SeqId(1), SeqId(2)


@pytest.fixture(params=WITH_SNAPSHOTS)
def context(request):
    with Model(tiny_model(request.param)) as model, Context(model, options()) as context:
        yield context


def options(n_snapshots: int = N) -> ContextOptions:
    return ContextOptions(n_ctx=512, n_seq_max=4, n_threads=1, n_threads_batch=1, n_snapshots=n_snapshots)


def append(context: Context, *parts: tuple[SeqId, list[int]], n_draft: int = 0) -> list[np.ndarray]:
    """The last row of each, after one decode of all."""
    context.decode([Feed(seq, np.array(t, np.int32), context.end(seq), True, n_draft) for seq, t in parts])
    return [context.logits((n_draft + 1) * (i + 1) - 1).copy() for i in range(len(parts))]


def back(context: Context, seq: SeqId, n: int) -> None:
    end = context.end(seq)
    context.take_back(seq, Mark(TokenCount(end.n_tokens - n), Position(end.pos - n)))


def alone(context: Context, tokens: list[int]) -> np.ndarray:
    """The logits after a text that nothing was ever taken back from."""
    with Context(context.model, options(0)) as other:
        append(other, (A, tokens[:-1]))
        return append(other, (A, tokens[-1:]))[0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_sequence_continues_from_before_the_tokens_that_were_taken_back(context, n):
    prompt, drafted = text(1, 60), text(2, 4)
    append(context, (A, prompt))
    append(context, (A, drafted), n_draft=N)
    back(context, A, n)
    context.check()
    found = append(context, (A, [7]))[0]
    expected = alone(context, [*prompt, *drafted[: 4 - n], 7])
    assert np.abs(found - expected).max() < NEAR_TIE
    assert np.abs(found - alone(context, [*prompt, *drafted, 7])).max() > NEAR_TIE  # the control: nothing taken back


def test_a_state_is_captured_as_it_is_after_tokens_were_taken_back(context):
    """Bit for bit: put back over whatever came since, it continues as the sequence itself does."""
    append(context, (A, text(1, 60)))
    append(context, (A, text(2, 4)), n_draft=N)
    before = context.capture(A)
    back(context, A, 2)
    state, mark = context.capture(A), context.end(A)
    assert state.tobytes() != before.tobytes()  # the control
    expected = append(context, (A, [7, 8]))[0]
    context.keep_kv(A, mark)
    context.restore(A, state, mark, clean=False)
    assert append(context, (A, [7, 8]))[0].tobytes() == expected.tobytes()


def test_no_second_name_before_the_next_decode(context):
    append(context, (A, text(1, 60)))
    assert context.can_be_parked(A)
    append(context, (A, text(2, 4)), n_draft=N)
    back(context, A, 1)
    assert not context.can_be_parked(A)
    for refused in (context.park, context.hold_state):
        with pytest.raises(AssertionError):
            refused(A, B)
    append(context, (A, [7]))
    assert context.can_be_parked(A)
    context.park(A, B)
    first, second = append(context, (A, [9]))[0], append(context, (B, [9]))[0]
    assert np.abs(first - second).max() < NEAR_TIE


def test_many_sequences_take_back_different_numbers_of_tokens(context):
    """Also while others are decoded without them, dropped, or made anew."""
    prompts, drafted = [text(seed, 40 + seed) for seed in (1, 2, 3)], [text(seed, 4) for seed in (4, 5, 6)]
    append(context, *zip((A, B, C), prompts, strict=True))
    append(context, *zip((A, B, C), drafted, strict=True), n_draft=N)
    for seq, n in ((A, 1), (B, 3), (C, 2)):
        back(context, seq, n)
    kept = [[*prompt, *more[: 4 - n]] for prompt, more, n in zip(prompts, drafted, (1, 3, 2), strict=True)]
    append(context, (B, [7]))
    fourth = SeqId(3)
    append(context, (fourth, text(9, 30)))
    rows = append(context, (A, [7]), (C, [7]))
    context.drop(fourth)
    rows += append(context, (B, [8]))
    for row, tokens in zip(rows, ([*kept[0], 7], [*kept[2], 7], [*kept[1], 7, 8]), strict=True):
        assert np.abs(row - alone(context, tokens)).max() < NEAR_TIE
    context.check()


def test_a_decode_of_unequal_parts_has_no_snapshots(context):
    """libllama splits it, and what lies between the parts is moved without its snapshots: the control takes tokens back all
    the same, and goes on from another's state."""
    prompts, drafted = [text(seed, 30) for seed in (1, 2, 3)], text(51, 4)
    append(context, *zip((A, B, C), prompts, strict=True))
    context.decode(
        [
            Feed(B, np.array(drafted, np.int32), context.end(B), True, N),
            Feed(A, np.array([5], np.int32), context.end(A), True),
            Feed(C, np.array([6], np.int32), context.end(C), True),
        ]
    )
    with pytest.raises(AssertionError, match="more or fewer tokens"):
        back(context, B, N)
    context._has_snapshots[B] = True
    back(context, B, N)
    found = append(context, (B, [7]))[0]
    assert np.abs(found - alone(context, [*prompts[1], drafted[0], 7])).max() > NEAR_TIE


def test_a_state_is_cut_by_nothing_else(context):
    append(context, (A, text(1, 60)))
    with pytest.raises(TrimRefused):
        context.trim(A, Mark(TokenCount(58), Position(58)))
    context.check()


def test_more_tokens_than_there_are_snapshots_are_not_taken_back(context):
    append(context, (A, text(1, 60)))
    append(context, (A, text(2, 8)), n_draft=7)
    with pytest.raises(AssertionError, match="snapshots"):
        back(context, A, N + 1)


def test_what_may_be_cut_is_not_called_clean(context):
    append(context, (A, text(1, 60)))
    append(context, (A, text(2, 8)), n_draft=7)  # too long for snapshots: it is kept as a whole, or not at all
    assert context.is_clean(A)
    append(context, (A, text(2, 4)), n_draft=N)
    assert not context.is_clean(A)


def test_an_architecture_without_snapshots_has_none():
    with Model(tiny_model("mamba2")) as model, Context(model, options()) as context:
        assert context.n_snapshots == 0


def test_the_number_of_snapshots_is_bounded():
    for n in (-1, 16):
        with pytest.raises(BadRequest, match="n_snapshots"):
            options(n)


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "mamba2"])
def test_a_held_state_is_put_back_with_the_cells_cut_to_it(arch):
    with Model(tiny_model(arch)) as model, Context(model, options(0)) as context:
        prompt = text(1, 60)
        append(context, (A, prompt))
        mark, before = context.end(A), context.capture(A)
        context.hold_state(A, B)
        append(context, (A, text(2, 9)), n_draft=8)
        assert context.capture(A).tobytes() != before.tobytes()  # the control
        context.put_state_back(B, A, mark)
        context.drop(B)
        context.check()
        assert context.capture(A).tobytes() == before.tobytes() and context.end(A) == mark
        assert context.is_clean(A)
        assert np.abs(append(context, (A, [7]))[0] - alone(context, [*prompt, 7])).max() < NEAR_TIE
