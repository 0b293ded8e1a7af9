"""The context of an MTP head beside the model's own: what it knows follows its sequences, in memory and in bytes."""

import contextlib

import numpy as np
import pytest

from everwarm.config import ContextOptions
from everwarm.demo.tiny.plans import WITH_HEADS
from everwarm.errors import StateRejected
from everwarm.llama.batch import DraftRequest, Feed
from everwarm.llama.blobs import split, tail_bytes, trunk
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.llama.mtp_head import cold, cut, extended, passed
from everwarm.types import START, Mark, SeqId
from support.drafts import STORY, tokens_of_model
from support.models import EMBEDDED, tiny_model

A, B, C = SeqId(0), SeqId(1), SeqId(2)
TEXT = np.random.default_rng(3).integers(0, 2000, 96).astype(np.int32)


@pytest.fixture
def context(request):
    """Of the embedded model, or of a tiny one with a head and random weights."""
    arch = getattr(request, "param", None)
    options = ContextOptions(n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=4, n_threads=1)
    path = EMBEDDED if arch is None else tiny_model(arch, mtp=True)
    with Model(path, head_from=0) as model, Context(model, options) as opened:
        yield opened
        opened.check()


of_all_heads = pytest.mark.parametrize("context", [None, *WITH_HEADS], indirect=True)


def read(context: Context, seq: SeqId, tokens: np.ndarray, n_chunk: int = 40) -> None:
    for i in range(0, len(tokens), n_chunk):
        chunk = tokens[i : i + n_chunk]
        context.decode([Feed(seq, chunk, context.end(seq), wants_logits=True)])


def mark(n: int) -> Mark:
    return Mark(n, n)


def guesses(context: Context, seq: SeqId, n: int = 3) -> list[int]:
    token = np.array([int(context.logits(0).argmax())], np.int32)
    found = context.draft([DraftRequest(seq, token, len(token), n)])[seq]
    context.check()
    return found


def test_guesses_are_what_the_model_says_next(context):
    read(context, A, tokens_of_model(context.model, STORY))
    found = guesses(context, A)
    written = []
    for _ in range(3):
        token = np.array([int(context.logits(0).argmax())], np.int32)
        context.decode([Feed(A, token, context.end(A), wants_logits=True)])
        written.append(int(context.logits(0).argmax()))
    assert found == written


@of_all_heads
def test_sequences_guess_together_as_each_alone(context):
    story, other = tokens_of_model(context.model, STORY), tokens_of_model(context.model, "Hello!")
    last, alone = {}, {}
    for seq, tokens in ((A, story), (B, other)):
        read(context, seq, tokens)
        last[seq] = np.array([int(context.logits(0).argmax())], np.int32)
        alone[seq] = context.draft([DraftRequest(seq, last[seq], len(last[seq]), 3)])[seq]
    both = [DraftRequest(A, last[A], len(last[A]), 3), DraftRequest(B, last[B], len(last[B]), 2)]
    assert context.draft(both) == {A: alone[A], B: alone[B][:2]}


@of_all_heads
def test_a_second_name_and_a_shared_beginning_know_the_same(context):
    read(context, A, tokens_of_model(context.model, STORY))
    expected = guesses(context, A)
    logits = context.logits(0).copy()
    token = np.array([int(logits.argmax())], np.int32)
    context.park(A, B)
    context.drop(A)
    assert context.draft([DraftRequest(B, token, len(token), 3)])[B] == expected
    context.unpark(B, A)
    assert context.draft([DraftRequest(A, token, len(token), 3)])[A] == expected
    assert context.draft([DraftRequest(C, token, len(token), 3)])[C] != expected  # the control: an empty sequence


def test_kept_parts_are_cut_and_joined_to_the_bytes_of_one_capture(context):
    read(context, A, TEXT)
    whole = context.capture_segment(A, START, mark(96))
    parts = [context.capture_segment(A, mark(a), mark(b)) for a, b in ((0, 30), (30, 33), (33, 96))]
    parts[0] = context.cut_segment(whole, START, mark(30))
    assert all(split(blob)[1] is not None for blob in (whole, *parts))
    assert np.array_equal(parts[0], context.capture_segment(A, START, mark(30)))
    assert len(parts[0]) == context.cut_bytes(whole, START, mark(30))
    assert np.array_equal(context.join_segments(parts), whole)
    mixed = context.join_segments([parts[0], trunk(parts[1]).copy(), parts[2]])
    assert split(mixed)[1] is None and np.array_equal(mixed, trunk(whole))  # not all of them have it
    assert len(whole) == len(trunk(whole)) + tail_bytes(len(split(whole)[1]))


@pytest.mark.parametrize("state_type", ["f32", "q8_0"])
def test_a_restored_sequence_guesses_as_before(state_type):
    options = ContextOptions(n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=4, n_threads=1, state_type=state_type)
    with Model(EMBEDDED, head_from=0) as model, Context(model, options) as context:
        tokens = tokens_of_model(model, STORY)
        read(context, A, tokens, 10)
        end = context.end(A)
        token = np.array([int(context.logits(0).argmax())], np.int32)
        expected = context.draft([DraftRequest(A, token, len(token), 3)])[A]
        segment, state = context.capture_segment(A, START, end), context.capture_packed(A)
        for tail in (True, False):
            context.drop(B)
            kept = (segment, state) if tail else (trunk(segment).copy(), trunk(state).copy())
            context.splice_segment(B, kept[0], START, end, n_cells=end.n_tokens, clean=True)
            context.restore(B, kept[1], end, clean=True)
            context.check()
            assert (context.head._tracks[B].start == 0) is tail
            assert not tail or context.draft([DraftRequest(B, token, len(token), 3)])[B] == expected


