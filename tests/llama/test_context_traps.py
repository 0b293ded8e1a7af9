"""The traps of libllama: whatever we are asked, the process lives, and a refusal changes nothing.

Each trial runs in a fork (see `run_trials`), so that an abort fails one test.
"""

import re

import pytest

from support import trials_blobs, trials_calls
from support.trials import ARCHS_OF, TRIALS, run_in_child

MODULES = (trials_blobs, trials_calls)  # importing them registers their trials

UNTOUCHED = "refused, then same bits"
NO_STATE = "AssertionError: sequence . has KV but no state"

EXPECTED = {
    "a_batch_larger_than_n_batch": "AssertionError: .* larger than n_batch 128",
    "two_feeds_that_are_too_large_together": "AssertionError: .* larger than n_batch 128",
    "a_full_batch": "decoded",
    "no_feed_at_all": "AssertionError: .* at least one token",
    "a_feed_without_tokens": "AssertionError: .* at least one token",
    "a_gap_in_the_positions": "AssertionError: sequence 0 ends at",
    "a_step_backwards": "AssertionError: sequence 0 ends at",
    "the_same_sequence_twice_in_a_batch": "AssertionError|DecodeFailed",
    "a_token_outside_the_vocabulary": UNTOUCHED,
    "more_sequences_in_a_batch_than_fit_an_ubatch": "decoded",
    "sequences_out_of_range": "all refused",
    "n_seq_max_256_with_attention": "AssertionError: .*256 sequences|BadRequest",
    "n_seq_max_255_with_attention": "decoded",
    "n_seq_max_256_without_attention": "BadRequest",
    "fewer_tokens_in_a_batch_than_sequences": "decoded",
    "a_batch_of_one_token_and_one_sequence": "decoded",
    "a_closed_context": "AssertionError",
    "two_contexts_of_one_model": "same bits",
    "decoding_after_a_splice": NO_STATE,
    "decoding_after_keeping_kv": NO_STATE,
    "decoding_after_sharing_kv": NO_STATE,
    "decoding_after_a_refused_state": NO_STATE,
    "trimming_does_not_make_up_for_a_state": "AssertionError: .*KV but no state",
    "a_state_before_its_kv": "AssertionError: sequence 2 holds less KV",
    "sharing_the_cells_of_a_window": "AssertionError: a sliding-window cache must not share cells",
    "parking_a_window": "AssertionError: a sliding-window cache must not share cells",
    "a_refused_trim": UNTOUCHED,
    "a_trim_past_the_window": UNTOUCHED,
    "a_trim_that_lengthens": "AssertionError",
    "a_full_context": UNTOUCHED,
    "a_segment_into_a_full_context": "refused, nothing changed",
    "the_logits_before_a_full_context": "same bits",
    "truncated_states": UNTOUCHED,
    "truncated_segments": UNTOUCHED,
    "a_state_of_no_bytes": UNTOUCHED,
    "a_segment_of_no_bytes": UNTOUCHED,
    "garbage": UNTOUCHED,
    "a_refused_segment_at_the_end_of_good_ones": UNTOUCHED,
    "wrong_words_in_a_state": "survived, then same bits",
    "wrong_words_in_a_segment": "survived, then same bits",
    "a_state_of_two_cells": UNTOUCHED,
    "a_segment_with_a_state_of_two_cells": UNTOUCHED,
    "a_state_that_is_not_a_number": "same bits",
    "a_state_that_is_not_a_number_without_flash_attention": "same bits",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_in_child("support.run_trials")


def _cases() -> list[object]:
    return [pytest.param(name, arch, id=f"{name}-{arch}") for name in TRIALS for arch in ARCHS_OF[name]]


@pytest.mark.parametrize(("name", "arch"), _cases())
def test_the_process_survives(name: str, arch: str, outcomes: dict[str, str]) -> None:
    found = outcomes[f"{name} {arch}"]
    assert re.match(EXPECTED[name], found), found


def test_every_trial_has_its_expectation() -> None:
    assert set(TRIALS) == set(EXPECTED)
