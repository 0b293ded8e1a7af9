"""A real cgroup with a memory limit, for tests that need the kernel's own judgement."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def real_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A cgroup of this machine's own, below the one we are in; skips where none can be made."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    v1_base, v2_base = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    is_v1 = "memory" in own and v1_base.is_dir()
    base = v1_base / own["memory"].lstrip("/") if is_v1 else v2_base / own.get("", "/").lstrip("/")
    made = base / f"everwarm-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {base}: {error}")
    try:
        try:
            (made / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"memory cannot be limited in {made}: {error}")
        yield made
    finally:
        for pid in (made / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        made.rmdir()
