"""After a reply, offers the engine what the next turn will begin with, for its idle time.

Only while no request runs: a busy server has no idle time, and a client in a tool loop continues at once. The engine
decides whether and when the text is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from everwarm.engine.process import messages as m
from everwarm.gateway.access.limits import AdmissionLimits
from everwarm.router.supervise.supervisor import Supervisor

log = logging.getLogger("everwarm.gateway")

SETTLE_S = 0.05


NextText = Callable[[], m.Prewarm | None]  # what the next prompt begins with


class NextTurnPrewarmer:
    def __init__(self, limits: AdmissionLimits, *, is_on: bool) -> None:
        self._limits = limits
        self._is_on = is_on
        self._tasks: dict[asyncio.Task[None], str] = {}  # with the namespaces they are for

    def offer(self, supervisor: Supervisor, submit: m.Submit, next_text: NextText) -> None:
        """``submit``: the request that was answered; ``next_text`` renders, so it runs on a thread."""
        if self._is_on:
            task = asyncio.create_task(self._offer(supervisor, submit, next_text))
            self._tasks[task] = submit.namespace
            task.add_done_callback(self._tasks.pop)

    def forget(self, namespace: str) -> None:
        """Cancels the offers of namespaces with this prefix."""
        for task in [task for task, own in self._tasks.items() if own.startswith(namespace)]:
            task.cancel()

    async def _offer(self, supervisor: Supervisor, submit: m.Submit, next_text: NextText) -> None:
        await asyncio.sleep(SETTLE_S)
        if self._limits.n_requests:
            return
        try:
            turn = await asyncio.to_thread(next_text)
        except Exception:
            log.exception("the beginning of the next turn could not be rendered")
            return
        if turn is not None and not self._limits.n_requests:
            own = {"add_special": submit.add_special, "namespace": submit.namespace, "session": submit.session}
            supervisor.tell(msgspec.structs.replace(turn, **own))
