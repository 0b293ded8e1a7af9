"""Checkpoints that another thread is still reading out of a slot file: a request that needs one of them waits for it, as it
waits for the disk. Everything but reading happens on the loop's thread."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import GUARD

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Arriving(Generic[T]):
    """The rest of one file, by how many items each checkpoint has."""

    prompt: Prompt
    namespace: str
    points: dict[int, Future[T]]
    clean: frozenset[int]  # those of one clean reading
    lost: set[int] = field(default_factory=set)  # those that are damaged, or were erased meanwhile
    is_stopped: bool = False  # what comes now is not wanted any more

    @classmethod
    def of(cls, prompt: Prompt, namespace: str, points: Mapping[int, bool]) -> Arriving[T]:
        """``points``: by their items, whether they are clean."""
        clean = frozenset(n_items for n_items, is_clean in points.items() if is_clean)
        return cls(prompt, namespace, {n_items: Future() for n_items in points}, clean)

    def best_for(self, prompt: Prompt, namespace: str, n_have: int, *, exact: bool = False) -> int | None:
        """The deepest one that a prompt begins with, if it is worth waiting for: ``n_have`` items are there already.
        ``exact``: only a clean one counts."""
        if self.is_stopped or namespace != self.namespace:
            return None
        most = min(int(prompt.common_prefix(self.prompt)), len(prompt) - 1)
        among = (self.clean if exact else self.points.keys()) - self.lost
        best = max((n_items for n_items in among if n_items <= most), default=0)
        return best if best > n_have + GUARD else None


@dataclass(slots=True)
class Arrivals(Generic[T]):
    files: list[Arriving[T]] = field(default_factory=list)

    def stop(self, namespace: str) -> None:
        """Nothing more of namespaces with this prefix is wanted."""
        for file in self.files:
            file.is_stopped |= file.namespace.startswith(namespace)
        self.files = [file for file in self.files if not file.is_stopped]

    def forget(self, prompt: Prompt, namespace: str, beyond: int) -> None:
        """This conversation was erased beyond so many items."""
        for file in self.files:
            if file.namespace == namespace:
                n_common = int(file.prompt.common_prefix(prompt))
                file.lost.update(n_items for n_items in file.points if beyond < n_items <= n_common)

    def remove(self, file: Arriving[T]) -> None:
        self.files = [other for other in self.files if other is not file]
