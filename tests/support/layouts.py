"""Who else is in the cells: the same prompt in other company, and how far its logits then move.

libllama's sums depend on where in the cache a sequence lies and on who shares its batches. That spread, measured between
cold runs only, is the ruler for everything that cannot be bitwise: warm runs must stay within it, wrong states outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

from everwarm.llama.batch import Feed, Tokens
from everwarm.llama.context import Context, Logits
from everwarm.llama.model import Model
from support.steps import OTHER, SLOT, TAIL_CHUNKS, THIRD, Saved, load, open_context, read, read_to, say, text

# A warm run differs from a cold one in two places at most: the prefix was read in another layout, and so is what
# follows. Each may move the logits by one spread.
BOUND = 2

TOKENS, CUTS = text(400), (70, 140)


@dataclass(frozen=True, slots=True)
class Layout:
    """``before`` puts others into the cells; ``n_beside`` tokens of another sequence follow each chunk, or go with it."""

    name: str
    before: Callable[[Context], None] = lambda context: None
    n_beside: int = 0
    same_batch: bool = False


def _in_front(n: int) -> Callable[[Context], None]:
    return lambda context: read_to(context, OTHER, text(n, seed=7), n)


def _hole(context: Context) -> None:
    read_to(context, THIRD, text(19, seed=8), 19)
    read_to(context, OTHER, text(30, seed=7), 30)
    context.drop(THIRD)


ALONE = Layout("alone")
LAYOUTS = (
    Layout("1 cell in front", _in_front(1)),
    Layout("37 cells in front", _in_front(37)),
    Layout("100 cells in front", _in_front(100)),
    Layout("a hole in front", _hole),
    Layout("cells between", n_beside=7),
    Layout("batched", n_beside=5, same_batch=True),
    Layout("batched behind a hole", _hole, n_beside=5, same_batch=True),
)


def go_on_in(context: Context, layout: Layout, tokens: Tokens, chunks: Sequence[int] = TAIL_CHUNKS) -> list[Logits]:
    """Decode on with this layout's company."""
    company, rows = text(200, seed=6), []
    for n in chunks:
        at, beside = context.end(SLOT).n_tokens, context.end(THIRD)
        mine = Feed(SLOT, tokens[at : at + n], context.end(SLOT), wants_logits=True)
        theirs = Feed(THIRD, company[: layout.n_beside], beside, wants_logits=False)
        context.decode([theirs, mine] if layout.same_batch else [mine])
        rows.append(context.logits(0).copy())
        if layout.n_beside and not layout.same_batch:
            say(context, THIRD, theirs.tokens)
    return rows


@dataclass(frozen=True, slots=True)
class ColdRun:
    """The prompt read in a layout: what was saved at the last cut, the logits after it, and whether it ended clean."""

    saved: Saved
    rows: list[Logits]
    clean: bool


@cache
def cold(model: Model, layout: Layout) -> ColdRun:
    with open_context(model) as context:
        layout.before(context)
        saved = read(context, TOKENS, CUTS)
        rows = go_on_in(context, layout, TOKENS)
        return ColdRun(saved, rows, context.is_clean(SLOT))


def warm(model: Model, layout: Layout, saved: Saved) -> list[Logits]:
    """The prompt brought back into a layout."""
    with open_context(model) as context:
        layout.before(context)
        load(context, SLOT, saved)
        return go_on_in(context, layout, TOKENS)


def distance(a: Sequence[Logits], b: Sequence[Logits]) -> float:
    """The largest difference of any logit; infinite where one is not a number."""
    pairs = zip(a, b, strict=True)
    return max(float(np.nan_to_num(np.abs(x - y), nan=np.inf, posinf=np.inf).max()) for x, y in pairs)


@cache
def cold_spread(model: Model) -> float:
    """How far cold runs of one prompt lie apart."""
    runs = [cold(model, layout).rows for layout in (ALONE, *LAYOUTS)]
    return max(distance(a, b) for a, b in combinations(runs, 2))
