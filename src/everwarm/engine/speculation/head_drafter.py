"""Drafts by the model's own MTP head, which has read what the model has read."""

from __future__ import annotations

from collections.abc import Sequence

from everwarm.engine.speculation.drafter import Wanted
from everwarm.llama.context import Context
from everwarm.types import SeqId


class HeadDrafter:
    source = "mtp"
    confidence = 0.75
    n_most = 8

    def __init__(self, context: Context) -> None:
        self._context = context

    def read(self, wanted: Sequence[Wanted]) -> None:
        """The head reads with the model."""

    def draft(self, wanted: Sequence[Wanted]) -> dict[SeqId, list[int]]:
        return self._context.draft([(seq, history[len(history) - n_due :], n) for seq, history, n_due, n in wanted])

    def forget(self) -> None:
        """Its cells are dropped with the model's."""

    def close(self) -> None:
        """It is closed with the model's context."""
