"""Requests that need what another is just reading wait for it; nobody else does."""

import pytest

from everwarm.engine.core import Core
from everwarm.engine.request import Finish, Progress, Request, Started
from everwarm.state.policy import CheckpointParams
from support.drive import GUARD, STATEFUL, assert_greedy, checkpoints, drain, open_core, step_until, submit, text

SMALL = {"n_ctx": 2048, "n_slots": 4, "n_batch": 64, "n_ubatch": 64}
SHARED = text(1, 300)
KINDS = (*STATEFUL, "gemma3", "llama")


def begin_reading(core: Core, prompt: list[int], **more) -> Request:
    """A request that has read a part of its prompt."""
    request = submit(core, prompt, **more)
    step_until(core, Progress)
    return request


def started(core: Core, n_steps: int = 1) -> list[int]:
    return [event.request_id for _ in range(n_steps) for event in core.step() if isinstance(event, Started)]


@pytest.mark.parametrize(("arch", "n_spares"), [*((arch, 0) for arch in KINDS), ("qwen35", 4), ("mamba2", 4)])
def test_what_eight_share_is_read_once(arch, n_spares):
    prompts = [SHARED + text(10 + i, 20) for i in range(8)]
    with open_core(arch, n_slots=4, n_spares=n_spares) as core:
        asked = {submit(core, prompt).id: prompt for prompt in prompts}
        results = drain(core)
        last = max(asked)
        assert_greedy(core, asked[last], results[last])
    n_new = len(SHARED) + 8 * 20
    assert sum(result.n_processed for result in results.values()) <= n_new + 8 * GUARD


def test_one_that_shares_what_is_being_read_waits_and_starts_from_it():
    with open_core(**SMALL) as core:
        reader = begin_reading(core, SHARED + text(2, 200))
        follower = submit(core, SHARED + text(3, 20))
        assert started(core) == [] and list(core.queue) == [follower]
        results = drain(core)
        assert results[follower.id].n_cached == len(SHARED)
        assert results[follower.id].n_processed == 20 and results[reader.id].n_cached == 0
        assert len(SHARED) in checkpoints(core)


def test_it_starts_as_soon_as_the_shared_part_is_read_and_not_at_the_end():
    with open_core(**SMALL) as core:
        reader = begin_reading(core, SHARED + text(2, 900))
        follower = submit(core, SHARED + text(3, 20))
        step_until(core, Started)
        slot = next(slot for slot in core.slots if slot.request is reader)
        assert len(SHARED) <= slot.n_fed < reader.n_prompt - 200
        assert follower not in core.queue
        drain(core)


def test_an_identical_prompt_waits_for_its_twin():
    with open_core(**SMALL) as core:
        begin_reading(core, SHARED)
        twin = submit(core, SHARED)
        assert started(core) == []
        assert drain(core)[twin.id].n_processed <= GUARD


def test_others_pass_those_who_wait():
    with open_core(**SMALL) as core:
        begin_reading(core, SHARED + text(2, 200))
        follower, other = submit(core, SHARED + text(3, 20)), submit(core, text(4, 50))
        assert started(core) == [other.id]
        assert list(core.queue) == [follower]
        assert drain(core)[follower.id].n_cached == len(SHARED)


@pytest.mark.parametrize(
    "more", [{"namespace": "another"}, {"use_cache": False}], ids=["another namespace", "without the cache"]
)
def test_one_who_may_not_reuse_it_does_not_wait_for_it(more):
    with open_core(**SMALL) as core:
        begin_reading(core, SHARED + text(2, 200))
        other = submit(core, SHARED + text(3, 20), **more)
        assert started(core) == [other.id]
        assert drain(core)[other.id].n_cached == 0


def test_one_whose_prefix_is_known_already_does_not_wait():
    with open_core(**SMALL) as core:
        submit(core, SHARED + text(3, 20))
        drain(core)
        begin_reading(core, SHARED[:290] + text(2, 300))
        again = submit(core, SHARED + text(3, 20))
        assert again.id in started(core)
        drain(core)


def test_a_prefix_too_short_to_matter_is_not_waited_for():
    with open_core(**SMALL) as core:
        begin_reading(core, SHARED + text(2, 200))
        other = submit(core, SHARED[: GUARD - 2] + text(3, 50))
        assert other.id in started(core)
        drain(core)


def test_a_reader_that_is_cancelled_lets_the_others_read_on_from_there():
    with open_core(**SMALL) as core:
        reader = begin_reading(core, SHARED + text(2, 200))
        followers = [submit(core, SHARED + text(3 + i, 20)) for i in range(3)]
        assert started(core) == []
        core.cancel(reader.id)
        results = drain(core)
        assert results[reader.id].finish is Finish.CANCELLED
        n_read = results[followers[0].id].n_cached
        assert n_read > 0
        total = sum(results[follower.id].n_processed for follower in followers)
        assert total <= len(SHARED) - n_read + 3 * 20 + 3 * GUARD


def test_a_follower_that_is_cancelled_never_starts():
    with open_core(**SMALL) as core:
        reader = begin_reading(core, SHARED + text(2, 200))
        follower = submit(core, SHARED + text(3, 20))
        core.step()
        core.cancel(follower.id)
        results = drain(core)
        assert results[follower.id].finish is Finish.CANCELLED and results[follower.id].tokens == ()
        assert results[reader.id].finish is Finish.LENGTH


def test_with_checkpoints_off_nobody_waits_in_vain():
    with open_core(**SMALL, checkpoints=CheckpointParams(max_checkpoints=0)) as core:
        begin_reading(core, SHARED + text(2, 200))
        other = submit(core, SHARED + text(3, 20))
        results = drain(core)
        assert results[other.id].finish is Finish.LENGTH


def test_a_prompt_that_is_the_beginning_of_the_one_being_read_is_not_read_again():
    """It has waited for the other to get there, so something must have been kept for it."""
    with open_core(**SMALL) as core:
        begin_reading(core, SHARED + text(2, 200))
        shorter = submit(core, SHARED)
        assert started(core) == []
        assert drain(core)[shorter.id].n_processed <= GUARD


def test_a_chain_of_followers_reads_every_token_once():
    """Each prompt is the one before and some more, asked all at once."""
    prompts = [SHARED]
    for i in range(5):
        prompts.append(prompts[-1] + text(20 + i, 40))
    with open_core(**SMALL) as core:
        for prompt in prompts:
            submit(core, prompt)
        results = drain(core)
    assert sum(result.n_processed for result in results.values()) <= len(prompts[-1]) + len(prompts) * GUARD
