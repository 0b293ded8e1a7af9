"""What an engine can go on from, as names that are the same everywhere: for whoever sends requests to the right server."""

from __future__ import annotations

from everwarm.engine.core import Core
from everwarm.state.lineage import keys, root_key
from everwarm.state.tree import Node

MOST = 1024
DIGITS = 16  # of a lineage's name


def warm_keys(core: Core, most: int = MOST) -> list[str]:
    """The beginnings of the names of lineages (see ``lineage.keys``) where a checkpoint is on the device or in RAM, or
    where KV ends for models without; the last used first. On the loop's thread. Empty until the fingerprint is known."""
    fingerprint = "" if core.archive is None else core.archive.fingerprint
    if not fingerprint:
        return []
    used_at: dict[str, float] = {}
    for namespace, top in core.tree.namespaces().items():
        root = root_key(fingerprint, namespace)
        for end in (node for node in top.below() if not node.children):
            warm = {node.n_items: _used_at(node) for node in end.lineage() if _is_warm(core, node)}
            for n_items, key in keys(root, end.path, warm).items():
                used_at[key[:DIGITS]] = warm[n_items]
    return sorted(used_at, key=lambda key: used_at[key], reverse=True)[:most]


def _is_warm(core: Core, node: Node) -> bool:
    if not core.context.kind.needs_checkpoints:
        return node.segment is not None
    return node.checkpoint is not None


def _used_at(node: Node) -> float:
    return 0.0 if node.checkpoint is None else node.checkpoint.used_at
