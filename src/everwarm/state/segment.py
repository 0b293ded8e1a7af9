"""A segment: the KV of one interval in RAM, and the objects on disk that hold the same."""

from __future__ import annotations

from dataclasses import dataclass

from everwarm.prompt.prompt import Prompt
from everwarm.state.history import Chunks
from everwarm.types import Blob, Mark


@dataclass(frozen=True, slots=True)
class Piece:
    """An object outside of RAM, of these items. It is used from where the one before it ends to where the next begins."""

    n_start: int
    n_stop: int
    name: str
    size: int  # of its file


@dataclass(slots=True, eq=False)
class Segment:
    """The KV of one interval. Several nodes may use parts of it; it goes when the last one lets go."""

    blob: Blob
    start: Mark
    stop: Mark
    clean: bool
    chunks: Chunks | None = None  # the history of its cells, over the chunk that ``stop`` lies in; None: unknown
    n_users: int = 0
    items: tuple[int, int] | None = None  # the same interval in items; None: text, one cell each
    path: Prompt | None = None  # any prompt that leads to its end; None: that is not known any more
    pieces: tuple[Piece, ...] = ()  # what was written of it, from its beginning on

    @property
    def n_start(self) -> int:
        return int(self.start.n_tokens) if self.items is None else self.items[0]

    @property
    def n_stop(self) -> int:
        return int(self.stop.n_tokens) if self.items is None else self.items[1]

    @property
    def n_cells(self) -> int:
        return self.stop.n_tokens - self.start.n_tokens

    def name_at(self, n_items: int) -> str | None:
        """Of the object that holds the item before that."""
        return next((piece.name for piece in reversed(self.pieces) if piece.n_start < n_items <= piece.n_stop), None)
