"""``/infill``: the text between what stands above an editor's cursor and what stands below it. Pure: tokens in, a prompt
out.

The text above the cursor grows while a user types, so it comes before everything that changes with it, and where it
is too long its beginning is dropped in large steps: the next request then begins with the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from everwarm.engine.process.messages import FillIn
from everwarm.errors import BadRequest
from everwarm.gateway.openai.schema import MAX_TOKENIZED_CHARS, Body, MarkedCompletion

MAX_EXTRAS = 256
PROJECT, FILE = "myproject\n", "filename\n"  # llama-server's words for what it is not told
SNIPPET = "\n\n--- snippet ---\n\n"  # between files where the model knows no token for that
Text = Annotated[str, Meta(max_length=MAX_TOKENIZED_CHARS)]


class ExtraText(Struct, frozen=True):
    """Text of another file, or of another place of this one."""

    text: Text
    filename: Annotated[str, Meta(max_length=4096)] = "tmp"


class InfillBody(Body, frozen=True, kw_only=True):
    """``prompt`` is the line of the cursor up to it, which belongs to the text above it."""

    input_prefix: Text
    input_suffix: Text
    prompt: Text = ""
    input_extra: Annotated[list[ExtraText], Meta(max_length=MAX_EXTRAS)] = msgspec.field(default_factory=list)
    response_fields: Annotated[list[str], Meta(max_length=256)] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=100)] | None = None
    return_tokens: bool | None = None

    def texts(self) -> list[str]:
        """Everything that must be tokenized, in the order in which ``infill_completion`` takes it."""
        extras = [text for extra in self.input_extra for text in (f"{extra.filename}\n", extra.text)]
        n_chars = sum(map(len, (self.input_prefix, self.prompt, self.input_suffix, *extras)))
        if n_chars > MAX_TOKENIZED_CHARS:
            raise BadRequest(
                f"there are {n_chars:,} characters around the cursor; send at most {MAX_TOKENIZED_CHARS:,}"
            )
        return [PROJECT, FILE, SNIPPET, self.input_prefix, self.prompt, self.input_suffix, *extras]

    def fields(self) -> dict[str, Any]:
        """Those of the completion that this is, besides its prompt."""
        own = ("input_prefix", "input_suffix", "prompt", "input_extra")
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in own}


def texts_around(above: str, below: str) -> list[str]:
    """``InfillBody.texts`` of a text above the cursor, whose last line is the line of the cursor."""
    before, newline, line = above.rpartition("\n")
    return InfillBody(input_prefix=before + newline, prompt=line, input_suffix=below).texts()


def infill_completion(
    texts: Sequence[Sequence[int]],
    fill: FillIn,
    fields: Mapping[str, Any],
    *,
    n_batch: int,
    n_ctx: int,
    n_predict: int,
    suffix_first: bool = False,
) -> MarkedCompletion:
    """A completion with the prompt that llama-server makes of a project's files; only a text above the cursor that is too
    long is cut differently. The breakpoints are where the line of the cursor begins and ends. ``texts``: the tokens of
    ``InfillBody.texts``. ``fields``: those of the completion besides its prompt. ``n_predict``: tokens of the reply, at
    most; -1: any number."""
    project, file, snippet, above, line, below, *extras = texts
    n_most = 3 * (n_batch // 4)
    prefix = [fill.prefix, *above[_n_dropped(len(above), n_most) :], *line]
    suffix = [fill.suffix, *below[: max(0, n_batch // 4 - 2 - len(line))]]
    others = _others(fill, project, file, snippet, extras)
    n_others = min(len(others), max(0, n_ctx - n_batch - 2 * n_predict))
    head = [*others[len(others) - n_others :], *(() if fill.bos is None else (fill.bos,))]
    if suffix_first:
        head += suffix
        suffix = []
    tokens = [*head, *prefix, *suffix, fill.middle]
    n_above = len(head) + len(prefix)
    if len(tokens) >= n_ctx:
        raise BadRequest(f"what is to be filled in has {len(tokens)} tokens of text around it, the context {n_ctx}")
    breakpoints = tuple(sorted({n_above - len(line), n_above}))
    return MarkedCompletion(**{**fields, "prompt": tokens, "breakpoints": breakpoints})


def _n_dropped(n: int, most: int) -> int:
    """How many tokens of the beginning are dropped, in steps: most requests drop as many as the one before."""
    step = max(1, most // 4)
    return max(0, -(-(n - most) // step) * step)


def _others(
    fill: FillIn,
    project: Sequence[int],
    file: Sequence[int],
    snippet: Sequence[int],
    extras: Sequence[Sequence[int]],
) -> list[int]:
    """What stands before the file of the cursor: the project and other files. ``extras``: names and texts, in turns."""
    found = [] if fill.project is None else [fill.project, *project]
    for name, text in zip(extras[::2], extras[1::2], strict=True):
        found += snippet if fill.file is None else [fill.file, *name]
        found += text
    return found if fill.file is None else [*found, fill.file, *file]
