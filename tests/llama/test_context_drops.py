"""Sequences that are dropped later: gone at once for everyone, and emptied in libllama when it suits, or when it must."""

from collections.abc import Callable

import pytest

from everwarm.errors import ContextFull
from everwarm.llama.context import Context
from everwarm.types import START, SeqId
from support.steps import WITH_KV, go_on, open_context, read_to, same_bits, say, text, wipe

FIRST, SECOND = SeqId(0), SeqId(1)
N_CELLS = 512
LONG, TOKENS = text(400, seed=1), text(300, seed=2)
ARCHS = pytest.mark.parametrize("arch", WITH_KV)


def with_one_dropped(context: Context) -> None:
    read_to(context, FIRST, LONG, 400)
    with context.dropping_later():
        context.drop(FIRST)


@ARCHS
def test_it_is_gone_at_once_and_emptied_later(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch), n_ctx=N_CELLS) as context:
        with_one_dropped(context)
        assert context.end(FIRST) == START and context.cells.used == 0
        assert context.n_to_empty == 1
        context.check()
        context.finish_drop()
        assert context.n_to_empty == 0
        context.check()
        context.finish_drop()  # there is none any more


@ARCHS
def test_its_cells_are_there_as_soon_as_they_are_needed(arch: str, open_tiny: Callable, monkeypatch) -> None:
    model = open_tiny(arch)
    with open_context(model, n_ctx=N_CELLS) as context:
        with_one_dropped(context)
        read_to(context, SECOND, TOKENS, 60)
        assert context.n_to_empty == 1, "there were cells enough"
        read_to(context, SECOND, TOKENS, 300)
        assert context.n_to_empty == 0
        context.check()
    monkeypatch.setattr(Context, "_finish_drops_for", lambda *_: None)
    with open_context(model, n_ctx=N_CELLS) as context:
        with_one_dropped(context)
        with pytest.raises(ContextFull):  # the control: libllama has no room
            read_to(context, SECOND, TOKENS, 300)


@ARCHS
def test_it_can_be_used_again_at_once(arch: str, open_tiny: Callable) -> None:
    with open_context(open_tiny(arch), n_ctx=N_CELLS) as context:
        read_to(context, FIRST, TOKENS, 200)
        cold = go_on(context, FIRST, TOKENS)
        wipe(context)
        with_one_dropped(context)
        read_to(context, FIRST, TOKENS, 200)
        assert context.n_to_empty == 0 and context.is_clean(FIRST)
        assert same_bits(go_on(context, FIRST, TOKENS), cold)


@ARCHS
def test_what_is_read_beside_it_is_not_clean(arch: str, open_tiny: Callable) -> None:
    """Its cells are still there, and bits depend on the places of cells."""
    with open_context(open_tiny(arch), n_ctx=N_CELLS) as context:
        with_one_dropped(context)
        say(context, SECOND, TOKENS[:50])
        assert not context.is_clean(SECOND)
        context.finish_drops()
        context.drop(SECOND)
        say(context, SECOND, TOKENS[:50])
        assert context.is_clean(SECOND)
