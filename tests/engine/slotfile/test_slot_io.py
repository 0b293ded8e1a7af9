"""Slot files: every kind of next request is warm after a restore, the bytes are the same, and a bad file harms nobody."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from everwarm.engine.settings import StoreSettings
from everwarm.engine.slotfile import slot_io
from everwarm.errors import BadRequest
from everwarm.llama import blobs
from everwarm.llama.model import MemoryKind
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CutKind
from everwarm.state.store.object import Damaged
from everwarm.state.store.slot_file import VERSION, Claim, Scattered, split_appendix
from everwarm.state.store.slot_names import COMPANION, checked_name
from everwarm.types import token_mark
from support.campaign import CAMPAIGN
from support.drafts import always_draft, drafting_core, tokens_of
from support.drive import EVERY_KIND, HYBRIDS, check, drain, open_core, run, submit, text, tidy
from support.models import EMBEDDED
from support.slot_files import damage_state, header_of, read_main, write_old_pair

ARCHITECTURES = tuple(dict.fromkeys((*HYBRIDS, *EVERY_KIND)))
HISTORY, NEW = text(1, 400), text(2, 30)
STABLE, MIDDLE = 380, 200
CLAIM = Claim("fingerprint", "")
TRUSTING = Claim("fingerprint", "", trusts_origin=True)


def save(core, path: Path, slot: int = 0) -> slot_io.Saved:
    saved = slot_io.capture(core, core.slots[slot], "")
    slot_io.write(path, saved, CLAIM)
    return saved


def restore(core, path: Path, slot: int = 0, claim: Claim = CLAIM) -> int:
    saved, _ = slot_io.read(path, claim, core.context.n_ctx)
    n = slot_io.put_back(core, core.slots[slot], saved, "")
    check(core)
    return n


def talk(core) -> list[int]:
    """A conversation in slot 0; returns all of it, with the reply."""
    result = run(core, HISTORY, boundaries=(MIDDLE,), stable=STABLE, slot=0)
    return [*HISTORY, *result.tokens[:-1]]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_after_a_restore_every_kind_of_next_request_is_warm(tmp_path, arch):
    with open_core(arch) as core:
        whole = talk(core)
        save(core, tmp_path / "a.bin")
    needs = arch != "llama"
    for prompt, n_cached in (
        ([*whole, *NEW], len(whole)),  # goes on
        ([*HISTORY[:STABLE], *NEW], STABLE),  # what came after the stable point was stripped
        ([*HISTORY[:MIDDLE], *NEW], MIDDLE),  # the last message was edited
        (HISTORY, len(HISTORY) - 20),  # said again, or regenerated
    ):
        with open_core(arch) as core:
            assert restore(core, tmp_path / "a.bin") == len(whole)
            result = run(core, prompt)
            assert result.n_cached >= n_cached if needs else result.n_cached >= min(n_cached, len(prompt) - 1)
    with open_core(arch) as core:
        assert run(core, [*whole, *NEW]).n_cached == 0, "this test could not fail"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_restored_is_byte_for_byte_what_was_saved(tmp_path, arch):
    with open_core(arch) as core:
        talk(core)
        saved = save(core, tmp_path / "a.bin")
        save(core, tmp_path / "b.bin")
    with open_core(arch) as core:
        restore(core, tmp_path / "a.bin")
        again = slot_io.capture(core, core.slots[0], "")
    assert again.prompt.codes.tolist() == saved.prompt.codes.tolist()
    assert again.state.tobytes() == saved.state.tobytes()
    assert [s.point.n_items for s in again.points] == [s.point.n_items for s in saved.points]
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    other = bytearray(saved.state.tobytes())
    other[len(other) // 2] ^= 1
    assert again.state.tobytes() != bytes(other), "this test could not fail"


STATEFUL = tuple(arch for arch in ARCHITECTURES if arch != "llama")


@pytest.mark.parametrize("arch", STATEFUL)
def test_no_state_is_in_a_pair_twice(tmp_path, arch):
    with open_core(arch) as core:
        talk(core)
        saved = save(core, tmp_path / "a.bin")
    both = b"".join((tmp_path / name).read_bytes() for name in ("a.bin", f"a.bin{COMPANION}"))
    bodies = [point.state[blobs.HEADER_BYTES :].tobytes() for point in saved.points]
    if arch != "gemma3":  # a window may hold the same numbers as another one
        assert len(saved.points) > 3 and [both.count(body) for body in bodies] == [1] * len(bodies)
    write_old_pair(tmp_path / "old.bin", saved, CLAIM)
    old = b"".join((tmp_path / name).read_bytes() for name in ("old.bin", f"old.bin{COMPANION}"))
    assert arch == "gemma3" or max(old.count(body) for body in bodies) == 2, "this test could not fail"
    n_spared = len(old) - len(both)
    assert n_spared >= (len(saved.appended) + (arch != "gemma3")) * len(bodies[0]) - 3 * 4096


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_pair_of_an_earlier_version_is_restored_with_the_same_bytes(tmp_path, arch):
    with open_core(arch) as core:
        whole = talk(core)
        saved = save(core, tmp_path / "new.bin")
        write_old_pair(tmp_path / "old.bin", saved, CLAIM)
    assert header_of(tmp_path / "old.bin").state_bytes == 0 != header_of(tmp_path / "new.bin").state_bytes
    states = []
    for name in ("old.bin", "new.bin"):
        with open_core(arch) as core:
            assert restore(core, tmp_path / name) == len(whole)
            again = slot_io.capture(core, core.slots[0], "")
            states.append([again.state.tobytes(), *((p.point.n_items, p.state.tobytes()) for p in again.points)])
            assert run(core, [*whole, *NEW]).n_cached >= (len(whole) if arch != "llama" else len(whole) - 1)
    assert states[0] == states[1]
    data = bytearray((tmp_path / "old.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "old.bin").write_bytes(data)
    with pytest.raises(Damaged, match="belongs to another file"):
        slot_io.read(tmp_path / "old.bin", CLAIM, 4096)


@pytest.mark.parametrize("arch", ["qwen35", "mamba2"])
@pytest.mark.parametrize("is_other", [False, True])
def test_a_restored_slot_goes_on_bit_for_bit(tmp_path, arch, is_other):
    """Compared is all that libllama holds of the sequence after it went on: KV and state. The control goes on from a state
    with one bit changed."""
    with open_core(arch, n_spares=4) as core:
        whole = talk(core)
        saved = save(core, tmp_path / "a.bin")
        expected = run(core, [*whole, *NEW], 16, slot=0)
        golden = core.context.capture_sequence(core.slots[0].seq).tobytes()
    if is_other:
        state = np.frombuffer(saved.state.tobytes(), np.uint8).copy()
        state[-1000] ^= 0x40
        slot_io.write(tmp_path / "a.bin", replace(saved, state=state), CLAIM)
    with open_core(arch, n_spares=4) as core:
        restore(core, tmp_path / "a.bin")
        result = run(core, [*whole, *NEW], 16, slot=0)
        assert result.n_cached == expected.n_cached
        assert (core.context.capture_sequence(core.slots[0].seq).tobytes() == golden) is not is_other


@pytest.mark.parametrize("arch", ["qwen35", "falcon-h1", "llama"])
def test_what_ram_has_of_a_slot_is_written_without_a_copy_and_with_the_same_bytes(tmp_path, arch):
    with open_core(arch) as core:
        talk(core)
        slot = core.slots[0]
        assert isinstance(slot_io.capture(core, slot, "").state, np.ndarray), "its KV is on the device alone"
        tidy(core)
        saved = save(core, tmp_path / "a.bin")
        golden = core.context.capture_sequence(slot.seq).tobytes()
        assert isinstance(saved.state, Scattered) and saved.state.tobytes() == golden
        kept = [node.segment.blob for node in slot.node.lineage() if node.segment is not None]
        assert any(np.shares_memory(part, blob) for part in saved.state.parts for blob in kept)
        kept[0][len(kept[0]) // 2] ^= 1
        assert slot_io.capture(core, slot, "").state.tobytes() != golden, "this test could not fail"
        kept[0][len(kept[0]) // 2] ^= 1
    assert slot_io.read(tmp_path / "a.bin", CLAIM, 4096)[0].state.tobytes() == golden


def test_what_was_read_beside_another_request_is_read_from_the_device(tmp_path):
    """Its KV in RAM may be of another reading: the last bits differ."""
    with open_core() as core:
        for tokens in (HISTORY, text(5, 300)):
            submit(core, tokens, 8)
        drain(core)
        tidy(core)
        slot = next(slot for slot in core.slots if slot.content.codes[0] == HISTORY[0])
        assert not core.context.is_clean(slot.seq), "this test could not fail"
        saved = slot_io.capture(core, slot, "")
        assert isinstance(saved.state, np.ndarray)
        assert saved.state.tobytes() == core.context.capture_sequence(slot.seq).tobytes()


def test_a_file_has_few_checkpoints_and_those_that_a_next_request_needs(tmp_path):
    ends = range(40, 400, 20)
    with open_core() as core:
        run(core, HISTORY, boundaries=tuple(ends), stable=STABLE, slot=0)
        held = [n.n_items for n in core.slots[0].node.lineage() if n.checkpoint is not None]
        saved = save(core, tmp_path / "a.bin")
        kept = [point.point.n_items for point in saved.points]
        assert len(held) > slot_io.MAX_SAVED == len(kept) and set(kept) < set(held)
        assert {STABLE, core.slots[0].n_fed} < set(kept)
        kept_kinds = {point.point.cut for point in saved.points}
        assert CutKind.STABLE.value in kept_kinds
        gaps = np.diff(kept)
        assert gaps[0] >= gaps[-1], "farther from the end they lie farther apart"


def test_the_rest_of_a_file_is_read_later_also_when_the_file_is_gone(tmp_path):
    path = tmp_path / "a.bin"
    with open_core() as core:
        run(core, HISTORY, boundaries=(100, 200, 300), stable=STABLE, slot=0)
        whole = save(core, path)
    with open_core() as core:
        saved, _ = slot_io.read(path, CLAIM, core.context.n_ctx, core.cache.ram.arena)
        early = {each.point.n_items for each in saved.points}
        late = {point.n_items for point in saved.later.points}
        assert {STABLE, len(whole.prompt)} <= early and {100, 200} <= late and not early & late
        assert [point.n_items for point in saved.later.points] == sorted(late, reverse=True)
        for file in (path, tmp_path / f"a.bin{COMPANION}"):
            file.unlink()
        states = {each.point.n_items: each.state for each in whole.points}
        for point in saved.later.points:
            assert saved.later.read(point).state.tobytes() == states[point.n_items].tobytes()
        saved.later.close()


SPEAKING = "Tell me a story about a river, a boat and a child."


@pytest.mark.parametrize("has_head", [True, False])
def test_a_restored_slot_drafts_as_before(tmp_path, has_head):
    """The control has a file without what the head knows, as older versions wrote it."""
    settings = {"path": EMBEDDED, "speculate": "mtp", "n_slots": 1, "n_ctx": 1024}
    with drafting_core(**settings) as core:
        always_draft(core)
        prompt = tokens_of(core, SPEAKING)
        first = run(core, prompt, 24, slot=0)
        saved = slot_io.capture(core, core.slots[0], "")
        assert saved.head is not None
        slot_io.write(tmp_path / "a.bin", saved if has_head else replace(saved, head=None), CLAIM)
        following = [*prompt, *first.tokens]
        expected = run(core, following, 64, slot=0)
        golden = core.context.capture_sequence(core.slots[0].seq).tobytes()
        assert expected.n_draft_accepted > 32
    with drafting_core(**settings) as core:
        always_draft(core)
        restore(core, tmp_path / "a.bin")
        track = core.context.head._tracks[core.slots[0].seq]
        assert (track.start == 0 and track.end == saved.n_tokens) is has_head
        result = run(core, following, 64, slot=0)
        assert result.tokens == expected.tokens and result.n_cached == expected.n_cached
        drafted, wanted = ((r.n_drafted, r.n_draft_accepted) for r in (result, expected))
        assert (drafted == wanted) is has_head
        assert (core.context.capture_sequence(core.slots[0].seq).tobytes() == golden) or not has_head
        core.context.head.check()


def test_a_conversation_that_left_the_context_is_saved_all_the_same(tmp_path):
    with open_core() as core:
        whole = talk(core)
        core.cache.room.vacate(core.slots[0])
        assert core.slots[0].n_fed == 0
        assert save(core, tmp_path / "a.bin").prompt.codes.tolist() == whole
        check(core)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_state_that_is_verified_when_it_is_needed_is_never_used_damaged(tmp_path, is_damaged):
    """In the arena a state's digest is looked at before it is used; a damaged one is as if it had not been there."""
    path = tmp_path / "a.bin"
    with open_core() as core:
        talk(core)
        save(core, path)
    if is_damaged:
        damage_state(path, STABLE)
    with open_core() as core:
        saved, _ = slot_io.read(path, CLAIM, core.context.n_ctx, core.cache.ram.arena)
        assert STABLE in [found.point.n_items for found in saved.points]
        slot_io.put_back(core, core.slots[0], saved, "")
        for point in saved.later.points:
            slot_io.keep_point(core, saved.prompt, "", saved.later.read(point))
        again = slot_io.capture(core, core.slots[0], "")
        assert (STABLE in [found.point.n_items for found in again.points]) is not is_damaged
        result = run(core, [*HISTORY[:STABLE], *NEW])
        assert result.n_cached == (MIDDLE if is_damaged else STABLE)
        check(core)
        saved.later.close()
    if is_damaged:
        with pytest.raises(Damaged, match=r"companion a\.bin\.checkpoints is damaged"):
            slot_io.read(path, CLAIM, 4096)  # without an arena everything is verified at once
    else:
        assert slot_io.read(path, CLAIM, 4096)[0].points


