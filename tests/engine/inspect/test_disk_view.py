"""What is only on disk is shown as what it is: after a restart the tree hangs together as before, and can be forgotten."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from everwarm.engine.core import Core
from everwarm.engine.inspect.cache_view import DiskView, finish_page
from everwarm.engine.process import messages as m
from everwarm.engine.process.reply_text import items_text
from everwarm.engine.request import Ask, NewToken
from everwarm.engine.settings import StoreSettings
from everwarm.engine.tiers.loader import Fetch
from everwarm.engine.tiers.pins import pinned_on_disk
from everwarm.errors import TreeChanged
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import root_key, short_key
from everwarm.state.store.object import ObjectReader
from everwarm.state.tree import Node
from support.cache_orders import NAMESPACE, SHARED, ask_tree, begin_page, on_disk, order, pages, talk
from support.drive import EVERY_KIND, GUARD, check, drain, open_core, run, step_until, submit, text
from support.kept_cores import files, kept_core, put_away


def shape(nodes: Iterable[m.NodeSeen]) -> list[tuple[int | None, int]]:
    """Where states are, each with the end of the nearest one above it."""
    listed = list(nodes)
    by_id = {node.id: node for node in listed}

    def above(node: m.NodeSeen) -> int:
        while node.parent is not None:
            node = by_id[node.parent]
            if "disk" in node.state_tiers:
                return node.end
        return 0

    return sorted((above(node), node.end) for node in listed if "disk" in node.state_tiers)


def assert_sound(nodes: list[m.NodeSeen]) -> None:
    """Every node once, after its parent, which ends where it starts, and with its children counted."""
    ids = [node.id for node in nodes]
    assert len(set(ids)) == len(ids)
    by_id = {node.id: node for node in nodes}
    for i, node in enumerate(nodes):
        assert node.n_children == sum(other.parent == node.id for other in nodes)
        assert node.parent is None or node.parent in ids[:i]
        assert node.start == (0 if node.parent is None else by_id[node.parent].end) <= node.end


@pytest.mark.parametrize(("limit", "n_talks"), [(1, 2), (3, 2), (1000, 2), (1000, 1)])
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_after_a_restart_the_tree_shows_what_is_on_disk(tmp_path, arch, limit, n_talks):
    with kept_core(tmp_path, arch) as core:
        for seed in range(n_talks):
            talk(core, seed)
        before = pages(core, limit)
        assert not on_disk(before), "nothing is shown twice"
        needs_states, has_kv = core.context.kind.needs_checkpoints, core.context.kind.has_attention
    ids = []
    for _ in range(2):
        with kept_core(tmp_path, arch) as core:
            after = pages(core, limit)
            assert_sound(after)
            states = [node for node in after if node.parent is not None]
            assert states == on_disk(states) and len(states) == len(files(tmp_path, "state")) >= 3 * n_talks
            assert all(node.kv_tiers == ("disk",) * has_kv for node in states)
            assert all(node.state_tiers == ("disk",) * needs_states for node in states)
            assert all(node.id > -(2**53) for node in after)
            n_bytes = sum(node.state_bytes + node.kv_bytes for node in states)
            assert n_bytes == sum(path.stat().st_size for path in files(tmp_path, "" if needs_states else "kv"))
            if has_kv and needs_states and n_talks == 1:  # what two have in common was read twice
                assert shape(after) == shape(before)
            ids.append([node.id for node in after])
    assert ids[0] == ids[1], "in every process the same"


def test_what_a_request_brings_back_is_shown_once(tmp_path):
    with kept_core(tmp_path) as core:
        prompt = talk(core)
        talk(core, seed=3)
    with kept_core(tmp_path) as core:
        before = pages(core)
        assert {node.namespace for node in before} != {NAMESPACE[:12]}, "nobody has said that name yet"
        assert run(core, [*prompt, *text(9, 30)], namespace=NAMESPACE).n_cached > 400
        after = pages(core)
        assert_sound(after)
        assert {node.namespace for node in after} == {NAMESPACE[:12]}
        assert shape(after) == shape(before)
        assert len(on_disk(after)) == len(files(tmp_path, "state")) - 3, "the other conversation's"
        here = [node for node in after if node.id > 0 and "disk" in node.state_tiers]
        assert sorted(node.state_tiers[0] for node in here) == ["disk", "disk", "ram"], "its KV leads past the others"
        (hanging,) = [n for n in on_disk(after) if n.start == 0]
        assert next(n for n in after if n.id == hanging.parent).parent is None


def test_names_filter_and_words_are_shown_only_when_wanted(tmp_path):
    with kept_core(tmp_path) as core:
        talk(core, n_turns=1)
        talk(core, n_turns=1, namespace="cd" * 16)
    with kept_core(tmp_path) as core:
        nodes = pages(core, with_words=True)
        assert all(node.words is None for node in pages(core))
        assert all(node.words for node in nodes if node.parent is not None)
        first, second = {node.namespace for node in nodes}
        assert len(pages(core, namespace=first)) == len(pages(core, namespace=second)) == 2


def test_a_page_goes_on_where_it_was_and_says_so_when_it_cannot(tmp_path):
    with kept_core(tmp_path) as core:
        talk(core)
    with kept_core(tmp_path) as core:
        disk = DiskView(core.cache.tiers)
        page = ask_tree(core, m.AskTree(1, 2), disk)
        assert page.next is not None and page.next < 0
        for after in (page.next - 1, -1):
            with pytest.raises(TreeChanged) as refused:
                ask_tree(core, m.AskTree(1, 2, after), disk)
            assert refused.value.status == 409
    with kept_core(tmp_path) as core:
        rest = ask_tree(core, m.AskTree(1, 9, page.next))
        assert rest.nodes[0].id == page.next and rest.nodes[0].parent == page.nodes[-1].id


def test_only_headers_are_read_and_each_of_them_once(tmp_path, monkeypatch):
    with kept_core(tmp_path) as core:
        talk(core)
    with kept_core(tmp_path) as core:
        assert core.cache.tiers.disk.is_on
        read: list[str] = []
        monkeypatch.setattr(ObjectReader, "read", lambda _, name: read.append(name))
        disk, before = DiskView(core.cache.tiers), core.cache.tiers.disk.counts.n_read
        for _ in range(3):
            ask_tree(core, m.AskTree(1, 100, words_of=""), disk)
        assert not read and core.cache.tiers.disk.counts.n_read - before == 3


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_what_vanishes_while_it_is_looked_at_is_left_out(tmp_path, how):
    with kept_core(tmp_path) as core:
        talk(core)
    with kept_core(tmp_path) as core:
        whole = pages(core)
        (second,) = [node for node in whole if node.n_children and node.start]
    with kept_core(tmp_path) as core:
        assert core.cache.tiers.disk.is_on
        names = {kept.n_items: kept.name for kept in core.cache.tiers.disk.objects() if kept.kind == "state"}
        middle = next(path for path in files(tmp_path, "state") if path.name == names[second.end])
        middle.unlink() if how == "gone" else middle.write_bytes(middle.read_bytes()[:-9] + b"x" * 9)
        at_once = ask_tree(core, m.AskTree(1, 100)).nodes
        for nodes in (at_once, pages(core)):
            assert [node.end for node in nodes] == [node.end for node in whole if node.id != second.id]
            assert nodes[-1].parent == second.parent and nodes[-1].start == second.start


class OnOneThread(Node):
    """A node that no thread but this one may look at."""

    __slots__ = ()
    owner = threading.current_thread()

    def __getattribute__(self, name: str) -> Any:
        assert threading.current_thread() is OnOneThread.owner, f"another thread reads {name} of a node"
        return super().__getattribute__(name)


def test_what_is_on_disk_is_looked_up_without_the_tree(tmp_path):
    """The tree changes while another thread looks: that one has its own copy, which is made in bounded pieces."""
    with kept_core(tmp_path) as core:
        prompt = talk(core)
        talk(core, seed=3)
    with kept_core(tmp_path) as core, ThreadPoolExecutor(1) as aside:
        run(core, [*prompt, *text(9, 30)], namespace=NAMESPACE)
        before = shape(pages(core))
        disk = DiskView(core.cache.tiers, most_copied=2)
        assert not disk.copy_places(core.cache.tree), "this test could not fail"
        page = begin_page(core, m.AskTree(1, 100, words_of=""), disk)
        for node in core.cache.tree.nodes():
            node.__class__ = OnOneThread
        seen = aside.submit(finish_page, page, disk, core.model.vocab).result()
        assert_sound(seen.nodes)
        assert shape(seen.nodes) == before and on_disk(seen.nodes)
        with pytest.raises(AssertionError, match="another thread reads n_items"):
            aside.submit(lambda: core.cache.tree.root(NAMESPACE).n_items).result()


# forgetting


def test_what_is_only_on_disk_is_dropped_with_everything_below_it_and_nothing_else(tmp_path):
    with kept_core(tmp_path) as core:
        first = talk(core)
        other = talk(core, seed=3)
    with kept_core(tmp_path) as core:
        nodes = pages(core)
        doomed = next(node for node in nodes if node.n_children and node.start)
        n_before = len(files(tmp_path))
        assert order(core, "drop", -12345).status == 404
        answer = order(core, "drop", doomed.id)
        assert answer["dropped"] == n_before - len(files(tmp_path)) > 2 and answer["id"] == doomed.id
        kept = {node.id for node in pages(core)}
        gone = {node.id for node in nodes} - kept
        below = {doomed.id}
        for node in nodes:
            below |= {node.id} if node.parent in below else set()
        assert gone == below
        assert order(core, "drop", doomed.id).status == 404
        dropped, intact = (first, other) if is_cut(doomed, core, first) else (other, first)
        assert run(core, [*intact, *text(9, 30)], namespace=NAMESPACE).n_cached > 400
        assert run(core, [*dropped, *text(9, 30)], namespace=NAMESPACE).n_cached <= doomed.start + GUARD
        check(core)


def is_cut(doomed: m.NodeSeen, core: Core, prompt: list[int]) -> bool:
    """Whether a node that was dropped lay on the way of a prompt: by what the disk finds for it now."""
    assert core.cache.tiers.disk.is_on
    root = root_key(core.cache.tiers.fingerprint, NAMESPACE)
    found = core.cache.tiers.disk.find(root, Prompt.of_tokens(prompt), len(prompt))
    return found is None or found.n_items <= doomed.start


def test_whoever_drops_a_node_drops_what_hangs_below_it_on_disk_alone(tmp_path):
    with kept_core(tmp_path) as core:
        prompt = talk(core)
        talk(core, seed=3)
    with kept_core(tmp_path) as core:
        run(core, [*prompt, *text(9, 30)], namespace=NAMESPACE)
        put_away(core)
        root = core.cache.tree.namespaces()[NAMESPACE]
        assert on_disk(pages(core))
        assert order(core, "drop", root.id)["dropped"] > 6
        assert not files(tmp_path) and not pages(core)


def test_a_root_on_disk_goes_with_all_its_states(tmp_path: Path):
    with kept_core(tmp_path) as core:
        talk(core)
        talk(core, namespace="cd" * 16)
    with kept_core(tmp_path) as core:
        roots = [node for node in pages(core) if node.parent is None]
        assert len(roots) == 2 and all(root.id < 0 for root in roots)
        order(core, "drop", roots[0].id)
        assert [node.id for node in pages(core) if node.parent is None] == [roots[1].id]
        assert order(core, "drop", None)["dropped"] > 0 and not files(tmp_path)


def test_one_namespace_goes_and_the_others_stay_also_after_a_restart(tmp_path: Path):
    """Nobody has used either since the start: the disk knows both by stand-ins only."""
    other = "cd" * 16
    with kept_core(tmp_path) as core:
        talk(core)
        talk(core, namespace=other)
    with kept_core(tmp_path) as core:
        mine, whole = pages(core, namespace=NAMESPACE), pages(core)
        assert len(mine) == 4 and len(whole) == 8 and pages(core, namespace=other) != mine
        alone = m.AskTree(1, 100, namespace=NAMESPACE, alone=True)
        assert ask_tree(core, alone).n_total == len(mine)
        doomed = next(node.id for node in mine if node.parent is not None)
        for action in ("drop", "pin", "unpin"):
            assert order(core, action, doomed, namespace=other).status == 404
        assert order(core, "drop", None, namespace=NAMESPACE)["dropped"] > 0
        assert not pages(core, namespace=NAMESPACE) and len(pages(core)) == len(pages(core, namespace=other)) == 4
        assert run(core, [*talk_of(2), *text(9, 30)], namespace=NAMESPACE).n_cached == 0
        assert run(core, [*talk_of(2), *text(9, 30)], namespace=other).n_cached > 400
        assert order(core, "drop", None, namespace="ef" * 16)["dropped"] == 0 and files(tmp_path)


def test_what_is_on_a_disk_that_cannot_be_reached_is_not_said_to_be_dropped(tmp_path: Path):
    store = StoreSettings(str(tmp_path / "states"), restore_policy="always")
    with kept_core(tmp_path) as core:
        talk(core)
    with kept_core(tmp_path), open_core(store=store) as second:
        refused = order(second, "drop", None)
        assert refused.status == 503 and "not dropped" in refused.message
    with kept_core(tmp_path) as core:
        assert order(core, "drop", None)["dropped"] > 0, "this test could not fail"


def talk_of(seed: int) -> list[int]:
    """The last prompt of a talk."""
    return [*SHARED, *(token for turn in range(3) for token in text(100 * seed + turn, 80))]


def test_what_is_dropped_is_quoted_to_nobody_neither_later_nor_while_it_runs(tmp_path):
    """Control: what leaves the tree for want of room is known on, so that somebody can be told of it."""
    known, beside = [*SHARED, *text(2, 60)], "cd" * 16
    parting = [*SHARED, *text(3, 60)]
    with kept_core(tmp_path) as core:
        run(core, known, namespace=NAMESPACE)
        core.cache.drop(core.cache.tree.root(NAMESPACE))
        why = run(core, parting, namespace=NAMESPACE).why
        assert why is not None and why.diverged is not None
        assert why.diverged.known == items_text(core.model.vocab, Prompt.of_tokens(known[200:216]))
    with kept_core(tmp_path / "other") as core:
        run(core, known, namespace=NAMESPACE)
        run(core, known, namespace=beside)
        running = submit(core, parting, max_tokens=20, namespace=NAMESPACE)
        step_until(core, NewToken)
        assert running.why is not None and running.why.diverged is not None
        core.prewarm.offer(Ask(Prompt.of_tokens([*known, *text(4, 30)]), max_tokens=0, namespace=NAMESPACE, ahead=True))
        order(core, "drop", None, namespace=NAMESPACE)
        assert not core.prewarm.waiting
        assert all(slot.namespace != NAMESPACE or not len(slot.content) for slot in core.slots)
        why = drain(core)[running.id].why
        assert why is not None and why.diverged is None
        order(core, "drop", None, namespace=NAMESPACE)
        assert run(core, parting, namespace=NAMESPACE).why == m.ReadReason(m.Reason.NEW, n_kv=0)
        beside_why = run(core, parting, namespace=beside).why
        assert beside_why is not None and beside_why.diverged is not None
        check(core)


def test_what_is_being_read_ahead_or_brought_from_disk_does_not_come_back(tmp_path):
    with kept_core(tmp_path) as core:
        prompt = talk(core)
    with kept_core(tmp_path) as core:
        core.prewarm.offer(Ask(Prompt.of_tokens(text(7, 900)), max_tokens=0, namespace=NAMESPACE, ahead=True))
        assert core.begin_prewarm()
        core.step()
        core.step()
        assert any(slot.request is not None and slot.n_fed for slot in core.slots)
        order(core, "drop", None, namespace=NAMESPACE)
        assert core.prewarm.running is None and not core.has_work and not pages(core)
    with kept_core(tmp_path / "fetch") as core:
        prompt = talk(core)
    with kept_core(tmp_path / "fetch") as core:
        waiting = submit(core, [*prompt, *text(9, 30)], namespace=NAMESPACE)
        core.admission.judge(waiting)
        assert isinstance(core.admission._fetches[waiting.id], Fetch), "else nothing was on its way"
        order(core, "drop", None, namespace=NAMESPACE)
        result = drain(core)[waiting.id]
        assert result.n_cached == 0 and result.why is not None and result.why.n_shared == 0


def test_users_pin_within_their_quota(tmp_path):
    with kept_core(tmp_path) as core:
        talk(core)
        *_, first, last = [node for node in pages(core) if node.kind is not None]
        shape = core.sizes.shape
        least = first.end * shape.kv_bytes_per_token + shape.state_bytes
        share = least / core.cache.ram_budget.n_bytes
        for node in (first, last):
            assert order(core, "pin", node.id, pin_quota=share / 2).code == "pin_quota_exceeded"
        assert order(core, "pin", last.id, pin_quota=20 * share)["pinned"] is True
        assert order(core, "pin", last.id, pin_quota=share / 2)["pinned"] is True, "it is already"
        talk(core, seed=3)
    with kept_core(tmp_path) as core:
        assert core.cache.tiers.disk.is_on
        space = short_key(root_key(core.cache.tiers.fingerprint, NAMESPACE))
        n_pins, n_bytes = pinned_on_disk(core.cache.tiers.disk, space)
        assert n_pins == 1 and n_bytes > shape.state_bytes
        other = next(node for node in pages(core) if node.kind is not None and not node.pinned)
        assert order(core, "pin", other.id, pin_quota=n_bytes / 2 / core.cache.ram_budget.n_bytes).status == 403
        run(core, [*SHARED, *text(300, 50)], namespace=NAMESPACE)
        fresh = next(node for node in pages(core) if node.id > 0 and node.kind is not None and not node.pinned)
        assert order(core, "pin", fresh.id, pin_quota=n_bytes / core.cache.ram_budget.n_bytes).status == 403
        assert order(core, "pin", fresh.id)["pinned"] is True, "an admin's has no bound"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_every_state_on_disk_is_shown_exactly_once(tmp_path, seed):
    """Turns, branches, a RAM tier that forgets, drops, pins and restarts, by chance."""
    rng = random.Random(seed)
    known: list[list[int]] = [text(1, 100)]
    for _ in range(4):
        with kept_core(tmp_path, ram_bytes=2 << 20) as core:
            for _ in range(8):
                match rng.randrange(8):
                    case 0:
                        order(core, "drop", rng.choice([node.id for node in pages(core)] or [1]))
                    case 1:
                        order(core, rng.choice(["pin", "unpin"]), rng.choice([node.id for node in pages(core)] or [1]))
                    case _:
                        base = rng.choice(known)
                        prompt = [*base[: rng.randint(50, len(base))], *text(rng.randrange(1 << 20), 60)]
                        run(core, prompt, stable=len(prompt) - 5, namespace=rng.choice([NAMESPACE, "cd" * 16]))
                        known.append(prompt)
                if rng.random() < 0.7:
                    put_away(core)
                nodes = pages(core, rng.choice([2, 1000]))
                assert_sound(nodes)
                assert core.cache.tiers.disk.is_on
                core.cache.tiers.flush()
                whole = {name for name in core.cache.tiers.disk.names() if core.cache.tiers.disk.has(name)}
                states = [
                    kept for kept in core.cache.tiers.disk.objects() if kept.kind == "state" and kept.name in whole
                ]
                shown = sorted(node.end for node in pages(core) if "disk" in node.state_tiers)
                assert shown == sorted(kept.n_items for kept in states)
            put_away(core)
    assert files(tmp_path, "state"), "this test could not fail"
