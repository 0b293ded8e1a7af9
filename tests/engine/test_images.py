"""Images in a conversation: one item, many cells, few positions, and every checkpoint still exactly right."""

from __future__ import annotations

import os

import numpy as np
import pytest

from everwarm.config import GREEDY
from everwarm.engine.build import assemble
from everwarm.engine.process.messages import SentImage
from everwarm.engine.request import Ask
from everwarm.engine.settings import EngineSettings, StoreSettings
from everwarm.engine.slotfile import slot_io
from everwarm.engine.verify import compare_with_cold
from everwarm.errors import PIXELS_MISSING, BadRequest
from everwarm.state.store.arena_file import memory_file
from everwarm.state.store.object import Damaged
from everwarm.state.store.slot_file import Claim
from support.drive import GUARD, check, drain, run, text, tidy
from support.image_cores import answered, ask, bits, make_image, n_items, seeing_core
from support.items import prompt_of
from support.models import tiny_vision

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
SEEING = ("qwen35", "gemma3")


A, B, C = text(1, 60), text(2, 40), text(3, 30)
CAT, DOG = make_image(1), make_image(2)


@pytest.mark.parametrize("arch", SEEING)
@pytest.mark.parametrize(
    "parts",
    [
        [A, CAT, B],
        [A, CAT, B, DOG, C],
        [CAT, A],
        [A, CAT],
        [A, CAT, DOG, B],
        [A, CAT, B, CAT, C],
        [A, make_image(3, 64, 96), B, make_image(3, 96, 64), C],
    ],
    ids=["one", "two", "first", "last", "side by side", "twice", "shapes"],
)
def test_coming_back_past_images_gives_the_bits_of_never_having_left(arch, parts):
    new = text(9, 20)
    with seeing_core(arch, n_slots=1) as core:
        first = answered(core, parts)
        assert first.n_cached == 0 and first.n_prompt > n_items(parts)
        straight = answered(core, [*parts, new])
        expected = bits(core, n_items(parts) + len(new) + 3)
        tidy(core)
        assert compare_with_cold(core, most=12).is_exact
        answered(core, [text(40, 50)], slot=0)  # the slot is given away
        again = answered(core, [*parts, new])
        assert again.tokens == straight.tokens and again.n_processed <= GUARD + len(new)
        assert bits(core, n_items(parts) + len(new) + 3) == expected
        assert core.images.n_encoded == len({part.digest for part in parts if isinstance(part, SentImage)})
        check(core)
    with seeing_core(arch, n_slots=1) as core:
        other = [make_image(77, p.width, p.height) if isinstance(p, SentImage) else p for p in parts]
        assert answered(core, [*other, new]).n_cached == 0
        assert bits(core, n_items(parts) + len(new) + 3) != expected, "this test could not fail"


@pytest.mark.parametrize("arch", SEEING)
def test_there_is_a_checkpoint_right_before_and_right_after_every_image(arch):
    with seeing_core(arch, n_slots=1) as core:
        answered(core, [A, CAT, B, DOG, C])
        tidy(core)
        ends = {node.n_items for node in core.cache.tree.nodes() if node.checkpoint is not None}
        assert {60, 61, 101, 102} <= ends
        answered(core, [text(50, 30)])
        assert answered(core, [A, DOG, B]).n_cached == 60, "another image of the same size is a miss from there on"
        other = answered(core, [A, CAT, text(60, 40)])
        assert other.n_cached == core.images.item(CAT).n_tokens + 60, "other text after it reads only that text"
        assert core.images.n_encoded == 2
        check(core)


@pytest.mark.parametrize("arch", SEEING)
def test_fifty_restores_in_a_row_drift_nowhere(arch):
    with seeing_core(arch, n_slots=1) as core:
        parts = [A, CAT, B]
        answered(core, parts)
        golden = answered(core, [*parts, C])
        state = bits(core, n_items(parts) + len(C) + 3)
        for i in range(50 if CAMPAIGN else 12):
            answered(core, [*parts, text(100 + i, 10)])
            again = answered(core, [*parts, C])
            assert again.tokens == golden.tokens and bits(core, n_items(parts) + len(C) + 3) == state
            end = core.context.end(core.slots[0].seq)
            assert end.n_tokens == 60 + 40 + 30 + 3 + core.images.item(CAT).n_tokens


