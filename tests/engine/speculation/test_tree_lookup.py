"""Drafts from other conversations of the same namespace, and of no other."""

import numpy as np
import pytest

from everwarm.engine.settings import StoreSettings
from everwarm.engine.speculation import lookup as lookup_module
from everwarm.engine.speculation.lookup import GATHER_EVERY, MOST_NAMESPACES, DiskTexts, TreeLookup
from everwarm.prompt.prompt import Prompt
from everwarm.state.tree import Tree
from support.drafts import always_draft, drafting_core
from support.drive import run, text


class Nothing:
    """No disk."""

    def of(self, namespace: str) -> np.ndarray:  # noqa: ARG002
        return np.array([-1], np.int32)

    def forget(self) -> None: ...


HERE, END = "mine", [900, 901, 902, 903, 904]


def tree_with(*texts: list[int], namespace: str = HERE) -> Tree:
    tree = Tree()
    for codes in texts:
        add(tree, codes, namespace)
    return tree


def add(tree: Tree, codes: list[int], namespace: str = HERE) -> None:
    node = tree.grow(tree.root(namespace), Prompt.of_tokens(codes), len(codes))
    tree.hold(node)  # as a slot does


def proposed(lookup: TreeLookup, n: int = 3, namespace: str = HERE) -> list[int] | None:
    found = lookup.propose(np.array([1, 2, *END], np.int32), n, namespace)
    return None if found is None else found.tokens.tolist()


def test_what_followed_in_another_conversation_is_proposed():
    assert proposed(TreeLookup(tree_with([7, 8, *END, 11, 12, 13, 14]), Nothing())) == [11, 12, 13]


def test_the_latest_conversation_wins():
    assert proposed(TreeLookup(tree_with([7, *END, 11, 12, 13], [8, *END, 21, 22, 23]), Nothing())) == [21, 22, 23]


def test_nothing_is_proposed_from_another_namespace():
    tree = tree_with([7, *END, 11, 12, 13], namespace="theirs")
    assert proposed(TreeLookup(tree, Nothing())) is None
    assert proposed(TreeLookup(tree, Nothing()), namespace="theirs") == [11, 12, 13]  # the control


def test_a_match_across_the_ends_of_two_texts_is_none():
    assert proposed(TreeLookup(tree_with([7, *END[:2]], [*END[2:], 11, 12]), Nothing())) is None


def test_a_draft_ends_where_its_text_does():
    found = TreeLookup(tree_with([7, *END, 11, 12], [20, 21, 22, 23]), Nothing()).propose(
        np.array(END, np.int32), 5, HERE
    )
    assert found is not None and found.tokens.tolist() == [11, 12] and len(found.confidences) == len(found.kinds) == 2


@pytest.mark.parametrize("more", [[], [[20, 21, 22, 23]]])
def test_a_text_that_ends_where_the_reply_is_does_not_hide_others(more):
    """As the kept text of the conversation itself does: it matches further than any other, and does not go on."""
    assert proposed(TreeLookup(tree_with([7, *END, 11, 12, 13], [1, 2, *END], *more), Nothing())) == [11, 12, 13]


def test_where_the_texts_of_other_conversations_end_they_do_not_disagree():
    agreed, ended, parted = [8, *END, 11, 12], [8, *END, 11], [8, *END, 11, 14]
    sure = {}
    for name, other in (("agreed", agreed), ("ended", ended), ("parted", parted)):
        found = TreeLookup(tree_with(other, [2, *END, 11, 12, 13]), Nothing()).propose(np.array(END, np.int32), 3, HERE)
        assert found is not None and found.tokens.tolist() == [11, 12, 13]
        sure[name] = found.confidences.tolist()
    assert sure["agreed"][0] == sure["ended"][0] == sure["parted"][0]
    assert sure["agreed"][1] > sure["ended"][1] > sure["parted"][1]


def test_texts_are_gathered_again_when_the_tree_has_changed_but_not_at_every_look():
    tree = tree_with([7, 8, 9])
    lookup = TreeLookup(tree, Nothing())
    assert proposed(lookup) is None
    add(tree, [8, *END, 21, 22, 23])
    found = [proposed(lookup) for _ in range(GATHER_EVERY)]
    assert found[0] is None and found[-1] == [21, 22, 23]


def test_what_was_erased_is_not_proposed():
    tree = tree_with([7, *END, 11, 12, 13])
    lookup = TreeLookup(tree, Nothing())
    assert proposed(lookup) == [11, 12, 13]
    node = next(node for node in tree.nodes() if node.parent is not None)
    tree.release(node)  # nothing holds it: it is pruned
    lookup.forget()
    assert proposed(lookup) is None


