"""What an infinite cache would have known of each request, and what a server read again. Pure.

*Known*: the longest beginning of a prompt that this very server has read before. *Avoidable*: the known tokens it came to.
*Regret*: those of them it read again. *Ahead*: tokens it need not read although no request had shown them before. A prompt
that parts from what is known in the midst of a message, at a place where none parted before, is told apart: no server can
have a state right there, only one before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from everwarm.prompt.prompt import Prompt
from everwarm.simulate.oracle import Known
from everwarm.state.policy import GUARD


@dataclass(frozen=True, slots=True)
class Reading:
    """One request on one server, in tokens."""

    n_prompt: int
    n_known: int
    n_reached: int  # where reading ended: the prompt's end unless the client hung up
    n_cached: int  # where it began
    is_first_inside: bool

    @property
    def n_avoidable(self) -> int:
        return min(self.n_known, self.n_reached)

    @property
    def n_regret(self) -> int:
        return max(0, self.n_avoidable - self.n_cached)

    @property
    def n_ahead(self) -> int:
        """What it knew although no request had shown it: read on idle, or before a client was heard to hang up."""
        return max(0, min(self.n_cached, self.n_reached) - self.n_known)


class Account:
    """What one server has read. ``message_start``: the token every message begins with."""

    def __init__(self, message_start: int) -> None:
        self._message_start = message_start
        self._known = Known()
        self._parted: set[bytes] = set()

    def add(self, tokens: Sequence[int], n_cached: int, n_reached: int | None = None) -> Reading:
        prompt = Prompt.of_tokens(np.array(tokens, np.int64))
        reached = len(tokens) if n_reached is None else n_reached
        n_known = self._known.n_shared(prompt)
        first = self._parts_inside(tokens, n_known) and self._is_new_place(tokens, n_known)
        self._known.add(prompt.first(reached))
        return Reading(len(tokens), n_known, reached, n_cached, first)

    def _parts_inside(self, tokens: Sequence[int], at: int) -> bool:
        """Further from the message's beginning than the few tokens that every message begins with."""
        if at >= len(tokens):
            return False
        start = next((i for i in range(min(at, len(tokens) - 1), -1, -1) if tokens[i] == self._message_start), 0)
        return at - start > GUARD

    def _is_new_place(self, tokens: Sequence[int], at: int) -> bool:
        place = hashlib.sha256(np.array(tokens[:at], np.int32).tobytes()).digest()
        is_new = place not in self._parted
        self._parted.add(place)
        return is_new
