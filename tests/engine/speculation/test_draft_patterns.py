"""Random drafts, right and wrong in any order: what is kept is what plain decoding of the same chunks would have kept."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.engine.core import Core
from everwarm.engine.verify import compare_with_cold
from everwarm.state.store.arena_file import memory_file
from support.campaign import by_chance
from support.drafts import Scripted, always_draft, drafting_core
from support.drive import check, drain, memory_of, replay, run, submit, text, tidy

PROMPT = text(1, 50)
N = 30


@pytest.fixture(scope="module")
def replies() -> dict[str, tuple[int, ...]]:
    found = {}
    for arch in ("qwen35", "mamba2", "llama"):
        with drafting_core(arch, n_slots=1, speculate="off") as core:
            found[arch] = run(core, PROMPT, N).tokens
    return found


@pytest.mark.parametrize("arch", ["qwen35", "mamba2"])
@by_chance(6, 200)
@given(wrong=st.lists(st.integers(0, 9), min_size=1, max_size=8), n_tokens=st.integers(1, 8))
def test_the_state_after_any_pattern_is_that_of_its_chunks(replies, arch, wrong, n_tokens):
    with drafting_core(arch, n_slots=1, n_spares=1) as core:
        always_draft(core, Scripted([[*PROMPT, *replies[arch]]], wrong, n_tokens))
        assert run(core, PROMPT, N).tokens == replies[arch]
        slot = core.slots[0]
        assert core.context.is_clean(slot.seq) and memory_of(core.context, slot.seq) == replay(core, slot)
        tidy(core)
        assert compare_with_cold(core).is_exact


@by_chance(4, 100)
@given(wrong=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_plain_attention_is_cut_to_what_was_accepted(replies, wrong):
    with drafting_core("llama", n_slots=1) as core:
        always_draft(core, Scripted([[*PROMPT, *replies["llama"]]], wrong, 4))
        assert run(core, PROMPT, N).tokens == replies["llama"]
        cold = np.frombuffer(replay(core, core.slots[0]), np.uint8)
        assert len(memory_of(core.context, 0)) == len(cold)


class Killed(BaseException):
    """Nothing catches it: the engine is gone in the midst of a decode."""


def die_after(core: Core, n_verified: int) -> None:
    """The engine ends within a verification, after so many whole ones."""
    decode, left = core.context.decode, [n_verified]

    def dying(feeds):
        decode(feeds)
        left[0] -= any(feed.n_draft for feed in feeds)
        if left[0] < 0:
            raise Killed

    core.context.decode = dying


@pytest.mark.parametrize("n_before", [0, 1, 3])
def test_what_outlives_an_engine_killed_within_a_verification_is_exact(replies, n_before):
    memory = memory_file()
    path = [*PROMPT, *replies["qwen35"]]
    try:
        with drafting_core(n_slots=2, memory=memory) as core:
            always_draft(core, Scripted([path], [2, 0, 99], 4))
            run(core, PROMPT, 12)
            tidy(core)
            core.cache.ram.flush()
            die_after(core, n_before)
            submit(core, PROMPT, N)
            with pytest.raises(Killed):
                drain(core)
        with drafting_core(n_slots=2, memory=memory) as core:
            check(core)
            kept = [node.path.codes[: node.n_items].tolist() for node in core.cache.tree.nodes()]
            assert max(map(len, kept)) > len(PROMPT)
            assert all(codes == path[: len(codes)] for codes in kept)  # no token of a draft that was not accepted
            assert compare_with_cold(core).is_exact
            assert run(core, PROMPT, N).tokens == replies["qwen35"]
    finally:
        os.close(memory)
