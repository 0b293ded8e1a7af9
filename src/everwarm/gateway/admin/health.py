"""What ``/health`` says of each part of the server: its state, and why where it is not well. Pure.

Anybody may ask without a key, so nothing here names a file, a folder or one model of many.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from everwarm.router.plan import Phase
from everwarm.router.pool import Standing
from everwarm.router.supervise.supervisor import State

Json = dict[str, Any]
ComponentState = Literal["ok", "asleep", "starting", "restarting", "stalled", "degraded", "down", "stopped"]

_MIB = 1 << 20
_STATES: dict[State, ComponentState] = {
    State.STARTING: "starting",
    State.READY: "stalled",  # it would be ok if it had been heard of lately
    State.RESTARTING: "restarting",
    State.UNHEALTHY: "down",
    State.STOPPED: "stopped",
}


@dataclass(frozen=True, slots=True)
class Component:
    """One part of the server. ``more`` has numbers that only this part has."""

    state: ComponentState
    reason: str | None = None
    more: Json = field(default_factory=dict)

    def as_json(self) -> Json:
        return {"state": self.state, "reason": self.reason, **self.more}


def components(standings: Sequence[Standing]) -> dict[str, Component]:
    """Every part that has something to say."""
    found = {"engine": engine_of(standings[0]) if len(standings) == 1 else engines_of(standings)}
    shrunk = [n for each in standings if (n := each.supervisor.shrunk_to) is not None]
    if shrunk:
        said = "an engine died for lack of memory, so the RAM tier keeps less until the server is started again"
        found["ram"] = Component("degraded", said, {"budget_bytes": min(shrunk)})
    loads = (each.supervisor.load for each in standings)
    for tier, reason in ((tier, why) for load in loads if load is not None for tier, why in load.degraded.items()):
        found[tier] = Component("degraded", f"{without_paths(reason)} (GET /cache has all of it)")
    return found


def without_paths(text: str) -> str:
    return re.sub(r"\S*/\S*", "…", text)


def engine_of(one: Standing) -> Component:
    supervisor = one.supervisor
    if supervisor.is_ready:
        return Component("ok", None, _tries(one))
    if one.status.phase is Phase.ASLEEP and one.status.reason is None:
        return Component("asleep", None, _tries(one))
    return Component(_STATES[supervisor.state], one.reason, _tries(one))


def engines_of(standings: Sequence[Standing]) -> Component:
    states = Counter(engine_of(each).state for each in standings)
    n_down = sum(each.status.reason is not None for each in standings)
    more = {"models": dict(states)}
    if n_down == 0:
        return Component("ok", None, more)
    return Component("degraded", f"{n_down} of {len(standings)} models failed; GET /v1/models says why", more)


def _tries(one: Standing) -> Json:
    """``attempts``: tries in a row that failed since it was given up; ``retry_in_s``: until the next."""
    wait_s = one.retry_in_s
    return {
        "restarts": one.supervisor.n_restarts,
        "attempts": one.supervisor.deaths.n_given_up,
        "retry_in_s": None if wait_s is None else round(wait_s, 1),
    }
