"""The newest texts of a namespace that are on disk, for drafts: so that a reply is drafted from them also after a restart.

They are read on the disk's thread, never waited for, and read again once in a while when the disk has changed. Knows tokens
and names; decides nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.state.lineage import root_key, short_key
from everwarm.state.namespace import is_volatile

MOST_TOKENS = 1 << 15  # of a namespace, 4 bytes each
MOST_NAMESPACES = 16
RENEW_S = 60.0  # between two readings; after something was erased, before the next
GAP = np.array([-1], np.int32)  # between texts: no token is equal to it


@dataclass(frozen=True, slots=True)
class _Texts:
    tokens: NDArray[np.int32]
    version: int  # of the disk when they were asked for
    asked_at: float


class DiskTexts:
    def __init__(self, tiers: LowerTiers) -> None:
        self._tiers = tiers
        self._texts: dict[str, _Texts] = {}  # by namespace, the one that was asked for first at the beginning
        self._lock = threading.Lock()
        self._n_forgotten = 0
        self._not_before = 0.0

    def of(self, namespace: str) -> NDArray[np.int32]:
        """What is known of them now, the newest last."""
        known = self._texts.get(namespace)
        if self._is_due(namespace, known):
            self._ask(namespace, GAP if known is None else known.tokens)
        return GAP if known is None else known.tokens

    def _is_due(self, namespace: str, known: _Texts | None) -> bool:
        now = time.monotonic()
        if now < self._not_before or not self._tiers.disk.is_on or is_volatile(namespace):
            return False
        return known is None or (known.version != self._tiers.disk.version and now - known.asked_at >= RENEW_S)

    def _ask(self, namespace: str, tokens: NDArray[np.int32]) -> None:
        asked = _Texts(tokens, self._tiers.disk.version, time.monotonic())
        with self._lock:
            self._texts[namespace] = asked
            while len(self._texts) > MOST_NAMESPACES:
                del self._texts[next(iter(self._texts))]
        self._tiers.after_all(partial(self._read, namespace, asked, self._n_forgotten))

    def _read(self, namespace: str, asked: _Texts, n_forgotten: int) -> None:
        """Runs on the disk's thread."""
        space = short_key(root_key(self._tiers.fingerprint, namespace))
        parts = [part for text in self._tiers.disk.newest_texts(space, MOST_TOKENS) for part in (GAP, text)]
        tokens = np.concatenate(parts[::-1]) if parts else GAP
        with self._lock:
            if n_forgotten == self._n_forgotten and namespace in self._texts:
                self._texts[namespace] = _Texts(tokens, asked.version, asked.asked_at)

    def forget(self) -> None:
        """Texts were erased: what is known is forgotten, and what is being read now does not count."""
        with self._lock:
            self._n_forgotten += 1
            self._not_before = time.monotonic() + RENEW_S
            self._texts.clear()
