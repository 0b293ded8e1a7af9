"""After a reply, renders what the next turn will begin with and offers it to the engine for its idle time.

Only while no request runs: a busy server has no idle time, and a client in a tool loop continues at once. Knows
templates and replies; the engine decides whether and when the text is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from everwarm.engine.process import messages as m
from everwarm.gateway.access.limits import AdmissionLimits
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.prepare import PreparedChat
from everwarm.gateway.parsing.output_parser import OutputParser
from everwarm.router.supervise.supervisor import Supervisor

log = logging.getLogger("everwarm.gateway")

SETTLE_S = 0.05


@dataclass(frozen=True, slots=True)
class NextTurn:
    """A conversation that may continue after its reply."""

    chat: PreparedChat
    template: ChatTemplate
    parser: Callable[[], OutputParser]
    namespace: str
    session: str | None

    def text(self, reply: str) -> str | None:
        """What the next turn will begin with; None: it is not known."""
        return self.chat.next_text(self.template, self.parser().message(reply))


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
        """Cancels the offers of namespaces with this prefix."""
        for task in [task for task, own in self._tasks.items() if own.startswith(namespace)]:
            task.cancel()

    async def _offer(self, supervisor: Supervisor, turn: NextTurn, reply: str) -> None:
        await asyncio.sleep(SETTLE_S)
        if self._limits.n_requests:
            return
        try:
            text = await asyncio.to_thread(turn.text, reply)
        except Exception:
            log.exception("the beginning of the next turn could not be rendered")
            return
        if text and not self._limits.n_requests:
            supervisor.tell(m.Prewarm(text, turn.chat.add_special, turn.namespace, turn.session))
