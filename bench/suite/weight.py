"""What a process and its children hold and have written, as the system counts it (Linux)."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Weight:
    rss_bytes: int
    peak_bytes: int
    written_bytes: int

    def after(self, earlier: Weight) -> Weight:
        """Of a process that took another one's place."""
        peak, written = max(self.peak_bytes, earlier.peak_bytes), self.written_bytes + earlier.written_bytes
        return Weight(self.rss_bytes, peak, written)


NOTHING = Weight(0, 0, 0)


def weigh(pid: int) -> Weight:
    """All of a family. Its peak is the sum of its members' peaks: never too low."""
    all_of_it = [_one(each) for each in _family(pid)]
    return Weight(*(sum(values) for values in zip(*all_of_it, strict=True))) if all_of_it else NOTHING


def _family(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found


def _one(pid: int) -> tuple[int, int, int]:
    status = io = ""
    with contextlib.suppress(OSError):  # it may be gone
        status = Path(f"/proc/{pid}/status").read_text()
        io = Path(f"/proc/{pid}/io").read_text()
    return 1024 * _number("VmRSS", status), 1024 * _number("VmHWM", status), _number("write_bytes", io)


def _number(name: str, text: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0
