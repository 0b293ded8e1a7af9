"""The simulator of our own policy reads what the real engine reads, request by request."""

import pytest
from bench.workload.chat import to_turn
from bench.workload.scenarios import scenario

from everwarm.engine.request import Progress
from everwarm.simulate.replay import replay
from everwarm.simulate.simulated_machine import Curves, MachineSize
from everwarm.simulate.trace import TraceTurn
from support.drive import open_core, step_until, submit, text, tidy
from support.drive import run as ask
from support.small_traces import turn

MANY_BYTES = 1 << 40
N_REPLY = 5


def played(core, turns: list[TraceTurn]) -> tuple[list[int], list[TraceTurn]]:
    """What the engine reads of each, and the same turns with the replies it gave."""
    reads, replies = [], []
    for each in turns:
        request = {"boundaries": each.boundaries, "stable": each.stable}
        result = ask(core, each.prompt.codes.tolist(), N_REPLY, **request)
        tidy(core)
        reads.append(result.n_processed)
        replies.append(
            turn(each.prompt.codes, result.tokens, each.at_s, boundaries=each.boundaries, stable=each.stable)
        )
    return reads, replies


def curves_of(core) -> Curves:
    shape = core.sizes.shape
    return Curves("engine", shape.state_bytes, shape.kv_bytes_per_token, 1e9, ((0, 1e-3),))


@pytest.mark.parametrize(
    "name", ["append", "tool_loops", "thinking_stripped", "resend", "edit", "prune", "fan_out", "interleave"]
)
def test_the_simulator_reads_what_the_engine_reads(name):
    turns = [to_turn(step, n_vocab=250) for step in scenario(name, seed=1, size=0.02)][:14]
    with open_core(n_slots=2, n_ctx=4096, n_spares=0) as core:
        reads, replies = played(core, turns)
        cost = replay(replies, "ours", curves_of(core), MANY_BYTES, MachineSize(n_slots=2, n_spares=0))
    assert list(cost.reads) == reads
    cold = replay(replies, "cold", curves_of(core), MANY_BYTES, MachineSize(n_slots=2, n_spares=0))
    assert cold.n_read > cost.n_read  # the control: sameness is not because nothing was saved


def test_a_cancelled_prompt_goes_on_in_both_where_it_stopped():
    tokens = text(5, 900)
    with open_core(n_slots=1, n_ctx=4096, n_spares=0, n_ubatch=64) as core:
        request = submit(core, tokens, 1)
        event = step_until(core, Progress)
        core.cancel(request.id)
        core.step()
        tidy(core)
        n_read = ask(core, tokens, 1).n_processed
        stopped = turn(tokens, stop_at=event.n_read)
        cost = replay([stopped, turn(tokens)], "ours", curves_of(core), MANY_BYTES, MachineSize(n_slots=1, n_spares=0))
    assert cost.reads == (event.n_read, n_read) and n_read < len(tokens)
