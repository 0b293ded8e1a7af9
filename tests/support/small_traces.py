"""Small random traces, and the obvious ways to ask of them what the simulator works out cleverly."""

import random

import numpy as np

from everwarm.prompt.prompt import Prompt
from everwarm.simulate.simulated_machine import Curves
from everwarm.simulate.trace import TraceTurn

STATE = 1000
SMALL = Curves(
    "small", STATE, 0, 1e12, ((0, 1.0),)
)  # a second per token, states of 1000 bytes, KV and loading for nothing


def turn(tokens, reply=(), at_s=0.0, **more) -> TraceTurn:
    return TraceTurn("c", Prompt.of_tokens(list(tokens)), np.array(reply, np.int32), at_s, **more)


def random_turns(seed: int, n_turns: int = 6, n_letters: int = 2, longest: int = 24) -> list[TraceTurn]:
    """Few letters, so that prompts share much; some go on from what was said before."""
    rng = random.Random(seed)
    turns: list[TraceTurn] = []
    for i in range(n_turns):
        old = rng.choice(turns).path.codes.tolist() if turns and rng.random() < 0.8 else []
        keep = old[: rng.randint(0, len(old))]
        tokens = (keep + rng.choices(range(n_letters), k=rng.randint(1, 12)))[:longest]
        reply = rng.choices(range(n_letters), k=rng.randint(0, 4))
        n = len(tokens)
        stop = rng.randint(1, n) if rng.random() < 0.15 else None
        turns.append(turn(tokens, reply, float(i), boundaries=(n // 2, n), stop_at=stop))
    return turns


def shared_by_hand(turns: list[TraceTurn], i: int) -> int:
    """How many tokens of a request somebody has read before, one comparison after the other."""
    prompt = turns[i].prompt.codes.tolist()[: turns[i].n_stop]
    best = 0
    for earlier in turns[:i]:
        path = earlier.path.codes.tolist()
        n = 0
        while n < min(len(path), len(prompt)) and path[n] == prompt[n]:
            n += 1
        best = max(best, n)
    return best
