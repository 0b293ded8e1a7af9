"""Work that must be done before a request can be queued, and may take seconds: off the thread that reads frames.

Constraints that were not tried yet and long texts wait here for one of a few threads. Namespaces take turns, so a client
that sends many waits for its own; the number that wait is bounded, and a request that is cancelled leaves. Knows only the
numbers of requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from everwarm.errors import Overloaded

Work = Callable[[], Callable[[], None] | None]  # what it returns is called at the end, unless it was cancelled


@dataclass(slots=True, eq=False)
class Task:
    """Something to be prepared, by the number of the request that needs it."""

    id: int
    work: Work
    is_cancelled: bool = False


@dataclass(slots=True)
class RoundRobin:
    """Waiting tasks. The namespaces take turns; the tasks of each keep their order."""

    max_waiting: int
    max_waiting_each: int
    _waiting: dict[str, deque[Task]] = field(default_factory=dict)  # the first namespace is the next one
    n_waiting: int = 0

    def add(self, namespace: str, task: Task) -> None:
        """Or ``Overloaded``."""
        own = self._waiting.get(namespace, ())
        if self.n_waiting >= self.max_waiting or len(own) >= self.max_waiting_each:
            raise Overloaded(
                f"{len(own)} schemas, grammars or long prompts of yours and {self.n_waiting} of all clients wait to be "
                f"prepared; at most {self.max_waiting_each} and {self.max_waiting} may, try again later"
            )
        self._waiting.setdefault(namespace, deque()).append(task)
        self.n_waiting += 1

    def next(self) -> Task | None:
        if not self._waiting:
            return None
        namespace = next(iter(self._waiting))
        own = self._waiting.pop(namespace)
        task = own.popleft()
        if own:
            self._waiting[namespace] = own  # behind all others
        self.n_waiting -= 1
        return task

    def remove(self, id: int) -> bool:
        for namespace, own in self._waiting.items():
            for task in own:
                if task.id == id:
                    own.remove(task)
                    self.n_waiting -= 1
                    if not own:
                        del self._waiting[namespace]
                    return True
        return False


class Preparing:
    """A few threads and what waits for them."""

    def __init__(self, name: str, n_threads: int = 2, max_waiting: int = 256, max_waiting_each: int = 128) -> None:
        self._turns = RoundRobin(max_waiting, max_waiting_each)
        self._running: dict[int, Task] = {}  # by the request's number
        self._changed = threading.Condition()
        self._name, self._n_threads = name, n_threads
        self._threads: list[threading.Thread] = []

    def add(self, id: int, namespace: str, work: Work) -> None:
        """``Overloaded`` if too many wait already. ``work`` must not raise."""
        with self._changed:
            self._turns.add(namespace, Task(id, work))
            if len(self._threads) < self._n_threads:
                thread = threading.Thread(target=self._run, name=f"everwarm-{self._name}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def cancel(self, id: int) -> bool:
        """Whether the task was here. If so it is removed; one that is already running finishes without effect."""
        with self._changed:
            task = self._running.get(id)
            if task is not None:
                task.is_cancelled = True
            return task is not None or self._turns.remove(id)

    def _run(self) -> None:
        while True:
            with self._changed:
                while (task := self._turns.next()) is None:
                    self._changed.wait()
                self._running[task.id] = task
            end = task.work()
            with self._changed:  # a cancel comes before this or finds what ``end`` has done
                del self._running[task.id]
                if end is not None and not task.is_cancelled:
                    end()
            del task, end  # their prompts
