"""Benchmarks and the generator of the docs use only what is there: most of them run seldom."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def missing(source: str) -> Iterator[str]:
    """What a file imports from the package and is not there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "everwarm":
            yield from (f"{node.module}.{each.name}" for each in node.names if not exists(node.module or "", each.name))


def exists(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
        return hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("everwarm")  # an extra that is not installed


@pytest.mark.parametrize("folder", ["bench", "docs", "deploy"])
def test_what_scripts_import_is_there(folder: str):
    files = sorted((ROOT / folder).rglob("*.py"))
    found = {path.relative_to(ROOT).as_posix(): list(missing(path.read_text())) for path in files}
    assert {name: names for name, names in found.items() if names} == {}


def test_what_is_not_there_is_found():
    source = "from everwarm.state import tree, nothing\ndef f():\n    from everwarm.nowhere import x\n"
    assert list(missing(source)) == ["everwarm.state.nothing", "everwarm.nowhere.x"]
