"""How densely checkpoints are taken: the defaults, what a user may set, and what fits a model."""

import pytest

from everwarm.errors import BadRequest
from everwarm.state.policy import MAX_SPACING, MIN_SPACING, WINDOW_FLOOR, CheckpointParams, Spacing

KIB = 1024


def fitted(params: CheckpointParams, *, state: int = 512 * KIB, kv: int = KIB, window: bool = False) -> Spacing:
    return params.fitted(state_bytes=state, kv_bytes_per_token=kv, window=window)


def test_the_defaults_leave_everything_but_the_number_to_the_model():
    params = CheckpointParams()
    assert (params.max_checkpoints, params.every_n_tokens, params.min_tokens, params.min_gap) == (32, None, None, None)


def test_each_with_changes_one_value_and_leaves_the_original_alone():
    params = CheckpointParams()
    changed = params.with_max_checkpoints(7).with_every_n_tokens(100).with_min_tokens(5).with_min_gap(9)
    assert changed == CheckpointParams(7, 100, 5, 9)
    assert params == CheckpointParams()
    assert params.with_min_gap(9) == CheckpointParams(min_gap=9)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_checkpoints": -1},
        {"max_checkpoints": (1 << 20) + 1},
        {"every_n_tokens": -2},
        {"every_n_tokens": (1 << 26) + 1},
        {"min_tokens": -1},
        {"min_tokens": (1 << 26) + 1},
        {"min_gap": -1},
        {"min_gap": (1 << 26) + 1},
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_name_and_value(bad):
    [(name, value)] = bad.items()
    with pytest.raises(BadRequest, match=rf"{name} is {value}; give -?\d+ to \d+"):
        CheckpointParams(**bad)


@pytest.mark.parametrize(
    "good",
    [
        {"max_checkpoints": 0},
        {"max_checkpoints": 1 << 20},
        {"every_n_tokens": -1},
        {"every_n_tokens": 0},
        {"every_n_tokens": 1 << 26},
        {"min_tokens": 0, "min_gap": 0},
    ],
)
def test_the_bounds_themselves_are_allowed(good):
    CheckpointParams(**good)


def test_a_with_is_checked_like_the_constructor():
    with pytest.raises(BadRequest, match="min_tokens is -3"):
        CheckpointParams().with_min_tokens(-3)


def test_a_state_costs_what_the_kv_between_two_states_costs():
    assert fitted(CheckpointParams(), state=1000 * KIB).every_n_tokens == 1000


@pytest.mark.parametrize(("state", "every"), [(0, 256), (255 * KIB, 256), (257 * KIB, 257), (10**9 * KIB, 8192)])
def test_the_spacing_is_clamped(state, every):
    assert (MIN_SPACING, MAX_SPACING) == (256, 8192)
    assert fitted(CheckpointParams(), state=state).every_n_tokens == every


def test_a_model_without_kv_gets_the_widest_spacing():
    assert fitted(CheckpointParams(), kv=0).every_n_tokens == MAX_SPACING


def test_the_27b_shape_of_the_design_notes_fits():
    spacing = CheckpointParams().fitted(state_bytes=149 << 20, kv_bytes_per_token=64 << 10, window=False)
    assert spacing == Spacing(max_checkpoints=32, every_n_tokens=2384, min_tokens=0, min_gap=0)


def test_window_models_have_a_floor_and_others_none():
    assert WINDOW_FLOOR == 64
    window, hybrid = fitted(CheckpointParams(), window=True), fitted(CheckpointParams())
    assert (window.min_tokens, window.min_gap) == (64, 64)
    assert (hybrid.min_tokens, hybrid.min_gap) == (0, 0)


@pytest.mark.parametrize("window", [False, True])
def test_what_the_user_sets_is_honoured_for_every_kind_of_model(window):
    params = CheckpointParams(5, 10, 3, 2)
    assert fitted(params, window=window) == Spacing(5, 10, 3, 2)
    off = CheckpointParams(0, -1, 0, 0)
    assert fitted(off, window=window) == Spacing(0, -1, 0, 0)
