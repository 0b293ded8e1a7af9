"""A thread around a ``Core``: jobs go in, events come out, idle time is used to tidy up.

The thread that runs the loop is the only one that touches the core. All others post jobs, or read ``status``, which the
core publishes as an immutable value. Knows no sockets and no callers; the owner of the loop says where events go.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from everwarm.engine.core import Core
from everwarm.engine.process.messages import Beat
from everwarm.engine.request import Event

REST_S = 0.01  # before idle work: a request right after an answer does not wait for a piece of it

Job = Callable[[Core], None]
Deliver = Callable[[list[Event]], None]


class Loop:
    def __init__(
        self, core: Core, deliver: Deliver, rest_s: float = REST_S, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """``meanwhile`` does without the core. It is called while a GPU computes a step, before each job and at the end."""
        self.core = core
        self._meanwhile = meanwhile
        self.thread = threading.current_thread()  # ``start`` makes it on the thread that runs it
        self._rest_s = rest_s
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._step_began: float | None = None
        self._rests_until = 0.0

    def post(self, job: Job) -> None:
        """Run ``job`` on the loop's thread, between two steps."""
        self._inbox.put(job)

    def stop(self) -> None:
        """Leave the loop after the current step."""
        self._inbox.put(None)

    @property
    def status(self) -> Beat:
        """Of the core alone, at most a step or a tenth of a second old; safe to ask from any thread."""
        return self.core.status

    def step_age_s(self) -> float | None:
        """How long the step that is running now has been running; safe to ask from any thread."""
        began = self._step_began
        return None if began is None else time.monotonic() - began

    def run(self) -> None:
        """Runs until ``stop``. Raises what a step raises."""
        try:
            self._run()
        finally:
            self._meanwhile()

    def _run(self) -> None:
        while self._take_jobs():
            if self.core.has_work:
                self._step_began = time.monotonic()
                self._deliver(self.core.step(self._meanwhile))
                self.core.keep_ends()
                self.core.tidy_overdue()
                self._step_began = None
                self._rest()

    def run_leftovers(self) -> None:
        """Run jobs that came too late, so that no caller waits for an answer for ever."""
        while not self._inbox.empty():
            job = self._inbox.get()
            if job is not None:
                job(self.core)

    def _take_jobs(self) -> bool:
        """Run what is in the inbox, but not what these jobs post: that waits for a step. Wait for a job only when there is
        nothing else to do. False: stop."""
        rest_s = self._rests_until - time.monotonic()
        if not self.core.has_work and (rest_s > 0 or not self.core.tidy()):
            try:
                job = self._inbox.get(timeout=rest_s if rest_s > 0 else self.core.nap_s)
            except queue.Empty:
                return True
            if not self._run_job(job):
                return False
        return all(self._run_job(self._inbox.get()) for _ in range(self._inbox.qsize()))

    def _run_job(self, job: Job | None) -> bool:
        if job is not None:
            self._meanwhile()  # the job may take long
            job(self.core)
            self._rest()
        return job is not None

    def _rest(self) -> None:
        self._rests_until = time.monotonic() + self._rest_s


def start(open_core: Callable[[], Core], deliver: Deliver, ended: Callable[[BaseException | None], None]) -> Loop:
    """Open a core and run its loop on one new thread; returns when it is open, or raises what opening raised.

    One thread does both because OpenMP gives every thread that computes a team of its own, and more teams than cores wait
    for each other the slow way. ``ended`` is called on that thread with what ended the loop.
    """
    opened: queue.SimpleQueue[Loop | BaseException] = queue.SimpleQueue()

    def body() -> None:
        try:
            loop = Loop(open_core(), deliver)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            return opened.put(error)
        opened.put(loop)
        try:
            loop.run()
        except BaseException as error:  # noqa: BLE001 - all that wait must get it
            ended(error)
        else:
            ended(None)
        loop.run_leftovers()

    threading.Thread(target=body, name="everwarm-engine", daemon=True).start()
    got = opened.get()
    if isinstance(got, BaseException):
        raise got
    return got
