"""Calls that libllama would abort on, or answer wrongly: batches, sequence ids, contexts, missing states, refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from everwarm.errors import ContextFull, DecodeFailed, StateRejected, TrimRefused
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.types import START, SeqId
from support.steps import (
    KINDS,
    OPTIONS,
    OTHER,
    SLOT,
    SPARE,
    WITH_KV,
    WITH_STATE,
    WITHOUT_TRIM,
    go_on,
    mark,
    open_context,
    read,
    read_to,
    same_bits,
    say,
    splice,
    text,
    wipe,
)
from support.trials import TOKENS, feed, model, trial, verdict

# batches


@trial(*KINDS)
def a_batch_larger_than_n_batch(arch: str) -> str:
    context = open_context(model(arch))
    context.decode([feed(context, context.n_batch + 1)])
    return "decoded"


@trial()
def two_feeds_that_are_too_large_together(arch: str) -> str:
    context = open_context(model(arch))
    context.decode([feed(context, context.n_batch), feed(context, 1, OTHER)])
    return "decoded"


@trial()
def a_full_batch(arch: str) -> str:
    context = open_context(model(arch))
    context.decode([feed(context, context.n_batch - 1), feed(context, 1, OTHER)])
    return "decoded"


@trial()
def no_feed_at_all(arch: str) -> str:
    open_context(model(arch)).decode([])
    return "decoded"


@trial()
def a_feed_without_tokens(arch: str) -> str:
    context = open_context(model(arch))
    context.decode([feed(context, 0)])
    return "decoded"


@trial(*KINDS)
def a_gap_in_the_positions(arch: str) -> str:
    context = open_context(model(arch))
    read_to(context, SLOT, TOKENS, 10)
    context.decode([Feed(SLOT, TOKENS[:1], mark(12), wants_logits=False)])
    return "decoded"


@trial(*KINDS)
def a_step_backwards(arch: str) -> str:
    context = open_context(model(arch))
    read_to(context, SLOT, TOKENS, 10)
    context.decode([Feed(SLOT, TOKENS[:1], mark(9), wants_logits=False)])
    return "decoded"


@trial(*KINDS)
def the_same_sequence_twice_in_a_batch(arch: str) -> str:
    context = open_context(model(arch))
    context.decode([feed(context, 3), feed(context, 3)])
    return "decoded"


@trial(*KINDS)
def a_token_outside_the_vocabulary(arch: str) -> str:
    cold = say(open_context(model(arch)), SLOT, TOKENS[:9])
    context = open_context(model(arch))
    for token in (264, 1 << 30, -1, -(1 << 31)):
        read_to(context, SLOT, TOKENS, 20)
        try:
            say(context, SLOT, np.array([token], np.int32))
        except DecodeFailed:
            assert context.end(SLOT) == START
        else:
            return f"decoded {token}"
    context.check()
    return "refused, then " + verdict(same_bits([say(context, SLOT, TOKENS[:9])], [cold]))


@trial("qwen35", "mamba2", "gemma3", "llama")
def more_sequences_in_a_batch_than_fit_an_ubatch(arch: str) -> str:
    context = open_context(model(arch), n_seq_max=100)
    for _ in range(2):
        context.decode([feed(context, 1, seq) for seq in range(100)])
    context.check()
    return "decoded"


# sequence ids


@trial(*KINDS)
def sequences_out_of_range(arch: str) -> str:
    context = open_context(model(arch))
    read_to(context, SLOT, TOKENS, 10)
    blob = np.zeros(100, np.uint8)
    for wrong in (SeqId(-1), SeqId(OPTIONS.n_seq_max), SeqId(OPTIONS.n_seq_max + 1), SeqId(1 << 30)):
        calls: tuple[Callable[[], object], ...] = (
            lambda seq=wrong: context.decode([Feed(seq, TOKENS[:1], START, wants_logits=False)]),
            lambda seq=wrong: context.drop(seq),
            lambda seq=wrong: context.trim(seq, mark(5)),
            lambda seq=wrong: context.park(seq, SPARE),
            lambda seq=wrong: context.park(SLOT, seq),
            lambda seq=wrong: context.share_kv(seq, SPARE, mark(5)),
            lambda seq=wrong: context.share_kv(SLOT, seq, mark(5)),
            lambda seq=wrong: context.keep_kv(seq, mark(5)),
            lambda seq=wrong: context.capture(seq),
            lambda seq=wrong: context.capture_segment(seq, START, mark(5)),
            lambda seq=wrong: context.restore(seq, blob, mark(5), clean=True),
            lambda seq=wrong: context.splice_segment(seq, blob, START, mark(5), n_cells=5, clean=True),
        )
        for i, call in enumerate(calls):
            try:
                call()
            except AssertionError:
                continue
            return f"call {i} took sequence {wrong}"
    context.check()
    return "all refused"


# contexts


@trial("llama", "qwen35")
def n_seq_max_256_with_attention(arch: str) -> str:
    open_context(model(arch), n_seq_max=256, n_batch=512)
    return "opened"


@trial("llama", "qwen35", "gemma3")
def n_seq_max_255_with_attention(arch: str) -> str:
    return _last_sequence_works(open_context(model(arch), n_seq_max=255, n_batch=512))


@trial("mamba2")
def n_seq_max_256_without_attention(arch: str) -> str:
    return _last_sequence_works(open_context(model(arch), n_seq_max=256, n_batch=512))


def _last_sequence_works(context: Context) -> str:
    context.decode([feed(context, 5, context.options.n_seq_max - 1)])
    context.check()
    return "decoded"


@trial("llama", "mamba2")
def fewer_tokens_in_a_batch_than_sequences(arch: str) -> str:
    return _last_sequence_works(open_context(model(arch), n_seq_max=9, n_batch=8, n_ubatch=8))


@trial()
def a_batch_of_one_token_and_one_sequence(arch: str) -> str:
    context = open_context(model(arch), n_seq_max=1, n_batch=1, n_ubatch=1)
    say(context, SLOT, TOKENS[:1])
    return "decoded"


@trial()
def a_closed_context(arch: str) -> str:
    context = open_context(model(arch))
    context.close()
    context.close()
    context.decode([Feed(SLOT, TOKENS[:1], START, wants_logits=False)])
    return "decoded"


@trial()
def two_contexts_of_one_model(arch: str) -> str:
    one, two = open_context(model(arch)), open_context(model(arch))
    read_to(one, SLOT, TOKENS, 30)
    read_to(two, SLOT, TOKENS, 30)
    a = go_on(one, SLOT, TOKENS)
    one.close()
    return verdict(same_bits(a, go_on(two, SLOT, TOKENS)))


# sequences without a state


def _must_not_decode(context: Context, seq: SeqId = SLOT) -> str:
    say(context, seq, TOKENS[:1])
    return "decoded"


STATEFUL_KV = tuple(arch for arch in WITH_STATE if arch in WITH_KV)


@trial(*STATEFUL_KV)
def decoding_after_a_splice(arch: str) -> str:
    context = open_context(model(arch))
    saved = read(context, TOKENS, (30,))
    wipe(context)
    splice(context, SLOT, saved.segments[0])
    return _must_not_decode(context)


@trial(*STATEFUL_KV)
def decoding_after_keeping_kv(arch: str) -> str:
    context = open_context(model(arch))
    read_to(context, SLOT, TOKENS, 30)
    context.keep_kv(SLOT, mark(20))
    return _must_not_decode(context)


@trial(*[arch for arch in STATEFUL_KV if KINDS[arch].can_share_cells])
def decoding_after_sharing_kv(arch: str) -> str:
    context = open_context(model(arch))
    read_to(context, SLOT, TOKENS, 30)
    context.share_kv(SLOT, OTHER, mark(20))
    return _must_not_decode(context, OTHER)


@trial(*WITH_STATE)
def decoding_after_a_refused_state(arch: str) -> str:
    context = open_context(model(arch))
    saved = read(context, TOKENS, (30,))
    try:
        context.restore(SLOT, saved.state[:-1].copy(), saved.end, clean=True)
    except StateRejected:
        return _must_not_decode(context)
    return "restored"


@trial(*STATEFUL_KV)
def trimming_does_not_make_up_for_a_state(arch: str) -> str:
    context = open_context(model(arch))
    saved = read(context, TOKENS, (30,))
    wipe(context)
    splice(context, SLOT, saved.segments[0])
    with contextlib.suppress(TrimRefused):
        context.trim(SLOT, saved.end)
    return _must_not_decode(context)


@trial(*STATEFUL_KV)
def a_state_before_its_kv(arch: str) -> str:
    context = open_context(model(arch))
    saved = read(context, TOKENS, (30,))
    context.restore(OTHER, saved.state, saved.end, clean=True)
    return "restored"


@trial("gemma3")
def sharing_the_cells_of_a_window(arch: str) -> str:
    context = open_context(model(arch))
    read_to(context, SLOT, TOKENS, 30)
    context.share_kv(SLOT, OTHER, mark(20))
    return "shared"


@trial("gemma3")
def parking_a_window(arch: str) -> str:
    """Shared window cells are never freed: after a few of these the context is full at a fraction of its cells."""
    context = open_context(model(arch), n_ctx=4096)
    for n in range(1, 10):
        read_to(context, SLOT, text(900), 100 * n)
        context.park(SLOT, SeqId(1 + n % 3))
    return f"parked, {context.end(SLOT).n_tokens} of {context.n_ctx} cells"


# refusals that change nothing


@trial(*WITHOUT_TRIM)
def a_refused_trim(arch: str) -> str:
    cold = open_context(model(arch))
    read_to(cold, SLOT, TOKENS, 80)
    context = open_context(model(arch))
    read_to(context, SLOT, TOKENS, 80)
    for n in (79, 40, 1):
        try:
            context.trim(SLOT, mark(n))
        except TrimRefused:
            context.check()
            assert context.end(SLOT) == mark(80) and context.is_clean(SLOT)
        else:
            return f"trimmed to {n}"
    return "refused, then " + verdict(same_bits(go_on(context, SLOT, TOKENS), go_on(cold, SLOT, TOKENS)))


@trial("gemma3")
def a_trim_past_the_window(arch: str) -> str:
    cold = open_context(model(arch))
    read_to(cold, SLOT, TOKENS, 300)
    context = open_context(model(arch))
    read_to(context, SLOT, TOKENS, 300)
    context.capture(SLOT)  # a freshly seated window holds exactly the window
    cold.capture(SLOT)
    try:
        context.trim(SLOT, mark(100))
    except TrimRefused:
        context.check()
        return "refused, then " + verdict(same_bits(go_on(context, SLOT, TOKENS), go_on(cold, SLOT, TOKENS)))
    return "trimmed"


@trial(*KINDS)
def a_trim_that_lengthens(arch: str) -> str:
    context = open_context(model(arch))
    read_to(context, SLOT, TOKENS, 30)
    context.trim(SLOT, mark(31))
    return f"trimmed to {context.end(SLOT).n_tokens}"


@trial(*WITH_KV)
def a_full_context(arch: str) -> str:
    """Beside another, no room; the other goes; on as if nothing had been."""
    rows = []
    for overfills in (False, True):
        context = open_context(model(arch), n_ctx=256)
        read_to(context, SLOT, TOKENS, 100)
        read_to(context, OTHER, text(120, seed=3), 120)
        if overfills:
            try:
                say(context, SLOT, TOKENS[100:137])
            except ContextFull as error:
                if str(error) != "37 tokens need 37 cells but 36 of 256 are free":
                    return str(error)
                context.check()
                assert context.end(SLOT) == mark(100) and context.end(OTHER) == mark(120)
            else:
                return "decoded"
        say(context, SLOT, TOKENS[100:136])  # exactly full
        assert context.cells.free == 0
        context.drop(OTHER)
        rows.append(go_on(context, SLOT, TOKENS))
    return "refused, then " + verdict(same_bits(*rows))


@trial(*WITH_KV)
def a_segment_into_a_full_context(arch: str) -> str:
    context = open_context(model(arch), n_ctx=256)
    saved = read(context, TOKENS, (100,))
    read_to(context, OTHER, text(120, seed=3), 120)
    context.drop(SLOT)
    read_to(context, SPARE, text(40, seed=4), 40)
    cells, ends = context.cells.used, [context.end(seq) for seq in (SLOT, SPARE, OTHER)]
    try:
        splice(context, SLOT, saved.segments[0])
    except ContextFull:
        context.check()
        same = cells == context.cells.used and ends == [context.end(seq) for seq in (SLOT, SPARE, OTHER)]
        return "refused, nothing changed" if same else "refused, but changed"
    return "spliced"


@trial("qwen35", "llama")
def the_logits_before_a_full_context(arch: str) -> str:
    context = open_context(model(arch), n_ctx=256)
    read_to(context, SLOT, TOKENS, 250)
    before = context.logits(0).copy()
    try:
        say(context, SLOT, TOKENS[250:270])
    except ContextFull:
        return verdict(same_bits([context.logits(0)], [before]))
    return "decoded"
