"""What a sweep says, as a Markdown table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from everwarm.simulate.replay import Cost

_HEAD = ("policy", "budget", "read", "regret", "hit rate", "seconds", "held", "written")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def markdown(costs: Sequence[Cost]) -> str:
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, costs)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(cost: Cost) -> tuple[str, ...]:
    return (
        cost.policy,
        size_text(cost.budget_bytes),
        f"{cost.n_read:,}",
        f"{cost.n_regret:,}",
        f"{100 * cost.hit_rate:.1f} %",
        f"{cost.seconds:,.1f}",
        size_text(cost.most_bytes),
        size_text(cost.written_bytes),
    )


def size_text(n_bytes: float) -> str:
    unit = 0
    while n_bytes >= 1024 and unit < len(_UNITS) - 1:
        n_bytes, unit = n_bytes / 1024, unit + 1
    return f"{n_bytes:.4g} {_UNITS[unit]}"