def test_saving_empty_slots_and_other_peoples_slots_is_refused(tmp_path):
    with open_core() as core:
        with pytest.raises(BadRequest):
            slot_io.capture(core, core.slots[1], "")
        run(core, HISTORY, namespace="mine", slot=0)
        with pytest.raises(BadRequest):
            slot_io.capture(core, core.slots[0], "yours")
        assert slot_io.erase(core, core.slots[0], "yours") == 0
        assert run(core, [*HISTORY, *NEW], namespace="mine").n_cached >= len(HISTORY) - 20


def test_erasing_forgets_what_nobody_shares(tmp_path):
    with open_core() as core:
        talk(core)
        run(core, [*HISTORY[:MIDDLE], *NEW], slot=1)
        assert slot_io.erase(core, core.slots[0], "") == len(HISTORY) + 3
        check(core)
        assert run(core, [*HISTORY[:MIDDLE], *text(7, 20)], slot=1).n_cached == MIDDLE
        assert run(core, [*HISTORY, *NEW]).n_cached == MIDDLE


def test_erasing_reaches_past_requests_that_are_only_remembered():
    """A reply that was written again, and of which nothing is kept, does not make a prompt shared."""
    with open_core(n_slots=1) as core:
        run(core, [*HISTORY, 7, 8, 9])
        run(core, HISTORY)
        core.cache.room.clear()
        first = next(node for node in core.cache.returns.visits if node.path.codes[len(HISTORY)] == 7)
        for node in reversed(list(first.below())):
            if node.checkpoint is not None:
                core.cache.checkpointer.drop(node, "for a test")
            if node.segment is not None:
                core.cache.tree.drop_segment(node)
        assert core.cache.tree.has(first), "the control: it is remembered"
        assert slot_io.erase(core, core.slots[0], "") > 0
        assert not core.cache.tree.by_id or all(node.parent is None for node in core.cache.tree.nodes())
        assert run(core, HISTORY).n_cached == 0


