"""Slots and spares: the sequences of the context, what each of them holds, and the verbs that change it.

A **slot** is where a request runs, and keeps its conversation while it is idle. A **spare** holds a parked checkpoint, or
nothing. Only this module assigns their fields; all others read them. Emptying a slot is ``Slot.vacate`` and nothing else:
it changes the sequence and the record of it together. It saves nothing; who must not lose the conversation calls
``cache.device_room.DeviceRoom.vacate``. Filling is ``cache.restore``'s work, and ``Slot.hold`` records it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from everwarm.engine.request import Request
from everwarm.llama.context import Context
from everwarm.prompt.prompt import MediaItem, Prompt
from everwarm.state.lineage import SEATED, Chunks, record
from everwarm.state.policy import Cut, CutKind
from everwarm.state.tree import Checkpoint, Node, Tree
from everwarm.types import SeqId


class Slot:
    """The first ``n_fed`` items of a request or of an idle conversation are decoded. ``node`` is the last tree node
    inside them; the slot holds it so that it is not pruned."""

    __slots__ = (
        "_context",
        "_tree",
        "chunks",
        "content",
        "cuts",
        "is_archived",
        "is_joined",
        "is_offloaded",
        "is_tidy",
        "items",
        "n_fed",
        "n_settled",
        "namespace",
        "node",
        "request",
        "seq",
        "session",
        "stable",
        "used_at",
    )

    def __init__(self, seq: SeqId, tree: Tree, context: Context) -> None:
        self._tree = tree
        self._context = context
        self.seq = seq
        self.node: Node = tree.root("")
        tree.hold(self.node)
        self.request: Request | None = None
        self.content = Prompt.of_tokens([])  # the last conversation that ran here
        self.namespace = ""  # the one that ``content`` belongs to
        self.stable: int | None = None  # what the next turn will share of the last prompt, if the caller knows it
        self.session: str | None = None
        self.used_at = 0.0
        self._clear()

    def _clear(self) -> None:
        self.n_fed = 0
        self.items = Prompt.of_tokens([])
        self.chunks: list[tuple[int, int]] = []  # how the items were decoded
        self.cuts: list[Cut] = []  # still ahead, nearest last
        self.n_settled = 0  # where the last request went on from: nothing of that was left aside
        self.is_offloaded = True  # nothing is left to copy to RAM while the reply is written
        self.is_tidy = True  # everything worth keeping is in RAM
        self.is_archived = True  # and has been offered to the disk
        self.is_joined = True  # and is joined into few segments there

    # questions

    @property
    def is_idle(self) -> bool:
        return self.request is None

    def resident(self) -> Prompt:
        """What the sequence holds right now."""
        return self.items if self.request is None else self.request.items(self.n_fed)

    def next_image(self) -> MediaItem | None:
        """The image that comes next in its request, if one does."""
        return None if self.request is None else self.request.ask.prompt.media.get(self.n_fed)

    def next_stop(self) -> int:
        """The item at which the next chunk must end at the latest."""
        assert self.request is not None
        stop = self.cuts[-1].at if self.cuts else self.request.n_items
        image = self.request.ask.prompt.next_media(self.n_fed) if self.request.ask.prompt.media else None
        return stop if image is None else min(stop, image)  # an image is read by itself

    # a request's stay

    def seat(self, request: Request, cuts: list[Cut]) -> None:
        """A request runs here from now on, continuing what the slot holds. ``cuts``: where it stops, the nearest
        last."""
        self.request = request
        self.cuts = cuts
        self.stable = request.ask.hints.stable
        self.session = request.ask.session
        self.n_settled = self.n_fed

    def advance(self, n_items: int) -> None:
        """Records that more items were decoded, in one chunk."""
        self.n_fed += n_items
        record(self.chunks, n_items)

    def note_window_seated(self) -> None:
        """Records that the sliding window was seated anew: that is part of the decoding history."""
        record(self.chunks, SEATED)

    def add_cut(self, cut: Cut) -> None:
        """One more stop, unless there is one already."""
        if all(other.at != cut.at for other in self.cuts):
            bisect.insort(self.cuts, cut, key=lambda other: -other.at)

    def skip_cuts(self, kind: CutKind) -> None:
        """No more stops of this kind in this prompt."""
        self.cuts = [cut for cut in self.cuts if cut.kind is not kind]

    def pop_cut(self) -> Cut | None:
        """The cut that the slot has just reached, if any."""
        return self.cuts.pop() if self.cuts and self.n_fed == self.cuts[-1].at else None

    def release(self) -> None:
        """The request leaves. What it decoded stays."""
        assert self.request is not None
        self.items = self.request.items(self.n_fed)
        self.request = None
        self.cuts = []

    def remember(self, namespace: str) -> None:
        """Records whose conversation the slot holds, also after it has left the context."""
        self.content = self.items
        self.namespace = namespace

    def forget_content(self) -> None:
        self.content = Prompt.of_tokens([])

    def touch(self, now: float) -> None:
        self.used_at = now

    # what the sequence holds

    def stand_at(self, node: Node) -> None:
        """``node`` is the last node of the slot's lineage now."""
        self._tree.hold(node)
        self._tree.release(self.node)
        self.node = node

    def hold(self, items: Prompt, node: Node, chunks: Chunks | list[tuple[int, int]]) -> None:
        """Records that the idle slot's sequence was restored to exactly these items, in these chunks."""
        self.stand_at(node)
        self.n_fed = len(items)
        self.items = items
        self.chunks = list(chunks)
        self.has_changed()

    def hold_as(self, items: Prompt) -> None:
        """The same items, as part of the prompt that continues them."""
        assert len(items) == self.n_fed
        self.items = items

    def vacate(self, root: Node | None = None) -> None:
        """Empty the sequence and the record of it. The slot stands at ``root`` then, or at the root above its node; a
        request that runs in it stays, with nothing decoded."""
        self._context.drop(self.seq)
        self.stand_at(self.node.root() if root is None else root)
        self._clear()

    # idle work

    def has_changed(self) -> None:
        """There may be idle work to do."""
        self.is_offloaded = self.is_tidy = self.is_archived = self.is_joined = False

    def note_offloaded(self) -> None:
        self.is_offloaded = True

    def note_tidy(self) -> None:
        self.is_tidy = True

    def note_archived(self) -> None:
        self.is_archived = True

    def note_joined(self) -> None:
        self.is_joined = True

    def archive_again(self) -> None:
        """What was offered to the disk may not be there: offer it again."""
        self.is_archived = False


