"""Running a real agent to its end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def output_of(command: Sequence[str], work: Path, env: Mapping[str, str], timeout_s: float = 240) -> str:
    """What it prints. It has no input, and must end well."""
    ran = subprocess.run(
        list(command),
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