@pytest.mark.parametrize("seed", range(160 if CAMPAIGN else 32))
def test_a_mutated_main_file_is_refused_or_is_right_and_the_slot_stays_usable(tmp_path, seed):
    """Flips inside the numbers themselves cannot be told from numbers; without a companion that is llama-server's own
    guarantee. Everything structural is refused, nothing aborts, and the engine answers as before."""
    rng = np.random.default_rng(seed)
    with open_core(EVERY_KIND[seed % len(EVERY_KIND)]) as core:
        talk(core)
        path = tmp_path / "a.bin"
        save(core, path)
        (tmp_path / f"a.bin{COMPANION}").unlink()
        expected = run(core, text(9, 50), deterministic=True).tokens
        data = bytearray(path.read_bytes())
        match seed // len(EVERY_KIND) % 4:
            case 0:
                data = data[: int(rng.integers(0, len(data)))]
            case 1:
                at = int(rng.integers(0, 64))
                data[at] ^= 1 << int(rng.integers(8))
            case 2:
                at = 12 + 4 * len(HISTORY) + int(rng.integers(0, 64))
                data[at : at + 4] = struct.pack("<I", int(rng.integers(1 << 32)))
            case 3:
                data[: int(rng.integers(1, 200))] = b""
        path.write_bytes(data)
        try:
            saved, _ = slot_io.read(path, TRUSTING, core.context.n_ctx)
            slot_io.put_back(core, core.slots[0], saved, "")
        except (Damaged, BadRequest):
            pass
        check(core)
        assert run(core, text(9, 50), deterministic=True, use_cache=False).tokens == expected


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/b", "/etc/passwd", "a\0b", "-a", "a" * 65, "ä", "a b", ".hidden", f"a{COMPANION}"],
)
def test_a_name_that_could_leave_the_directory_is_refused(name):
    with pytest.raises(BadRequest):
        checked_name(name)


