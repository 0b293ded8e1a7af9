"""Every prompt that a server was shown, as a client can know it: what of a new one nobody needs to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Shown:
    def __init__(self) -> None:
        self._following: dict[int, Any] = {}  # by token, what follows it

    def n_known(self, prompt: Sequence[int]) -> int:
        at, n = self._following, 0
        while n < len(prompt) and prompt[n] in at:
            at, n = at[prompt[n]], n + 1
        return n

    def add(self, prompt: Sequence[int]) -> None:
        at = self._following
        for token in prompt:
            at = at.setdefault(token, {})
