"""How long the last frame of a turn waits until the turn is safe: with room in RAM, and with RAM full of what others come
back to and a disk, where it waits for the disk (``kept: disk``).

Conversations take turns on the embedded model, so each comes back, and none is worth another's place.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.measure import EMBEDDED, table
from bench.server import Server, everwarm, post

N_CONVERSATIONS, N_ROUNDS, N_WARM = 8, 8, 2  # of the rounds, those before anything is known of returns
N_FIRST, N_NEW, N_REPLY = 600, 40, 32
N_VOCAB = 250
ROOMY, FULL = "512MiB", "6MiB"  # the KV alone takes 9 MiB in the end


@dataclass(frozen=True, slots=True)
class Waited:
    keep_ms: float
    kept: str


def run() -> None:
    found = {"roomy RAM": _waits("--cache-ram", ROOMY), "full RAM, disk": _waits("--cache-ram", FULL)}
    head = ("", "turns", "kept", "median", "p95", "longest")
    rows = [
        (where, str(len(group)), kept, *_times(group))
        for where, waits in found.items()
        for kept, group in _by_place(waits).items()
    ]
    table("How long the last frame waits", head, rows)


def _waits(*arguments: str) -> list[Waited]:
    with (
        tempfile.TemporaryDirectory(prefix="everwarm-bench-") as states,
        everwarm(str(EMBEDDED), *arguments, "--state-dir", states, "--disk-cache", "1GiB") as server,
    ):
        return _take_turns(server)


def _take_turns(server: Server) -> list[Waited]:
    words = np.random.default_rng(1)
    prompts = [words.integers(0, N_VOCAB, N_FIRST).tolist() for _ in range(N_CONVERSATIONS)]
    waits = []
    for n_round in range(N_ROUNDS):
        for i, prompt in enumerate(prompts):
            answer = post(server, "/completion", _body(prompt))
            prompts[i] = [*prompt, *answer["tokens"], *words.integers(0, N_VOCAB, N_NEW).tolist()]
            if n_round >= N_WARM:
                waits.append(Waited(answer["timings"]["keep_ms"], answer["kept"]))
    return waits


def _body(prompt: Sequence[int]) -> dict[str, object]:
    return {"prompt": prompt, "n_predict": N_REPLY, "temperature": 0, "ignore_eos": True, "return_tokens": True}


def _by_place(waits: Sequence[Waited]) -> dict[str, list[Waited]]:
    places = Counter(each.kept for each in waits)
    return {place: [each for each in waits if each.kept == place] for place, _ in places.most_common()}


def _times(waits: Sequence[Waited]) -> tuple[str, str, str]:
    times = sorted(each.keep_ms for each in waits)
    shown = (statistics.median(times), times[int(0.95 * (len(times) - 1))], times[-1])
    return tuple(f"{ms:.1f} ms" for ms in shown)  # type: ignore[return-value]


if __name__ == "__main__":
    run()
