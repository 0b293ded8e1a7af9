"""A reply that fills its context goes on with less behind it: what is left is read like any other prompt, so every state
that is kept is that of its own tokens."""

from __future__ import annotations

import numpy as np
import pytest

from everwarm.config import ContextShift
from everwarm.engine import request
from everwarm.engine.request import Finish
from everwarm.prompt.prompt import Prompt
from support.drive import drain, memory_of, open_core, record_logits, replay, run, submit, text

N_CTX, N_PROMPT, N_REPLY = 256, 200, 100
NEAR = 0.02  # KV is f16, and what was read in other chunks differs in its last places
ARCHS = ["llama", "qwen35", "gemma3", "mamba2"]


def items_left(prompt: list[int], reply: tuple[int, ...], n_keep: int, n_discard: int) -> list[int]:
    """By hand: what a full context is cut to."""
    whole = [*prompt, *reply][:N_CTX]
    return [*whole[:n_keep], *whole[n_keep + n_discard :]]


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_left_is_read_as_if_it_had_been_asked(arch):
    prompt, n_first = text(1, N_PROMPT), N_CTX - N_PROMPT
    with open_core(arch, n_ctx=N_CTX) as core:
        rows = record_logits(core)
        result = run(core, prompt, N_REPLY, deterministic=True, shift=ContextShift(10, 100))
        assert (len(result.tokens), result.finish, result.n_shifts) == (N_REPLY, Finish.LENGTH, 1)
        assert (result.n_prompt, result.n_cached) == (N_PROMPT, 0)
        left = items_left(prompt, result.tokens, 10, 100)
        slot = next(s for s in core.slots if s.items.common_prefix(Prompt.of_tokens(left)) == len(left))
        assert memory_of(core.context, slot.seq) == replay(core, slot)
        held = slot.items.codes.tolist()
        control = [
            *held[:10],
            *text(1, N_PROMPT)[10:110],
            *held[110:],
        ]  # what was dropped instead of what came after it
        assert memory_of(core.context, slot.seq) != replay(core, slot, control)
    for n_keep, is_same in ((10, True), (11, False)):
        with open_core(arch, n_ctx=N_CTX) as core:
            again = record_logits(core)
            cut = items_left(prompt, result.tokens, n_keep, 100)
            asked = run(core, cut, N_REPLY - n_first, deterministic=True)
            assert (asked.tokens == result.tokens[n_first:]) or not is_same
            assert np.array_equal(np.array(rows[-len(again) :]), np.array(again)) == is_same


@pytest.mark.parametrize("arch", ARCHS)
def test_the_cache_knows_what_was_read_and_nothing_else(arch):
    """Afterwards the prompt with its reply, as the client has it, is known as far as it was read before the shift."""
    prompt = text(2, N_PROMPT)
    with open_core(arch, n_ctx=N_CTX) as core:
        shifted = run(core, prompt, N_REPLY, shift=ContextShift(16))
        n_first = N_CTX - N_PROMPT
        client = [*prompt, *shifted.tokens][:230]
        rows = record_logits(core)
        again = run(core, client, 4)
        assert again.n_shared <= N_PROMPT + n_first
        warm = np.array(rows)
    with open_core(arch, n_ctx=N_CTX) as core:
        rows = record_logits(core)
        cold = run(core, client, 4)
        assert again.tokens == cold.tokens and np.abs(warm - np.array(rows)).max() < NEAR
        rows.clear()
        run(core, text(7, 230), 4)
        assert np.abs(warm - np.array(rows[: len(warm)])).max() > 10 * NEAR, "another prompt has other numbers"


def test_it_shifts_as_often_as_it_must_and_ends_with_its_tokens():
    with open_core(n_ctx=N_CTX) as core:
        result = run(core, text(3, N_PROMPT), 700, shift=ContextShift(n_keep=-1, n_discard=7))
        assert len(result.tokens) == 700 and result.n_prompt == N_PROMPT
        assert 10 < result.n_shifts < 700 / 7  # at least a quarter is dropped: each shift reads the rest again


def test_a_reply_is_shifted_a_bounded_number_of_times(monkeypatch):
    monkeypatch.setattr(request, "MAX_SHIFTS", 3)
    with open_core(n_ctx=N_CTX) as core:
        result = run(core, text(3, N_PROMPT), 700, shift=ContextShift(n_keep=0, n_discard=1))
        assert result.n_shifts == 3 and len(result.tokens) < 700 and result.finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("shift", "max_tokens", "n_written"),
    [
        (None, 100, 56),
        (ContextShift(n_keep=1 << 20), 500, 500),
        (ContextShift(), 56, 56),
        (ContextShift(0, 1 << 20), 100, 100),
    ],
)
def test_without_it_a_full_context_ends_the_reply_and_odd_numbers_are_bounded(shift, max_tokens, n_written):
    with open_core("llama", n_ctx=N_CTX) as core:
        result = run(core, text(4, N_PROMPT), max_tokens, shift=shift)
        assert len(result.tokens) == n_written and result.finish is Finish.LENGTH


def test_two_replies_that_fill_their_context_go_on_side_by_side():
    with open_core("llama", n_ctx=2 * N_CTX, kv_unified=False) as core:
        asked = [submit(core, text(seed, N_PROMPT), 150, shift=ContextShift(4)) for seed in (5, 6)]
        found = drain(core)
        assert all(len(found[request.id].tokens) == 150 and found[request.id].n_shifts for request in asked)
