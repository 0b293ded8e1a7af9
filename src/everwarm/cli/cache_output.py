"""The output of ``everwarm cache``: facts for JSON, and text for people.

Text from files is shown without control characters that a terminal would obey.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from everwarm.config import size_text
from everwarm.types import Json

if TYPE_CHECKING:  # what other commands take from here needs none of these
    from everwarm.engine.verify import Report
    from everwarm.gateway.client import Client
    from everwarm.state.tools.inventory import Folder, Inspected, Lineage

SHORT_KEY = 12
_MOST_SHOWN = 50

Facts = dict[str, Any]
_TITLES = ("key", "tokens", "size", "shared", "tier", "last use", "hits", "saves")
_COLUMNS = "{:<12} {:>9} {:>10} {:>10} {:>5} {:>9} {:>5} {:>9}"
PAGE = 1000


def readable(text: str) -> str:
    return "".join(c if c.isprintable() else "·" for c in text)


def _time_text(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _when(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""


# ls


def folder_facts(folder: Folder) -> Facts:
    about = folder.about
    return {
        "folder": folder.path.name,
        "model": "" if about is None else about.model,
        "path": "" if about is None else about.path,
        "description": "" if about is None else about.description,
        "fingerprint": folder.fingerprint,
        "seconds_per_token": None if about is None else about.seconds_per_token,
        "n_objects": len(folder.objects),
        "n_bytes": folder.n_bytes,
        "n_broken": len(folder.broken),
        "n_quarantined": len(folder.quarantined()),
        "states": [_state_facts(lineage) for lineage in folder.lineages()],
    }


def _state_facts(lineage: Lineage) -> Facts:
    state = lineage.state
    head = lineage.state.header
    return {
        "name": state.name,
        "words": head.words,
        "n_tokens": head.n_items,
        "n_bytes": lineage.n_bytes,
        "n_bytes_shared": lineage.n_bytes_shared,
        "tier": "disk",
        "used_at": _when(state.used_at),
        "hits": state.hits,
        "seconds_saved": lineage.seconds_saved,
        "clean": head.clean,
        "cut": head.cut,
        "is_whole": not lineage.missing,
    }


def print_folder(console: Console, folder: Folder, now: float) -> None:
    about = folder.about
    speed = about.seconds_per_token if about is not None else None
    parts = [readable(about.description)] if about is not None and about.description else []
    parts += [f"{len(folder.objects)} objects", size_text(folder.n_bytes)]
    parts += [f"{1 / speed:,.0f} tokens/s"] if speed else ["speed not measured yet"]
    parts += [f"{len(folder.broken)} damaged"] if folder.broken else []
    parts += [f"{n} in quarantine"] if (n := len(folder.quarantined())) else []
    console.print(Text(readable(folder.title), "bold"), Text(f"{folder.path.name} · {' · '.join(parts)}"))
    if lineages := folder.lineages():
        console.print(Text(_COLUMNS.format(*_TITLES), "dim"), soft_wrap=True)
    for lineage in lineages:
        console.print(Text(_COLUMNS.format(*_cells(lineage, now))), soft_wrap=True)
        words = Text("    " + readable(lineage.state.header.words or "(no words)"), "dim")
        words.truncate(console.width, overflow="ellipsis")
        console.print(words, soft_wrap=True)
    console.print()


def _cells(lineage: Lineage, now: float) -> tuple[str, ...]:
    state = lineage.state
    saved = "?" if lineage.seconds_saved is None else _time_text(lineage.seconds_saved)
    return (
        readable(state.header.key[:SHORT_KEY]),
        f"{state.header.n_items:,}",
        size_text(lineage.n_bytes),
        size_text(lineage.n_bytes_shared) if lineage.n_bytes_shared else "-",
        "disk",
        _time_text(max(0.0, now - state.used_at)),
        str(state.hits),
        "not whole" if lineage.missing else saved,
    )


# show


def object_facts(found: Inspected) -> Facts:
    head = found.header
    facts: Facts = {
        "name": found.path.name,
        "kind": head.kind,
        "is_whole": found.is_whole,
        "n_bytes": found.size,
        "words": head.words,
        "n_tokens": head.n_items,
        "n_start": head.n_start,
        "key": head.key,
        "start": head.start,
        "fingerprint": head.fingerprint,
        "space": head.space,
        "cut": head.cut,
        "clean": head.clean,
        "chunks": [f"{size}×{times}" for size, times in head.chunks or ()],
        "needs": [
            {"name": need, "up_to": reach, "trouble": trouble}
            for (need, trouble), reach in zip(found.needs.items(), _reaches(found), strict=False)
        ],
        "sections": [
            {"name": s.name, "n_bytes": s.length, "blake3": s.blake3, "trouble": found.damaged.get(s.name, "")}
            for s in head.sections
        ],
    }
    if head.kind == "slot":
        facts["main"] = head.main
        facts["points"] = [{"n_tokens": p.n_items, "cut": p.cut, "clean": p.clean} for p in head.points]
    return facts


def _reaches(found: Inspected) -> tuple[int, ...]:
    head = found.header
    return head.reaches if len(head.reaches) == len(found.needs) else (head.n_items,) * len(found.needs)


def print_facts(console: Console, facts: Facts) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if shown := _shown(value):
            table.add_row(Text(name.replace("_", " ")), Text(shown))
    console.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, list):
        return readable(str(value))
    lines = [readable(_line(item)) for item in value[:_MOST_SHOWN]]
    lines += [f"… and {len(value) - _MOST_SHOWN} more"] if len(value) > _MOST_SHOWN else []
    return ("\n" if any(isinstance(item, dict) for item in value) else " ").join(lines)


def _line(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    fields = ", ".join(f"{n.replace('_', ' ')} {value}" for n, value in item.items() if n not in ("name", "trouble"))
    verdict = f" — {item['trouble'] or 'whole'}" if "trouble" in item else ""
    return f"{item.get('name', '')} {fields}{verdict}".strip()


# verify


def report_facts(report: Report) -> Facts:
    return {
        "folder": report.folder.path.name,
        "model": report.folder.title,
        "n_objects": len(report.folder.objects) + len(report.folder.broken),
        "damaged": [{"name": broken.path.name, "why": str(broken.why)} for broken in report.broken],
        "replayed": [{"name": f.name, "verdict": f.verdict, "spread": f.spread, "why": f.why} for f in report.findings],
        "not_replayed": report.not_replayed,
        "n_left": report.n_left,
        "quarantined": [] if report.not_put_aside else list(report.wrong),
        "is_well": report.is_well,
    }


def _spread_text(spread: float | None) -> str:
    if spread is None:
        return ""
    return f": logits differ by up to {spread:.3g}" if spread else ": the same logits"


def print_report(console: Console, report: Report) -> None:
    folder = report.folder
    n_good = len(folder.objects) + len(folder.broken) - len(report.broken)
    lines = [f"{n_good} objects are what was written"]
    lines += [f"damaged: {broken.path.name}: {broken.why}" for broken in report.broken]
    n_exact = sum(finding.verdict == "exact" for finding in report.findings)
    lines += [f"{n_exact} objects have the bytes of a cold reading"] if n_exact else []
    for finding in report.findings:
        spread = _spread_text(finding.spread)
        if finding.verdict == "close":
            lines.append(f"{finding.why or 'not clean'}: {finding.name}{spread}")
        elif finding.verdict != "exact":
            lines.append(f"{finding.verdict}: {finding.name}{spread}{': ' * bool(finding.why)}{finding.why}")
    lines += [f"no state was read again: {report.not_replayed}"] if report.not_replayed else []
    lines += [f"{report.n_left} more states were not read again"] if report.n_left and not report.not_replayed else []
    if report.not_put_aside:
        lines.append(f"reported but not quarantined: {report.not_put_aside}")
    elif report.wrong:
        lines.append(f"{len(report.wrong)} objects were moved to {folder.path.name}/quarantine")
    console.print(Text(readable(folder.title), "bold"), Text(folder.path.name))
    for line in lines:
        console.print(Text("  " + readable(line)), soft_wrap=True)


Need = tuple[str, int]  # KV by name, and how far of it is used


# of a running server


def live_nodes(server: Client, model: str | None, limit: int) -> tuple[list[Json], int]:
    """The first ``limit`` nodes of the tree, and how many it has."""
    found: list[Json] = []
    after = None
    while True:
        page = server.get("/cache/tree", model=model, after=after, limit=min(PAGE, limit - len(found)))
        found += page["nodes"]
        after = page["next"]
        if after is None or len(found) >= limit:
            return found, page["n_total"]


def live_tree(nodes: Iterable[Json], title: str) -> Tree:
    top = Tree(Text(readable(title), "bold"))
    branches: dict[int | None, Tree] = {None: top}
    for node in nodes:
        above = branches.get(node["parent"], top)  # the tree may have changed between two pages
        branches[node["id"]] = above.add(_node(node))
    return top


def _node(node: Json) -> Text:
    if node["parent"] is None:
        return Text(f"namespace {readable(node['namespace']) or 'none'}", "dim")
    text = Text(f"{node['start']:,}–{node['end']:,}")
    checkpoint = node["checkpoint"]
    kv = node["kv"]
    if checkpoint is not None:
        where = "+".join(checkpoint["tiers"]) or "nowhere"
        text.append(f"  {checkpoint['kind']} ({where}, {size_text(checkpoint['bytes'])})", "green")
    if kv["tiers"]:
        text.append(f"  kv {'+'.join(kv['tiers'])} {size_text(kv['bytes'])}", "cyan")
    if node["hits"]:
        text.append(f"  {node['hits']} hits")
    if node["pinned"]:
        text.append("  pinned", "magenta")
    if node["running"] is not None:
        text.append(f"  running at {node['running']['at']:,} of {node['running']['n_prompt']:,}", "yellow")
    if node["words"]:
        text.append(f"  {readable(node['words'])}", "dim")
    return text


# of a folder on disk


def stored_tree(folder: Folder) -> Tree:
    top = Tree(Text.assemble((readable(folder.title), "bold"), f" {folder.path.name}"))
    branches: dict[tuple[Need, ...], Tree] = {(): top}
    for lineage in sorted(folder.lineages(), key=lambda each: (_needs(each), each.state.header.n_items)):
        _branch(branches, _needs(lineage), folder).add(_state(lineage))
    return top


def _needs(lineage: Lineage) -> tuple[Need, ...]:
    head = lineage.state.header
    reaches = head.reaches if len(head.reaches) == len(head.needs) else (head.n_items,) * len(head.needs)
    return tuple(zip(head.needs, reaches, strict=True))


def _branch(branches: dict[tuple[Need, ...], Tree], needs: tuple[Need, ...], folder: Folder) -> Tree:
    """The branch of the object that needs this KV, made with all branches above it."""
    above = branches[()]
    for n in range(1, len(needs) + 1):
        if needs[:n] not in branches:
            name, reach = needs[n - 1]
            kv = folder.objects.get(name)
            label = "missing" if kv is None else f"{kv.header.n_start:,}–{reach:,}  kv {size_text(kv.size)}"
            branches[needs[:n]] = above.add(Text(label, "red" if kv is None else "cyan"))
        above = branches[needs[:n]]
    return above


def _state(lineage: Lineage) -> Text:
    state = lineage.state
    text = Text(f"{readable(state.header.key[:SHORT_KEY])}  {state.header.n_items:,} tokens")
    text.append(f"  {readable(state.header.cut) or 'kv'} ({size_text(state.size)}, {state.hits} hits)", "green")
    if lineage.missing:
        text.append("  not whole", "red")
    if state.header.words:
        text.append(f"  {readable(state.header.words)}", "dim")
    return text
