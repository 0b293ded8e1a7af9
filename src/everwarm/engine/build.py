"""Putting a core together: the model, its context, what is remembered and where. The one place that knows all parts."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from everwarm.config import ModelOptions, default_threads
from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.cache.compaction import Joiner
from everwarm.engine.cache.device_room import DeviceRoom
from everwarm.engine.cache.offload import Offload
from everwarm.engine.cache.prefix_cache import PrefixCache
from everwarm.engine.cache.prewarm import PrewarmQueue
from everwarm.engine.cache.ram_budget import RamBudget
from everwarm.engine.cache.ram_writer import RamWriter
from everwarm.engine.cache.restore import Restorer
from everwarm.engine.core import Core
from everwarm.engine.images import ImageCache
from everwarm.engine.lifecycle.keeping import Keeper
from everwarm.engine.lifecycle.starting import Starter, Unverified
from everwarm.engine.memory_plan import Sizes, decide_sizes, gpu_free_bytes, host_free_bytes, is_on_gpu, limited_bytes
from everwarm.engine.process.reply_text import words_of
from everwarm.engine.scheduling.admission import Admission, RequestQueue
from everwarm.engine.scheduling.scheduler import GPU_STEP_S, Budget, StepPlanner
from everwarm.engine.settings import EngineSettings, RestorePolicy
from everwarm.engine.slots import Residents, Slot, Spares
from everwarm.engine.speculation.draft_length import Pacing
from everwarm.engine.speculation.lookup import DiskTexts, SuffixLookup, TreeLookup
from everwarm.engine.speculation.model_drafter import HeadDrafter, ModelDrafter, require_drafts_for
from everwarm.engine.speculation.speculator import Rollback, Speculator
from everwarm.engine.speculation.step_cost import RepeatedStepCost, StepCost
from everwarm.engine.stats import FIRST_GUESS_S, EngineStats, Speed
from everwarm.engine.tiers.loader import Loader
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.engine.tiers.pins import TimedPins
from everwarm.engine.tiers.ram import Pinning, Ram, why_not_pinned
from everwarm.engine.tiers.tier_writer import TierWriter
from everwarm.errors import EverwarmError, ModelFileError
from everwarm.llama.context import Context
from everwarm.llama.lib import lib
from everwarm.llama.media.media_model import MediaModel
from everwarm.llama.model import Model, Progress, identity_of, rope_limit_of
from everwarm.llama.sampler import PickPool
from everwarm.llama.system.model_files import WatchedFiles
from everwarm.llama.system.pinned_memory import loaded_runtime
from everwarm.state.returns import Returns
from everwarm.state.segment_merge import most_joined
from everwarm.state.store.arena import Arena
from everwarm.state.store.arena_file import memory_file
from everwarm.state.tree import Tree
from everwarm.types import SeqId

log = logging.getLogger("everwarm.ram")

_MIB = 1 << 20

MOST_PICK_THREADS = 8
LARGE_BYTES = 512 << 20  # of one whole conversation: then its first copy should find pinned memory


def assemble(path: Path, settings: EngineSettings, progress: Progress | None = None, memory: int | None = None) -> Core:
    """``memory`` is the RAM tier's file. What an earlier engine of the same model left in it is known from the start,
    and the part that no longer fits is evicted before the context allocates its memory."""
    tree = Tree()
    ram: Ram | None = None

    def hand_over() -> None:
        """The next engine is to recognise what is kept by the model's files as they are now."""
        if ram is not None:
            ram.arena.hand_to(settings.fingerprint(model.identity, model.rope_limit))

    with contextlib.ExitStack() as undo:
        fd = memory_file() if memory is None else memory
        undo.callback(os.close, fd)
        left = _open_left(path, settings, fd)
        if left is not None:
            undo.callback(left.close)
        model = undo.enter_context(
            Model(path, settings.model, progress, head_from=settings.head_from, on_same=hand_over)
        )
        _require_head(model, settings)
        images = None if settings.mmproj is None else _open_images(Path(settings.mmproj), model, settings)
        if images is not None:
            undo.callback(images.close)
        small = _open_drafter(model, settings)
        if small is not None:
            undo.callback(small.close)
        if left is not None and left.identity != model.identity:
            left.close()  # the file was replaced meanwhile
            left = None
        files = WatchedFiles([model.files, *([] if images is None else [images.media.files])])
        left = left or _open_left_on_host(model, settings, fd)
        ram = None if left is None else _take_up(left, tree, model, files, undo)
        sizes = decide_sizes(model, settings, limited_bytes(), 0 if left is None else left.arena.n_used)
        if left is None or ram is None:
            left = _open_memory(model, settings, sizes, fd)
            ram = _take_up(left, tree, model, files, undo)
        _warn_of_limits(left.arena.budget_bytes, sizes)
        _warn_of_context(model.n_ctx_train, settings.n_ctx)
        options = settings.context(sizes.n_spares + sizes.n_rollback, sizes.n_snapshots)
        context = Context(model, options, ram.place)
        undo.pop_all()  # all is well: the core closes them
        os.close(fd)  # the mapping holds on to it
    sizes = replace(sizes, ram_bytes=left.arena.budget_bytes)
    opened = _Opened(model, settings, sizes, context, tree, ram, images, files, small)
    if _has_gpu(opened):
        _warm_up(context)
    return _core(opened, outlives_us=memory is not None)