def test_positions_that_were_counted_as_tokens_would_be_seen():
    """The negative control: an image that pretends to take a position for every cell."""
    new = text(9, 20)
    with seeing_core(n_slots=1) as core:
        right = answered(core, [A, CAT, B, new])
        expected = bits(core, n_items([A, CAT, B, new]) + 3)
        assert right.n_cached == 0
    with seeing_core(n_slots=1) as core:
        shape = core.images.media.shape(CAT.width, CAT.height)
        assert shape.n_pos < shape.n_tokens
        item = core.images.item(CAT)
        core.images.embedding(item, {item.digest: CAT})
        seq = core.slots[0].seq
        from everwarm.llama.batch import Feed
        from everwarm.types import Mark

        def feed(tokens):
            codes = np.array(tokens, np.int32)
            core.context.decode([Feed(seq, codes, core.context.end(seq), wants_logits=False)])

        feed(A)
        end = core.context.end(seq)
        embedding = core.images.embedding(item, {})
        core.context.see(
            seq,
            core.images.media,
            embedding,
            Mark(end.n_tokens + shape.n_tokens, end.pos + shape.n_pos, shape.n_pos - 1),
            wants_logits=False,
        )
        wrong = core.context._end[seq]
        core.context._end[seq] = Mark(wrong.n_tokens, wrong.n_tokens)  # tokens taken for positions
        feed([*B, *new])
        assert core.context.capture(seq).tobytes() != expected


@pytest.mark.parametrize("arch", SEEING)
def test_images_survive_the_engine_in_ram_and_on_disk(arch, tmp_path):
    parts, new = [A, CAT, B, DOG, C], text(9, 20)
    stable = n_items(parts)
    with seeing_core(arch, n_slots=1) as core:
        answered(core, [*parts, C], stable=stable)
        tidy(core)
        golden = answered(core, [*parts, new])
        expected = bits(core, stable + len(new) + 3)
    memory = memory_file()
    store = StoreSettings(str(tmp_path / "states"), restore_policy="always")
    with seeing_core(arch, n_slots=1, memory=memory, store=store) as core:
        answered(core, [*parts, C], stable=stable)
        core.put_away()
    for where in ({"memory": memory}, {"store": store}):
        with seeing_core(arch, n_slots=1, **where) as core:
            again = answered(core, [*parts, new], with_pixels=False)  # the images themselves are not needed
            assert again.tokens == golden.tokens and again.n_prompt - again.n_cached == len(new)
            assert bits(core, stable + len(new) + 3) == expected
            assert core.images.n_encoded == 0
            assert "memory" not in where or answered(core, [A, DOG, B]).n_cached == 60
            check(core)
    os.close(memory)


def test_an_image_that_is_needed_and_was_not_sent_is_asked_for():
    with seeing_core() as core:
        with pytest.raises(BadRequest) as refused:
            answered(core, [A, CAT, B], with_pixels=False)
        assert refused.value.code == PIXELS_MISSING
        check(core)
        assert answered(core, [A, CAT, B]).n_cached == 60
        assert answered(core, [A, CAT, B], with_pixels=False).n_cached > 60


def test_an_image_too_large_for_a_model_that_reads_it_at_once_is_refused():
    with seeing_core("gemma3", n_ubatch=8, n_batch=512) as core:
        with pytest.raises(BadRequest, match="ubatch-size"):
            ask(core, [A, CAT, B])
        assert run(core, A).n_cached == 0


def test_a_model_without_a_projector_says_so():
    model, _ = tiny_vision("qwen35")
    with seeing_core() as other:
        item = other.images.item(CAT)
    core = assemble(model, EngineSettings(n_slots=1, n_ctx=512, n_threads=1, ram_bytes=1 << 26))
    try:
        with pytest.raises(BadRequest, match="mmproj"):
            core.submit(Ask(prompt_of([1, item, 2]), sampling=GREEDY))
    finally:
        core.close()


