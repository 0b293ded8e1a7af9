"""Pins that end by themselves. They are held in this engine's memory alone, so they end with it at the latest."""

from __future__ import annotations

from dataclasses import dataclass, field

from everwarm.state.tree import Node, Tree, pin, unpin

MOST_TIMED = 4096  # of all namespaces; beyond it the one that would end first is ended


@dataclass(slots=True)
class TimedPins:
    tree: Tree
    _until: dict[int, tuple[Node, float]] = field(default_factory=dict)  # by node id, on the monotonic clock

    def hold(self, node: Node, until: float) -> None:
        """A pin without an end stays one, and a later end replaces an earlier one."""
        if node.is_pinned and node.id not in self._until:
            return
        pin(node)
        self.tree.changed()
        _, before = self._until.get(node.id, (node, until))
        self._until[node.id] = node, max(before, until)
        if len(self._until) > MOST_TIMED:
            self.release(min(self._until.values(), key=lambda held: held[1])[0])

    def expire(self, now: float) -> None:
        for node, until in list(self._until.values()):
            if until <= now:
                self.release(node)

    def release(self, node: Node) -> None:
        """Ends the pin if it is one of these."""
        held = self._until.pop(node.id, None)
        if held is not None and self.tree.has(node):
            unpin(node)
            self.tree.unpinned(node)