def test_the_texts_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lookup_module, "MOST_TOKENS", 50)
    tree = tree_with(*([i, *range(100, 120)] for i in range(20)))
    lookup = TreeLookup(tree, Nothing())
    for i in range(2 * MOST_NAMESPACES):
        proposed(lookup, namespace=f"namespace {i}")
    proposed(lookup)
    assert len(lookup._texts) == MOST_NAMESPACES and len(lookup._texts[HERE].tokens) <= 52


def test_a_reply_that_another_conversation_had_is_drafted_from_it():
    prompt = text(1, 60)
    with drafting_core(n_slots=2) as core:
        first = run(core, prompt, 40)
        always_draft(core)
        core.speculator.drafters = core.speculator.drafters[1:]  # without the reply's own text
        again = run(core, prompt, 40)
        assert again.tokens == first.tokens and again.n_draft_accepted > 10
        others = run(core, prompt, 40, namespace="others")
        assert others.tokens == first.tokens and others.n_drafted == 0


# what is only on disk


def disk_core(folder, **settings):
    store = StoreSettings(str(folder), restore_policy="always")
    return drafting_core(**{"n_slots": 2, "store": store} | settings)


def write_all(core) -> None:
    core.cache.tiers.wait_open(60.0)
    core.put_away()


def drafted_from_disk(core, prompt: list[int], n: int, **more):
    """The reply, once what is on disk was read."""
    core.cache.tiers.wait_open(60.0)
    always_draft(core)
    core.speculator.drafters = core.speculator.drafters[1:]  # without the reply's own text
    texts = core.speculator.drafters[0]._on_disk
    texts.of(more.get("namespace", ""))
    core.cache.tiers.flush()
    return run(core, prompt, n, use_cache=False, **more)


def test_a_reply_is_drafted_from_what_was_kept_before_a_restart(tmp_path):
    prompt = text(1, 60)
    with disk_core(tmp_path) as core:
        first = run(core, prompt, 40)
        write_all(core)
    with disk_core(tmp_path) as core:
        again = drafted_from_disk(core, prompt, 40)
        assert again.tokens == first.tokens and again.n_draft_accepted > 10
    with disk_core(tmp_path / "empty") as core:
        assert drafted_from_disk(core, prompt, 40).n_drafted == 0  # the control


def test_nothing_on_disk_is_proposed_to_another_namespace_nor_after_it_was_erased(tmp_path):
    prompt = text(1, 60)
    with disk_core(tmp_path) as core:
        run(core, prompt, 40)
        write_all(core)
    with disk_core(tmp_path) as core:
        assert drafted_from_disk(core, prompt, 40, namespace="others").n_drafted == 0
    with disk_core(tmp_path) as core:
        core.cache.tiers.wait_open(60.0)
        lookup = core.speculator.drafters[1]
        lookup._on_disk.of("")
        core.cache.tiers.flush()
        assert len(lookup._on_disk.of("")) > 60
        core.forget_ahead("")
        assert len(lookup._on_disk.of("")) == 1


def test_a_damaged_file_is_no_text(tmp_path):
    prompt = text(1, 60)
    with disk_core(tmp_path) as core:
        run(core, prompt, 40)
        write_all(core)
    with disk_core(tmp_path) as core:
        core.cache.tiers.wait_open(60.0)
        disk, space = core.cache.tiers.disk, next(kept.space for kept in core.cache.tiers.disk.objects())
        assert sum(map(len, disk.newest_texts(space, 1000))) >= 60
        assert sum(map(len, disk.newest_texts(space, 50))) == 50
        for path in tmp_path.rglob("kv-*.ew"):
            raw = bytearray(path.read_bytes())
            raw[4096:4100] = b"\xff\xff\xff\xff"
            path.write_bytes(raw)
        assert disk.newest_texts(space, 1000) == []


@pytest.mark.parametrize("n_namespaces", [1, 16, 32])
def test_the_disk_reads_texts_one_namespace_after_the_other(n_namespaces):
    """Its thread also writes what is acknowledged: looks never queue up there."""

    class Disk:
        is_on, version = True, 1

        def newest_texts(self, _space, _most):
            return [np.array([7, 8], np.int32)]

    class Tiers:
        def __init__(self):
            self.disk, self.fingerprint, self.jobs = Disk(), "f", []

        def after_all(self, job):
            self.jobs.append(job)

    tiers = Tiers()
    texts = DiskTexts(tiers)
    for i in range(200):
        texts.of(f"n{i % n_namespaces}")
    assert len(tiers.jobs) == 1
    for job in tiers.jobs:
        job()
    texts.of(f"n{n_namespaces - 1}")
    assert texts.of("n0").tolist() == [7, 8, -1] and len(tiers.jobs) == min(2, n_namespaces)
