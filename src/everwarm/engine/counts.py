"""Counting what requests cost, and saying why when a prompt had to be read again."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from everwarm.engine.request import Request
from everwarm.engine.restore import Restored
from everwarm.state.params import Spacing
from everwarm.state.policy import GUARD
from everwarm.state.tree import Match

log = logging.getLogger("everwarm.engine")


@dataclass(slots=True)
class Counts:
    """What happened since the start."""

    n_requests: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_avoidable: int = 0  # prompt tokens read again although somebody had read them before
    n_full_rereads: int = 0
    n_suspended: int = 0
    n_decode_failures: int = 0
    n_prewarms: int = 0  # turns read before anybody asked
    n_prewarms_interrupted: int = 0
    n_prewarm_tokens: int = 0

    def add(self, request: Request, match: Match, restored: Restored, spacing: Spacing) -> None:
        """A request has started: from where, and at what price."""
        request.n_cached = min(restored.n_items, request.n_prompt)
        request.n_shared = match.n_shared
        request.used = restored.use
        if request.ask.ahead:
            return
        self.n_requests += 1
        n_cached, n_shared = request.n_tokens(request.n_cached), request.n_tokens(match.n_shared)
        self.n_prompt += request.n_prompt_tokens
        self.n_cached += n_cached
        self.n_avoidable += max(0, n_shared - n_cached)
        if match.n_shared > GUARD and request.n_cached == 0 and request.ask.use_cache:
            self.n_full_rereads += 1
            reason = why_cold(match, spacing)
            sizes = request.n_prompt_tokens, n_shared
            log.warning("full re-read of %d tokens although %d were known: %s", *sizes, reason)


def why_cold(match: Match, spacing: Spacing) -> str:
    if spacing.max_checkpoints == 0:
        return "checkpoints are off (max_checkpoints is 0)"
    if match.usable:
        return f"{len(match.usable)} checkpoints could not be restored"
    if any(node.checkpoint is not None and node.n_items <= match.n_shared for node in match.path):
        return "the KV below the checkpoints was evicted"
    return "no checkpoint was kept inside the shared part"