def test_a_damaged_part_costs_only_guesses(context):
    read(context, A, TEXT)
    whole = context.capture_segment(A, START, mark(96))
    state = context.capture(A)
    n_trunk = len(trunk(whole))
    rng = np.random.default_rng(1)
    for _ in range(24):
        bad = whole.copy()
        at = n_trunk + int(rng.integers(0, len(whole) - n_trunk))
        bad[at : at + 8] = rng.integers(0, 256, len(bad[at : at + 8]), dtype=np.uint8)
        context.drop(B)
        with contextlib.suppress(StateRejected):  # where its end says that it has no such part
            context.splice_segment(B, bad, START, mark(96), n_cells=96, clean=True)
        if context.end(B) == START:
            continue
        context.restore(B, state, mark(96), clean=True)
        context.check()
        context.decode([Feed(B, TEXT[:1], context.end(B), wants_logits=True)])


def test_a_feed_that_is_not_for_the_head_is_a_gap(context):
    read(context, A, TEXT[:40])
    context.decode([Feed(A, TEXT[40:60], context.end(A), wants_logits=True, is_for_head=False)])
    assert context.capture_segment(A, START, mark(60)) is not None
    assert split(context.capture_segment(A, START, mark(60)))[1] is None
    assert split(context.capture_segment(A, START, mark(40)))[1] is not None
    context.park(A, B)  # while tokens before the gap wait
    context.drop(B)
    read(context, A, TEXT[60:80])
    assert context.head._tracks[A].start == 60


def test_a_gap_right_after_tokens_that_wait_is_no_trouble(context):
    read(context, A, TEXT[:40])
    read(context, A, TEXT[40:48])
    context.decode([Feed(A, TEXT[48:60], context.end(A), wants_logits=True, is_for_head=False)])
    context.park(A, B)
    context.check()
    assert context.head._tracks[B].known == 48


def test_a_head_without_cells_forgets_and_goes_on(context):
    read(context, A, np.resize(TEXT, 508))
    assert guesses(context, A, 8) == [] or len(guesses(context, A, 8)) <= 8
    context.decode([Feed(A, TEXT[:2], context.end(A), wants_logits=True)])


def test_a_model_opened_without_its_head_has_none():
    for path, head_from in ((EMBEDDED, None), (EMBEDDED, 16), (tiny_model("qwen35"), 0), (tiny_model("llama"), 0)):
        with Model(path, head_from=head_from) as model:
            assert not model.has_head
    with Model(tiny_model("qwen35", mtp=True, n_layers=16), head_from=16) as model:
        assert model.has_head and model.n_layers == 16


# tracks

WIDTH = 4


def rows(n: int) -> np.ndarray:
    return np.arange(1, n * WIDTH + 1, dtype=np.float32).reshape(n, WIDTH)


@pytest.mark.parametrize("n_blocks", [0, 1, 2])
def test_only_a_head_of_one_block_is_used(monkeypatch, n_blocks):
    """libllama aborts on others."""
    with Model(EMBEDDED) as model:
        monkeypatch.setattr(model.lib, "model_n_layer_nextn", lambda _ptr: n_blocks, raising=False)
        assert model._has_usable_head() is (n_blocks == 1)


def test_tokens_wait_with_the_row_before_them():
    track = extended(cold(0, WIDTH), 0, TEXT[:3], rows(3))
    assert track.tokens.tolist() == TEXT[:3].tolist() and not track.rows[0].any()
    assert np.array_equal(track.rows[1:], rows(3)) and track.known == 3
    track = passed(track, 2)
    assert (track.start, track.end, track.known) == (0, 2, 3) and np.array_equal(track.row(3), rows(3)[2])
    assert track.row(1) is None and track.covers(0, 3) and not track.covers(0, 4)


def test_what_is_read_again_is_known_unless_it_is_another_text():
    track = passed(extended(cold(0, WIDTH), 0, TEXT[:6], rows(6)), 2)
    assert extended(track, 3, TEXT[3:6], rows(3)) is track
    other = extended(track, 3, TEXT[10:14], rows(4))
    assert other.tokens.tolist() == [TEXT[2], *TEXT[10:14]] and other.known == 7
    assert extended(track, 9, TEXT[:2], rows(2)).start == 9  # after a gap


def test_a_track_is_cut_anywhere():
    track = passed(extended(cold(5, WIDTH), 5, TEXT[:6], rows(6)), 3)
    assert (cut(track, 20).known, cut(track, 10).known, cut(track, 7).known, cut(track, 2).known) == (11, 10, 7, 2)
    assert cut(track, 7).start == 5 and cut(track, 2).start == 2 and not cut(track, 7).rows.any()
