"""What other threads may know of a core: immutable values, published by the loop's thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from everwarm.engine.inspect.stats import RequestStats
from everwarm.engine.process.messages import Backlog
from everwarm.engine.scheduling.admission import backlog_of
from everwarm.engine.scheduling.request_queue import RequestQueue
from everwarm.engine.slots import Slot
from everwarm.engine.speed import Speed
from everwarm.state.tree import Tree

STATUS_S = 0.1  # between two published statuses while steps run


class CoreStatus(NamedTuple):
    n_running: int  # without what is read ahead
    n_queued: int
    tree_version: int
    backlog: Backlog


class StatusBoard:
    def __init__(
        self, slots: Sequence[Slot], queue: RequestQueue, tree: Tree, speed: Speed, counts: RequestStats
    ) -> None:
        self._slots = slots
        self._queue = queue
        self._tree = tree
        self._speed = speed
        self._counts = counts
        self.is_old = False  # a request has come, started or ended since
        self.publish()

    @property
    def is_due(self) -> bool:
        return self.is_old or time.monotonic() >= self._due_at

    def note_change(self) -> None:
        self.is_old = True

    def publish(self) -> None:
        running = [request for slot in self._slots if (request := slot.request) is not None]
        self.status = CoreStatus(
            n_running=sum(not request.ask.ahead for request in running),
            n_queued=len(self._queue),
            tree_version=self._tree.version,
            backlog=backlog_of(self._slots, self._queue, self._speed, self._counts.new_share),
        )
        self._due_at = time.monotonic() + STATUS_S
        self.is_old = False
