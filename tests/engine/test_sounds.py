"""Sounds in a conversation: one item of many cells, whose states are restored bit for bit."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from everwarm.engine.process.messages import SentSound
from everwarm.engine.request import Finished, NewToken
from everwarm.engine.scheduling import admission
from everwarm.engine.settings import StoreSettings
from everwarm.engine.slotfile import slot_io
from everwarm.engine.verify import compare_with_cold
from everwarm.errors import PIXELS_MISSING, BadRequest
from everwarm.llama.media.media_model import MediaModel, MediaShape
from everwarm.state.store.arena_file import memory_file
from everwarm.state.store.slot_file import Claim
from support.drive import GUARD, check, drain, text, tidy
from support.image_cores import answered, ask, bits, make_image, n_items, seeing_core
from support.sounds import make_sound

HEARING = ("qwen35", "gemma3", "lfm2")
A, B, C = text(1, 60), text(2, 40), text(3, 30)
BELL, HORN, LONG = make_sound(1), make_sound(2), make_sound(3, seconds=31)
CAT = make_image(1)


def other(part):
    return make_sound(77, part.n_samples / 16_000) if isinstance(part, SentSound) else part


@pytest.mark.parametrize("arch", HEARING)
@pytest.mark.parametrize(
    "parts",
    [[A, BELL, B], [BELL, A], [A, BELL], [A, BELL, HORN, B], [A, LONG, B, BELL, C]],
    ids=["one", "first", "last", "side by side", "two windows"],
)
def test_coming_back_past_sounds_gives_the_bits_of_never_having_left(arch, parts):
    new = text(9, 20)
    whole = n_items(parts) + len(new) + 3
    with seeing_core(arch, n_slots=1, audio=True) as core:
        first = answered(core, parts)
        assert first.n_cached == 0 and first.n_prompt > n_items(parts)
        straight = answered(core, [*parts, new])
        expected = bits(core, whole)
        tidy(core)
        assert compare_with_cold(core, most=12).is_exact
        answered(core, [text(40, 50)], slot=0)  # the slot is given away
        again = answered(core, [*parts, new])
        assert again.tokens == straight.tokens and again.n_processed <= GUARD + len(new)
        assert bits(core, whole) == expected
        assert core.images.n_encoded == len({part.digest for part in parts if isinstance(part, SentSound)})
        check(core)
    with seeing_core(arch, n_slots=1, audio=True) as core:
        assert answered(core, [*map(other, parts), new]).n_cached == 0
        assert bits(core, whole) != expected, "this test could not fail"


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_one_conversation_may_have_images_and_sounds(arch):
    parts, new = [A, CAT, B, BELL, C], text(9, 20)
    with seeing_core(arch, n_slots=1, audio=True, vision=True) as core:
        answered(core, parts)
        straight = answered(core, [*parts, new])
        expected = bits(core, n_items(parts) + len(new) + 3)
        tidy(core)
        assert compare_with_cold(core, most=12).is_exact
        ends = {node.n_items for node in core.cache.tree.nodes() if node.checkpoint is not None}
        assert {60, 61, 101, 102} <= ends, "a checkpoint right before and right after each"
        answered(core, [text(40, 50)], slot=0)
        assert answered(core, [*parts, new]).tokens == straight.tokens
        assert bits(core, n_items(parts) + len(new) + 3) == expected
        assert answered(core, [A, CAT, B, HORN]).n_cached == 100 + core.images.item(CAT).n_tokens
        check(core)


def test_a_long_sound_is_read_in_one_piece_where_images_must_fit_a_ubatch():
    with seeing_core("gemma3", n_ubatch=16, n_batch=512, audio=True, vision=True) as core:
        assert core.images.item(LONG).n_tokens == 30
        assert answered(core, [A, LONG, B]).n_prompt == 130
        with pytest.raises(BadRequest, match="ubatch-size"):
            ask(core, [A, CAT, B])


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_sounds_survive_the_engine_in_ram_and_on_disk(arch, tmp_path):
    parts, new = [A, BELL, B, HORN, C], text(9, 20)
    stable = n_items(parts)
    store = StoreSettings(str(tmp_path / "states"), restore_policy="always")
    memory = memory_file()
    with seeing_core(arch, n_slots=1, audio=True, memory=memory, store=store) as core:
        answered(core, [*parts, C], stable=stable)
        tidy(core)
        golden = answered(core, [*parts, new])
        expected = bits(core, stable + len(new) + 3)
        core.put_away()
    for where in ({"memory": memory}, {"store": store}):
        with seeing_core(arch, n_slots=1, audio=True, **where) as core:
            again = answered(core, [*parts, new], with_pixels=False)  # the sounds themselves are not needed
            assert again.tokens == golden.tokens and again.n_prompt - again.n_cached <= len(new)
            assert bits(core, stable + len(new) + 3) == expected and core.images.n_encoded == 0
            check(core)
    os.close(memory)


def test_a_slot_file_keeps_a_conversation_with_sounds(tmp_path):
    parts, new, path = [A, BELL, B], text(9, 20), tmp_path / "a.bin"
    claim = Claim("me", "", trusts_origin=True)
    with seeing_core(n_slots=1, audio=True) as core:
        answered(core, parts, slot=0)
        slot_io.write(path, slot_io.capture(core, core.slots[0], ""), claim)
        golden = answered(core, [*parts, new])
    with seeing_core(n_slots=1, audio=True) as core:
        again, _ = slot_io.read(path, claim, core.context.n_ctx)
        slot_io.put_back(core, core.slots[0], again, "")
        result = answered(core, [*parts, new], with_pixels=False)
        assert result.tokens == golden.tokens and result.n_processed <= len(new) + GUARD
        assert core.images.n_encoded == 0
        check(core)


def test_positions_of_another_layout_would_be_seen(monkeypatch):
    """The negative control: a sound whose cells share one position, as those of an image do under M-RoPE."""
    with seeing_core(n_slots=1, audio=True) as core:
        answered(core, [A, BELL, B])
        expected = bits(core, n_items([A, BELL, B]) + 3)
    right = MediaShape.positions

    def wrong(self, start, *, uses_mrope):
        return right(replace(self, is_sound=False), start, uses_mrope=uses_mrope)

    monkeypatch.setattr(MediaShape, "positions", wrong)
    with seeing_core(n_slots=1, audio=True) as core:
        ask(core, [A, BELL, B])
        drain(core)
        assert bits(core, n_items([A, BELL, B]) + 3) != expected


def test_others_write_while_a_long_sound_is_encoded():
    with seeing_core(n_slots=2, audio=True) as core:
        writer = ask(core, [B], max_tokens=40)
        core.step()
        listener = ask(core, [A, make_sound(9, seconds=65), C])
        n_between, results = 0, {}
        while len(results) < 2:
            events = core.step()
            n_between += core.is_encoding and any(isinstance(e, NewToken) and e.request_id == writer.id for e in events)
            results |= {e.request_id: e.result for e in events if isinstance(e, Finished)}
        assert n_between >= 2, "one after each window but the last, and while it is cut into them"
        assert core.images.n_encoded == 1 and results[listener.id].error is None
        assert results[listener.id].n_prompt == 60 + 45 + 30
        gone = ask(core, [A, make_sound(10, seconds=65), C])
        core.step()
        core.cancel(gone.id)
        drain(core)
        assert answered(core, [A, BELL, C]).error is None, "one that was given up is in nobody's way"
        check(core)


def test_others_write_while_a_long_sound_is_cut_into_windows(monkeypatch):
    """libmtmd goes through all samples at once, which takes seconds."""
    may_go_on, right = threading.Event(), MediaModel.hear

    def slow(self, pcm):
        assert may_go_on.wait(30), "nobody wrote meanwhile"
        return right(self, pcm)

    monkeypatch.setattr(MediaModel, "hear", slow)
    with seeing_core(n_slots=2, audio=True) as core:
        writer = ask(core, [B], max_tokens=12)
        listener = ask(core, [A, HORN, C])
        results = {}
        while writer.id not in results:
            results |= {e.request_id: e.result for e in core.step() if isinstance(e, Finished)}
        core.cancel(listener.id)
        drain(core)
        may_go_on.set()
        assert answered(core, [A, BELL, C]).error is None, "one that was given up while it was cut is in nobody's way"
        assert core.images.n_encoded == 1
        check(core)


def test_what_cannot_be_heard_is_refused_and_nothing_else_suffers():
    good = make_sound(5)
    silent = np.frombuffer(good.data, np.float32).copy()
    silent[7] = np.nan
    with seeing_core(n_slots=1, audio=True) as core:
        with pytest.raises(BadRequest, match="samples"):
            ask(core, [A, SentSound(b"x" * 32, 3, b"\0" * 12), B])
        for data in (silent.tobytes(), (silent * 0 + 1e30).tobytes(), good.data[:-4]):
            with pytest.raises(BadRequest):
                answered(core, [A, SentSound(os.urandom(32), good.n_samples, data), B])
        with pytest.raises(BadRequest) as refused:
            answered(core, [A, good, B], with_pixels=False)
        assert refused.value.code == PIXELS_MISSING
        assert answered(core, [A, good, B]).n_cached == 60
        with pytest.raises(BadRequest, match="vision encoder"):
            ask(core, [A, CAT, B])
    with seeing_core(n_slots=1) as core, pytest.raises(BadRequest, match="audio encoder"):
        ask(core, [A, good, B])


def test_a_sound_that_all_others_would_wait_for_too_long_is_refused(monkeypatch):
    with seeing_core("qwen35", n_slots=1, audio=True) as core:
        n = next(iter(ask(core, [A, BELL]).ask.prompt.media.values())).n_tokens
        drain(core)
        monkeypatch.setattr(admission, "MAX_SOUND_TOKENS", n)
        assert answered(core, [B, BELL, HORN]).n_prompt > 2 * n  # several that are short enough are fine
        monkeypatch.setattr(admission, "MAX_SOUND_TOKENS", n - 1)
        with pytest.raises(BadRequest, match="in parts"):
            ask(core, [C, BELL])
        assert answered(core, [C]).error is None
        check(core)
