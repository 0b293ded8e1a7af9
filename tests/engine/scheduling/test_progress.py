"""Requests that fill the context together all end: the one admitted first decodes something in every step and is never
suspended for a younger one."""

import random
from dataclasses import dataclass, field

import pytest

from everwarm.engine.core import Core
from everwarm.engine.request import Finish, Finished, Request, Result
from everwarm.engine.scheduling import scheduler
from everwarm.engine.scheduling.admission import Admission
from everwarm.engine.scheduling.scheduler import fit, oldest_first
from everwarm.errors import ContextFull
from support.drive import EVERY_KIND, assert_greedy, check, open_core, submit, text

UNLIMITED = 1 << 20  # as a caller without max_tokens


@dataclass
class Watched:
    """A core under observation: who was suspended, and whether the oldest moved."""

    core: Core
    asked: dict[int, Request] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)
    n_steps: int = 0
    n_vain: int = 0  # steps in which the oldest running request did not move

    def submit(self, tokens: list[int], max_tokens: int, **more) -> None:
        request = submit(self.core, tokens, max_tokens, **more)
        self.asked[request.id] = request

    @property
    def most_steps(self) -> int:
        """While one is the oldest every step decodes an item of it, from the first one on at worst."""
        return sum(request.room + 1 for request in self.asked.values())

    def step(self) -> None:
        order = oldest_first(self.core.slots)
        oldest = self.core.slots[order[0]] if order else None
        request, n_fed = (oldest.request, oldest.n_fed) if oldest else (None, 0)
        n_items = 0 if request is None else request.n_items
        for event in self.core.step():
            if isinstance(event, Finished):
                self.results[event.request_id] = event.result
        self.core.keep_ends()
        self.n_steps += 1
        if request is not None and request.id not in self.results:
            has_moved = oldest.n_fed > n_fed or request.n_items > n_items  # a rejected draft still brings a token
            self.n_vain += oldest.request is not request or not has_moved

    def drain(self) -> None:
        while self.core.has_work and self.n_steps <= self.most_steps:
            self.step()


def forbid_unfair_suspensions(core: Core, monkeypatch) -> list[int]:
    """Every suspension is of the youngest and never of a lone one; returns who was suspended, as it happens."""
    suspended, suspend = [], Core._suspend

    def checked(core, slot, reason):
        running = sorted(s.request.admitted for s in core.slots if s.request is not None)
        assert len(running) > 1 and slot.request.admitted == running[-1] != running[0]
        suspended.append(slot.request.id)
        suspend(core, slot, reason)

    monkeypatch.setattr(Core, "_suspend", checked)
    return suspended


