"""A pass over many files on a thread of its own, which works half of the time until it is waited for.

Knows nothing of what is done to a file.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

log = logging.getLogger("everwarm.disk")

PAUSE_EVERY = 32  # files; afterwards the thread rests for as long as they took


class BackgroundPass:
    def __init__(self, names: Iterable[str], look: Callable[[str], None], end: Callable[[], None]) -> None:
        """``look`` is called for every name, then ``end``, unless the pass is stopped before. Both must not fail. The
        names are asked for on the thread, too."""
        self._names = names
        self._look = look
        self._end = end
        self._is_urgent = threading.Event()
        self._is_stopped = False
        self._has_looked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everwarm-reconcile", daemon=True)

    def start(self, head_start_s: float = 0.0) -> None:
        """Waits for so long, and does without pauses meanwhile: a short pass is over when this returns."""
        self._is_urgent.set()
        self._thread.start()
        self._thread.join(head_start_s)
        self._is_urgent.clear()

    @property
    def is_over(self) -> bool:
        return self._has_looked.is_set()

    def finish(self) -> None:
        """Waits until every file was looked at, without pauses from now on; not for ``end``."""
        self._is_urgent.set()
        self._has_looked.wait()

    def stop(self) -> None:
        """Ends the pass after the file that it is looking at, and waits for its thread."""
        self._is_stopped = True
        self._is_urgent.set()
        if self._thread.ident is not None:
            self._thread.join()

    def join(self) -> None:
        """Waits until the pass and its end are over."""
        self._is_urgent.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._look_at_all()
        except Exception:
            log.exception("not every file on disk could be looked at")
        self._has_looked.set()
        if not self._is_stopped:
            self._end()

    def _look_at_all(self) -> None:
        began = time.monotonic()
        for i, name in enumerate(self._names, start=1):
            if self._is_stopped:
                return
            self._look(name)
            if i % PAUSE_EVERY == 0:
                self._is_urgent.wait(time.monotonic() - began)
                began = time.monotonic()
