"""Idle time spent on the next turn: a finished turn is read again as the next request will show it.

Templates strip thinking and write tool calls anew, so what a model wrote is rarely what comes back. Whoever knows the
template offers that text; here it waits until nothing else is to be done, is read in small steps, and gives way at once
when somebody asks for something. Its end is kept as a checkpoint that is the first to be evicted until somebody uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everwarm.engine.cache.checkpointing import Keeper
from everwarm.engine.request import Ask, Request
from everwarm.errors import EverwarmError
from everwarm.state.policy import GUARD, CutKind
from everwarm.state.tree import Node

if TYPE_CHECKING:
    from everwarm.engine.core import Core

MAX_WAITING = 8  # conversations; the one that waits longest is forgotten
MAX_TRIES = 4  # how often one may be interrupted


@dataclass(slots=True)
class Waiting:
    ask: Ask
    n_tries: int = 0


@dataclass(slots=True)
class Prewarmer:
    waiting: list[Waiting] = field(default_factory=list)
    running: tuple[Request, Waiting] | None = None

    def offer(self, ask: Ask) -> None:
        """Have this read some time. One for each conversation: a newer text replaces the one it continues."""
        self.waiting = [other for other in self.waiting if not _are_kin(other.ask, ask)][1 - MAX_WAITING :]
        self.waiting.append(Waiting(ask))

    def begin(self, core: Core) -> bool:
        """Idle work: start with the newest that is worth it. False: there is none."""
        while self.waiting:
            waiting = self.waiting.pop()
            if self._is_worth_it(core, waiting.ask):
                waiting.n_tries += 1
                try:
                    self.running = core.enqueue(waiting.ask), waiting
                except EverwarmError:  # it fits no more
                    continue
                return True
        return False

    def give_way(self, core: Core) -> None:
        """Somebody wants something: what is being read stops where it is, and goes on later from there."""
        if self.running is None:
            return
        request, waiting = self.running
        self.running = None
        core.cancel(request.id)
        core.counts.n_prewarms_interrupted += 1
        if waiting.n_tries < MAX_TRIES:
            self.waiting.append(waiting)

    def ended(self, core: Core, request: Request, n_read: int) -> None:
        core.counts.n_prewarm_tokens += n_read
        if self.running is not None and self.running[0] is request:
            self.running = None
            core.counts.n_prewarms += 1

    @staticmethod
    def _is_worth_it(core: Core, ask: Ask) -> bool:
        """Something is to be read, and nobody else has to leave the context for it."""
        sources = core.restorer.sources(ask.prompt, ask.namespace)
        match = core.restorer.match(ask.prompt, ask.namespace, sources)
        needs = core.context.kind.needs_checkpoints
        n_known = max((node.n_items for node in match.usable), default=0) if needs else match.n_kv
        n_resident = max((source.n_common for source in sources), default=0)
        n_cells = ask.prompt.n_tokens(len(ask.prompt)) - ask.prompt.n_tokens(n_resident)
        fits = not core.context.kind.has_attention or core.context.cells.free > n_cells
        return len(ask.prompt) - n_known > GUARD and fits

    def drop(self, core: Core, namespace: str) -> None:
        """Nothing is read ahead in namespaces that begin so; what is being read ends now."""
        self.waiting = [w for w in self.waiting if not w.ask.namespace.startswith(namespace)]
        if self.running is not None and self.running[0].ask.namespace.startswith(namespace):
            request, _ = self.running
            self.running = None
            core.cancel(request.id)
            core.stop(request.id)

    def forget(self, core: Core, end: Node) -> list[Node]:
        """Nothing more is read ahead in this lineage's namespace; returns the branches off it that were, to be dropped."""
        root, lineage = end.root(), end.lineage()
        self.waiting = [w for w in self.waiting if core.tree.root(w.ask.namespace) is not root]
        branches = [child for node in lineage for child in node.children.values() if child not in lineage]
        return [branch for branch in branches if _kinds(branch) == {CutKind.PREWARM}]


def note_used(keeper: Keeper, node: Node) -> None:
    """Somebody goes on from here; if it was read ahead that was guessed right."""
    if node.checkpoint is not None and node.checkpoint.kind is CutKind.PREWARM:
        node.checkpoint.kind = CutKind.STABLE
        keeper.counts.n_prewarms_used += 1


def _kinds(branch: Node) -> set[CutKind]:
    return {node.checkpoint.kind for node in branch.below() if node.checkpoint is not None}


def _are_kin(one: Ask, other: Ask) -> bool:
    """Whether both belong to one conversation: the shorter is mostly the beginning of the longer."""
    if one.namespace != other.namespace:
        return False
    n_common = int(one.prompt.common_prefix(other.prompt))
    return 2 * n_common > min(len(one.prompt), len(other.prompt))
