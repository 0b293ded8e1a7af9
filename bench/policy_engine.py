"""``python -m bench.policy_engine``: the traces of ``bench policy`` on the engine, beside what the simulator says of them.

The embedded model, all lengths scaled by ``SIZE``, and budgets that hold the same shares of everything. What the engine
replies takes the place of the reply in the trace, so that later prompts continue from it.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.measure import table
from bench.policy import whole_bytes
from bench.workload.memory import FORMS, TRACES, trace
from everwarm.config import GREEDY
from everwarm.demo import EMBEDDED_MODEL
from everwarm.engine.build import assemble
from everwarm.engine.core import Core
from everwarm.engine.process.messages import CutHints
from everwarm.engine.request import Ask, Finished, Result
from everwarm.engine.settings import EngineSettings
from everwarm.prompt.prompt import Codes, Prompt
from everwarm.simulate.oracle import unavoidable_tokens
from everwarm.simulate.replay import DEFAULT_NAMES, replay
from everwarm.simulate.simulated_machine import Curves, MachineSize
from everwarm.simulate.trace import TraceTurn
from everwarm.state.store.arena_file import memory_file

SIZE, N_VOCAB = 0.05, 500
N_CELLS = 16_384
N_SPARES = 4
SHARES = (0.05, 0.1, 0.2, 0.4)
SEGMENT_BYTES = 236  # of libllama's, beside those of the tokens
SETTINGS = EngineSettings(n_slots=2, n_ctx=N_CELLS, n_spares=N_SPARES, ram_bytes=1 << 26, speculate="off")
ISSUED = ("in turn", "popular", "agents", "branches")


@dataclass(frozen=True, slots=True)
class Played:
    """What the engine did with a trace, and the trace with its replies."""

    turns: list[TraceTurn]
    reads: list[int]

    @property
    def n_prompt(self) -> int:
        return sum(len(turn.prompt) for turn in self.turns)

    def hit_rate(self, reads: Sequence[int]) -> float:
        return 1 - sum(reads) / self.n_prompt


def run() -> None:
    _run(_parser().parse_args([]))


def main() -> None:
    _run(_parser().parse_args())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.policy_engine")
    parser.add_argument("--traces", nargs="+", choices=list(TRACES), default=list(ISSUED))
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=["hinted", "plain"])
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--size", type=float, default=SIZE, help="of all lengths")
    parser.add_argument("--requests", type=int, default=120, help="of each trace, at most")
    parser.add_argument("--seed", type=int, default=103)
    return parser


def _run(chosen: argparse.Namespace) -> None:
    head = ("trace", "form", *(f"{100 * share:g} %" for share in chosen.shares))
    rows = []
    for name in chosen.traces:
        for form in chosen.forms:
            turns = trace(name, form, chosen.seed, chosen.size, N_VOCAB)[: chosen.requests]
            rows.append((name, form, *(_compared(turns, share) for share in chosen.shares)))
            print(rows[-1], flush=True)
    table("Share of prompt tokens found: engine | simulated | best other simulated", head, rows)


def _compared(turns: list[TraceTurn], share: float) -> str:
    curves = _curves()
    budget = int(share * whole_bytes(turns, unavoidable_tokens(turns), curves))
    core = assemble(EMBEDDED_MODEL, replace(SETTINGS, ram_bytes=budget), memory=memory_file())  # as a server has it
    try:
        played = play(core, turns)
    finally:
        core.close()
    machine = MachineSize(SETTINGS.n_slots, N_SPARES, N_CELLS)
    simulated = {name: replay(played.turns, name, curves, budget, machine).reads for name in DEFAULT_NAMES}
    others = [played.hit_rate(reads) for name, reads in simulated.items() if name != "ours"]
    rates = (played.hit_rate(played.reads), played.hit_rate(simulated["ours"]), max(others))
    return " | ".join(f"{100 * rate:.1f}" for rate in rates)


@functools.cache
def _curves() -> Curves:
    """What the embedded model takes."""
    core = assemble(EMBEDDED_MODEL, SETTINGS)
    try:
        return curves_of(core)
    finally:
        core.close()


def curves_of(core: Core) -> Curves:
    """What the model of an engine takes; all tokens take as long."""
    shape, n_logits = core.sizes.shape, core.model.vocab.n_tokens
    return Curves(
        "engine",
        shape.state_bytes,
        shape.kv_bytes_per_token,
        1e9,
        ((0, 1e-3),),
        logits_bytes=4 * n_logits,
        segment_bytes=SEGMENT_BYTES,
    )


def play(core: Core, turns: Iterable[TraceTurn]) -> Played:
    played_turns: list[TraceTurn] = []
    reads: list[int] = []
    known: dict[str, list[tuple[Codes, Codes]]] = {}  # of each conversation: paths of the trace, and with own replies
    for turn in turns:
        paths = known.setdefault(turn.conversation, [])
        codes = _with_replies(turn.prompt.codes, paths)
        now = time.monotonic()
        result = _ask(core, codes, replace(turn, prompt=Prompt(codes)))
        reply = np.array(result.tokens, np.int32)
        paths.append((turn.path.codes, np.concatenate([codes, reply[:-1]])))
        played_turns.append(replace(turn, prompt=Prompt(codes), reply=reply, at_s=now))
        reads.append(result.n_processed)
    return Played(played_turns, reads)


def _with_replies(codes: Codes, paths: Sequence[tuple[Codes, Codes]]) -> Codes:
    """A prompt of the trace with the replies of the engine in it."""
    fits = [own for path, own in paths if len(path) <= len(codes) and np.array_equal(codes[: len(path)], path)]
    longest = max(fits, key=len, default=codes[:0])
    return np.concatenate([longest, codes[len(longest) :]])


def _ask(core: Core, codes: Codes, turn: TraceTurn) -> Result:
    ask = Ask(
        Prompt(codes),
        sampling=GREEDY,
        max_tokens=max(1, len(turn.reply)),
        ignore_eos=True,
        hints=CutHints(turn.boundaries, turn.stable),
    )
    request = core.submit(ask)
    results = []
    while core.has_work:
        events = core.step()
        core.keep_ends()
        results += [event.result for event in events if isinstance(event, Finished) and event.request_id == request.id]
    while core.tidy():
        pass
    return results[0]


if __name__ == "__main__":
    main()