def prompts(rng: random.Random, n_ctx: int) -> list[int]:
    """Some share a long beginning, some a short one, some nothing."""
    shared = text(1, n_ctx)[: rng.choice([0, 2, 3, 20, 60])]
    return [*shared, *text(rng.randrange(2, 200), rng.randint(1, n_ctx // 3))]


def play(seed: int, watched: Watched) -> None:
    """A random crowd: some come later, some are cancelled, some want no end."""
    rng, core = random.Random(seed), watched.core
    for _ in range(rng.randint(4, 7)):
        more = {"namespace": rng.choice(["", "", "other"]), "use_cache": rng.random() > 0.1}
        if rng.random() < 0.15:
            more["slot"] = rng.randrange(len(core.slots))
        length = rng.choice([UNLIMITED, UNLIMITED, rng.randint(0, 100)])
        watched.submit(prompts(rng, core.context.n_ctx), length, **more)
        for _ in range(rng.choice([0, 0, 3, 40])):
            watched.step()
        if rng.random() < 0.15:
            core.cancel(rng.choice(list(watched.asked)))
    watched.drain()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_whatever_comes_every_request_ends_and_the_oldest_always_moves(arch, seed, monkeypatch):
    rng = random.Random(seed)
    sizes = {"n_slots": rng.choice([2, 3, 4]), "n_spares": rng.choice([0, 4]), "n_ctx": 256}
    ram = rng.choice([0, 1 << 20, 64 << 20])  # what was suspended may be lost
    with open_core(arch, width=64, ram_bytes=ram, **sizes) as core:
        watched = Watched(core)
        suspended = forbid_unfair_suspensions(core, monkeypatch)
        play(seed, watched)
        check(core)
        assert watched.results.keys() == watched.asked.keys() and watched.n_vain == 0
        assert all(result.error is None for result in watched.results.values())
        assert core.counts.n_stalls == 0
        assert suspended or not core.context.kind.has_attention


def stop_in_vain(core, grants, events):
    """How a step once made room: it suspended somebody and decoded nothing."""
    if not grants or core.cache.room.make_room(sum(grant.n_tokens for grant in grants)):
        return grants
    kept = fit(grants, oldest_first(core.slots), core.context.cells.free)
    if not kept:
        core._make_way(ContextFull("every cell is taken"), events)
    return kept


def count_too_little(monkeypatch) -> None:
    """How admission once counted: an equal prefix passed for shared cells, and whoever fitted for one step came back."""
    monkeypatch.setattr(Admission, "_n_cells_beside", lambda *_: 0)
    monkeypatch.setattr(Admission, "_n_to_grow", lambda self, request, n_running: n_running + 1)


def step_in_vain(monkeypatch) -> None:
    """Both together: admit, suspend, admit, suspend."""
    monkeypatch.setattr(Core, "_with_room", stop_in_vain)
    count_too_little(monkeypatch)


def play_pairs(core: Core) -> Watched:
    """Two that begin alike in cells of their own: side by side they fill the context."""
    watched = Watched(core)
    for i in range(2):
        watched.submit([*text(1, 40)[:9], *text(5 + i, 20)], UNLIMITED)
    watched.drain()
    return watched


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_two_that_begin_alike_in_cells_of_their_own_end(arch):
    with open_core(arch, n_ctx=256, n_spares=4) as core:
        watched = play_pairs(core)
        assert watched.n_vain == 0
        assert [result.finish for result in watched.results.values()] == [Finish.LENGTH] * 2
        assert core.counts.n_suspended == 1  # and it came back once there was room
        for id, result in watched.results.items():
            assert_greedy(core, watched.asked[id].ask.prompt.codes.tolist(), result)


def test_the_control_without_the_rule_nobody_moves(monkeypatch):
    step_in_vain(monkeypatch)
    monkeypatch.setattr(scheduler, "MAX_STEPS", 1 << 30)
    with open_core("llama", n_ctx=256, n_spares=4) as core:
        watched = play_pairs(core)
        assert len(watched.results) < 2 and watched.n_vain > watched.most_steps / 2


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_the_rule_holds_although_admission_counts_too_little(arch, monkeypatch):
    count_too_little(monkeypatch)
    with open_core(arch, n_ctx=256, n_spares=4) as core:
        watched = play_pairs(core)
        assert len(watched.results) == 2 and watched.n_vain == 0


def test_a_loop_that_turns_in_vain_is_named_once_and_cleared(monkeypatch, caplog):
    """The livelock of old, with the watch on: it says who waits for what, suspends the others, and all end."""
    step_in_vain(monkeypatch)
    with open_core("llama", n_ctx=256, n_spares=4) as core:
        watched = play_pairs(core)
        assert core.counts.n_stalls >= 1 and len(watched.results) == 2
        output = [record.message for record in caplog.records if "nothing has moved" in record.message]
        assert len(output) == core.counts.n_stalls < 8
        assert "of 256 cells are in use" in output[0] and output[0].count("request") == 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("arch", ["qwen35", "gemma3", "llama"])
def test_a_restore_takes_just_the_cells_that_admission_counted(arch, seed):
    with open_core(arch, width=64, n_ctx=512, n_slots=4, n_spares=4) as core:
        counted, bring, cells = [], core.cache.restorer.bring, core.context.cells

        def checked(slot, goal, match, sources):
            running = [other.seq for other in core.slots if other.request is not None]
            expected = core.cache.restorer.n_cells_beside(slot, goal, running)
            restored = bring(slot, goal, match, sources)
            n_left = goal.prompt.n_tokens(len(goal.prompt)) - goal.prompt.n_tokens(restored.n_items)
            counted.append((expected, cells.used_by([*running, slot.seq]) + n_left, restored.n_items))
            return restored

        core.cache.restorer.bring = checked
        play(seed, Watched(core))
        play(seed + 100, Watched(core))
        assert [expected for expected, _, _ in counted] == [really for _, really, _ in counted]
        assert sum(n_items > 0 for _, _, n_items in counted) >= 2
