"""Tests that can fail: every wrong state moves the logits further than company does, or is refused."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from everwarm.errors import DecodeFailed, StateRejected
from everwarm.llama import abi
from everwarm.llama.batch import Tokens
from everwarm.llama.context import Logits
from everwarm.llama.model import Model
from everwarm.types import Blob
from support.blob_cases import (
    Numbers,
    recurrent_numbers,
    window_numbers,
    with_flipped_bit,
    with_position,
    with_shifted_window,
    zeroed,
)
from support.layouts import ALONE, BOUND, CUTS, TOKENS, cold, cold_spread, distance, warm
from support.steps import (
    HYBRIDS,
    KINDS,
    SLOT,
    WITH_KV,
    WITH_STATE,
    WITHOUT_TRIM,
    Saved,
    go_on,
    open_context,
    read,
    same_bits,
    text,
    wander,
)

STRANGER, END = text(400, seed=2), CUTS[-1]


class Ruler:
    """One model's right answer, and whether another run is further from it than company could explain."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.right, self.rows = cold(model, ALONE).saved, cold(model, ALONE).rows
        self.limit = BOUND * cold_spread(model)

    def is_off(self, rows: Sequence[Logits]) -> bool:
        return distance(rows, self.rows) > self.limit

    def is_off_with(self, model: Model | None = None, **wrong: object) -> bool:
        return self.is_off(warm(model or self.model, ALONE, replace(self.right, **wrong)))


def save(model: Model, tokens: Tokens = TOKENS, cuts: Sequence[int] = CUTS) -> Saved:
    with open_context(model) as context:
        return read(context, tokens, cuts)


@pytest.fixture(scope="module")
def ruler(open_tiny: Callable) -> Callable[[str], Ruler]:
    return lambda arch: Ruler(open_tiny(arch))


def numbers(arch: str, state: Blob) -> list[Numbers]:
    return window_numbers(state) if KINDS[arch].has_window else recurrent_numbers(state)


def posing_as(arch: str, state: Blob, n_off: int) -> Blob:
    """A state of ``n_off`` tokens more or less that claims to end at the right place."""
    return with_shifted_window(state, -n_off) if KINDS[arch].has_window else with_position(state, END - 1)


@pytest.mark.parametrize("arch", tuple(KINDS))
def test_the_right_state_is_not_off(arch: str, ruler: Callable) -> None:
    assert not ruler(arch).is_off_with()


@pytest.mark.parametrize("n_off", [-1, 1])
@pytest.mark.parametrize("arch", WITH_STATE)
def test_the_state_of_one_token_more_or_less_is_off(arch: str, n_off: int, ruler: Callable) -> None:
    state = save(ruler(arch).model, cuts=(*CUTS[:-1], END + n_off)).state
    assert ruler(arch).is_off_with(state=posing_as(arch, state, n_off))


@pytest.mark.parametrize("arch", WITH_STATE)
def test_a_zeroed_state_is_off(arch: str, ruler: Callable) -> None:
    state = ruler(arch).right.state
    assert ruler(arch).is_off_with(state=zeroed(state, numbers(arch, state)))


@pytest.mark.parametrize("arch", WITH_STATE)
def test_one_flipped_bit_shows(arch: str, ruler: Callable) -> None:
    """The sign of one number shows in the bits of the logits; the highest bit of its exponent is off by any measure."""
    state = ruler(arch).right.state
    sign, exponent = (with_flipped_bit(state, numbers(arch, state), bit) for bit in (0, 1))
    assert [sum((flipped ^ state).tolist()) for flipped in (sign, exponent)] == [128, 64], "one bit each"
    assert not same_bits(warm(ruler(arch).model, ALONE, replace(ruler(arch).right, state=sign)), ruler(arch).rows)
    assert ruler(arch).is_off_with(state=exponent)


@pytest.mark.parametrize("arch", WITH_STATE)
def test_the_state_of_another_prompt_is_off(arch: str, ruler: Callable) -> None:
    assert ruler(arch).is_off_with(state=save(ruler(arch).model, STRANGER).state)


@pytest.mark.parametrize("arch", WITH_KV)
def test_the_kv_of_another_prompt_is_off_even_with_the_right_state(arch: str, ruler: Callable) -> None:
    assert ruler(arch).is_off_with(segments=save(ruler(arch).model, STRANGER).segments)


@pytest.mark.parametrize("arch", WITH_KV)
def test_one_wrong_segment_is_off(arch: str, ruler: Callable) -> None:
    first, second = ruler(arch).right.segments
    wrong, _ = save(ruler(arch).model, STRANGER).segments
    assert ruler(arch).is_off_with(segments=(wrong, second))
    assert not ruler(arch).is_off_with(segments=(first, second))


@pytest.mark.parametrize("arch", tuple(KINDS))
def test_other_weights_are_off_even_with_the_right_state(arch: str, open_tiny: Callable, ruler: Callable) -> None:
    assert ruler(arch).is_off_with(model=open_tiny(arch, seed=1))


@pytest.mark.parametrize("arch", [*HYBRIDS, "gemma3"])
def test_a_restore_without_its_trim_is_off(arch: str, ruler: Callable) -> None:
    """Duplicate positions, which libllama decodes silently: past ``Context``, by the raw call."""
    right = ruler(arch).right
    with open_context(ruler(arch).model) as context:
        read(context, TOKENS, CUTS)
        wander(context)
        pointer, size = right.state.ctypes.data, len(right.state)
        assert context.model.lib.state_seq_set_data_ext(context.native, pointer, size, SLOT, abi.STATE_PARTIAL) == size
        context._end[SLOT] = right.end
        assert ruler(arch).is_off(go_on(context, SLOT, TOKENS))


@pytest.mark.parametrize("arch", WITH_STATE)
def test_a_state_without_its_kv_is_refused(arch: str, ruler: Callable) -> None:
    right = ruler(arch).right
    with open_context(ruler(arch).model) as context:
        if arch in WITH_KV:
            with pytest.raises(AssertionError, match="less KV"):
                context.restore(SLOT, right.state, right.end, clean=True)
        else:
            context.restore(SLOT, right.state, right.end, clean=True)
            assert not ruler(arch).is_off(go_on(context, SLOT, TOKENS)), "a recurrent state is all there is"


@pytest.mark.parametrize("arch", WITHOUT_TRIM)
def test_a_state_that_ends_later_is_refused(arch: str, ruler: Callable) -> None:
    with pytest.raises(StateRejected):
        ruler(arch).is_off_with(state=save(ruler(arch).model, cuts=(*CUTS[:-1], END + 1)).state)


@pytest.mark.parametrize("arch", WITH_STATE)
def test_a_state_that_ends_earlier_is_never_decoded(arch: str, ruler: Callable) -> None:
    with pytest.raises((StateRejected, DecodeFailed)):
        ruler(arch).is_off_with(state=save(ruler(arch).model, cuts=(*CUTS[:-1], END - 1)).state)


def test_the_positions_in_a_state_are_where_these_tests_think(ruler: Callable) -> None:
    for arch in WITHOUT_TRIM:
        assert struct.unpack_from("<i", ruler(arch).right.state, 12) == (END - 1,)
