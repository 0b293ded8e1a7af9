"""Where a prompt should be cut: the gateway gives it in characters of a text, the engine needs it in items of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec


class CutHints(msgspec.Struct, frozen=True):
    """Points of one prompt, all in characters or all in items. They change speed, never results.

    ``boundaries`` are ends of messages, ``stables`` are where likely next turns part from this one, ``stable`` is what
    all of them share, and ``breakpoints`` are what the client marked.
    """

    boundaries: tuple[int, ...] = ()
    stable: int | None = None
    stables: tuple[int, ...] = ()
    breakpoints: tuple[int, ...] = ()

    def counted(self, count: Callable[[Sequence[int]], list[int]], sure: Callable[[int], int]) -> CutHints:
        """The same points in items. ``count`` gives the items before ends of messages, ``sure`` those before any
        character that no later text can change."""
        known = dict(zip(self.boundaries, count(self.boundaries), strict=True))
        others = {*self.stables, *self.breakpoints, *(() if self.stable is None else (self.stable,))}
        known |= {at: sure(at) for at in others - known.keys()}
        return CutHints(
            tuple(known[at] for at in self.boundaries),
            None if self.stable is None else known[self.stable],
            tuple(known[at] for at in self.stables),
            tuple(known[at] for at in self.breakpoints),
        )
