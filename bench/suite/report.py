"""Markdown and plots out of what was played. Pure: the same rows give the same files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from bench.suite.summary import Figures, Row, figures, percent, quantile, spread
from everwarm.simulate.plot import Axis, line_chart

Line = Mapping[str, Any]
SHARES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
MIB = 1 << 20


def files(about: Mapping[str, Any], lines: Sequence[Line], name: str) -> dict[str, str]:
    """Everything the report consists of, by file name."""
    return {
        f"{name}.md": _page(about, lines, name),
        f"{name}-regret.svg": _regret_plot(lines, about["servers"]),
        f"{name}-time.svg": _time_plot(lines, about["servers"]),
    }


def in_a_line(line: Line) -> str:
    found = {name: figures(rows) for name, rows in line["rows"].items()}
    return "; ".join(f"{name} {f.n_regret:,} of {f.n_avoidable:,}" for name, f in found.items())


def totals_table(lines: Sequence[Line], servers: Sequence[str]) -> str:
    """Over everything: the figures that are claimed, and their spread over seeds."""
    rows = [(server, *_totals(lines, server)) for server in servers]
    head = ("server", "avoidable", "regret", "%", "of which first divergences inside a message", "% without those")
    head += ("read ahead", "first token p50 ms", "p95 ms", "restore p50 ms", "prompt tokens/s")
    return _table(head, rows)


def _totals(lines: Sequence[Line], server: str) -> tuple[str, ...]:
    whole = figures(_rows(lines, server))
    seeds = sorted({line["seed"] for line in lines})
    each = [figures(_rows([line for line in lines if line["seed"] == seed], server)) for seed in seeds]
    return (
        f"{whole.n_avoidable:,}",
        f"{whole.n_regret:,}",
        spread([f.regret_percent for f in each], "{:.2f}"),
        f"{whole.n_regret_inside:,}",
        spread([f.else_percent for f in each], "{:.2f}"),
        f"{whole.n_ahead:,}",
        spread([f.ms_p50 for f in each]),
        spread([f.ms_p95 for f in each]),
        _or_dash([f.restore_ms_p50 for f in each if f.restore_ms_p50 is not None]),
        spread([f.prompt_tokens_per_s for f in each]),
    )


def _or_dash(values: Sequence[float]) -> str:
    return spread(values, "{:.2f}") if values else "–"


def _page(about: Mapping[str, Any], lines: Sequence[Line], name: str) -> str:
    servers = about["servers"]
    parts = [
        "# Benchmark suite: results",
        "`python -m bench suite` writes this page; do not edit it. [README](README.md) describes the method and defines "
        "the terms.",
        _machine(about, lines, name),
        "## All scenarios together",
        totals_table(lines, servers),
        f"![regret]({name}-regret.svg)",
        f"![time]({name}-time.svg)",
        "## By scenario",
        "For each server: regret in percent of the avoidable tokens, in parentheses without first divergences inside a "
        "message; then the median time to the first token in milliseconds.",
        _by_scenario(lines, servers),
        "## Memory and disk",
        "Values are medians over the scenarios, in MiB. *Grown* is resident memory at the end minus resident memory right "
        "after the start. *Peak* is the largest value of any scenario, summed over the server's processes. *Written* is "
        "the sum over all scenarios, as counted by the operating system.",
        _weights(lines, servers),
        "## Requests in which Everwarm prefilled known tokens again",
        _misses(lines),
    ]
    return "\n\n".join(parts) + "\n"


def _machine(about: Mapping[str, Any], lines: Sequence[Line], name: str) -> str:
    machine, versions, settings = about["machine"], about["versions"], about["settings"]
    options = " ".join(f"--{key} {settings[key]}" for key in ("size", "seeds", "ctx", "threads", "pause"))
    loads = [line["load"] for line in lines]
    rows = (
        ("machine", f"{machine['cores']} cores, {machine['cpu']}, {machine['arch']}, {machine['system']}"),
        ("versions", f"Everwarm {versions['everwarm']}, libllama {versions['libllama']}, Python {versions['python']}"),
        ("command", f"`python -m bench.suite {options}`"),
        ("load average", f"{spread(loads, '{:.1f}') if loads else '–'}; the benchmark adds about 1 {settings['note']}"),
        ("raw data", f"[data/{name}.jsonl](data/{name}.jsonl): every request of every server"),
    )
    return _table(("", ""), rows)


def _by_scenario(lines: Sequence[Line], servers: Sequence[str]) -> str:
    rows = []
    for number, scenario in enumerate(_scenarios(lines), 1):
        found = [figures(_rows(_of(lines, scenario), server)) for server in servers]
        shown = [cell for f in found for cell in (_share(f), f"{f.ms_p50:.0f}")]
        rows.append((number, scenario.replace("_", " "), found[0].n_requests, f"{found[0].n_avoidable:,}", *shown))
    head = ["", "scenario", "requests", "avoidable"]
    head += [cell for server in servers for cell in (f"{server} %", "ms")]
    return _table(head, rows)


def _share(found: Figures) -> str:
    return f"{found.regret_percent:.2f} ({found.else_percent:.2f})"


def _weights(lines: Sequence[Line], servers: Sequence[str]) -> str:
    rows = []
    for server in servers:
        weights = [line["weights"][server] for line in lines]
        grown = [(w["end"]["rss_bytes"] - w["empty"]["rss_bytes"]) / MIB for w in weights]
        peak = max((w["end"]["peak_bytes"] for w in weights), default=0) / MIB
        written = sum(w["end"]["written_bytes"] for w in weights) / MIB
        empty = [w["empty"]["rss_bytes"] / MIB for w in weights]
        shown = (spread(empty), spread(grown)) if weights else ("–", "–")
        rows.append((server, *shown, f"{peak:.0f}", f"{written:.0f}"))
    return _table(("server", "at the start", "grown", "peak", "written"), rows)


def _misses(lines: Sequence[Line]) -> str:
    """Every request with a reason for what was read again, largest first."""
    rows = [(line, i, row) for line in lines for i, row in enumerate(line["rows"].get("Everwarm", ())) if "why" in row]
    rows.sort(key=lambda each: -each[2]["regret"])
    shown = [
        (
            f"{line['scenario'].replace('_', ' ')}, seed {line['seed']}, request {i + 1}",
            row["regret"],
            "yes" if row["is_first_inside"] else "**no**",
            row["why"]["again"] or row["why"]["reason"],
            f"{row['n_known']} / {row['why']['n_kv']} / {row['why']['n_checkpoint']}",
            row["why"]["checkpoint"] or "–",
        )
        for line, i, row in rows[:40]
    ]
    head = ("request", "tokens", "first divergence inside a message", "reason", "known / KV / state", "continued from")
    rest = "" if len(rows) <= 40 else f"\n\n… and {len(rows) - 40} smaller ones in the raw data."
    return (_table(head, shown) + rest) if shown else "In no request were more than 16 known tokens prefilled again."


def _regret_plot(lines: Sequence[Line], servers: Sequence[str]) -> str:
    names = _scenarios(lines)
    avoidable = figures(_rows(lines, servers[0])).n_avoidable if lines else 0
    found = {}
    for server in servers:
        each = [figures(_rows(_of(lines, scenario), server)).n_regret for scenario in names]
        points = enumerate(itertools.accumulate(each), 1)
        found[server] = [(float(i), percent(n, avoidable)) for i, n in points]
    x, y = Axis("scenarios played, numbers as in the table"), Axis("% of all avoidable tokens read again, summed up")
    return line_chart("What had been read before and was read again", x, y, found)


def _time_plot(lines: Sequence[Line], servers: Sequence[str]) -> str:
    found = {}
    for server in servers:
        times = [row["ms"] for row in _rows(lines, server) if not row["cancelled"]]
        found[server] = [(100 * share, max(0.1, quantile(times, share))) for share in SHARES] if times else []
    x, y = Axis("% of requests that are answered sooner"), Axis("ms to the first token", is_log=True)
    return line_chart("Time to the first token", x, y, found)


def _scenarios(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["scenario"] for line in lines))


def _of(lines: Sequence[Line], scenario: str) -> list[Line]:
    return [line for line in lines if line["scenario"] == scenario]


def _rows(lines: Sequence[Line], server: str) -> list[Row]:
    return [row for line in lines for row in line["rows"].get(server, ())]


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(text + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])
