"""``--state-type``: copies of recurrent states in fewer bytes. They are never called clean and never served without the
flag, and what is computed from one carries its mark."""

from __future__ import annotations

import pytest

from everwarm.engine.request import Ask
from everwarm.engine.settings import EngineSettings
from everwarm.llama.blobs import is_packed
from everwarm.prompt.prompt import Prompt
from support.drive import memory_of, open_core, replay, run, slot_holding, text, tidy
from support.kept_cores import files, kept_core, put_away

PROMPT, STABLE = text(1, 400), 380
NEXT = [*PROMPT[:STABLE], *text(2, 60)]
RECURRENT = ("qwen35", "jamba", "falcon-h1", "granitehybrid", "nemotron_h", "lfm2", "mamba2")


def states(core):
    held = [
        node for node in core.cache.tree.nodes() if node.checkpoint is not None and node.checkpoint.state is not None
    ]
    return {node.n_items: node.checkpoint for node in held}


@pytest.mark.parametrize("arch", RECURRENT)
def test_copies_are_smaller_and_not_clean_and_the_next_turn_goes_on_from_them(arch):
    sizes = {}
    for kind in ("f32", "f16", "q8_0"):
        with open_core(arch, n_spares=0, state_type=kind) as core:
            run(core, PROMPT, stable=STABLE)
            tidy(core)
            kept = states(core)[STABLE]
            sizes[kind] = kept.size_bytes
            assert (is_packed(kept.state), kept.clean) == (kind != "f32", kind == "f32")
            core.cache.room.clear()
            assert run(core, NEXT, max_tokens=0).n_cached == STABLE
            assert core.context.is_clean(slot_holding(core, NEXT).seq) is (kind == "f32")
    assert sizes["f16"] < 0.6 * sizes["f32"]
    assert sizes["q8_0"] < 0.35 * sizes["f32"]


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_what_is_computed_from_a_packed_state_is_not_called_clean(kind):
    with open_core(n_spares=0, state_type=kind) as core:
        run(core, PROMPT, stable=STABLE)
        core.cache.room.clear()
        run(core, NEXT, stable=len(NEXT) - 4)
        core.cache.room.clear()
        beyond = [n for n in core.cache.tree.nodes() if n.n_items > STABLE and n.path.codes[STABLE] == NEXT[STABLE]]
        kept = [part for n in beyond for part in (n.segment, n.checkpoint) if part is not None]
        assert kept
        assert all(part.clean for part in kept) is (kind == "f32")
        assert any(part.clean for part in kept) is (kind == "f32")


def test_parked_states_are_exact():
    found = []
    for kind in ("f32", "q8_0"):
        with open_core(n_spares=4, state_type=kind) as core:
            run(core, PROMPT, stable=STABLE)
            tidy(core)
            assert is_packed(states(core)[STABLE].state) is (kind != "f32")
            result = run(core, NEXT, max_tokens=0)
            assert (result.n_cached, result.checkpoint.how) == (STABLE, "unparked")
            found.append(memory_of(core.context, slot_holding(core, NEXT).seq))
    assert found[0] == found[1]


def test_a_suspended_request_keeps_its_state_exactly():
    with open_core(n_spares=0, state_type="q8_0") as core:
        request = core.submit(Ask(Prompt.of_tokens(PROMPT), max_tokens=2, deterministic=True))
        while core.slots[0].n_fed < 200:
            core.step()
        core._suspend(core.slots[0], "a test")
        kept = states(core)
        assert max(kept) >= 200
        assert all(checkpoint.clean and not is_packed(checkpoint.state) for checkpoint in kept.values())
        core.cancel(request.id)
        core.step()


@pytest.mark.parametrize(("wrote", "reads"), [("q8_0", "f32"), ("q8_0", "f16"), ("f32", "q8_0")])
def test_objects_of_another_type_are_absent(tmp_path, wrote, reads):
    with kept_core(tmp_path, state_type=wrote) as core:
        run(core, PROMPT, stable=STABLE)
        put_away(core)
    assert files(tmp_path, "state")
    with kept_core(tmp_path, state_type=reads) as core:
        assert run(core, NEXT, max_tokens=0).n_cached == 0
    with kept_core(tmp_path, state_type=wrote) as core:  # the control
        assert run(core, NEXT, max_tokens=0).n_cached == STABLE


def test_the_default_changes_no_fingerprint_and_no_byte():
    plain, same, other = (EngineSettings(**more) for more in ({}, {"state_type": "f32"}, {"state_type": "f16"}))
    assert plain.fingerprint("m", None) == same.fingerprint("m", None) != other.fingerprint("m", None)
    with open_core(n_spares=0) as core:
        run(core, PROMPT, stable=STABLE)
        core.cache.room.clear()
        assert run(core, NEXT, max_tokens=0).n_cached == STABLE
        slot = slot_holding(core, NEXT)
        assert memory_of(core.context, slot.seq) == replay(core, slot)


def test_a_packed_state_gives_other_bytes():
    """The negative control of the test above."""
    with open_core(n_spares=0, state_type="q8_0") as core:
        run(core, PROMPT, stable=STABLE)
        core.cache.room.clear()
        assert run(core, NEXT, max_tokens=0).n_cached == STABLE
        slot = slot_holding(core, NEXT)
        assert memory_of(core.context, slot.seq) != replay(core, slot)
