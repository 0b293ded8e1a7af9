"""Which neighbouring segments of a lineage become one, so that coming back does not get dearer with every turn. Pure:
asks the tree, changes nothing.

A turn leaves two or three nodes behind, and libllama looks at all cells of a context for each segment that it gets. What a
turn adds is saved in few segments; later, segments of like size are joined, so that their number grows with the logarithm
of the turns and every byte is copied only that often. Where conversations part segments stay apart: whoever comes back to
one branch would load the other's as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from everwarm.state.lineage import history_over
from everwarm.state.policy import CutKind
from everwarm.state.tree import Node, Segment

MOST = 4096  # tokens of a segment that is made of several
LIKE, FEW = (
    4,
    32,
)  # whoever is less than so many times as large as the next is joined with it; all below so many are alike
MOST_SHARE = 1 / 32  # of the budget: what is evicted goes as a whole
N_TURN = 4  # nodes that one turn leaves behind, or a retry: no conversation of its own

_ENDS = (CutKind.NEAR_END, CutKind.STABLE, CutKind.BOUNDARY, CutKind.BREAKPOINT, CutKind.BRANCH)


def most_joined(budget_bytes: int, kv_bytes_per_token: int) -> int:
    """In tokens, for this budget."""
    return min(MOST, int(MOST_SHARE * budget_bytes) // max(1, kv_bytes_per_token))


def runs(nodes: Iterable[Node], is_clean: Callable[[Node], bool], most: int = MOST) -> Iterator[list[Node]]:
    """Nodes to be saved, in runs of one segment each: child after parent, and no further than to where the next turn is
    likely to part."""
    run: list[Node] = []
    for node in nodes:
        if run and not _goes_on(run, node, is_clean, most):
            yield run
            run = []
        run.append(node)
    if run:
        yield run


def _goes_on(run: Sequence[Node], node: Node, is_clean: Callable[[Node], bool], most: int) -> bool:
    last, first = run[-1], run[0].parent
    if node.parent is not last or first is None or is_clean(node) != is_clean(last):
        return False
    is_end = last.is_pinned or len(last.children) > 1
    is_end = is_end or (last.checkpoint is not None and last.checkpoint.kind in _ENDS)
    return not is_end and node.mark.n_tokens - first.mark.n_tokens <= most


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """What one lineage uses of a segment."""

    segment: Segment
    users: tuple[Node, ...]

    @property
    def start(self) -> int:
        return self.users[0].start

    @property
    def stop(self) -> int:
        return self.users[-1].n_items

    @property
    def n_tokens(self) -> int:
        above = self.users[0].parent
        return self.users[-1].mark.n_tokens - (0 if above is None else above.mark.n_tokens)


def to_join(end: Node, n_settled: int, most: int = MOST) -> list[list[SegmentRun]]:
    """What of a lineage is to become one segment each. ``n_settled``: only items up to there, for a later turn went on from
    there; the newest may still be left aside."""
    found = [SegmentRun(segment, tuple(users)) for segment, users in _stretches(end.lineage()) if segment is not None]
    settled = [stretch for stretch in found if stretch.stop <= n_settled]
    first = _first_boundary(end)
    chain: list[SegmentRun] = []
    chains = [chain]
    for stretch in settled:
        if chain and not _may_join(chain[-1], stretch, first):
            chains.append(chain := [])
        chain.append(stretch)
    return [
        [chain[i] for i in span]
        for chain in chains
        for span in merged([stretch.n_tokens for stretch in chain], most)
        if len(span) > 1
    ]


def fetched(segments: Sequence[Segment], most: int = MOST) -> list[list[Segment]]:
    """Segments of a lineage that came from elsewhere, those that are to become one together."""
    chains: list[list[Segment]] = []
    for segment in segments:
        last = chains[-1][-1] if chains else None
        if last is not None and last.n_stop == segment.n_start and _are_alike(last, segment):
            chains[-1].append(segment)
        else:
            chains.append([segment])
    return [[chain[i] for i in span] for chain in chains for span in merged([s.n_cells for s in chain], most)]


def merged(sizes: Sequence[int], most: int = MOST) -> list[range]:
    """Neighbours that become one: whoever is not much larger than what follows, as long as it stays small. What is left
    gets smaller by a factor towards the end, so there is little of it; what is copied has grown by a part of itself."""
    done: list[tuple[int, range]] = []
    for i, size in enumerate(sizes):
        span = range(i, i + 1)
        while done and done[-1][0] < LIKE * max(size, FEW) and done[-1][0] + size <= most:
            before, above = done.pop()
            size, span = before + size, range(above.start, i + 1)
        done.append((size, span))
    return [span for _, span in done]


def _stretches(lineage: Sequence[Node]) -> Iterator[tuple[Segment | None, list[Node]]]:
    for segment, users in groupby(lineage, key=lambda node: node.segment):
        yield segment, list(users)


def _first_boundary(end: Node) -> Node | None:
    """Usually the end of a system prompt, where other conversations begin."""
    kept = ((node, node.checkpoint) for node in end.lineage())
    return next((node for node, point in kept if point is not None and point.kind is CutKind.BOUNDARY), None)


def _may_join(one: SegmentRun, two: SegmentRun, first_boundary: Node | None) -> bool:
    a, b, between = one.segment, two.segment, one.users[-1]
    if one.start != a.n_start or two.start != b.n_start or one.stop != b.n_start:
        return False
    if not _are_alike(a, b):
        return False
    is_kept_apart = between is first_boundary or between.is_pinned or _is_breakpoint(between)
    return not is_kept_apart and not _is_junction(between, two.users[0])


def _are_alike(a: Segment, b: Segment) -> bool:
    """Whether one follows the other in the same reading, and both are written or neither is."""
    history = None if b.chunks is None else history_over(b.chunks, b.n_start)
    own = None if a.chunks is None else history_over(a.chunks, b.n_start)
    return a.clean == b.clean and own == history and bool(a.pieces) == bool(b.pieces)


def _is_breakpoint(node: Node) -> bool:
    return node.checkpoint is not None and node.checkpoint.kind is CutKind.BREAKPOINT


def _is_junction(node: Node, ours: Node) -> bool:
    """Whether other conversations go on from here, not only what a turn left aside."""
    others = (other for child in node.children.values() if child is not ours for other in child.below())
    return len(list(islice(others, N_TURN + 1))) > N_TURN
