"""Blobs that are not what they should be, handed to libllama through our API."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable

import numpy as np

from everwarm.errors import MemoryFault, StateRejected
from everwarm.llama.context import Context
from everwarm.types import START, Blob
from support.blob_cases import HEADER, recurrent_numbers
from support.steps import (
    HYBRIDS,
    SLOT,
    WITH_KV,
    WITH_STATE,
    WITHOUT_TRIM,
    Saved,
    go_on,
    load,
    mark,
    open_context,
    read,
    read_to,
    restore,
    same_bits,
    say,
    splice,
    wipe,
)
from support.trials import TOKENS, model, trial, verdict

SOME_STATES = ("qwen35", "lfm2", "mamba2", "gemma3")
SOME_SEGMENTS = ("qwen35", "nemotron_h", "gemma3", "llama")


def _is_whole_again(context: Context) -> str:
    """Whatever was refused, the sequence can be dropped and used as if new."""
    wipe(context)
    context.check()
    saved = read(context, TOKENS, (30, 80))
    cold = go_on(context, SLOT, TOKENS)
    wipe(context)
    load(context, SLOT, saved)
    fresh = open_context(context.model)
    read(fresh, TOKENS, (30, 80))
    return verdict(same_bits(go_on(context, SLOT, TOKENS), cold) and same_bits(go_on(fresh, SLOT, TOKENS), cold))


def _cuts_of(blob: Blob) -> list[int]:
    n = len(blob)
    return [1, 4, 7, 8, 9, 12, 16, 20, 24, 28, 40, 100, n // 3, n // 2, n - 100, n - 4, n - 1]


@trial(*SOME_STATES)
def truncated_states(arch: str) -> str:
    context = open_context(model(arch))
    saved = read(context, TOKENS, (30,))
    for n in _cuts_of(saved.state):
        try:
            context.restore(SLOT, saved.state[:n].copy(), saved.end, clean=True)
        except StateRejected:
            context.check()
            continue
        return f"accepted {n} of {len(saved.state)} bytes"
    if arch in WITH_KV:  # the KV is still there, and so the right state still fits
        restore(context, SLOT, saved)
        context.check()
    return "refused, then " + _is_whole_again(context)


@trial(*SOME_SEGMENTS)
def truncated_segments(arch: str) -> str:
    context = open_context(model(arch))
    saved = read(context, TOKENS, (30,))
    for n in _cuts_of(saved.segments[0].blob):
        wipe(context)
        try:
            blob = saved.segments[0].blob[:n].copy()
            context.splice_segment(SLOT, blob, START, saved.end, n_cells=30, clean=True)
        except StateRejected:
            context.check()
            assert context.end(SLOT) == START and context.cells.used == 0
            continue
        return f"accepted {n} of {len(saved.segments[0].blob)} bytes"
    return "refused, then " + _is_whole_again(context)


@trial(*SOME_STATES, "llama")
def garbage(arch: str) -> str:
    context = open_context(model(arch))
    for n in (8, 100, 5000, 300_000):
        blob = np.random.default_rng(n).integers(0, 256, n).astype(np.uint8)
        with_magic = blob.copy()
        struct.pack_into("<I", with_magic, 0, 0xAF143CD8)
        for damaged in (blob, with_magic):
            wipe(context)
            read_to(context, SLOT, TOKENS, 30)
            try:
                if arch in WITH_STATE:
                    context.restore(SLOT, damaged, mark(30), clean=True)
                else:
                    context.splice_segment(SLOT, damaged, mark(30), mark(60), n_cells=30, clean=True)
            except StateRejected:
                continue
            return f"accepted {n} bytes"
    return "refused, then " + _is_whole_again(context)


@trial(*SOME_SEGMENTS)
def a_refused_segment_at_the_end_of_good_ones(arch: str) -> str:
    context = open_context(model(arch))
    saved = read(context, TOKENS, (30, 60))
    wipe(context)
    splice(context, SLOT, saved.segments[0])
    try:
        context.splice_segment(SLOT, np.zeros(999, np.uint8), mark(30), mark(60), n_cells=30, clean=True)
    except StateRejected:
        assert context.end(SLOT) == mark(30)
        return "refused, then " + _is_whole_again(context)
    return "spliced"


@trial(*SOME_STATES)
def a_state_of_no_bytes(arch: str) -> str:
    context = open_context(model(arch))
    read_to(context, SLOT, TOKENS, 40)
    try:
        context.restore(SLOT, np.empty(0, np.uint8), mark(40), clean=True)
    except StateRejected:
        return "refused, then " + _is_whole_again(context)
    return "restored"


@trial(*SOME_SEGMENTS)
def a_segment_of_no_bytes(arch: str) -> str:
    context = open_context(model(arch))
    try:
        context.splice_segment(SLOT, np.empty(0, np.uint8), START, mark(30), n_cells=30, clean=True)
    except StateRejected:
        return "refused, then " + _is_whole_again(context)
    return "spliced"


STRUCTURE_BYTES = 40  # then come the numbers of a recurrent state; of other blobs it is the first cells
WORDS = (0, 1, 2, 3, 30, 1000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


@trial("qwen35", "mamba2", "gemma3")
def wrong_words_in_a_state(arch: str) -> str:
    """Each of the first words replaced by others: refused or decoded, never a crash."""

    def attempt(context: Context, saved: Saved, damaged: Blob) -> None:
        for segment in saved.segments:
            splice(context, SLOT, segment)
        context.restore(SLOT, damaged, saved.end, clean=True)

    return _with_wrong_words(arch, attempt, lambda saved: saved.state)


@trial("qwen35", "gemma3", "llama")
def wrong_words_in_a_segment(arch: str) -> str:
    def attempt(context: Context, saved: Saved, damaged: Blob) -> None:
        context.splice_segment(SLOT, damaged, START, saved.end, n_cells=30, clean=True)
        restore(context, SLOT, saved)

    return _with_wrong_words(arch, attempt, lambda saved: saved.segments[0].blob)


def _with_wrong_words(
    arch: str, attempt: Callable[[Context, Saved, Blob], None], blob_of: Callable[[Saved], Blob]
) -> str:
    context = open_context(model(arch))
    saved = read(context, TOKENS, (30,))
    for at in range(0, STRUCTURE_BYTES, 4):
        for word in WORDS:
            wipe(context)
            damaged = blob_of(saved).copy()
            struct.pack_into("<I", damaged, at, word)
            with contextlib.suppress(MemoryFault):
                attempt(context, saved, damaged)
                say(context, SLOT, TOKENS[30:33])
    return "survived, then " + _is_whole_again(context)


def _two_cells(state: Blob) -> Blob:
    """Well-formed but for one thing: a sequence never has two recurrent cells."""
    cells = np.frombuffer(struct.pack("<IiIiI", 2, 29, 0, 30, 0), np.uint8)
    pieces = [state[:HEADER], cells, state[HEADER + 12 : HEADER + 20]]
    for part in recurrent_numbers(state):
        row = part.of(state).view(np.uint8)
        pieces += [state[part.offset - 12 : part.offset], row, row]
    return np.concatenate(pieces)


@trial(*WITHOUT_TRIM)
def a_state_of_two_cells(arch: str) -> str:
    context = open_context(model(arch))
    damaged = _two_cells(read(context, TOKENS, (30,)).state)
    try:
        context.restore(SLOT, damaged, mark(30), clean=True)
    except StateRejected:
        return "refused, then " + _is_whole_again(context)
    return "restored"


@trial(*HYBRIDS)
def a_segment_with_a_state_of_two_cells(arch: str) -> str:
    """A segment ends with an empty recurrent part; here one follows that libllama asserts on."""
    context = open_context(model(arch))
    saved = read(context, TOKENS, (30,))
    segment = saved.segments[0].blob
    empty = open_context(model(arch)).capture(SLOT)[HEADER:]
    assert segment[-len(empty) :].tobytes() == empty.tobytes(), "a segment does not end as this trial thinks"
    damaged = np.concatenate([segment[: -len(empty)], _two_cells(saved.state)[HEADER:]])
    wipe(context)
    try:
        context.splice_segment(SLOT, damaged, START, mark(30), n_cells=30, clean=True)
    except StateRejected:
        return "refused, then " + _is_whole_again(context)
    return "spliced"


@trial(*WITHOUT_TRIM)
def a_state_that_is_not_a_number(arch: str) -> str:
    """Whatever one conversation's state was, the next one in its place starts from nothing."""
    return _after_nan(open_context(model(arch)))


@trial(*WITHOUT_TRIM)
def a_state_that_is_not_a_number_without_flash_attention(arch: str) -> str:
    """Here attention multiplies masked cells by 0, and NaN times 0 is NaN: the freed cells must hold numbers too."""
    return _after_nan(open_context(model(arch), flash_attention="off"))


def _after_nan(context: Context) -> str:
    saved = read(context, TOKENS, (30,))
    cold = go_on(context, SLOT, TOKENS)
    poisoned = saved.state.copy()
    for part in recurrent_numbers(poisoned):
        part.of(poisoned)[:] = np.nan
    context.restore(SLOT, poisoned, saved.end, clean=True)
    assert np.isnan(say(context, SLOT, TOKENS[30:31])).any()
    assert not context.is_finite(SLOT)
    context.scrub(SLOT)
    read(context, TOKENS, (30,))
    return verdict(same_bits(go_on(context, SLOT, TOKENS), cold))