def _warm_up(context: Context) -> None:
    try:
        context.warm_up()
    except EverwarmError as error:  # requests will say more
        log.warning("the first steps of this model failed: %s", error)
        context.clear()


def _require_head(model: Model, settings: EngineSettings) -> None:
    """``--speculate mtp`` insists on it; ``auto`` takes what there is."""
    if settings.speculate == "mtp" and not model.has_head:
        raise ModelFileError(
            f"{model.path.name} has no MTP head that can be used, so --speculate mtp cannot be; give auto or lookup"
        )


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a core is made of, once everything that takes memory is open."""

    model: Model
    settings: EngineSettings
    sizes: Sizes
    context: Context
    tree: Tree
    ram: Ram
    images: ImageCache | None
    files: WatchedFiles
    small: ModelDrafter | None


def _core(opened: _Opened, *, outlives_us: bool) -> Core:
    """``outlives_us``: a later engine may take over the RAM tier's memory."""
    settings = opened.settings
    context = opened.context
    residents = _residents(opened)
    speed = Speed()
    counts = EngineStats(opened.sizes.spacing.max_checkpoints)
    queue = RequestQueue()
    prewarm = PrewarmQueue()
    cache = _cache(opened, residents, speed, counts, outlives_us=outlives_us)
    speculator = _speculator(opened, DiskTexts(cache.tiers), counts)
    takes_cuts = context.kind.needs_checkpoints and opened.sizes.spacing.max_checkpoints > 0
    admission = Admission(
        context, cache.tree, residents.slots, cache.restorer, cache.loader, cache.returns, speed, cuts=takes_cuts
    )
    finish_prefill_s = settings.finish_prefill_s
    return Core(
        context=context,
        files=opened.files,
        settings=settings,
        sizes=opened.sizes,
        slots=residents.slots,
        images=opened.images,
        cache=cache,
        unverified=Unverified(cache.restorer),
        queue=queue,
        admission=admission,
        starter=Starter(context, residents.slots, cache, admission, counts, settings.n_ubatch),
        planner=_planner(opened, residents.slots, speed),
        speculator=speculator,
        picks=_pick_pool(context.model, settings.n_slots),
        keeper=Keeper(cache.checkpointer, cache.returns, cache.offload, prewarm, counts, finish_prefill_s),
        prewarm=prewarm,
        speed=speed,
        counts=counts,
        computes_aside=is_on_gpu(context.model),
    )