def test_good_names_are_good():
    assert [checked_name(n) for n in ("a", "a.bin", "A-1_2.x", "0")] == ["a", "a.bin", "A-1_2.x", "0"]


def test_a_symbolic_link_is_never_followed(tmp_path):
    with open_core() as core:
        talk(core)
        save(core, tmp_path / "a.bin")
        (tmp_path / "link").symlink_to(tmp_path / "a.bin")
        with pytest.raises(Damaged):
            slot_io.read(tmp_path / "link", CLAIM, core.context.n_ctx)
        target = tmp_path / "victim"
        target.write_text("precious")
        (tmp_path / "b.bin").symlink_to(target)
        (tmp_path / f"b.bin{COMPANION}").symlink_to(target)
        save(core, tmp_path / "b.bin")
        assert target.read_text() == "precious" and not (tmp_path / "b.bin").is_symlink()


def test_llama_servers_packed_token_list_is_understood(tmp_path):
    tokens = np.array([5, 6, 7], "<i4")
    packed = struct.pack("<iII", -1, 1, 3) + tokens.tobytes() + struct.pack("<I", 0)
    path = tmp_path / "peer.bin"
    path.write_bytes(struct.pack("<III", 0x67677371, VERSION, len(packed) // 4) + packed + b"state")
    found, state = read_main(path, 100)
    assert found.tolist() == [5, 6, 7] and state.tobytes() == b"state"
    path.write_bytes(struct.pack("<III", 0x67677371, VERSION, 1 << 31) + packed)
    with pytest.raises(Damaged):
        read_main(path, 100)


def test_llama_server_gets_a_state_without_what_the_head_keeps_behind_it(tmp_path):
    with drafting_core(path=EMBEDDED, speculate="mtp", n_slots=1, n_ctx=1024) as core:
        always_draft(core)
        talk(core)
        saved = save(core, tmp_path / "a.bin")
        kept = {found.point.n_items: found.state for found in saved.points}
        _, appended = split_appendix(read_main(tmp_path / "a.bin", 1024)[1])
        assert any(blobs.split(kept[point.n_tokens])[1] is not None for point in appended), "this test could not fail"
        for point in appended:
            assert point.state.tobytes() == blobs.trunk(kept[point.n_tokens]).tobytes()
            assert blobs.split(point.state)[1] is None


@pytest.mark.parametrize("in_arena", [True, False])
def test_a_state_is_restored_without_a_copy_although_checkpoints_follow_it(tmp_path, in_arena):
    with open_core("qwen35") as core:
        talk(core)
        assert save(core, tmp_path / "a.bin").appended
        arena = core.cache.ram.arena if in_arena else None
        saved, _ = slot_io.read(tmp_path / "a.bin", CLAIM, core.context.n_ctx, arena)
        assert np.shares_memory(blobs.with_header(saved.state, 0), saved.state)


def test_a_slots_content_is_its_last_conversation():
    with open_core() as core:
        run(core, HISTORY, slot=0)
        run(core, text(4, 100), slot=0)
        assert core.slots[0].content.first(100).codes.tolist() == Prompt.of_tokens(text(4, 100)).codes.tolist()


def test_after_a_restore_the_very_same_prompt_decodes_nothing(tmp_path):
    with open_core("qwen35", n_spares=8) as core:
        first = run(core, HISTORY)
        save(core, tmp_path / "a.bin")
    with open_core("qwen35", n_spares=8) as core:
        restore(core, tmp_path / "a.bin")
        again = run(core, HISTORY)
        assert again.n_processed == 0 and again.tokens == first.tokens
        other = run(core, [*HISTORY[:-1], (HISTORY[-1] + 1) % 250])
        assert other.n_processed > 0 and other.tokens != first.tokens, "this test could not fail"


def test_what_was_erased_is_not_on_disk_either_but_what_others_share_is(tmp_path):
    store = StoreSettings(str(tmp_path / "states"), restore_policy="always")
    other = [*HISTORY[:200], *text(9, 100)]
    with open_core(store=store, n_slots=2) as core:
        run(core, other, stable=280, boundaries=(200,), slot=1)
        run(core, HISTORY, stable=STABLE, boundaries=(200,), slot=0)
        core.put_away()
        before = core.cache.tiers.disk.n_bytes
        assert slot_io.erase(core, core.slots[0], "") > 0
        assert 0 < core.cache.tiers.disk.n_bytes < before
    with open_core(store=store, n_slots=2) as core:
        assert run(core, [*other[:280], *NEW]).n_cached == 280
        assert run(core, [*HISTORY[:STABLE], *NEW]).n_cached <= 200


def second_part(data: bytearray, kind: MemoryKind, n_tokens: int) -> int:
    """Where in a slot file the window or the recurrent state begins."""
    tokens, state = 12 + 4 * n_tokens, np.frombuffer(bytes(data[12 + 4 * n_tokens :]), np.uint8)
    for words in (3, 6):
        found, rest = blobs._section(state, words, token_mark(n_tokens))
        if found == n_tokens:
            return tokens + len(state) - len(rest)
    raise AssertionError(f"no {kind} in here")


@pytest.mark.parametrize(
    ("arch", "at", "value"),
    [
        ("gemma3", 8, -2),
        ("gemma3", 8, 1 << 30),
        ("gemma3", 4, 1 << 30),
        ("qwen35", 0, 2),
        ("qwen35", 4, -2),
        ("qwen35", 8, 1),
    ],
)
def test_a_part_that_libllama_would_choke_on_never_reaches_it(tmp_path, arch, at, value):
    """A cell before position 0 stays for ever and spoils its next owner; two recurrent cells end the process."""
    with open_core(arch) as core:
        whole = talk(core)
        save(core, tmp_path / "a.bin")
        (tmp_path / f"a.bin{COMPANION}").unlink()
        data = bytearray((tmp_path / "a.bin").read_bytes())
        place = second_part(data, core.context.kind, len(whole)) + at
        honest = bytes(data)
        data[place : place + 4] = struct.pack("<i", value)
        (tmp_path / "a.bin").write_bytes(data)
        with pytest.raises(BadRequest):
            restore(core, tmp_path / "a.bin", claim=TRUSTING)
        (tmp_path / "a.bin").write_bytes(honest)
        assert restore(core, tmp_path / "a.bin", claim=TRUSTING) == len(whole), "this test could not fail"