def test_deleted_turns_leave_no_trace_and_earlier_points_are_used():
    """Text, text, image, text; then the last turns are deleted and an earlier one is said again."""
    turns = [A, B, CAT, C, text(4, 25), text(5, 35)]
    with seeing_core(n_slots=1) as core:
        at, boundaries = 0, []
        for part in turns:
            at += n_items([part])
            boundaries.append(at)
        answered(core, turns, boundaries=tuple(boundaries[:-1]))
        tidy(core)
        retry = [A, B, CAT, C, text(6, 15)]
        again = answered(core, retry, boundaries=tuple(boundaries[:4]))
        n_known = n_items(turns[:4]) - 1 + core.images.item(CAT).n_tokens
        assert again.n_cached == n_known, "the point after the shared part is used, and none beyond it"
        found = bits(core, n_items(retry) + 3)
    with seeing_core(n_slots=1) as core:
        cold = answered(core, retry, boundaries=tuple(boundaries[:4]))
        assert cold.tokens == again.tokens and bits(core, n_items(retry) + 3) == found


def test_text_and_images_take_turns_on_one_slot_without_end():
    rng = np.random.default_rng(0)
    images = [make_image(200 + i, 32 * int(rng.integers(1, 4)), 32 * int(rng.integers(1, 4))) for i in range(5)]
    texts = [text(300 + i, int(rng.integers(3, 40))) for i in range(6)]
    with seeing_core(n_slots=1, n_ctx=1024) as core:
        for _ in range(1000 if CAMPAIGN else 40):
            chosen = [texts[rng.integers(6)] if rng.random() < 0.6 else images[rng.integers(5)] for _ in range(4)]
            result = answered(core, chosen, max_tokens=2)
            assert result.error is None and len(result.tokens) == 2
        check(core)


@pytest.mark.parametrize("parts", [[A, CAT, B], [CAT, A], [A, CAT, B, DOG, C]], ids=["one", "first", "two"])
@pytest.mark.parametrize("arch", SEEING)
def test_a_slot_file_keeps_a_conversation_with_images(arch, parts, tmp_path):
    new, path, claim = text(9, 20), tmp_path / "a.bin", Claim("me", "", trusts_origin=True)
    with seeing_core(arch, n_slots=1) as core:
        answered(core, parts, slot=0)
        saved = slot_io.capture(core, core.slots[0], "")
        slot_io.write(path, saved, claim)
        whole = n_items(parts) + 3
        golden = answered(core, [*parts, new])
    with seeing_core(arch, n_slots=1) as core:
        again, _ = slot_io.read(path, claim, core.context.n_ctx)
        n = slot_io.put_back(core, core.slots[0], again, "")
        assert n == saved.n_tokens > whole and core.slots[0].n_fed == whole
        check(core)
        result = answered(core, [*parts, new], with_pixels=False)
        assert result.tokens == golden.tokens and result.n_processed <= len(new) + GUARD
        assert core.images.n_encoded == 0
        path.with_name("a.bin.checkpoints").unlink()
        with pytest.raises(Damaged, match="images"):
            slot_io.read(path, claim, core.context.n_ctx)


def test_what_was_read_so_far_holds_no_image_that_is_still_ahead():
    with seeing_core() as core:
        request = ask(core, [A, CAT, B])
        assert not request.items(60).media and list(request.items(61).media) == [60]
        assert len(request.items(60).cells) == 60
        drain(core)


def test_a_namespace_encodes_an_image_for_itself_although_another_has_sent_it():
    with seeing_core(n_slots=1) as core:
        answered(core, [A, CAT, B], namespace="a")
        assert core.images.n_encoded == 1
        assert answered(core, [A, CAT, B], namespace="b").n_cached == 0
        assert core.images.n_encoded == 2, "time would tell that somebody has sent it"
        with pytest.raises(BadRequest) as refused:
            answered(core, [C, CAT, B], namespace="c", with_pixels=False)
        assert refused.value.code == PIXELS_MISSING
        answered(core, [C, CAT, B], namespace="a", with_pixels=False)
        answered(core, [C, CAT, B], namespace="b")
        assert core.images.n_encoded == 2, "the control: its own is known"
