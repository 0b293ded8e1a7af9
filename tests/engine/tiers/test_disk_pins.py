"""A pin is a wish about a point: it outlives the node, the engine and the server, until it is taken back or dropped."""

from __future__ import annotations

import pytest

from everwarm.engine.core import Core
from everwarm.state.store.index import INDEX
from everwarm.state.tree import Node
from support.cache_orders import NAMESPACE, on_disk, order, pages, talk
from support.drive import EVERY_KIND, check, open_core, run, text, tidy
from support.kept_cores import die, files, kept_core, put_away

MORE = text(9, 30)


def pinned(core: Core) -> list[int]:
    """Where the pinned nodes in RAM end."""
    return sorted(node.n_items for node in core.cache.tree.nodes() if node.is_pinned)


def node_at(core: Core, n_items: int) -> Node:
    (found,) = [node for node in core.cache.tree.nodes() if node.n_items == n_items]
    return found


def written(core: Core) -> list[int]:
    assert core.cache.tiers.disk.is_on
    return sorted(pin.n_items for pin in core.cache.tiers.disk.pins)


@pytest.mark.parametrize("index", ["kept", "lost"])
@pytest.mark.parametrize("arch", EVERY_KIND)
def test_a_pin_is_there_again_when_its_point_comes_back(tmp_path, arch, index):
    with kept_core(tmp_path, arch) as core:
        prompt = talk(core)
        assert order(core, "pin", node_at(core, 350).id)["pinned"] is True
        put_away(core)
    if index == "lost":
        for path in (tmp_path / "states").rglob(f"{INDEX}*"):
            path.unlink()
    with kept_core(tmp_path, arch) as core:
        shown = {node.end: node.pinned for node in on_disk(pages(core)) if node.parent is not None}
        assert shown | {270: True, 350: True, 430: False} == shown, "and the way to it"
        assert pinned(core) == []
        run(core, [*prompt, *MORE], namespace=NAMESPACE)
        assert pinned(core) == [350] and node_at(core, 430).n_pinned == 0
        assert all(node.n_pinned == 1 for node in node_at(core, 350).lineage())
        check(core)


def test_without_a_pin_none_comes_back(tmp_path):
    with kept_core(tmp_path) as core:
        prompt = talk(core)
        order(core, "pin", node_at(core, 350).id)
        assert order(core, "unpin", node_at(core, 350).id)["pinned"] is False
    with kept_core(tmp_path) as core:
        assert not any(node.pinned for node in pages(core)) and written(core) == []
        run(core, [*prompt, *MORE], namespace=NAMESPACE)
        assert pinned(core) == []


def test_what_is_read_again_is_pinned_again(tmp_path):
    with kept_core(tmp_path) as core:
        prompt = talk(core)
        order(core, "pin", node_at(core, 350).id)
    for path in files(tmp_path):
        path.unlink()
    with kept_core(tmp_path) as core:
        assert run(core, prompt, namespace=NAMESPACE, boundaries=(350,)).n_cached == 0
        put_away(core)
        assert pinned(core) == [350]


def test_a_pinned_point_is_on_disk_itself_and_the_next_state_on_the_way_there_stays_with_it(tmp_path):
    with kept_core(tmp_path) as core:
        prompt = [*text(1, 200), *text(5, 200)]
        run(core, prompt, boundaries=(100, 200), stable=390, namespace=NAMESPACE)
        put_away(core)
        assert [node.end for node in pages(core) if "disk" in node.state_tiers] == [100, 390]
        order(core, "pin", node_at(core, 200).id)
        assert [node.end for node in pages(core) if "disk" in node.state_tiers] == [100, 200, 390]
        run(core, [*prompt[:150], *text(6, 100)], stable=150, namespace=NAMESPACE)
        put_away(core)
    with kept_core(tmp_path) as core:
        shown = {node.end: node.pinned for node in on_disk(pages(core)) if node.parent is not None}
        assert shown == {100: True, 150: True, 200: True, 390: False}


def test_what_is_only_on_disk_is_pinned_there_and_in_ram_when_it_comes(tmp_path):
    with kept_core(tmp_path) as core:
        prompt = talk(core)
    with kept_core(tmp_path) as core:
        nodes = {node.end: node for node in pages(core)}
        assert order(core, "pin", nodes[0].id).status == 400 and order(core, "pin", -77).status == 404
        answer = order(core, "pin", nodes[350].id)
        assert answer["pinned"] is True and answer["bytes"] > nodes[350].state_bytes
        assert {n.end: n.pinned for n in pages(core)} == {0: False, 270: True, 350: True, 430: False}
        assert order(core, "unpin", nodes[270].id)["pinned"] is True, "a node below it is"
        assert order(core, "unpin", nodes[350].id)["pinned"] is False
        assert not any(node.pinned for node in pages(core))
        order(core, "pin", nodes[350].id)
    with kept_core(tmp_path) as core:
        run(core, [*prompt, *MORE], namespace=NAMESPACE)
        assert pinned(core) == [350]


@pytest.mark.parametrize("when", ["in ram", "on disk"])
@pytest.mark.parametrize("what", ["above", "everything"])
def test_a_pin_goes_with_what_is_dropped(tmp_path, when, what):
    with kept_core(tmp_path) as core:
        prompt = talk(core)
        order(core, "pin", node_at(core, 350).id)
        if when == "in ram":
            order(core, "drop", node_at(core, 270).id if what == "above" else None)
            assert written(core) == []
    with kept_core(tmp_path) as core:
        if when == "on disk":
            assert written(core) == [350]
            (above,) = [node.id for node in pages(core) if node.end == 270]
            order(core, "drop", above if what == "above" else None)
        run(core, prompt, boundaries=(350,), namespace=NAMESPACE)
        put_away(core)
        assert pinned(core) == written(core) == []


def test_a_pin_of_another_namespace_marks_nothing(tmp_path):
    with kept_core(tmp_path) as core:
        prompt = talk(core)
        order(core, "pin", node_at(core, 350).id)
    with kept_core(tmp_path) as core:
        run(core, prompt, boundaries=(350,), namespace="cd" * 16)
        put_away(core)
        assert pinned(core) == [] and written(core) == [350]


# without a disk


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_the_next_engine_finds_pins_in_the_memory_of_the_old_one(memory, arch):
    with open_core(arch, memory=memory) as core:
        prompt = [*text(1, 200), *text(5, 200)]
        run(core, prompt, boundaries=(200,), stable=390)
        run(core, [*prompt[:200], *text(6, 100)])
        tidy(core)
        deepest = max(core.cache.tree.nodes(), key=lambda node: node.n_items)
        for node in (node_at(core, 200), deepest):
            order(core, "pin", node.id)
        order(core, "unpin", deepest.id)
        die(core)
    for _ in range(2):
        with open_core(arch, memory=memory) as core:
            assert pinned(core) == [200]
            check(core)
            die(core)
    with open_core(arch, memory=memory) as core:
        order(core, "unpin", node_at(core, 200).id)
        die(core)
    with open_core(arch, memory=memory) as core:
        assert pinned(core) == []
        order(core, "pin", node_at(core, 200).id)
        order(core, "drop", node_at(core, 200).id)
        die(core)
    with open_core(arch, memory=memory) as core:
        assert pinned(core) == []