def _pick_pool(model: Model, n_slots: int) -> PickPool | None:
    """Where a GPU computes, most of the processor is idle."""
    n_threads = min(MOST_PICK_THREADS, default_threads() // 2)
    return PickPool(n_threads) if n_slots > 1 and n_threads > 1 and is_on_gpu(model) else None


def _cache(
    opened: _Opened, residents: Residents, speed: Speed, stats: EngineStats, *, outlives_us: bool
) -> PrefixCache:
    settings = opened.settings
    sizes = opened.sizes
    context = opened.context
    tree = opened.tree
    ram = opened.ram
    kv_bytes = sizes.shape.kv_bytes_per_token
    state_bytes = sizes.shape.state_bytes
    returns = Returns(tree)
    budget = RamBudget(sizes.ram_bytes, settings.namespace_share, tree, context.kind, residents, returns, speed, stats)
    most = most_joined(sizes.ram_bytes, kv_bytes)
    writer = RamWriter(context, tree, residents, budget, most, kv_bytes, state_bytes)
    checkpointer = Checkpointer(context, tree, residents.spares, sizes.spacing, writer, budget, stats, state_bytes)
    budget.enforce()
    tiers = _tiers(opened, speed)
    tier_writer = _tier_writer(opened, tiers, returns, writer, speed)
    tier_writer.note_adopted()
    loader = Loader(tiers, context, tree, checkpointer, ram, speed, _restore_policy(settings), most, tier_writer.stores)
    budget.bind(partial(tier_writer.save_leaving, residents.slots), loader.load_s)
    idle = settings.idle_cells
    room = DeviceRoom(
        context, residents, checkpointer, writer, budget, returns, speed, loader.disk_s, tier_writer, idle
    )
    return PrefixCache(
        tree=tree,
        residents=residents,
        checkpointer=checkpointer,
        restorer=Restorer(context, tree, residents, checkpointer, writer, room, ram, stats),
        returns=returns,
        room=room,
        joiner=Joiner(context, tree, ram, budget, writer.most_joined),
        timed_pins=TimedPins(tree),
        ram=ram,
        ram_budget=budget,
        ram_writer=writer,
        offload=Offload(context.kind, tree, writer, budget, ram, tiers, tier_writer) if outlives_us else None,
        tiers=tiers,
        tier_writer=tier_writer,
        loader=loader,
    )


def _speculator(opened: _Opened, on_disk: DiskTexts, counts: EngineStats) -> Speculator:
    settings = opened.settings
    sizes = opened.sizes
    first = settings.n_slots + sizes.n_spares
    rollback = Rollback(opened.context, [SeqId(first + i) for i in range(sizes.n_rollback)])
    looks_up = settings.speculate in ("auto", "lookup")
    drafters: list[SuffixLookup | TreeLookup] = [SuffixLookup(), TreeLookup(opened.tree, on_disk)] if looks_up else []
    head = None if opened.context.head is None else HeadDrafter(opened.context)
    computing = opened.small or head
    # processor time where that is what is spent: other programs on the machine do not make a row look cheap or dear
    has_gpu = _has_gpu(opened)
    clock = time.monotonic if has_gpu else time.thread_time
    n_even = min(opened.context.n_snapshots, settings.max_draft)
    return Speculator(
        rollback,
        drafters,
        frozenset(opened.model.vocab.eog),
        settings.max_draft,
        counts,
        computing,
        clock,
        Pacing(n_even, RepeatedStepCost() if has_gpu or n_even else StepCost()),
    )


def _has_gpu(opened: _Opened) -> bool:
    """Whether a GPU computes any of it."""
    options = opened.settings.model
    return options.n_gpu_layers != 0 and gpu_free_bytes(opened.model.lib, options) > 0


def _open_drafter(model: Model, settings: EngineSettings) -> ModelDrafter | None:
    """Before sizes are decided: its memory is taken then."""
    if settings.draft_model is None or not settings.drafts_with_model:
        return None
    small = Model(Path(settings.draft_model), ModelOptions(n_gpu_layers=settings.model.n_gpu_layers))
    try:
        require_drafts_for(model, small)
        return ModelDrafter(small, settings.context(0), settings.n_slots, model.vocab.n_tokens)
    except BaseException:
        small.close()
        raise


def _residents(opened: _Opened) -> Residents:
    tree = opened.tree
    context = opened.context
    n_slots = opened.settings.n_slots
    slots = [Slot(SeqId(i), tree, context) for i in range(n_slots)]
    return Residents(slots, Spares([SeqId(n_slots + i) for i in range(opened.sizes.n_spares)], tree, context))


def _tiers(opened: _Opened, speed: Speed) -> LowerTiers:
    settings = opened.settings
    return LowerTiers(
        settings.store,
        settings.remote,
        partial(_fingerprint, opened.model, settings),
        opened.context,
        opened.ram.arena,
        speed,
        namespace_share=settings.namespace_share,
        is_right=opened.files.is_right,
    )


def _tier_writer(
    opened: _Opened, tiers: LowerTiers, returns: Returns, ram_writer: RamWriter, speed: Speed
) -> TierWriter:
    store = opened.settings.store
    remote = opened.settings.remote
    return TierWriter(
        tiers,
        opened.tree,
        opened.context,
        ram_writer,
        opened.ram,
        speed,
        returns,
        words=partial(words_of, opened.model.vocab),
        writes_all=store is not None and store.restore_policy == "always",
        shares_all=remote is not None and remote.restore_policy == "always",
    )


def _planner(opened: _Opened, slots: list[Slot], speed: Speed) -> StepPlanner:
    settings = opened.settings
    model = opened.model
    gpu_s = GPU_STEP_S if is_on_gpu(model) else 0.0
    budget = Budget(min(settings.n_ubatch, opened.context.n_batch), settings.prefill_beside_decode, gpu_s)
    max_step_s = settings.max_step_ms / 1e3
    return StepPlanner(slots, budget, speed, max_step_s, settings.prefill_beside_decode, bool(model.adapters))


def _restore_policy(settings: EngineSettings) -> RestorePolicy:
    kept = settings.store or settings.remote
    return "auto" if kept is None else kept.restore_policy


def _fingerprint(model: Model, settings: EngineSettings) -> str:
    return settings.fingerprint(model.fingerprint, model.rope_limit)


def _take_up(left: Memory, tree: Tree, model: Model, files: WatchedFiles, undo: contextlib.ExitStack) -> Ram:
    """Adds what an earlier engine left to the tree, within the budget."""
    ram = Ram(left.arena, tree, model.memory_kind, left.pinning, files.is_right)
    undo.callback(ram.close)
    tree.tell(ram.on_state, ram.on_segment)
    ram.adopt()
    ram.shrink(FIRST_GUESS_S)
    return ram


def _warn_of_limits(budget_bytes: int, sizes: Sizes) -> None:
    if budget_bytes > sizes.ram_room:
        shown = (budget_bytes / _MIB, sizes.ram_room / _MIB)
        log.warning(
            "--cache-ram is %.0f MiB, but the memory limit of this process leaves %.0f MiB beside weights and context: "
            "the kernel will kill the engine when it is filled; give less, or raise the limit",
            *shown,
        )


def _warn_of_context(n_trained: int, n_ctx: int) -> None:
    if 0 < n_trained < n_ctx:
        log.warning(
            "--ctx-size is %d, but the model was trained on %d tokens: several conversations share the context, and one "
            "that is longer than that gets bad replies; /v1/models announces the smaller number",
            n_ctx,
            n_trained,
        )


def _open_images(path: Path, model: Model, settings: EngineSettings) -> ImageCache:
    on_gpu = settings.model.n_gpu_layers != 0
    return ImageCache(MediaModel(path, model, n_threads=settings.n_threads, use_gpu=on_gpu))


@dataclass(frozen=True, slots=True)
class Memory:
    """The RAM tier's memory, opened for a model of this identity."""

    identity: str
    arena: Arena
    pinning: Pinning | None

    def close(self) -> None:
        if self.pinning is not None:
            self.pinning.close()
        self.arena.close()


def _open_left(path: Path, settings: EngineSettings, fd: int) -> Memory | None:
    """Pins and verifies what an earlier engine left while the model loads. None: nothing was left, or it is not known
    yet whether a GPU will need it."""
    if settings.model.n_gpu_layers >= 0 or gpu_free_bytes(lib(), settings.model) == 0:
        return None
    try:
        identity = identity_of(path, settings.model)
        owner = settings.fingerprint(identity, rope_limit_of(path))
    except (OSError, ModelFileError):
        return None  # opening the model will raise it
    if not Arena.is_left(fd, owner, settings.ram_bytes):
        return None
    arena = Arena(fd, owner, settings.ram_bytes, 0)
    return Memory(identity, arena, _pinning(arena, settings, on_gpu=True))


def _open_left_on_host(model: Model, settings: EngineSettings, fd: int) -> Memory | None:
    """The same without a GPU: nothing is pinned, and it can be opened before sizes are decided."""
    owner = settings.fingerprint(model.identity, model.rope_limit)
    if is_on_gpu(model) or not Arena.is_left(fd, owner, settings.ram_bytes):
        return None
    return Memory(model.identity, Arena(fd, owner, settings.ram_bytes, 0), None)


def _open_memory(model: Model, settings: EngineSettings, sizes: Sizes, fd: int) -> Memory:
    arena = Arena(fd, settings.fingerprint(model.identity, model.rope_limit), settings.ram_bytes, sizes.ram_bytes)
    is_large = sizes.shape.context_bytes(settings.n_ctx, 1) >= LARGE_BYTES
    return Memory(model.identity, arena, _pinning(arena, settings, on_gpu=is_on_gpu(model), at_once=is_large))


def _pinning(arena: Arena, settings: EngineSettings, *, on_gpu: bool, at_once: bool = False) -> Pinning | None:
    """Only memory that a GPU copies from gains by pinning; elsewhere nothing is reported either."""
    free = host_free_bytes() + arena.n_used  # what is found in it needs no more memory
    reason = why_not_pinned(settings.pin_ram, is_on_gpu=on_gpu, n_bytes=arena.budget_bytes, free_bytes=free)
    if reason is None:
        return Pinning(arena, loaded_runtime, at_once=at_once or settings.pin_ram == "on")
    if on_gpu or settings.pin_ram == "on":
        log.info("RAM is not pinned: %s", reason)
    return None
