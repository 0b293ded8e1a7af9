"""Every reason, from what decides it alone; then from real engines whose caches were brought into that state."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from everwarm.engine.core import Core
from everwarm.engine.inspect.read_reason import ReadFacts, counted, explain
from everwarm.engine.process.messages import N_SHOWN, ReadReason, Reason
from everwarm.engine.process.reply_text import items_text
from everwarm.errors import StateRejected
from everwarm.prompt.prompt import MediaItem, Prompt
from everwarm.state.policy import CheckpointParams, CutKind, first_message, is_new_conversation
from everwarm.state.store.object import Damaged
from everwarm.state.tree import (
    MAX_EVICTIONS,
    MAX_GHOST_ITEMS,
    MAX_GHOSTS,
    Checkpoint,
    Eviction,
    Ghosts,
    Parting,
    Segment,
    Tree,
)
from everwarm.types import Position, TokenCount
from support.drive import EVERY_KIND, GUARD, open_core, run, text, tidy
from support.items import prompt_of
from support.kept_cores import HISTORY, STABLE, kept_core, put_away

KNOWN = text(1, 100)
OTHER = text(2, 60)


def blob() -> np.ndarray:
    return np.zeros(8, np.uint8)


def tree_of(*tokens: list[int], at: tuple[int, ...] = (), with_kv: bool = True) -> Tree:
    """A tree that knows these, with states at some points."""
    tree = Tree()
    for each in tokens:
        path, node = Prompt.of_tokens(each), tree.root("")
        for end in (*(n for n in at if n < len(each)), len(each)):
            above, node = node, tree.grow(node, path, end)
            if with_kv and node.segment is None and node is not above and node.parent is above:
                tree.set_segment(node, Segment(blob(), above.mark, node.mark, clean=True))
            if end in at and node.checkpoint is None:
                tree.set_checkpoint(node, Checkpoint(CutKind.BOUNDARY, True, ((end, 1),), state=blob()))
    return tree


def numbers(items: Prompt) -> str:
    """In place of a vocabulary."""
    return " ".join(map(str, items.codes.tolist()))


def listed(tokens: list[int]) -> str:
    return numbers(Prompt.of_tokens(tokens))


def shown(core: Core, tokens: list[int]) -> str:
    return items_text(core.model.vocab, Prompt.of_tokens(tokens))


def why(tree: Tree, tokens: list[int], n_cached: int = 0, **more) -> ReadReason:
    prompt = Prompt.of_tokens(tokens)
    match = tree.match("", prompt, 0)
    return explain(ReadFacts(prompt, match, n_cached, **({"max_checkpoints": 8} | more)), numbers)


def test_nothing_known_is_new():
    assert why(Tree(), KNOWN) == ReadReason(Reason.NEW, n_kv=0)
    assert why(tree_of(KNOWN), OTHER) == ReadReason(Reason.NEW, n_kv=0)  # not a word of what it shares nothing with
    few = [*KNOWN[:GUARD], *OTHER]
    assert why(tree_of(KNOWN), few).reason is Reason.NEW  # what all prompts begin with is no conversation
    short = [*KNOWN[:3], *OTHER[:5]]
    assert why(tree_of(KNOWN), short).reason is Reason.NEW  # also in a short prompt
    assert why(tree_of(KNOWN[:3]), short).reason is Reason.EXTENDED  # but going on is going on


def test_everything_known_is_a_hit():
    found = why(tree_of(KNOWN, at=(96,)), KNOWN, 96)
    assert found == ReadReason(Reason.HIT, None, 100, 100, 96)


def test_going_on_where_the_known_ends_is_extended():
    found = why(tree_of(KNOWN, at=(96,)), [*KNOWN, *OTHER], 96)
    assert (found.reason, found.again, found.n_shared, found.diverged) == (Reason.EXTENDED, None, 100, None)


def test_leaving_what_is_known_names_the_first_item_that_differs():
    given = [*KNOWN[:70], 251, *OTHER]
    found = why(tree_of(KNOWN, at=(70,)), given, 70)
    assert found.reason is Reason.EDITED and found.diverged is not None and found.diverged.at == 70
    assert found.diverged.before == listed(KNOWN[70 - N_SHOWN : 70])
    assert found.diverged.known == listed(KNOWN[70 : 70 + N_SHOWN])
    assert found.diverged.given == listed(given[70 : 70 + N_SHOWN])


def test_at_a_branch_the_latest_one_is_compared():
    branches = [*KNOWN[:50], *text(3, 40)], [*KNOWN[:50], *text(4, 40)]
    found = why(tree_of(*branches, at=(50,)), [*KNOWN[:50], *OTHER], 50)
    assert found.diverged is not None and found.diverged.at == 50
    assert found.diverged.known == listed(branches[1][50 : 50 + N_SHOWN])


def test_kv_beyond_every_state_is_no_checkpoint():
    found = why(tree_of(KNOWN, at=(30,)), KNOWN[:90], 30)
    assert (found.reason, found.again, found.n_kv, found.n_checkpoint) == (*[Reason.NO_CHECKPOINT] * 2, 90, 30)


def test_the_larger_part_gives_the_reason_and_the_smaller_is_still_said():
    found = why(tree_of(KNOWN, at=(30,)), [*KNOWN[:60], *OTHER], 30)
    assert (found.reason, found.again) == (Reason.EDITED, Reason.NO_CHECKPOINT)
    assert why(tree_of(KNOWN, at=(30,)), [*KNOWN[:60], *OTHER[:20]], 30).reason is Reason.NO_CHECKPOINT


def test_a_state_without_its_kv_or_a_state_that_went_is_evicted():
    assert why(tree_of(KNOWN, at=(90,), with_kv=False), KNOWN).reason is Reason.EVICTED
    tree = tree_of(KNOWN, at=(90,))
    node = next(node for node in tree.nodes() if node.n_items == 90)
    tree.drop_checkpoint(node)
    assert why(tree, KNOWN).reason is Reason.NO_CHECKPOINT
    node.evicted = True
    assert why(tree, KNOWN).reason is Reason.EVICTED


def test_what_the_tree_forgot_altogether_is_evicted():
    parting = Parting(80, Prompt.of_tokens(KNOWN))
    found = why(Tree(), [*KNOWN[:80], *OTHER], forgotten=parting)
    assert (found.reason, found.n_shared) == (Reason.EVICTED, 80)
    assert found.diverged is not None and found.diverged.known == listed(KNOWN[80:96])
    assert why(Tree(), KNOWN, forgotten=Parting(100, Prompt.of_tokens(KNOWN))).diverged is None


def test_why_it_was_evicted_is_said_with_figures():
    ghosts, prompt, gib = Ghosts(), Prompt.of_tokens(KNOWN), 1 << 30
    for n_items, worth in ((40, 0.1), (90, 0.2)):
        ghosts.note_eviction("", prompt, Eviction(n_items, 100.0, worth / gib, 1.1 / gib, 8 * gib))
    parting = Parting(100, prompt)
    more = {"eviction": partial(ghosts.eviction, "", prompt), "now": 280.0, "forgotten": parting}
    found = why(Tree(), KNOWN, **more).evicted
    assert found is not None and (found.at, found.ago_s, found.budget_bytes) == (90, 180.0, 8 * gib)
    assert found.words == (
        "evicted 3 min ago: worth 0.2 s per GiB, the budget of 8 GiB was full, the least kept was worth 1.1"
    )
    other = {**more, "eviction": partial(ghosts.eviction, "other", prompt)}
    assert why(Tree(), KNOWN, **other).evicted is None, "another namespace learns nothing of it"
    assert why(tree_of(KNOWN, at=(90,)), KNOWN, 90, **more).evicted is None, "the control: nothing was read again"
    counted_too = counted(why(Tree(), KNOWN, **more), lambda n: 2 * n)
    assert counted_too.evicted is not None and counted_too.evicted.at == 180
    ghosts.clear("")
    assert why(Tree(), KNOWN, **more).evicted is None


def test_reasons_of_evictions_are_bounded():
    ghosts = Ghosts()
    for i in range(MAX_EVICTIONS + 5):
        ghosts.note_eviction("", Prompt.of_tokens([i, i + 1]), Eviction(2, 0.0, 0.0, None, 1))
    assert ghosts.eviction("", Prompt.of_tokens([4, 5]), 0) is None
    found = ghosts.eviction("", Prompt.of_tokens([5, 6]), 0)
    assert found is not None and ghosts.eviction("", Prompt.of_tokens([5, 6]), 2) is None


def test_attention_that_lost_its_kv_is_evicted_and_needs_no_checkpoints():
    found = why(tree_of(KNOWN, with_kv=False), KNOWN, needs_checkpoints=False, max_checkpoints=0)
    assert found.reason is Reason.EVICTED
    assert why(tree_of(KNOWN), KNOWN, 99, needs_checkpoints=False, max_checkpoints=0).reason is Reason.HIT


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"use_cache": False}, Reason.CACHE_OFF),
        ({"deterministic": True}, Reason.DETERMINISTIC),
        ({"n_refused": 1}, Reason.REFUSED),
        ({"max_checkpoints": 0}, Reason.CHECKPOINTS_OFF),
        ({"n_passed": 90}, Reason.LOAD_SLOWER),
        ({"n_spoilt": 90}, Reason.REFUSED),
        ({}, Reason.EVICTED),
    ],
)
def test_what_was_in_the_way_is_named(told, reason):
    found = why(tree_of(KNOWN, at=(90,)), KNOWN, **told)
    assert (found.reason, found.again, found.n_checkpoint) == (reason, reason, 90)
    assert why(tree_of(KNOWN, at=(90,)), KNOWN, 90, **told).again is None


def test_kept_for_another_fingerprint_is_said_only_of_what_is_not_known_here():
    assert why(Tree(), KNOWN, n_elsewhere=90).reason is Reason.FINGERPRINT
    assert why(Tree(), KNOWN, n_elsewhere=20).reason is Reason.NEW
    assert why(tree_of(KNOWN, at=(96,)), KNOWN, 96, n_elsewhere=90).reason is Reason.HIT


def test_without_attention_there_is_no_kv_to_speak_of():
    assert why(Tree(), KNOWN, has_attention=False).n_kv is None


def test_images_count_with_all_their_cells():
    image = MediaItem(b"p" * 32, TokenCount(60), Position(8))
    prompt = prompt_of([*KNOWN[:20], image, *OTHER])
    tree = Tree()
    tree.grow(tree.root(""), prompt_of([*KNOWN[:20], image, *KNOWN[20:]]), 100)
    seen = ReadFacts(prompt, tree.match("", prompt, 0), 0)
    found = counted(explain(seen, numbers), prompt.n_tokens)
    assert found.n_shared == 80 and found.diverged is not None and found.diverged.at == 80


def test_every_reason_has_words_and_a_code_of_its_own():
    assert all(reason.words for reason in Reason)
    assert len({reason.words for reason in Reason}) == len({reason.value for reason in Reason}) == 12


# what is forgotten


def test_forgotten_is_bounded_and_kept_apart_by_namespace():
    forgotten = Ghosts()
    for i in range(3 * MAX_GHOSTS):
        forgotten.note("a", Prompt.of_tokens(text(i, 50)), 50)
    assert len(forgotten) == MAX_GHOSTS
    latest = Prompt.of_tokens(text(3 * MAX_GHOSTS - 1, 50))
    found = forgotten.parting("a", latest)
    assert found is not None and found.at == 50
    assert forgotten.parting("b", latest) is None
    forgotten.clear("a")
    assert forgotten.parting("a", latest) is None and len(forgotten) == 0


def test_forgotten_holds_no_more_items_than_it_may():
    forgotten = Ghosts()
    long = Prompt(np.zeros(MAX_GHOST_ITEMS + 5, np.int32))
    forgotten.note("", long, len(long))
    forgotten.note("", Prompt.of_tokens(KNOWN), 100)
    assert len(forgotten) == 1 and forgotten._n_items == 100


# real engines


def reason(core: Core, tokens: list[int], **more) -> Reason:
    result = run(core, tokens, **more)
    assert result.why is not None
    return result.why.reason


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_every_kind_of_model_says_new_hit_and_extended(arch):
    with open_core(arch) as core:
        first = text(1, 200)
        assert reason(core, first) is Reason.NEW
        again = run(core, first)
        assert again.why is not None and again.why.reason is Reason.HIT and again.n_processed <= GUARD
        reply = list(again.tokens)
        assert reason(core, [*first, *reply, *text(5, 50)]) is Reason.EXTENDED


def test_the_edited_item_is_the_first_that_differs():
    edited = [*HISTORY[:300], (HISTORY[300] + 1) % 250, *HISTORY[301:420]]
    with open_core() as core:
        run(core, HISTORY)
        found = run(core, edited).why
        assert found is not None and found.diverged is not None and found.diverged.at == 300
        assert found.diverged.known == shown(core, HISTORY[300:316])


def test_another_namespace_learns_nothing():
    with open_core() as core:
        run(core, HISTORY, namespace="a")
        found = run(core, HISTORY, namespace="b").why
        assert found == ReadReason(Reason.NEW, n_kv=0)


def test_checkpoints_that_are_off_are_named():
    with open_core(n_slots=1, checkpoints=CheckpointParams(0)) as core:
        run(core, HISTORY)
        run(core, text(9, 100))
        assert reason(core, HISTORY) is Reason.CHECKPOINTS_OFF


def test_far_apart_checkpoints_are_named():
    with open_core(n_slots=1, checkpoints=CheckpointParams(every_n_tokens=-1)) as core:
        run(core, HISTORY)
        assert reason(core, [*HISTORY[:400], *text(9, 20)]) is Reason.NO_CHECKPOINT


def test_the_engine_says_what_it_gave_up_and_for_what():
    with open_core(n_slots=1, n_spares=0) as core:
        run(core, HISTORY)
        tidy(core)
        core.cache.ram_budget.n_bytes = core.cache.tree.ram_bytes  # full
        asked = [text(seed, 400) for seed in (9, 8, 7)]
        reasons = []
        for prompt in [*asked, *asked]:
            reasons.append(run(core, prompt).why)
            tidy(core)
        again = [each for each in reasons if each is not None and each.again is Reason.EVICTED]
        assert again and all(each.evicted is not None for each in again)
        evicted = again[0].evicted
        assert 0 < evicted.at <= 400 and evicted.budget_bytes == core.cache.ram_budget.n_bytes
        assert evicted.worth >= 0 and evicted.least_kept is not None and 0 <= evicted.ago_s < 600


def test_little_ram_is_named():
    with open_core(n_slots=1, ram_bytes=0) as core:
        run(core, HISTORY)
        tidy(core)
        run(core, text(9, 100))
        tidy(core)
        found = run(core, HISTORY)
        assert found.n_cached == 0 and found.why is not None
        assert (found.why.reason, found.why.n_shared) == (Reason.EVICTED, len(HISTORY))


def test_a_refused_state_is_named(monkeypatch):
    with open_core(n_slots=1) as core:
        run(core, HISTORY)
        run(core, text(9, 100))

        def refuse(*_args, **_more):
            raise StateRejected("not today")

        monkeypatch.setattr(type(core.context), "restore", refuse)
        assert reason(core, HISTORY) is Reason.REFUSED
        assert core.counts.n_quarantined > 0


def test_no_cache_and_deterministic_are_named():
    with open_core(n_slots=2) as core:
        run(core, HISTORY)
        assert reason(core, HISTORY, use_cache=False) is Reason.CACHE_OFF
        for node in core.cache.tree.nodes():
            if node.checkpoint is not None:
                node.checkpoint.clean = False
        assert reason(core, HISTORY, deterministic=True) is Reason.DETERMINISTIC


def test_what_was_erased_is_not_remembered():
    from everwarm.engine.slotfile import slot_io

    with open_core(n_slots=1) as core:
        run(core, HISTORY)
        slot_io.erase(core, core.slots[0], "")
        assert run(core, HISTORY).why == ReadReason(Reason.NEW, n_kv=0)


@pytest.mark.parametrize("ram_bytes", [0, 1 << 19, 64 << 20])
def test_whatever_happens_nothing_is_claimed_that_was_not_read(ram_bytes):
    """Random edits and extensions in two namespaces; everything that was ever read is the oracle."""
    rng = np.random.default_rng(ram_bytes)
    read: dict[str, list[list[int]]] = {"a": [], "b": []}
    seen = set()
    with open_core(ram_bytes=ram_bytes) as core:
        for i in range(40):
            space = "ab"[i % 2]
            old = read[space][rng.integers(len(read[space]))] if read[space] and rng.random() < 0.8 else []
            prompt = [*old[: rng.integers(len(old) + 1)], *text(100 + i, int(rng.integers(1, 80)))][:700]
            result = run(core, prompt, namespace=space)
            why = result.why
            assert why is not None and result.n_cached <= result.n_shared <= why.n_shared
            assert why.n_shared <= max((_common(prompt, each) for each in read[space]), default=0)
            if why.diverged is not None:
                at, known = why.diverged.at, why.diverged.known
                assert why.diverged.given == shown(core, prompt[at : at + N_SHOWN]) != known
                others = [each[at : at + N_SHOWN] for each in read[space] if each[:at] == prompt[:at]]
                others = [each for each in others if each[:1] != prompt[at : at + 1]]
                assert known in {shown(core, each[:n]) for each in others for n in range(1, N_SHOWN + 1)}
            seen.add(why.reason)
            read[space].append([*prompt, *result.tokens])
    assert len(seen) >= 3


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# the disk


def one_kept(tmp_path, **settings) -> None:
    with kept_core(tmp_path, **settings) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)


def test_loading_that_is_slower_than_reading_is_named(tmp_path):
    one_kept(tmp_path)
    with kept_core(tmp_path, policy="auto") as core:
        core.cache.loader._read_rate, core.speed.seconds_per_token = 1.0, 1e-9
        found = run(core, HISTORY).why
        assert found is not None and (found.reason, found.n_shared) == (Reason.LOAD_SLOWER, STABLE)
    with kept_core(tmp_path) as core:
        assert run(core, HISTORY).n_cached == STABLE


def test_a_damaged_object_is_named(tmp_path):
    one_kept(tmp_path)
    with kept_core(tmp_path) as core:

        def broken(*_):
            raise Damaged("it is not what it was")

        core.cache.loader._load = broken
        assert reason(core, HISTORY) is Reason.REFUSED


def test_what_is_kept_for_another_fingerprint_is_named_to_its_namespace_alone(tmp_path):
    one_kept(tmp_path, flash_attention="off")
    with kept_core(tmp_path, flash_attention="on") as core:
        assert run(core, HISTORY, namespace="other").why == ReadReason(Reason.NEW, n_kv=0)
        assert reason(core, text(9, 300)) is Reason.NEW
        found = run(core, HISTORY).why
        assert found is not None and (found.reason, found.n_shared) == (Reason.FINGERPRINT, 0)


def test_looking_elsewhere_survives_rubbish(tmp_path):
    one_kept(tmp_path, flash_attention="off")
    for index in (tmp_path / "states").rglob("index.sqlite*"):
        index.write_bytes(b"rubbish")
    (tmp_path / "states" / "v1-nothing").mkdir()
    with kept_core(tmp_path, flash_attention="on") as core:
        assert core.cache.tiers.foreign_states == {}
        assert reason(core, HISTORY) is Reason.NEW


def test_a_reason_costs_nothing_where_nothing_is_missing(monkeypatch):
    with open_core() as core:
        run(core, HISTORY)
        monkeypatch.setattr(Ghosts, "parting", lambda *_: pytest.fail("it was looked up"))
        assert reason(core, HISTORY) is Reason.HIT


SYSTEM = range(148, 163)  # the first message after a system text


@pytest.mark.parametrize(
    ("n_known", "n_prompt", "first", "parts", "is_new"),
    [
        (0, 100, None, False, True),
        (3, 24, None, True, True),  # the template's own tokens
        (3, 24, range(14), True, True),
        (14, 40, range(14), True, False),  # the same short question: what follows it was edited
        (151, 168, SYSTEM, True, True),  # the system text, and the beginning of every question
        (163, 400, SYSTEM, True, False),  # the first question, too
        (180, 400, SYSTEM, True, False),
        (22, 236, SYSTEM, True, False),  # a date in the system text
        (151, 168, None, True, False),  # without a system text so much is a conversation
        (148, 168, SYSTEM, False, False),  # the system text was read ahead: it goes on from there
        (100, 120, None, False, False),
    ],
)
def test_what_all_chats_begin_with_is_no_conversation(n_known, n_prompt, first, parts, is_new):
    assert is_new_conversation(n_known, n_prompt, first, parts=parts) is is_new


def test_the_first_message_is_between_the_system_text_and_the_next_end():
    assert first_message(148, (148, 163, 200)) == SYSTEM
    assert first_message(None, (3, 5)) is None and first_message(5, (3, 5)) is None
