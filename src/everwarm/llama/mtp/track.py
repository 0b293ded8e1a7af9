"""What a head knows of a sequence. Pure.

The head reads a token together with the model's last hidden row before it. It has cells for the positions from ``start`` to
``end``; behind them wait tokens that the model has read and the head has not, each with its row, so that the head reads
them when it is needed and many at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Track:
    """``rows`` has one more than ``tokens``: the last goes with the token that comes next. A row of zeroes is unknown."""

    start: int
    end: int
    tokens: Tokens
    rows: Rows

    @property
    def known(self) -> int:
        """The position of the next token."""
        return self.end + len(self.tokens)

    def covers(self, start: int, stop: int) -> bool:
        """Whether the head has, or can have, cells for all these positions."""
        return self.start <= start and stop <= self.known

    def row(self, pos: int) -> Rows | None:
        """The row that goes with the token at this position; None: it is not known any more."""
        return self.rows[pos - self.end] if self.end <= pos <= self.known else None


def cold(pos: int, width: int, row: Rows | None = None) -> Track:
    """Nothing is known before ``pos``, but perhaps the row that goes with the token there."""
    rows = np.zeros((1, width), np.float32) if row is None else row.reshape(1, width)
    return Track(pos, pos, np.empty(0, np.int32), rows)


def cut(track: Track, pos: int) -> Track:
    """Nothing is known from ``pos`` on. Where the head has cells there, they must be removed."""
    width = track.rows.shape[1]
    if pos < track.start:
        return cold(pos, width)
    if pos < track.end:
        return Track(track.start, pos, np.empty(0, np.int32), np.zeros((1, width), np.float32))
    n = pos - track.end
    return Track(track.start, track.end, track.tokens[:n], track.rows[: n + 1]) if n < len(track.tokens) else track


def extended(track: Track, pos: int, tokens: Tokens, after: Rows) -> Track:
    """The model has read these tokens from ``pos`` on; ``after``: its row after each of them. Tokens that were read before,
    in a draft that was taken back, are known already. After a gap all before it is forgotten."""
    if pos > track.known:
        track = cold(pos, track.rows.shape[1])
    elif pos < track.end:
        track = cut(track, pos)
    held = track.tokens[pos - track.end :]
    n = min(len(held), len(tokens))
    if not np.array_equal(held[:n], tokens[:n]):
        track, n = cut(track, pos), 0
    elif n == len(tokens):
        return track
    return Track(
        track.start,
        track.end,
        np.concatenate([track.tokens, tokens[n:]]),
        np.concatenate([track.rows, after[n:]]),
    )


def passed(track: Track, n: int) -> Track:
    """The head has read the first ``n`` tokens that waited."""
    return Track(track.start, track.end + n, track.tokens[n:].copy(), track.rows[n:].copy())
