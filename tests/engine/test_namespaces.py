"""No state crosses from one namespace to another, whatever happens: on the device, in RAM, on disk, over restarts.

Everybody says the same things, so that whoever could see another's states would find them. EVERWARM_CAMPAIGN=1 takes
100,000 steps.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from everwarm.engine.core import Core
from everwarm.engine.request import Result
from everwarm.engine.settings import StoreSettings
from support.drive import check, drain, open_core, submit, text

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_STEPS = 100_000 if CAMPAIGN else 100
NAMESPACES = [f"tenant {i}" for i in range(6)]
HEADS = [text(seed, n) for seed, n in ((1, 90), (2, 40), (3, 130))]
PER_LIFE = 120 if CAMPAIGN else 50  # steps between two restarts
PER_CHECK = 25
MOST_CONTINUED = 60  # prompts of a namespace that it may go on from


@dataclass
class World:
    """What each namespace has read, and what it was told was known."""

    rng: random.Random
    read: dict[str, list[list[int]]] = field(default_factory=lambda: {name: [] for name in NAMESPACES})
    prefixes: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in NAMESPACES})  # hashes of all
    n_crossed: int = 0
    n_cached: int = 0

    def prompt(self, namespace: str) -> list[int]:
        """As others say it; or as this one went on before."""
        mine = self.read[namespace]
        start = self.rng.choice(mine) if mine and self.rng.random() < 0.5 else self.rng.choice(HEADS)
        cut = start[: self.rng.randrange(1, len(start) + 1)] if self.rng.random() < 0.3 else start
        return [*cut, *text(self.rng.randrange(4, 12), self.rng.randrange(1, 20))][:220]

    def judge(self, namespace: str, prompt: list[int], result: Result, beside: list[list[int]]) -> None:
        """``beside``: what the same namespace asked at the same time; who starts first need not end first."""
        mine, prefixes = self.read[namespace], self.prefixes[namespace]
        known = next((i for i, prefix in enumerate(hashes(prompt)) if prefix not in prefixes), len(prompt))
        known = max(known, *(common(prompt, other) for other in beside), 0)
        self.n_crossed += result.n_cached > known or result.n_shared > known
        self.n_cached += result.n_cached
        mine.append([*prompt, *result.tokens])
        prefixes.update(hashes(mine[-1]))
        if len(mine) > MOST_CONTINUED:
            del mine[self.rng.randrange(len(mine))]


def hashes(items: list[int]) -> Iterator[int]:
    """One for every prefix that is not empty."""
    found = 0
    for item in items:
        found = hash((found, item))
        yield found


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def live(core: Core, world: World, n_steps: int, is_blind: bool = False) -> None:
    """``is_blind``: the engine is told that all are one namespace."""
    for i in range(n_steps):
        asked = {}
        for _ in range(world.rng.choice([1, 1, 1, 2])):
            namespace = world.rng.choice(NAMESPACES)
            prompt = world.prompt(namespace)
            hints = {"stable": world.rng.randrange(len(prompt) + 1), "boundaries": (world.rng.randrange(len(prompt)),)}
            seen = "everybody" if is_blind else namespace
            request = submit(core, prompt, world.rng.choice([0, 1, 3]), namespace=seen, **hints)
            asked[request.id] = (namespace, prompt)
        for id, result in drain(core, after_step=check if i % PER_CHECK == 0 else lambda _: None).items():
            assert result.error is None
            own, prompt = asked[id]
            beside = [other for each, (name, other) in asked.items() if each != id and name == own]
            world.judge(own, prompt, result, beside)
        if world.rng.random() < 0.3:
            while core.tidy():
                pass


@contextlib.contextmanager
def opened(tmp_path: Path, memory: int, ram_bytes: int = 4 << 20) -> Iterator[Core]:
    store = StoreSettings(str(tmp_path / "states"), 64 << 20, restore_policy="always")
    with open_core(width=64, n_ctx=512, n_spares=2, ram_bytes=ram_bytes, store=store, memory=memory) as core:
        yield core


def test_no_state_crosses_between_namespaces(tmp_path: Path, memory: int) -> None:
    world = World(random.Random(5))
    for life in range(max(2, N_STEPS // PER_LIFE)):
        with opened(tmp_path, memory) as core:
            live(core, world, PER_LIFE)
            if life % 2:
                core.put_away()
        assert world.n_crossed == 0, f"in life {life}"
    assert world.n_cached > 10 * N_STEPS, "nothing was ever reused, so nothing could have crossed"


def test_states_that_crossed_would_be_noticed(tmp_path: Path, memory: int) -> None:
    """The negative control: an engine that takes all namespaces for one."""
    world = World(random.Random(5))
    with opened(tmp_path, memory) as core:
        live(core, world, 40, is_blind=True)
    assert world.n_crossed > 10
