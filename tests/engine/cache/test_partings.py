"""Prompts that part inside a message: cuts where the text is likely to change, by hints and by what was learned."""

from __future__ import annotations

import pytest

from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import GUARD, CheckpointParams, CutKind
from everwarm.state.returns import EARLIER, MAX_CONTEXTS, MAX_PLACES, Partings
from support.drive import open_core, run, text, tidy

HEAD, TAIL = text(1, 400), text(2, 300)
ONE, OTHER = text(3, 20), text(4, 20)
AT = len(HEAD)
WIDE = CheckpointParams(every_n_tokens=1000)
STABLE = AT + len(ONE) + len(TAIL) - 2


@pytest.mark.parametrize("arch", ["qwen35", "mamba2", "gemma3"])
@pytest.mark.parametrize("volatile", [(AT,), ()])
def test_a_volatile_place_is_not_read_again_the_first_time_it_changes(arch, volatile):
    with open_core(arch, checkpoints=WIDE) as core:
        run(core, HEAD + ONE + TAIL, stable=STABLE, volatile=volatile)
        result = run(core, HEAD + OTHER + TAIL, stable=STABLE, volatile=volatile)
        assert (AT - result.n_cached <= GUARD) is bool(volatile)  # the control: without it, all is read again


def test_joints_make_cuts_closer_only_where_ram_has_room():
    joints = tuple(range(40, 700, 40))
    with open_core(checkpoints=CheckpointParams(every_n_tokens=300)) as core:
        run(core, HEAD + ONE + TAIL, stable=STABLE, joints=joints)
        ends = [
            node.n_items
            for node in core.cache.tree.nodes()
            if node.checkpoint and node.checkpoint.kind is CutKind.GUESS
        ]
        assert len(ends) >= 4
        assert all(end in joints for end in ends)
        tidy(core)
        core.cache.ram_budget.n_bytes = int(core.cache.tree.ram_bytes * 1.1)
        run(core, text(9, 720), stable=700, joints=joints)
        new = [node for node in core.cache.tree.nodes() if node.n_items and node.path.codes[0] == 9 and node.checkpoint]
        assert new
        assert not any(node.checkpoint.kind is CutKind.GUESS for node in new), "where RAM is nearly full"


def test_a_guess_takes_no_spare_from_another_checkpoint():
    with open_core(n_spares=2, n_slots=1, checkpoints=WIDE) as core:
        run(core, HEAD + TAIL, stable=600)
        parked = {node.id for _, node in core.cache.residents.spares.parked()}
        run(core, [*HEAD, *TAIL, *ONE, *text(5, 200)], max_tokens=0, volatile=(760, 820, 880))
        assert len(parked) == 2
        kinds = [node.checkpoint.kind for _, node in core.cache.residents.spares.parked()]
        assert CutKind.GUESS not in kinds


# learned


def test_words_before_a_parting_are_found_in_another_prompt_of_the_namespace():
    partings = Partings()
    prompt = Prompt.of_tokens(HEAD + ONE)
    partings.note("us", prompt, AT)
    elsewhere = Prompt.of_tokens(text(7, 200) + HEAD[-6:] + OTHER + TAIL)
    assert partings.places("us", elsewhere, 0) == [206]
    assert partings.places("us", elsewhere, 210) == []
    assert partings.places("them", elsewhere, 0) == []
    partings.forget("u")
    assert partings.places("us", elsewhere, 0) == []


def test_a_value_that_begins_alike_is_found_by_the_words_before_it():
    partings = Partings()
    partings.note("", Prompt.of_tokens(HEAD + ONE), AT + EARLIER)
    elsewhere = Prompt.of_tokens(text(7, 200) + HEAD[-6:] + OTHER + TAIL)
    assert partings.places("", elsewhere, 0) == [206]


def test_what_is_learned_is_bounded_and_repeated_words_say_nothing():
    partings = Partings()
    for seed in range(40):
        partings.note("", Prompt.of_tokens(text(seed, 100)), 60)
    every = [token for seed in range(40) for token in text(seed, 100)]
    assert len(partings.places("", Prompt.of_tokens(every), 0)) == MAX_PLACES
    assert len(list(partings._contexts.values(""))) <= MAX_CONTEXTS
    often = Partings()
    often.note("", Prompt.of_tokens(HEAD + ONE), AT)
    assert often.places("", Prompt.of_tokens((HEAD[-6:] + TAIL) * 5), 0) == []


def test_the_next_prompt_with_the_same_words_is_not_read_again_when_it_changes_there():
    """Another system prompt with the same line: its own first change costs nothing."""
    line, other_head = HEAD[-6:], text(8, 300)
    with open_core(checkpoints=WIDE) as core:
        for value in (ONE, OTHER):
            run(core, HEAD + value + TAIL, stable=STABLE)
        stable = len(other_head) + len(line) + 300
        run(core, other_head + line + ONE + TAIL, stable=stable)
        result = run(core, other_head + line + OTHER + TAIL, stable=stable)
        assert result.n_cached == len(other_head) + len(line)
    with open_core(checkpoints=WIDE) as core:  # the control: nothing learned
        run(core, other_head + line + ONE + TAIL, stable=stable)
        assert run(core, other_head + line + OTHER + TAIL, stable=stable).n_cached == 0


def test_a_parting_at_the_beginning_of_a_message_teaches_nothing():
    with open_core(checkpoints=WIDE) as core:
        for value in (ONE, OTHER):
            run(core, HEAD + value + TAIL, stable=STABLE, boundaries=(AT - 3,))
        assert core.starter.partings.places("", Prompt.of_tokens(text(8, 300) + HEAD[-6:] + ONE), 0) == []
