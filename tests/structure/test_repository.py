"""What is committed: no package index, no path of a machine, and every requirement with its hash."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_no_package_index_or_machine_path_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    forbidden = re.compile("(--(extra-)?index" + r"-url|file:///(opt|root|home)|/(root|home)/\w+/)")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".gguf", ".png"} or not path.is_file() or path == Path(__file__):
            continue
        assert not forbidden.search(path.read_text(errors="replace")), f"{name} names a package index or a machine path"


def test_the_lock_pins_everything_with_hashes() -> None:
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line and not line.startswith((" ", "#")):
            assert "==" in line and line.endswith("\\"), f"{line!r} is not pinned with a hash"
