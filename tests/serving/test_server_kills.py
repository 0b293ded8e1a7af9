"""The whole server killed under traffic, again and again: what was acknowledged long enough before is never read again.

EVERWARM_CAMPAIGN=1 kills 300 times, in four runs.
"""

from __future__ import annotations

import http.client
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.server import PATIENCE_S, Server, is_alive, serving, until, words

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_KILLS = 75 if CAMPAIGN else 1  # of each run
N_TALKS = 6
DURABLE_S = 2.0  # so long after its end a turn is on disk, whatever else runs (docs/store.md)
SLACK = 32  # guard tokens, and what a template writes before a reply and drops afterwards
MAX_PROMPT = 2500


@dataclass
class Talk:
    """One conversation, over all lives of the server."""

    seed: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    ended: list[tuple[float, int]] = field(default_factory=list)  # when, and the tokens of the prompt
    n_turns: int = 0

    def turn(self, server: Server) -> tuple[int, int]:
        """Tokens of the prompt, and of them those that were cached. What breaks off is as if it had not been said."""
        self.renew()
        n_words = 150 if not self.messages else 12
        self.n_turns += 1
        asked = [*self.messages, {"role": "user", "content": words(n_words, 1000 * self.seed + self.n_turns)}]
        body = {
            "messages": asked,
            "temperature": 0,
            "max_tokens": 8,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        reply = server.ask("/v1/chat/completions", body)
        ended = time.monotonic()
        self.messages = [*asked, reply["choices"][0]["message"]]
        usage = reply["usage"]
        self.ended.append((ended, usage["prompt_tokens"]))
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def renew(self) -> None:
        """One that has become too long begins anew."""
        if self.ended and self.ended[-1][1] > MAX_PROMPT:
            self.messages, self.ended = [], []

    def owed(self, killed_at: float) -> int:
        """Tokens that must still be known after a kill."""
        return max((n for ended, n in self.ended if ended < killed_at - DURABLE_S), default=0)


def live_once(folder: Path, talks: list[Talk], killed_at: float, rng: random.Random) -> tuple[float, list[str]]:
    """One life: every conversation goes on and is checked against what it was owed, then traffic, then the kill."""
    lost, stop = [], threading.Event()
    with serving("--disk-cache", "2GiB", "--state-dir", str(folder)) as server:
        for talk in talks:
            talk.renew()
            owed = talk.owed(killed_at)
            n_prompt, n_cached = talk.turn(server)
            if n_cached < min(owed, n_prompt) - SLACK:
                lost.append(f"conversation {talk.seed}: {owed} were owed, {n_cached} of {n_prompt} were known")
        n_busy = rng.randrange(1, N_TALKS)
        threads = [threading.Thread(target=chat_on, args=(server, talk, stop)) for talk in talks[:n_busy]]
        for thread in threads:
            thread.start()
        time.sleep(DURABLE_S + rng.random())
        victims = [*server.engine_pids, server.process.pid]
        for pid in victims if rng.random() < 0.5 else victims[::-1]:
            os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        server.process.wait(PATIENCE_S)
        until(lambda: not any(map(is_alive, victims)), "all of it is gone")
    return killed_at, lost


def chat_on(server: Server, talk: Talk, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            talk.turn(server)
        except (OSError, AssertionError, http.client.HTTPException, ValueError):
            return  # its server was killed


@pytest.mark.parametrize("seed", range(4 if CAMPAIGN else 1))
def test_nothing_acknowledged_is_lost_when_everything_is_killed(tmp_path: Path, seed: int) -> None:
    rng, talks = random.Random(seed), [Talk(i) for i in range(N_TALKS)]
    killed_at, n_owed = 0.0, 0
    for life in range(N_KILLS + 1):
        n_owed += sum(talk.owed(killed_at) for talk in talks)
        killed_at, lost = live_once(tmp_path, talks, killed_at, rng)
        assert not lost, (life, lost)
    print(f"\n{N_KILLS} kills of the whole server: {n_owed} tokens were owed, none was read again")
    assert n_owed > 500 * N_KILLS, "nothing was ever owed"
    shutil.rmtree(tmp_path)
    assert live_once(tmp_path, talks, killed_at, rng)[1], "this test could not fail"
