"""The Python interpreters of this machine that Everwarm supports."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

OLDEST = 11


def supported_interpreters() -> list[str]:
    """One interpreter for each version from 3.11 on, by version: on PATH, and where pyenv and uv install them."""
    found: dict[int, str] = {}
    for path in _candidates():
        minor = _minor(path)
        if minor is not None and minor >= OLDEST:
            found.setdefault(minor, path)
    return [found[minor] for minor in sorted(found)]


def _candidates() -> Iterator[str]:
    names = ["python3", *(f"python3.{minor}" for minor in range(OLDEST, OLDEST + 10))]
    yield from filter(None, map(shutil.which, names))
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
    uv = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "uv" / "python"
    for folder in (pyenv / "versions", uv):
        yield from map(str, sorted(folder.glob("*/bin/python3")))


def _minor(path: str) -> int | None:
    """A shim of pyenv may lead nowhere, and a package of the system may lack ``venv``."""
    code = "import sys, venv, ensurepip; print(sys.version_info[:2])"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    version = re.fullmatch(r"\(3, (\d+)\)\s*", done.stdout)
    return int(version[1]) if done.returncode == 0 and version else None
