"""Several conversations: slots change hands, requests are cancelled, the context fills up."""

import pytest

from everwarm.config import Sampling
from everwarm.engine.request import Finish, NewToken, Progress
from everwarm.errors import BadRequest, PromptTooLong
from everwarm.state.policy import CheckpointParams
from support.campaign import crossed
from support.drive import (
    EVERY_KIND,
    GUARD,
    STATEFUL,
    assert_greedy,
    checkpoints,
    drain,
    open_core,
    run,
    step_until,
    submit,
    text,
    tidy,
)

SPARES = pytest.mark.parametrize("n_spares", [0, 4])


class Chat:
    """A client that sends its history back, with the reply or without its last tokens."""

    def __init__(self, seed: int, drops: int) -> None:
        self.seed, self.drops, self.turn = seed, drops, 0
        self.history = text(seed, 120 + 5 * seed)

    def n_new(self) -> int:
        return 0 if self.turn == 0 else self._n_new

    def next_prompt(self, reply: tuple[int, ...]) -> list[int]:
        self.turn += 1
        kept = list(reply)[: len(reply) - self.drops]
        more = text(100 * self.seed + self.turn, 25)
        self._n_new = len(more) + min(self.drops, len(reply)) + 1
        self.history = [*self.history, *kept, *more]
        return self.history


@pytest.mark.parametrize(("arch", "n_spares", "idle", "drops"), crossed(EVERY_KIND, (0, 4), (False, True), (0, 3)))
def test_six_conversations_in_two_slots_never_read_their_history_again(arch, n_spares, idle, drops):
    chats = [Chat(seed, drops) for seed in range(1, 7)]
    with open_core(arch, n_spares=n_spares, n_ctx=1024) as core:
        replies = {chat: run(core, chat.history, 6).tokens for chat in chats}
        for _ in range(3):
            for chat in chats:
                result = run(core, chat.next_prompt(replies[chat]), 6)
                replies[chat] = result.tokens
                assert result.n_processed <= chat.n_new() + GUARD
                if idle:
                    tidy(core)


@SPARES
@pytest.mark.parametrize("arch", ["qwen35", "gemma3", "llama"])
def test_conversations_running_two_at_a_time_keep_their_history_too(arch, n_spares):
    chats = [Chat(seed, 0) for seed in range(1, 7)]
    with open_core(arch, n_spares=n_spares, n_ctx=1024) as core:
        replies = {chat: run(core, chat.history, 6).tokens for chat in chats}
        for _ in range(2):
            asked = {submit(core, chat.next_prompt(replies[chat]), 6).id: chat for chat in chats}
            for request_id, result in drain(core).items():
                chat = asked[request_id]
                replies[chat] = result.tokens
                assert result.n_processed <= chat.n_new() + GUARD


def test_without_ram_conversations_that_lost_their_slot_are_read_again():
    """The control: it is the copies in RAM that bring them back."""
    chats = [Chat(seed, 0) for seed in range(1, 7)]
    with open_core(n_spares=0, ram_bytes=0) as core:
        replies = {chat: run(core, chat.history, 6).tokens for chat in chats}
        first = chats[0]
        assert run(core, first.next_prompt(replies[first]), 6).n_cached == 0


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_namespaces_never_reuse_each_others_reading(arch):
    prompt = text(1, 100)
    with open_core(arch, n_spares=4) as core:
        mine = run(core, prompt, namespace="mine")
        yours = run(core, prompt, namespace="yours")
        assert yours.n_cached == yours.n_shared == 0 and yours.tokens == mine.tokens
        assert run(core, prompt, namespace="mine").n_cached >= 84  # the control


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_a_request_that_asks_for_no_cache_processes_everything(arch):
    prompt = text(1, 100)
    with open_core(arch, n_spares=4) as core:
        first = run(core, prompt)
        cold = run(core, prompt, use_cache=False)
        assert cold.n_cached == 0 and cold.n_processed == 100 and cold.tokens == first.tokens
        assert run(core, prompt).n_cached >= 84  # the control


# cancelling


def test_a_request_cancelled_in_the_queue_never_starts():
    with open_core() as core:
        request = submit(core, text(1, 50))
        core.cancel(request.id)
        result = drain(core)[request.id]
        assert result.finish is Finish.CANCELLED and result.tokens == ()
        assert core.counts.n_requests == 0 and core.cache.tree.ram_bytes == 0


@SPARES
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_what_was_read_before_a_cancellation_is_kept_for_the_retry(arch, n_spares):
    prompt = text(1, 900)
    with open_core(arch, n_spares=n_spares, n_ubatch=128, n_batch=128) as core:
        request = submit(core, prompt)
        n_read = 0
        for _ in range(4):
            n_read = step_until(core, Progress).n_read
        core.cancel(request.id)
        assert drain(core)[request.id].finish is Finish.CANCELLED
        assert 256 <= n_read < 900
        retry = run(core, prompt)
        assert retry.n_cached == n_read
        other = text(2, 500)
    with open_core(arch) as fresh:
        assert run(fresh, other).n_cached == 0  # the control
        assert run(fresh, prompt).tokens == retry.tokens


@SPARES
def test_a_reply_cancelled_half_way_is_kept_too(n_spares):
    prompt = text(1, 60)
    with open_core(n_spares=n_spares) as core:
        request = submit(core, prompt, 100)
        written = [step_until(core, NewToken).token for _ in range(5)]
        core.cancel(request.id)
        result = drain(core)[request.id]
        assert result.finish is Finish.CANCELLED and result.tokens[:5] == tuple(written)
        following = run(core, [*prompt, *result.tokens, *text(2, 10)])
        assert following.n_processed <= 12


