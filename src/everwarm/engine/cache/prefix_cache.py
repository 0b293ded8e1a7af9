"""Everything that is kept of prompts, as one thing: the tree, and the parts that fill it, empty it and move it between
device, RAM, disk and remote store. Made by ``build``; decides nothing itself."""

from __future__ import annotations

import time
from dataclasses import dataclass

from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.compaction import Joiner
from everwarm.engine.cache.device_room import DeviceRoom
from everwarm.engine.cache.drop import Dropper
from everwarm.engine.cache.offload import Offload
from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.cache.restore import Restorer
from everwarm.engine.cache.timed_pins import TimedPins
from everwarm.engine.inspect.stats import CheckpointStats
from everwarm.engine.slots import Residents
from everwarm.engine.tiers.loader import Loader
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.engine.tiers.ram import Ram
from everwarm.engine.tiers.tier_writer import TierWriter
from everwarm.state.returns import Returns
from everwarm.state.tree import Tree


@dataclass(frozen=True, slots=True)
class PrefixCache:
    tree: Tree
    residents: Residents  # what of it is on the device
    # taking, restoring and dropping checkpoints
    checkpointer: Checkpointer
    checkpoint_stats: CheckpointStats
    restorer: Restorer
    returns: Returns
    room: DeviceRoom
    joiner: Joiner
    dropper: Dropper
    timed_pins: TimedPins
    # RAM, disk and the remote store
    ram: Ram
    ram_budget: RamBudget
    ram_writer: RamWriter
    offload: Offload | None  # None: nothing outlives this engine but what is on disk
    tiers: LowerTiers
    tier_writer: TierWriter
    loader: Loader

    def save_piece(self) -> bool:
        """One piece of idle work: copies to RAM, or offers to the tiers beyond. False: there is none."""
        return self.ram_writer.tidy() or self.tier_writer.tidy(self.residents.slots)

    def join_piece(self) -> bool:
        """One piece of idle work: joins small segments. False: there is none."""
        return self.joiner.tidy(self.residents.slots)

    def tidy_overdue(self) -> None:
        """Work that cannot wait until nothing runs any more."""
        if self.offload is not None:
            self.offload.copy_piece(self.residents.slots)
        self.tier_writer.tidy_overdue(self.residents.slots, time.monotonic())

    def close(self) -> None:
        self.loader.close()
        self.tiers.close()
        self.ram.close()
