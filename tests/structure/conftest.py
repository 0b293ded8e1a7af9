"""The source as syntax trees, read once; and made-up packages, to show that each rule refuses what breaks it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from support.source_tree import Package, read

MakePackage = Callable[[dict[str, str]], Package]


@pytest.fixture(scope="session")
def everwarm() -> Package:
    return read(Path(__file__).parents[2] / "src" / "everwarm")


@pytest.fixture
def make_package(tmp_path: Path) -> MakePackage:
    """``make_package({"a/b.py": source})``: a package ``made`` of these files, with an ``__init__`` in every folder."""

    def make(files: dict[str, str]) -> Package:
        root = tmp_path / "made"
        for name, source in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
            if not (folder / "__init__.py").exists():
                (folder / "__init__.py").write_text('"""A folder."""\n')
        return read(root)

    return make
