"""``everwarm cache tree``: the prefixes that are kept, as a tree; of a running server, or of what lies on disk.

On disk a state says which KV it needs, so states that need the same KV share a beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.text import Text
from rich.tree import Tree

from everwarm.cli.cache_output import SHORT_KEY, readable, size_text
from everwarm.gateway.client import Inquiry
from everwarm.state.tools.inventory import Folder, Lineage

Json = dict[str, Any]
Need = tuple[str, int]  # KV by name, and how far of it is used

PAGE = 1000


# of a running server


def live_nodes(server: Inquiry, model: str | None, limit: int) -> tuple[list[Json], int]:
    """At most so many nodes, and how many there are."""
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
    checkpoint, kv = node["checkpoint"], node["kv"]
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
    """The place of whatever needs this KV, with everything on the way there."""
    above = branches[()]
    for n in range(1, len(needs) + 1):
        if needs[:n] not in branches:
            name, reach = needs[n - 1]
            kv = folder.objects.get(name)
            said = "missing" if kv is None else f"{kv.header.n_start:,}–{reach:,}  kv {size_text(kv.size)}"
            branches[needs[:n]] = above.add(Text(said, "red" if kv is None else "cyan"))
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
