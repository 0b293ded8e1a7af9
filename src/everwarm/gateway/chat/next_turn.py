"""After a reply: what the next turn will begin with is worked out and offered to the engine's idle time.

Only while nobody asks for anything: a busy server has no idle time, and a client in a loop of tools is back at once. Knows
templates and replies; when and whether the text is read, the engine decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everwarm.engine.process import messages as m
from everwarm.gateway.access.limits import AdmissionLimits
from everwarm.gateway.parsing.output_parser import OutputParser
from everwarm.router.supervise.supervisor import Supervisor

log = logging.getLogger("everwarm.gateway")

SETTLE_S = 0.05


@dataclass(frozen=True, slots=True)
class NextTurn:
    """How a conversation goes on. ``after``: a reply as one message in, the text that is sure to follow out."""

    reader: Callable[[], OutputParser]
    after: Callable[[dict[str, Any]], str | None]
    add_special: bool
    namespace: str
    session: str | None

    def text(self, reply: str) -> str | None:
        return self.after(self.reader().message(reply))


class NextTurnPrewarmer:
    def __init__(self, limits: AdmissionLimits, *, is_on: bool) -> None:
        self._limits = limits
        self._is_on = is_on
        self._tasks: dict[asyncio.Task[None], str] = {}  # with the namespaces they are for

    def offer(self, supervisor: Supervisor, turn: NextTurn | None, reply: str) -> None:
        if self._is_on and turn is not None:
            task = asyncio.create_task(self._offer(supervisor, turn, reply))
            self._tasks[task] = turn.namespace
            task.add_done_callback(self._tasks.pop)

    def forget(self, namespace: str) -> None:
        """Offer nothing more of what was said so far in namespaces that begin so."""
        for task in [task for task, own in self._tasks.items() if own.startswith(namespace)]:
            task.cancel()

    async def _offer(self, supervisor: Supervisor, turn: NextTurn, reply: str) -> None:
        await asyncio.sleep(SETTLE_S)
        if self._limits.n_requests:
            return
        try:
            text = await asyncio.to_thread(turn.text, reply)
        except Exception:
            log.exception("what the next turn begins with could not be worked out")
            return
        if text and not self._limits.n_requests:
            supervisor.tell(m.Prewarm(text, turn.add_special, turn.namespace, turn.session))
