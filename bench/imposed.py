"""A reply that is imposed, whatever the model says; and the processor time of a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from bench.peer import Peer


class Imposed:
    """In place of a sampler: says a given text, whatever the logits are."""

    matcher = None
    may_pick_ahead = False
    reply: ClassVar[list[int]] = []  # of the only request that runs

    def __init__(self, *_args: object, **_more: object) -> None:
        self._left = list(self.reply[::-1])

    def pick(self, *_args: object) -> int:
        return self._left.pop()

    pick_from = pick

    def forget_ahead(self) -> None:
        pass

    def close(self) -> None:
        pass


def cpu_s(peer: Peer) -> float:
    fields = Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
