"""Where a prompt is cut for checkpoints: ``state.policy`` decides, from the caller's hints and from what was learned."""

from __future__ import annotations

from dataclasses import dataclass, field

from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.cache.restore import Restored
from everwarm.engine.request import Ask, Request
from everwarm.llama.model import MemoryKind
from everwarm.state import policy
from everwarm.state.lineage import n_items_of
from everwarm.state.partings import Partings
from everwarm.state.policy import Cut, CutKind
from everwarm.state.returns import Returns
from everwarm.state.tree import Match


@dataclass(frozen=True, slots=True)
class CutPlanner:
    kind: MemoryKind
    n_ubatch: int
    checkpointer: Checkpointer
    returns: Returns
    ram_budget: RamBudget
    partings: Partings = field(default_factory=Partings)

    def cuts(self, request: Request, match: Match, restored: Restored) -> list[Cut]:
        """The cuts that are still ahead of a request, the nearest last."""
        found = self._found(request, match, restored)
        if request.chunks:
            found = request.cuts  # as before it was suspended
        elif request.ask.deterministic:
            request.cuts = found
        if not self.kind.needs_checkpoints:
            return []
        n_passed = max(restored.n_items, n_items_of(request.chunks))
        ahead = self._as_kept(request.ask, [cut for cut in reversed(found) if cut.at > n_passed])
        return [cut for cut in ahead if request.ask.deterministic or self.checkpointer.is_worth_a_cut(cut.kind)]

    def _found(self, request: Request, match: Match, restored: Restored) -> tuple[Cut, ...]:
        ask = request.ask
        known = match.n_shared if match.n_shared - restored.n_items > policy.GUARD else None
        found = policy.cuts(
            request.n_prompt,
            self.checkpointer.spacing,
            n_ubatch=self.n_ubatch,
            boundaries=ask.boundaries,
            stable=ask.stable,
            branch=known,
            media=ask.prompt.media,
            stables=ask.stables,
            breakpoints=ask.breakpoints,
            learned=self._learned(request, restored.n_items, known),
            volatile=ask.volatile,
            joints=ask.joints if self._may_guess(ask) else (),
            kept=0 if ask.deterministic else _n_kept(match, restored),
        )
        return tuple(found)

    def _as_kept(self, ask: Ask, cuts: list[Cut]) -> list[Cut]:
        """Of what is read ahead only the end is kept, and where a guess begins; of background work the stable points."""
        if ask.ahead:
            return [Cut(cut.at, CutKind.PREWARM) for cut in cuts if cut.at == ask.stable]
        if ask.is_background and not ask.deterministic:
            return [Cut(cut.at, CutKind.BACKGROUND) for cut in cuts if cut.kind is CutKind.STABLE]
        return cuts

    def _learned(self, request: Request, n_restored: int, branch: int | None) -> list[int]:
        ask = request.ask
        if ask.deterministic or not ask.use_cache:
            return []
        if branch is not None and not any(0 <= branch - end <= policy.GUARD for end in ask.boundaries):
            self.partings.note(ask.namespace, ask.prompt, branch)  # inside a message
        found = self.partings.places(ask.namespace, ask.prompt, n_restored)
        return [*self.returns.places(request.n_prompt, self.checkpointer.spacing), *found]

    def _may_guess(self, ask: Ask) -> bool:
        """Whether to stop at joints. They are worth little, so only while RAM has room to spare; and the chunks of a
        deterministic request must not depend on that."""
        return not ask.deterministic and self.ram_budget.is_roomy(ask.namespace)


def _n_kept(match: Match, restored: Restored) -> int:
    """Where a request continues, if another one could continue there as well; else 0."""
    return restored.n_items if any(node.n_items == restored.n_items for node in match.usable) else 0
