"""Which neighbouring segments of a lineage are joined, so that the cost of restoring does not grow with every turn.
Pure: reads the tree, changes nothing.

A turn leaves two or three nodes behind, and libllama looks at all cells of a context for each segment that it restores.
What a turn adds is saved in few segments; later, segments of similar size are joined, so that their number and the
copies of each byte grow with the logarithm of the turns. Segments are not joined across a junction: restoring one
branch would load the other's as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from everwarm.state.lineage import history_over
from everwarm.state.policy import CutKind
from everwarm.state.tree import Node, Segment, first_message_end

MOST = 32_768  # tokens of a segment that is made of several
LIKE = 4  # a segment less than so many times as large as the next is joined with it
FEW = 32  # tokens: all segments below that count as so large
MOST_SHARE = 1 / 32  # of the budget: what is evicted goes as a whole
N_TURN = 4  # nodes that one turn leaves behind, or a retry: no conversation of its own

_ENDS = (CutKind.NEAR_END, CutKind.STABLE, CutKind.BOUNDARY, CutKind.BREAKPOINT, CutKind.BRANCH)


def most_joined(budget_bytes: int, kv_bytes_per_token: int) -> int:
    """The largest size of a joined segment, in tokens, for this budget."""
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
    return not _is_end(last) and node.mark.n_tokens - first.mark.n_tokens <= most


def _is_end(node: Node) -> bool:
    """Whether another turn may leave the lineage here."""
    is_cut = node.checkpoint is not None and node.checkpoint.kind in _ENDS
    return node.is_pinned or node.is_junction or is_cut


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
    """The groups of segments of a lineage to join. ``n_settled``: a later turn continued from there; what is newer may
    still be abandoned, but only at an end, so the pieces of one reading are joined at once."""
    found = [SegmentRun(segment, tuple(users)) for segment, users in _stretches(end.lineage()) if segment is not None]
    first = first_message_end(end.lineage())
    chain: list[SegmentRun] = []
    chains = [chain]
    for stretch in found:
        is_settled = bool(chain) and (stretch.stop <= n_settled or not _is_end(chain[-1].users[-1]))
        if not is_settled or not _may_join(chain[-1], stretch, first):
            chains.append(chain := [])
        chain.append(stretch)
    return [
        [chain[i] for i in span]
        for chain in chains
        for span in merged([stretch.n_tokens for stretch in chain], most)
        if len(span) > 1
    ]


def fetched(segments: Sequence[Segment], most: int = MOST) -> list[list[Segment]]:
    """Loaded segments of a lineage, grouped by those to join."""
    chains: list[list[Segment]] = []
    for segment in segments:
        last = chains[-1][-1] if chains else None
        if last is not None and last.n_stop == segment.n_start and _are_alike(last, segment):
            chains[-1].append(segment)
        else:
            chains.append([segment])
    return [[chain[i] for i in span] for chain in chains for span in merged([s.n_cells for s in chain], most)]


def merged(sizes: Sequence[int], most: int = MOST) -> list[range]:
    """Groups of neighbours to join: a segment is joined with the next unless it is much larger, as long as the sum is
    small. The sizes that remain fall by a factor towards the end, so they are few; a byte is copied again only when its
    segment has grown by a share of itself."""
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


def _may_join(one: SegmentRun, two: SegmentRun, first_end: Node | None) -> bool:
    a, b, between = one.segment, two.segment, one.users[-1]
    if one.start != a.n_start or two.start != b.n_start or one.stop != b.n_start:
        return False
    if not _are_alike(a, b):
        return False
    is_kept_apart = between is first_end or between.is_pinned or _is_breakpoint(between)
    return not is_kept_apart and not _leads_to_others(between, two.users[0])


def _are_alike(a: Segment, b: Segment) -> bool:
    """Whether one follows the other in the same reading, and both are written or neither is."""
    history = None if b.chunks is None else history_over(b.chunks, b.n_start)
    own = None if a.chunks is None else history_over(a.chunks, b.n_start)
    return a.clean == b.clean and own == history and bool(a.pieces) == bool(b.pieces)


def _is_breakpoint(node: Node) -> bool:
    return node.checkpoint is not None and node.checkpoint.kind is CutKind.BREAKPOINT


def _leads_to_others(node: Node, ours: Node) -> bool:
    """Whether a junction leads to another conversation, and not only to an abandoned retry or turn: whether more nodes
    follow than one turn makes. Their number decides, because a model without checkpoints has no other evidence."""
    others = (other for child in node.children.values() if child is not ours for other in child.below())
    return len(list(islice(others, N_TURN + 1))) > N_TURN
