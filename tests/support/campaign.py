"""The long form of the tests, and how the short form chooses among combinations of parameters."""

import itertools
import os
from collections.abc import Sequence
from typing import Any

from hypothesis import settings

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))


def crossed(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows for ``pytest.mark.parametrize``: in a campaign every combination, otherwise so many that every two values of
    two columns meet in one of them."""
    rows = list(itertools.product(*columns))
    if CAMPAIGN:
        return rows
    missing: set[tuple[Any, ...]] = set().union(*map(_pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return sorted(chosen, key=rows.index)


def _pairs(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(enumerate(row), 2))


def by_chance(short: int, long: int) -> settings:
    """So many examples by Hypothesis, and so many in a campaign."""
    return settings(max_examples=long if CAMPAIGN else short, deadline=None)
