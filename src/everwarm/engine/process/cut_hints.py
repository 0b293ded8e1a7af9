"""Where a prompt should be cut: given in characters of a text, needed in items of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everwarm.engine.process import messages as m


@dataclass(frozen=True, slots=True)
class Hints:
    """In items. They change speed, never results."""

    boundaries: tuple[int, ...] = ()
    stable: int | None = None
    stables: tuple[int, ...] = ()
    breakpoints: tuple[int, ...] = ()

    @classmethod
    def counted(
        cls, message: m.Submit, count: Callable[[Sequence[int]], list[int]], sure: Callable[[int], int]
    ) -> Hints:
        """``count``: the items before characters where messages end; ``sure``: before any character."""
        known = dict(zip(message.boundaries, count(message.boundaries), strict=True))
        others = {*message.stables, *message.breakpoints, *(() if message.stable is None else (message.stable,))}
        known |= {at: sure(at) for at in others - known.keys()}
        return cls(
            tuple(known[at] for at in message.boundaries),
            None if message.stable is None else known[message.stable],
            tuple(known[at] for at in message.stables),
            tuple(known[at] for at in message.breakpoints),
        )
