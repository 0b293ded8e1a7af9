"""Conversations from slot files of unknown origin: which requests continue one, and in which namespace.

Each file has a namespace of its own (``state.lineage``). A request is moved into it as a whole, before anything is
looked up for it, and stays there; so no other namespace knows what it reads, and nothing of it leaves RAM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from everwarm.engine.cache.restore import Restorer
from everwarm.engine.request import Ask
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import is_unverified, is_volatile, owner_of


@dataclass(slots=True)
class Unverified:
    restorer: Restorer
    # By their namespaces: what each holds, and how many items a request must share with it.
    _files: dict[str, tuple[Prompt, int]] = field(default_factory=dict)

    def add(self, namespace: str, prompt: Prompt, points: Iterable[int] = ()) -> None:
        """``points``: after how many items the file has a checkpoint."""
        assert is_unverified(namespace)
        self._files[namespace] = (prompt, min(points, default=len(prompt)))

    def route(self, ask: Ask) -> Ask:
        """Moves a request to the namespace of a file if it continues all that the file holds, or a checkpoint in it, and no
        verified reading reaches as far. A request that shares only a beginning with a file does not count."""
        if not self._files or not ask.use_cache or ask.deterministic or is_volatile(ask.namespace):
            return ask
        self._files = {name: file for name, file in self._files.items() if self.restorer.knows(name)}
        best = ask.namespace
        most = self.restorer.reach(ask.prompt, ask.namespace)
        for name, (prompt, n_least) in self._files.items():
            if owner_of(name) == ask.namespace and int(ask.prompt.common_prefix(prompt)) >= n_least:
                n_items = self.restorer.reach(ask.prompt, name)
                if n_items > most:
                    best, most = name, n_items
        return ask if best == ask.namespace else replace(ask, namespace=best)
