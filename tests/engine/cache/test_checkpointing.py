"""No prompt stops for a checkpoint that nothing can hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from everwarm.config import Sampling
from everwarm.engine.cache import checkpointing
from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.core import Core
from everwarm.engine.slots import Slot
from everwarm.state.policy import CheckpointParams, CutKind
from support.drive import check, checkpoints, open_core, run, text, tidy
from support.kept_cores import kept_core, put_away

PROMPT, BOUNDARIES, STABLE = text(1, 800), (100, 250, 430), 780
EVERY_50 = CheckpointParams(every_n_tokens=50)


def chunks(core: Core, ask: Callable[[], object]) -> list[int]:
    """The sizes of the pieces in which prompts are read meanwhile."""
    sizes, decode = [], core.context.decode

    def noting(feeds):
        sizes.extend(len(feed.tokens) for feed in feeds if len(feed.tokens) > 1)
        decode(feeds)

    core.context.decode = noting
    ask()
    return sizes


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "gemma3"])
def test_without_spares_and_ram_a_prompt_stops_for_its_stable_point_alone(arch, is_known, monkeypatch):
    if not is_known:  # the control
        monkeypatch.setattr(Checkpointer, "is_worth_a_cut", lambda _self, _kind: True)
    with open_core(arch, ram_bytes=0, checkpoints=EVERY_50) as core:
        n_ubatch = core.settings.n_ubatch
        seen = chunks(core, lambda: run(core, PROMPT, boundaries=BOUNDARIES, stable=STABLE))
        assert checkpoints(core) == []
    most = -(-STABLE // n_ubatch) + -(-(len(PROMPT) - STABLE) // n_ubatch)
    assert (len(seen) <= most) is is_known


def test_a_deterministic_prompt_is_cut_as_always():
    """Its bits must not depend on what there is room for."""
    seen = []
    for ram_bytes in (0, 256 << 20):
        with open_core(ram_bytes=ram_bytes, checkpoints=EVERY_50) as core:
            seen.append(chunks(core, lambda core=core: run(core, PROMPT, stable=STABLE, deterministic=True)))
    assert seen[0] == seen[1]


def in_full_ram(core: Core) -> int:
    """How many checkpoints a prompt takes where RAM has no room for any of them, and nothing else may go."""
    run(core, PROMPT)
    core.cache.room.clear()
    weigh, n_created = core.cache.ram_budget._weigh, core.counts.n_created
    core.cache.ram_budget._weigh = lambda part: [e for e in weigh(part) if part.nodes[e.key // 2].path.codes[0] == 2]
    core.cache.ram_budget.n_bytes = core.cache.tree.ram_bytes
    run(core, text(2, 800))
    return core.counts.n_created - n_created


def test_where_ram_is_full_of_better_ones_the_rest_of_a_prompt_is_read_without_stops(monkeypatch):
    with open_core(checkpoints=EVERY_50) as core:
        assert in_full_ram(core) <= 3, "one of each kind"
    monkeypatch.setattr(Slot, "skip_cuts", lambda _self, _kind: None)  # the control
    with open_core(checkpoints=EVERY_50) as core:
        assert in_full_ram(core) >= 16


def test_where_ram_holds_nothing_spares_are_for_what_the_next_turn_needs(tmp_path):
    with kept_core(tmp_path, ram_bytes=0, n_spares=3, n_slots=1, checkpoints=EVERY_50) as core:
        run(core, PROMPT, stable=STABLE)
        parked = {
            node.checkpoint.kind for _, node in core.cache.residents.spares.parked() if node.checkpoint is not None
        }
        assert CutKind.STABLE in parked
        put_away(core)
    with kept_core(tmp_path) as core:
        assert run(core, [*PROMPT[:STABLE], *text(3, 20)]).n_cached == STABLE


# what a turn leaves behind

OPENS, ENDS = [250, 1], [250, 2]


def test_where_ram_is_full_the_spares_hold_the_newest_states():
    """An older one is copied for that, and RAM may evict it."""
    with open_core(n_spares=2, ram_bytes=1 << 20, checkpoints=EVERY_50) as core:
        run(core, PROMPT, 8, boundaries=BOUNDARIES, stable=STABLE)
        tidy(core)
        parked = sorted(node.n_items for _, node in core.cache.residents.spares.parked())
        assert parked[-1] > len(PROMPT) and parked[0] >= STABLE


def talk(core: Core, n_turns: int, *, strips: int) -> Counter[CutKind]:
    """A chat whose template leaves out the first ``strips`` tokens of earlier replies; the kinds of all states in RAM."""
    history = [*text(3, 60), *ENDS]
    ends = [len(history)]
    for turn in range(n_turns):
        asked = [*history, *OPENS, *text(10 + turn, 70), *ENDS]
        ends.append(len(asked))
        message = run(core, [*asked, *OPENS], max_tokens=20, stable=len(asked), boundaries=tuple(ends)).tokens
        tidy(core)
        history = [*asked, *OPENS, *message[strips:], *ENDS]
        ends.append(len(history))
    return kinds_in_ram(core)


def kinds_in_ram(core: Core) -> Counter[CutKind]:
    kept = (node.checkpoint for node in core.cache.tree.nodes())
    return Counter(each.kind for each in kept if each is not None and each.state is not None)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("arch", ["qwen35", "mamba2"])
def test_the_end_of_a_reply_goes_when_the_next_turn_has_a_checkpoint_behind_it(arch, is_known, monkeypatch):
    if not is_known:  # the control
        monkeypatch.setattr(Checkpointer, "_drop_superseded", lambda _self, _node: None)
    with open_core(arch) as core:
        kinds = talk(core, 5, strips=0)
        check(core)
    assert kinds[CutKind.STABLE] == kinds[CutKind.BOUNDARY] == 5
    assert kinds[CutKind.REPLY] == (1 if is_known else 5)


def test_replies_that_may_be_continued_stay():
    """Two conversations begin alike and get other replies: each goes on from its own."""
    with open_core() as core:
        asked = [*text(3, 80), *ENDS]
        message = [
            run(core, [*asked, *OPENS], max_tokens=8, stable=len(asked), sampling=Sampling(temperature=9.0, seed=seed))
            for seed in (1, 2)
        ]
        tidy(core)
        assert kinds_in_ram(core)[CutKind.REPLY] == 2
        for reply in message:
            following = [*asked, *OPENS, *reply.tokens, *ENDS, *text(4, 30)]
            assert run(core, following, max_tokens=0).n_cached >= len(asked) + len(OPENS) + len(reply.tokens) - 1
            tidy(core)
            assert kinds_in_ram(core)[CutKind.REPLY] == 2


def test_where_replies_are_never_continued_their_ends_are_not_kept(monkeypatch):
    with open_core() as core:
        monkeypatch.setattr(type(core.cache.returns), "keeps_replies", False)
        assert talk(core, 3, strips=10)[CutKind.REPLY] == 0
        check(core)


# parked or copied


@pytest.mark.parametrize("cell_s", [0.0, 1.0])
def test_where_parking_takes_longer_than_a_copy_states_are_copied(cell_s, monkeypatch):
    monkeypatch.setattr(checkpointing, "PARK_S_PER_CELL", cell_s)
    with open_core(n_spares=3, n_slots=1) as core:
        run(core, PROMPT, stable=STABLE)
        kept = [node.checkpoint for node in core.cache.tree.nodes() if node.checkpoint is not None]
        assert any(each.parked is not None for each in kept) is (cell_s == 0.0)
        assert run(core, [*PROMPT[:STABLE], *text(3, 20)]).n_cached == STABLE
    with open_core(n_spares=3, n_slots=1, ram_bytes=0) as core:
        run(core, PROMPT, stable=STABLE)
        assert core.cache.residents.spares.parked(), "RAM holds none"


@pytest.mark.parametrize("seed", [7063, 7096, 7102, 7127])
def test_what_is_thinned_is_not_evicted_before(seed):
    """Several checkpoints of a path are given up at once while RAM is full: dropping one must not evict the next."""
    rng = random.Random(seed)
    ram_bytes = rng.choice([200, 300, 400, 500, 600, 800]) << 10
    n_spares = rng.choice([0, 1, 2, 4])
    arch = rng.choice(["gemma3", "gemma3", "qwen35"])
    params = CheckpointParams(max_checkpoints=rng.choice([2, 3, 4]), every_n_tokens=1000, min_gap=0, min_tokens=0)
    with open_core(arch, n_spares=n_spares, ram_bytes=ram_bytes, n_ctx=2048, checkpoints=params) as core:
        history = text(1, 100)
        for _ in range(12):
            kind = rng.random()
            stables = tuple(sorted(rng.sample(range(20, len(history) - 1), min(8, len(history) // 12))))
            if 0.4 <= kind < 0.7:
                prompt = [*history[: rng.randrange(20, len(history))], *text(rng.randrange(2, 200), 60)]
                inside = tuple(stable for stable in stables if stable < len(prompt))
                run(core, prompt, 2, stables=inside[:2], boundaries=inside, priority=rng.choice([0, 100]))
                continue
            if kind < 0.4:
                result = run(core, history, 2, stables=stables, priority=rng.choice([0, 100, 10]))
            else:
                result = run(core, history, 2, stable=len(history) - 3)
            history = [*history, *result.tokens, *text(rng.randrange(2, 200), 50)]
            check(core)
            assert core.cache.tree.ram_bytes <= ram_bytes
