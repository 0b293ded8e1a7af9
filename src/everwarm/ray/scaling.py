"""How many replicas there should be: by the prompt tokens that wait to be read, and by requests where slots run out.

Serve's controller calls it whenever it checks the replicas, and applies bounds and delays itself. Pure.
"""

from __future__ import annotations

import math
from typing import Any

METRIC = "waiting_tokens"  # what a replica reports of itself


def wanted(n_waiting_tokens: float, n_requests: float, tokens_per_replica: int, slots_per_replica: int) -> int:
    """Enough to read what waits, and to have a slot for every request."""
    return max(math.ceil(n_waiting_tokens / tokens_per_replica), math.ceil(n_requests / slots_per_replica))


class ByWaitingTokens:
    def __init__(self, tokens_per_replica: int, slots_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica
        self._slots_per_replica = slots_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        reported = (context.aggregated_metrics or {}).get(METRIC) or {}
        n_waiting = sum(reported.values())
        n_requests = context.total_num_requests
        return wanted(n_waiting, n_requests, self._tokens_per_replica, self._slots_per_replica), {}
