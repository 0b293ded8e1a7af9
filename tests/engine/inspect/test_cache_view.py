"""Looking at a core's tree by pages, and forgetting parts of it, beside what runs."""

from __future__ import annotations

import pytest

from everwarm.engine.core import Core
from everwarm.engine.inspect.cache_commands import CacheCommands
from everwarm.engine.inspect.cache_view import turn_page, walk
from everwarm.engine.inspect.report import summary
from everwarm.engine.process import messages as m
from everwarm.engine.request import NewToken
from everwarm.errors import TreeChanged
from everwarm.prompt.prompt import Prompt
from support.cache_orders import ask_tree
from support.drive import EVERY_KIND, AtOnce, check, drain, open_core, run, step_until, submit, text, tidy

SHARED = text(1, 200)


def talk(core: Core) -> None:
    for seed in (2, 3, 4):
        run(core, [*SHARED, *text(seed, 60)], boundaries=(200,), stable=240)
    tidy(core)


def pages(core: Core, limit: int) -> list[m.NodeSeen]:
    found: list[m.NodeSeen] = []
    after = None
    while True:
        seen = ask_tree(core, m.AskTree(1, limit, after))
        found += seen.nodes
        after = seen.next
        if after is None:
            return found


@pytest.mark.parametrize("arch", EVERY_KIND)
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_pages_of_any_size_show_every_node_once_after_its_parent(arch, limit):
    with open_core(arch) as core:
        talk(core)
        seen = pages(core, limit)
        ids = [node.id for node in seen]
        hidden = {root.id for root in core.cache.tree.roots() if not root.children}
        assert len(ids) == len(set(ids)) and set(ids) == core.cache.tree.by_id.keys() - hidden
        assert all(node.parent is None or node.parent in ids[:i] for i, node in enumerate(seen))
        assert sum(node.state_bytes + node.kv_bytes for node in seen) == pytest.approx(
            core.cache.tree.ram_bytes, rel=0.02
        )


def test_a_page_goes_on_where_it_was_although_the_tree_has_grown_and_says_so_when_it_cannot():
    with open_core() as core:
        talk(core)
        page = turn_page(core, m.AskTree(1, 4), lambda id: id)
        run(core, [*SHARED, *text(9, 60)])
        rest = list(walk(core.cache.tree.roots(), core.cache.tree.by_id[page.next or 0]))
        assert rest[0].id == page.next and not {row.seen.id for row in page.rows} & {node.id for node in rest}
        with pytest.raises(TreeChanged) as refused:
            turn_page(core, m.AskTree(1, 4, after=1), lambda id: id)
        assert refused.value.status == 409


@pytest.mark.parametrize("n_spares", [0, 3])
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_what_is_dropped_is_gone_and_what_lies_above_it_is_still_warm(arch, n_spares):
    with open_core(arch, n_spares=n_spares if arch != "mamba2" else 0) as core:
        talk(core)
        (junction, *_) = [node for node in core.cache.tree.nodes() if len(node.children) > 1]
        child = next(iter(junction.children.values()))
        gone = child.path
        core.cache.drop(child)
        check(core)
        assert child.id not in core.cache.tree.by_id
        again = run(core, gone.codes.tolist()[:260])
        assert again.n_cached <= junction.n_items, "it was forgotten"
        assert again.n_cached >= 190, "what others share was not"
        for root in core.cache.tree.roots():
            core.cache.drop(root)
        check(core)
        assert core.cache.tree.ram_bytes == 0 and summary(core)["tiers"]["device"] == {"n_states": 0, "n_cells": 0}
        assert run(core, gone.codes.tolist()[:260]).n_cached == 0


def test_one_that_runs_goes_on_while_its_lineage_is_dropped():
    with open_core() as core:
        prompt = [*SHARED, *text(2, 60)]
        alone = run(core, prompt, 20).tokens
        for root in core.cache.tree.roots():
            core.cache.drop(root)
        request = submit(core, prompt, 20)
        step_until(core, NewToken)
        seen = pages(core, 1000)
        (running,) = [node.running for node in seen if node.running]
        assert running[0] == request.id and running[2] == len(prompt)
        for root in core.cache.tree.roots():
            core.cache.drop(root)
            check(core)
        assert drain(core)[request.id].tokens == alone


def test_what_a_running_request_shares_with_a_prompt_is_not_pinned_as_another_text(monkeypatch):
    """Of the deepest point that is kept the prompt has only the beginning."""
    other, long = [*SHARED, *text(3, 60)], [*SHARED, *text(2, 200)]
    pinned: list[m.CacheOrder] = []
    monkeypatch.setattr(CacheCommands, "_carry_out", lambda *given: pinned.append(given[2]))
    with open_core("llama") as core:
        reply = run(core, other).tokens
        submit(core, long, 40)
        step_until(core, NewToken)
        answers: list[m.Message] = []
        commands = CacheCommands(core, answers.append, lambda id: id)
        question = m.AskPrompt(5, "hold", m.Submit(0), ttl_s=60.0)
        commands.hold(core, question, Prompt.of_tokens([*long, 1]), AtOnce(core))
        assert not pinned and answers == [m.Answer(5, {"id": None, "pinned": False, "bytes": 0})]
        commands.hold(core, question, Prompt.of_tokens([*other, *reply, *text(4, 20)]), AtOnce(core))
        assert [core.cache.tree.by_id[order.node].n_items for order in pinned] == [len(other) + 3]  # the control
