"""Counts what requests cost, and logs why a prompt had to be read again."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from everwarm.engine.cache.restore import Restored
from everwarm.engine.inspect.read_reason import ReadFacts, Why, explain
from everwarm.engine.request import Request
from everwarm.engine.tiers.loader import Brought
from everwarm.llama.model import MemoryKind
from everwarm.state.policy import GUARD, Spacing
from everwarm.state.tree import Match, Tree

log = logging.getLogger("everwarm.engine")


@dataclass(slots=True)
class RequestStats:
    """What happened since the start."""

    n_requests: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_avoidable: int = 0  # prompt tokens read again although they had been read before
    n_full_rereads: int = 0
    n_suspended: int = 0
    n_turns: int = 0  # times a deterministic request and the others gave way to each other
    n_stalls: int = 0  # times that nothing moved although a request waited
    n_decode_failures: int = 0
    n_prewarms: int = 0  # turns read before they were requested
    n_prewarms_interrupted: int = 0
    n_prewarm_tokens: int = 0

    @property
    def new_share(self) -> float:
        """How much of the prompts had to be read."""
        return 1 - self.n_cached / self.n_prompt if self.n_prompt else 1.0

    def add(self, request: Request, why: Why) -> None:
        """Counts a request that has started: what it reused, what that cost, and why it reads the rest."""
        self.n_requests += 1
        n_cached, n_shared = request.n_tokens(request.n_cached), request.n_tokens(request.n_shared)
        self.n_prompt += request.n_prompt_tokens
        self.n_cached += n_cached
        self.n_avoidable += max(0, n_shared - n_cached)
        if request.n_shared > GUARD and request.n_cached == 0 and request.ask.use_cache:
            self.n_full_rereads += 1
            reason = why.again or why.reason
            log.warning(
                "full re-read of %d tokens although %d were known: %s", request.n_prompt_tokens, n_shared, reason.words
            )


def why_of(
    request: Request, match: Match, restored: Restored, brought: Brought, tree: Tree, kind: MemoryKind, spacing: Spacing
) -> Why:
    """Why a request read what it read. Looks up only what the reason may depend on."""
    ask = request.ask
    is_known = request.n_prompt - match.n_shared <= GUARD
    return explain(
        ReadFacts(
            ask.prompt,
            match,
            request.n_cached,
            restored.n_refused,
            brought.n_passed,
            brought.n_spoilt,
            brought.n_elsewhere,
            None if is_known else tree.forgotten.parting(ask.namespace, ask.prompt),
            ask.use_cache,
            ask.deterministic,
            kind.has_attention,
            kind.needs_checkpoints,
            spacing.max_checkpoints,
        )
    )
