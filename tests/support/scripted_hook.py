"""A model that says what a test wants, behind a server that is real: prompts are read and replies are decoded by libllama,
only what is picked comes from a script.

``install`` is named by EVERWARM_TEST_HOOK, the script by EVERWARM_SCRIPT: a JSON list of ``Line``. The first one whose
``when`` stands near the prompt's end is said.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from everwarm.config import Sampling
from everwarm.engine.core import Core
from everwarm.engine.lifecycle import starting
from everwarm.llama.model import Model
from everwarm.llama.sampler import Sampler

SCRIPT = "EVERWARM_SCRIPT"
N_NEAR = 600  # characters
UNSCRIPTED = "There is nothing in the script for this."


class Line(msgspec.Struct, frozen=True):
    """``say`` is all that the model writes; a prompt that ends inside its thinking wants a ``</think>`` in it."""

    when: str
    say: str


def install(_core: Core) -> None:
    script = msgspec.json.decode(Path(os.environ[SCRIPT]).read_bytes(), type=list[Line])

    class Scripted(Sampler):
        """Of one request: picks the next token of its line, and then the end."""

        def __init__(self, model: Model, sampling: Sampling, history: Any = (), *more: Any, **named: Any) -> None:
            super().__init__(model, sampling, history, *more, **named)
            text = model.vocab.detokenize([int(token) for token in history]).decode("utf-8", "replace")
            assert model.vocab.eos is not None
            message = model.vocab.tokenize(line_for(script, text), add_special=False, parse_special=True)
            self._left = [*map(int, message), model.vocab.eos]

        def pick(self, context: Any, row: int) -> int:
            super().pick(context, row)  # the row must be good
            return self._next()

        def pick_from(self, logits: Any) -> int:
            super().pick_from(logits)
            return self._next()

        def _next(self) -> int:
            return self._left.pop(0) if len(self._left) > 1 else self._left[0]

    starting.Sampler = Scripted  # type: ignore[misc]


def line_for(script: Sequence[Line], prompt: str) -> str:
    return next((line.say for line in script if line.when in prompt[-N_NEAR:]), UNSCRIPTED)
