"""A slot: a libllama sequence, what is in it, and who is using it."""

from __future__ import annotations

from dataclasses import dataclass, field

from everwarm.engine.request import Request
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import Cut
from everwarm.state.tree import Node
from everwarm.types import SeqId


@dataclass(slots=True, eq=False)
class Slot:
    """``items`` of it are decoded. ``node`` is the last tree node on its way; an idle slot keeps both."""

    seq: SeqId
    node: Node
    items: Prompt = field(default_factory=lambda: Prompt.of_tokens([]))
    request: Request | None = None
    n_fed: int = 0
    cuts: list[Cut] = field(default_factory=list)  # still ahead, nearest last
    chunks: list[tuple[int, int]] = field(default_factory=list)
    stable: int | None = None  # what the next turn will share of the last prompt, if the caller said so
    used_at: float = 0.0
    session: str | None = None
    content: Prompt = field(default_factory=lambda: Prompt.of_tokens([]))  # the last conversation that ran here
    namespace: str = ""  # whose it is
    is_offloaded: bool = True  # nothing of it is left to be copied to RAM while its reply is written
    is_tidy: bool = True  # everything of it that is worth keeping is in RAM
    is_archived: bool = True  # and has been offered to the disk
    is_joined: bool = True  # and lies there in few segments
    n_settled: int = 0  # where the last request went on from: nobody left that aside

    @property
    def is_idle(self) -> bool:
        return self.request is None

    def resident(self) -> Prompt:
        """What the sequence holds right now."""
        return self.items if self.request is None else self.request.items(self.n_fed)

    def next_stop(self) -> int:
        """Where the next chunk must end at the latest."""
        assert self.request is not None
        stop = self.cuts[-1].at if self.cuts else self.request.n_items
        picture = self.request.ask.prompt.next_media(self.n_fed) if self.request.ask.prompt.media else None
        return stop if picture is None else min(stop, picture)  # a picture is read by itself

    def clear(self) -> None:
        self.n_fed, self.n_settled, self.chunks, self.cuts = 0, 0, [], []
        self.items = Prompt.of_tokens([])
        self.is_offloaded = self.is_tidy = self.is_archived = self.is_joined = True

    def has_changed(self) -> None:
        """There may be idle work to do."""
        self.is_offloaded = self.is_tidy = self.is_archived = self.is_joined = False
