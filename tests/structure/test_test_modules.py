"""The shape of the tests: what several of them use lies in `support`, so that a test module can be read by itself."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import campaign

TESTS = Path(__file__).parents[1]
MODULES = sorted(TESTS.rglob("*.py"))


def imported(source: str) -> Iterator[str]:
    """Every dotted name that is imported, with what is taken from it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def among_tests(names: Iterator[str]) -> list[str]:
    return [name for name in names if any(part.startswith("test_") for part in name.split(".")[-2:])]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_module_imports_a_test_module(path: Path) -> None:
    assert not among_tests(imported(path.read_text()))


@pytest.mark.parametrize(
    "line", ["from engine.test_core import run", "from engine import test_core", "import a.test_b"]
)
def test_such_an_import_would_be_seen(line: str) -> None:
    assert among_tests(imported(line))


@pytest.mark.parametrize("columns", [("ab", "cd"), ("abc", "de", "fg"), ("abcdefghi", "jk", "lm", "nop")])
def test_in_crossed_rows_every_two_values_meet(columns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(itertools.product(*columns))
    monkeypatch.setattr(campaign, "CAMPAIGN", False)
    rows = campaign.crossed(*columns)
    for (i, one), (j, other) in itertools.combinations(enumerate(columns), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(one, other))
    assert set(rows) <= set(every) and (len(columns) < 3 or len(rows) < len(every))
    monkeypatch.setattr(campaign, "CAMPAIGN", True)
    assert campaign.crossed(*columns) == every