def test_cancelling_somebody_unknown_or_finished_does_nothing():
    with open_core() as core:
        request = submit(core, text(1, 20))
        drain(core)
        core.cancel(request.id)
        core.cancel(10**9)
        assert run(core, text(1, 20)).finish is Finish.LENGTH


def test_a_cancelled_request_makes_place_for_the_next():
    with open_core(n_slots=1) as core:
        first, second = submit(core, text(1, 50), 500), submit(core, text(2, 50))
        step_until(core, NewToken)
        core.cancel(first.id)
        results = drain(core)
        assert results[first.id].finish is Finish.CANCELLED and results[second.id].finish is Finish.LENGTH


# a full context


@SPARES
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_a_reply_that_fills_the_context_ends_with_its_length(arch, n_spares):
    with open_core(arch, n_ctx=256, n_spares=n_spares, n_slots=1) as core:
        n_ctx = core.context.n_ctx
        result = run(core, text(1, 200), 10_000)
        assert result.finish is Finish.LENGTH
        assert len(result.tokens) == n_ctx - 200


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_the_longest_prompt_that_fits_is_answered(arch):
    with open_core(arch, n_ctx=256) as core:
        n = core.context.n_ctx - 1
        run(core, text(2, 100))  # something must give way first
        assert len(run(core, text(1, n), 50).tokens) == 1


@pytest.mark.parametrize(
    ("arch", "n_spares", "n_checkpoints"), crossed((*STATEFUL, "gemma3", "llama"), (0, 4), (0, 32))
)
def test_two_requests_that_do_not_fit_together_both_finish_whole(arch, n_spares, n_checkpoints):
    params = CheckpointParams(max_checkpoints=n_checkpoints)
    prompts = [text(1, 60), text(2, 60)]
    with open_core(arch, n_ctx=256, n_spares=n_spares, checkpoints=params) as core:
        asked = [submit(core, prompt, 120) for prompt in prompts]
        results = drain(core)
        if core.context.kind.has_attention:
            assert core.counts.n_suspended >= 1
        for prompt, request in zip(prompts, asked, strict=True):
            result = results[request.id]
            assert result.finish is Finish.LENGTH and len(result.tokens) == 120
            assert_greedy(core, prompt, result)
        with pytest.raises(AssertionError):  # the control: the other's reply would be noticed
            assert_greedy(core, prompts[0], results[asked[1].id])


def test_two_equal_prompts_of_different_namespaces_both_finish():
    with open_core(n_ctx=256) as core:
        asked = [submit(core, text(1, 130), 20, namespace=name) for name in ("mine", "yours")]
        results = drain(core, most=400)
    assert [len(results[request.id].tokens) for request in asked] == [20, 20]


def test_five_requests_that_do_not_fit_together_all_finish():
    with open_core(n_ctx=256, n_slots=4, n_spares=2) as core:
        asked = [submit(core, text(i, 50), 70) for i in range(1, 6)]
        results = drain(core)
    assert [len(results[request.id].tokens) for request in asked] == [70] * 5


def test_a_prompt_longer_than_what_others_leave_waits_for_its_turn():
    with open_core(n_ctx=512) as core:
        first, second = submit(core, text(1, 300), 20), submit(core, text(2, 300), 20)
        results = drain(core)
    assert {len(results[r.id].tokens) for r in (first, second)} == {20}


# what is refused


def test_a_prompt_that_never_fits_is_refused_with_both_numbers():
    with open_core(n_ctx=256) as core:
        n = core.context.n_ctx
        with pytest.raises(PromptTooLong, match=f"{n} tokens but the context holds {n}"):
            submit(core, text(1, n))
        assert not core.has_work


@pytest.mark.parametrize("bad", [264, 10_000, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_refused(bad):
    with open_core() as core, pytest.raises(BadRequest, match="not in the vocabulary; give 0 to 263"):
        submit(core, [1, bad, 2])


@pytest.mark.parametrize("token", [-1, 264, 10**6])
def test_a_bias_on_a_token_outside_the_vocabulary_is_refused(token):
    with open_core() as core:
        with pytest.raises(BadRequest, match="logit_bias names token"):
            submit(core, [1, 2], sampling=Sampling(logit_bias={token: 1.0}))
        biased = run(core, [1, 2], 3, sampling=Sampling(temperature=0.0, logit_bias={77: 1000.0}))
        assert biased.tokens == (77, 77, 77)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": -1},
        {"stable": 11},
        {"stable": -1},
        {"boundaries": (3, 11)},
        {"boundaries": (-1,)},
        {"breakpoints": (11,)},
        {"stables": (-1,)},
    ],
)
def test_a_malformed_ask_is_refused(bad):
    with open_core() as core, pytest.raises(BadRequest):
        submit(core, text(1, 10), **bad)


def test_an_empty_prompt_is_refused():
    with open_core() as core, pytest.raises(BadRequest, match="the prompt is empty"):
        submit(core, [])


def test_checkpoints_are_taken_where_boundaries_and_other_hints_say():
    with open_core() as core:
        run(core, text(1, 200), boundaries=(50, 120), stable=130, stables=(130, 140), breakpoints=(33,))
        assert {33, 50, 120, 130, 140} <= set(checkpoints(core))
