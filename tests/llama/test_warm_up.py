"""Steps that are decoded before the first request, and forgotten: they leave no trace in any number."""

import numpy as np
import pytest

from everwarm.config import ContextOptions
from everwarm.llama.batch import DraftRequest, Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.types import START, SeqId
from support.models import EMBEDDED, tiny_model

A, B = SeqId(0), SeqId(1)
TEXT = np.random.default_rng(5).integers(0, 200, 300).astype(np.int32)


def logits_of(context: Context, n_tokens: int = len(TEXT)) -> bytes:
    for part in (TEXT[: n_tokens - 1], TEXT[n_tokens - 1 : n_tokens]):
        context.decode([Feed(B, part, context.end(B), wants_logits=True)])
    return context.logits(0).tobytes()


@pytest.mark.parametrize(
    ("arch", "n_snapshots"), [("qwen35", 3), ("qwen35", 0), ("mamba2", 0), ("llama", 0), ("gemma3", 0)]
)
def test_a_context_that_was_warmed_up_computes_the_same_bits(arch, n_snapshots):
    options = ContextOptions(n_ctx=512, n_seq_max=4, n_threads=1, n_threads_batch=1, n_snapshots=n_snapshots)
    with Model(tiny_model(arch)) as model:
        with Context(model, options) as fresh:
            expected = logits_of(fresh)
        with Context(model, options) as warmed:
            warmed.warm_up()
            warmed.check()
            assert warmed.end(A) == START and warmed.cells.used == 0
            assert logits_of(warmed) == expected


def test_without_clearing_the_steps_would_stay(monkeypatch):
    """The control."""
    options = ContextOptions(n_ctx=512, n_seq_max=4, n_threads=1, n_threads_batch=1)
    with Model(tiny_model("qwen35")) as model, Context(model, options) as context:
        monkeypatch.setattr(Context, "clear", lambda self: None)
        context.warm_up()
        assert context.end(A) != START and context.cells.used == 4


def test_a_head_forgets_what_it_was_warmed_up_with():
    options = ContextOptions(n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=4, n_threads=1)
    with Model(EMBEDDED, head_from=0) as model:
        found = []
        for is_warmed in (False, True):
            with Context(model, options) as context:
                if is_warmed:
                    context.warm_up()
                logits_of(context, 60)
                token = np.array([int(context.logits(0).argmax())], np.int32)
                found.append(context.draft([DraftRequest(B, token, len(token), 3)])[B])
                context.check()
    assert found[0] == found[1]