class Spares:
    """The sequences for parked checkpoints, each with the node whose checkpoint it holds."""

    def __init__(self, seqs: Iterable[SeqId], tree: Tree, context: Context) -> None:
        self._nodes: dict[SeqId, Node | None] = dict.fromkeys(seqs)
        self._tree = tree
        self._context = context

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[SeqId]:
        return iter(self._nodes)

    def node(self, spare: SeqId) -> Node | None:
        """The node whose checkpoint is parked in this sequence; None: it is free, or no spare."""
        return self._nodes.get(spare)

    def parked(self) -> list[tuple[SeqId, Node]]:
        return [(spare, node) for spare, node in self._nodes.items() if node is not None]

    def free(self) -> SeqId | None:
        return next((spare for spare, node in self._nodes.items() if node is None), None)

    def take(self, spare: SeqId, seq: SeqId, node: Node, checkpoint: Checkpoint) -> None:
        """Park what ``seq`` holds, the checkpoint of this node, in a free spare. Nothing is copied."""
        assert self._nodes[spare] is None
        self._context.park(seq, spare)
        self._nodes[spare] = node
        checkpoint.parked = spare

    def release(self, spare: SeqId) -> None:
        """Empty a spare. A checkpoint that has no copy in RAM is lost by this."""
        self._context.drop(spare)
        self._set_free(spare)

    def scrub(self, spare: SeqId) -> None:
        """Empties a spare whose state contains NaN: no trace of it stays on the device."""
        self._context.scrub(spare)
        self._set_free(spare)

    def _set_free(self, spare: SeqId) -> None:
        node = self._nodes[spare]
        if node is not None and node.checkpoint is not None and node.checkpoint.parked == spare:
            node.checkpoint.parked = None
        self._nodes[spare] = None
        self._tree.changed()


class Residents:
    """Everything that holds KV or a state on the device: all slots and all spares."""

    def __init__(self, slots: list[Slot], spares: Spares) -> None:
        self.slots = slots
        self.spares = spares

    def ends(self) -> Iterator[tuple[SeqId, Node]]:
        """Each sequence with the last node of its lineage."""
        for slot in self.slots:
            yield slot.seq, slot.node
        yield from self.spares.parked()

    def history(self, seq: SeqId) -> Chunks:
        """How the cells of a sequence were decoded."""
        node = self.spares.node(seq)
        if node is not None and node.checkpoint is not None:
            return node.checkpoint.chunks
        return next((tuple(slot.chunks) for slot in self.slots if slot.seq == seq), ())
