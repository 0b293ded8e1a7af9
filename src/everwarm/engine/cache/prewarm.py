"""Uses idle time for the next turn: reads a finished turn again as the next request will render it.

Templates strip thinking and write tool calls anew, so what a model wrote is rarely what comes back. The gateway knows
the template and offers that text; it waits here until the engine is idle. It is read in small steps, which stop at once
when a request comes. Its end is kept as a checkpoint that is the first to be evicted until a request uses it.

A long prompt whose client went away while it was read can wait here, too: clients give up after a minute or two, and send
the same again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from everwarm.engine.cache.restore import Restorer
from everwarm.engine.request import Ask, Request
from everwarm.llama.context import Context
from everwarm.state.policy import GUARD, CutKind
from everwarm.state.tree import Node

MAX_WAITING = 8  # conversations; the one that waits longest is forgotten
MAX_TRIES = 4  # how often one may be interrupted
MIN_UNREAD = 256  # tokens; less is not worth reading ahead


@dataclass(slots=True)
class Waiting:
    ask: Ask
    n_tries: int = 0
    until: float = math.inf  # on the monotonic clock: later it is not worth beginning


@dataclass(slots=True)
class PrewarmQueue:
    """The prompts that wait to be read ahead, and the one that is being read."""

    waiting: list[Waiting] = field(default_factory=list)
    running: tuple[Request, Waiting] | None = None

    def offer(self, ask: Ask, until: float = math.inf) -> None:
        """Queues a prompt. Each conversation has one: a newer text replaces the one it continues."""
        self.waiting = [other for other in self.waiting if not _are_kin(other.ask, ask)][1 - MAX_WAITING :]
        self.waiting.append(Waiting(ask, until=until))

    def take_newest(self, now: float) -> Iterator[Waiting]:
        """Yields the waiting prompts that are still worth it, the newest first, and removes each."""
        while self.waiting:
            found = self.waiting.pop()
            if now <= found.until:
                yield found

    def started(self, request: Request, waiting: Waiting) -> None:
        waiting.n_tries += 1
        self.running = (request, waiting)

    def give_way(self) -> Request | None:
        """A request has come: returns what is being read ahead, to be cancelled. It continues later from there."""
        if self.running is None:
            return None
        request, waiting = self.running
        self.running = None
        if waiting.n_tries < MAX_TRIES:
            self.waiting.append(waiting)
        return request

    def ended(self, request: Request) -> bool:
        """Whether this one ended by itself, and was not stopped for a request."""
        if self.running is None or self.running[0] is not request:
            return False
        self.running = None
        return True

    def drop(self, namespace: str) -> Request | None:
        """Drops what waits in namespaces with this prefix; returns what is being read ahead there, to be stopped."""
        self.waiting = [w for w in self.waiting if not w.ask.namespace.startswith(namespace)]
        if self.running is None or not self.running[0].ask.namespace.startswith(namespace):
            return None
        request, _ = self.running
        self.running = None
        return request

    def drop_waiting(self, namespace: str) -> None:
        """Drops what waits in exactly this namespace."""
        self.waiting = [w for w in self.waiting if w.ask.namespace != namespace]


def unread_rest(request: Request, n_fed: int) -> Ask | None:
    """The prompt of a request that was cancelled while it was read, to be read in idle time; None: little is left of it,
    or it could not be reused."""
    ask = request.ask
    is_reusable = ask.use_cache and not ask.deterministic and not ask.prompt.media
    if not is_reusable or request.n_prompt - n_fed < MIN_UNREAD:
        return None
    hints = replace(ask.hints, stable=None)
    return replace(ask, max_tokens=0, n_probs=None, slot=None, constraint=None, ahead=True, hints=hints)


def is_worth_prewarming(ask: Ask, restorer: Restorer, context: Context) -> bool:
    """Whether something is left to read, and it fits without evicting anything from the context."""
    sources = restorer.sources(ask.prompt, ask.namespace)
    match = restorer.match(ask.prompt, ask.namespace, sources)
    n_resident = max(sources.values(), default=0)
    n_cells = ask.prompt.n_tokens(len(ask.prompt)) - ask.prompt.n_tokens(n_resident)
    fits = not context.kind.has_attention or context.cells.free > n_cells
    return len(ask.prompt) - restorer.n_known(match) > GUARD and fits


def prewarmed_branches(end: Node) -> list[Node]:
    """The branches of a lineage that hold nothing but prewarmed checkpoints."""
    lineage = end.lineage()
    branches = [child for node in lineage for child in node.children.values() if child not in lineage]
    return [branch for branch in branches if _kinds(branch) == {CutKind.PREWARM}]


def _kinds(branch: Node) -> set[CutKind]:
    return {node.checkpoint.kind for node in branch.below() if node.checkpoint is not None}


def _are_kin(one: Ask, other: Ask) -> bool:
    """Whether both belong to one conversation: the shorter is mostly the beginning of the longer."""
    if one.namespace != other.namespace:
        return False
    n_common = int(one.prompt.common_prefix(other.prompt))
    return 2 * n_common > min(len(one.prompt), len(other.prompt))
