"""Proof that what is kept is what a cold reading gives, bit for bit: a lineage is read again in a context of its own, in
the same chunks as it was read before.

``compare_with_cold`` does that for the checkpoints of a running core, ``check_up`` for states on disk, for
``everwarm cache verify``. A clean state must have the same bytes as a cold reading in the same chunks (E2), and so must KV
of the same clean reading. Any other is compared by the logits of the next token. Bits depend on how the model was opened,
so a state that differs is tried in every way that engines of its folder are known to have used.

A state is loaded from disk with all its KV. No file is trusted: parts that do not fit together are ``Damaged`` before
libllama sees any of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import blake3
import msgspec
import numpy as np
from numpy.typing import NDArray

from everwarm.config import CELLS_STEP, MAX_BATCH, MAX_CTX, ContextOptions, ModelOptions
from everwarm.engine.core import Core
from everwarm.engine.fingerprint import N_ALWAYS, STATE_PREFIX, state_fingerprint
from everwarm.engine.images import ImageCache
from everwarm.errors import BadRequest, MemoryFault, ModelError, ModelFileError
from everwarm.llama.batch import Feed
from everwarm.llama.blobs import trunk
from everwarm.llama.context import Context
from everwarm.llama.model import MemoryKind, Model, fingerprint_of, rope_limit_of
from everwarm.prompt.prompt import Codes, Prompt
from everwarm.state.lineage import SEATED, Chunks, history_over, n_items_of
from everwarm.state.store.folder_meta import Way
from everwarm.state.store.object import Damaged, ObjectHeader, ObjectReader
from everwarm.state.tools.inventory import (
    BrokenObject,
    Folder,
    Lineage,
    Object,
    Tick,
    check_digests,
    open_object,
    quarantine,
)
from everwarm.state.tree import Checkpoint, Node
from everwarm.types import Blob, SeqId, token_mark

_MAX_SEATS = 1 << 16
_SEQ = SeqId(0)


def replay(
    context: Context,
    seq: SeqId,
    prompt: Prompt,
    chunks: Chunks,
    tick: Callable[[int], None] = lambda _: None,
    images: ImageCache | None = None,
) -> None:
    """Decode ``prompt`` into an empty sequence exactly as recorded, with logits; ``tick`` is called for every chunk."""
    assert context.end(seq).n_tokens == 0, "a replay starts from an empty sequence"
    at = 0
    for size, times in chunks:
        for _ in range(times):
            if size == SEATED:
                context.touch(seq)
                continue
            if (item := prompt.media.get(at)) is not None:
                assert size == 1 and images is not None, "an image is read by itself, by a model that can see"
                embedding = images.embedding(item, {})
                context.see(seq, images.media, embedding, prompt.mark(at + 1), wants_logits=True)
            else:
                context.decode([Feed(seq, prompt.codes[at : at + size], context.end(seq), wants_logits=True)])
            at += size
            tick(size)
    assert at == len(prompt), f"the chunks cover {at} of {len(prompt)} items"


def cold_state(
    context: Context,
    seq: SeqId,
    prompt: Prompt,
    chunks: Chunks,
    tick: Callable[[int], None] = lambda _: None,
    images: ImageCache | None = None,
) -> Blob:
    """The state after reading ``prompt`` in these chunks; the sequence is kept."""
    while chunks and chunks[-1][0] == SEATED:  # the capture below seats it
        chunks = chunks[:-1]
    replay(context, seq, prompt, chunks, tick, images)
    return context.capture(seq)


def is_same_state(a: Blob, b: Blob) -> bool:
    """Bytes after the header, which names the sequence a state was taken from, without the part of an MTP head. Zeroes
    may differ in sign: libllama empties a used cell by multiplying it with 0, and a prompt of one to three tokens leaves
    some of that in place."""
    return bool(np.array_equal(_unsigned_zeroes(trunk(a)), _unsigned_zeroes(trunk(b))))


def _unsigned_zeroes(blob: Blob) -> Blob:
    words = blob[8 : 8 + (len(blob) - 8) // 4 * 4].view(np.uint32).copy()
    words[words == 0x80000000] = 0
    return words.view(np.uint8)


# checkpoints of a running core


@dataclass(frozen=True, slots=True)
class ExactReport:
    n_compared: int
    n_different: int
    n_controls: int
    n_controls_equal: int

    @property
    def is_exact(self) -> bool:
        return self.n_compared > 0 and self.n_different == 0 and self.n_controls_equal == 0


def compare_with_cold(core: Core, most: int = 4) -> ExactReport:
    """Replay up to ``most`` clean checkpoints cold with their recorded chunks. For each there is a control: the same
    replay with one item changed, which must not give the same bytes."""
    kept = ((node, node.checkpoint) for node in core.cache.tree.nodes())
    clean = [(node, point) for node, point in kept if point and point.clean and point.state is not None]
    clean.sort(key=lambda pair: -pair[0].n_items)
    different = n_controls = controls_equal = 0
    options = replace(core.settings.context(0), n_seq_max=1)
    with Context(core.model, options) as context:
        for node, checkpoint in clean[:most]:
            different += not _is_reproduced(context, node, checkpoint, core.images)
            tokens = np.flatnonzero(node.path.codes[: node.n_items] >= 0)
            if len(tokens):
                change = int(tokens[len(tokens) // 2])
                n_controls += 1
                controls_equal += _is_reproduced(context, node, checkpoint, core.images, change)
    return ExactReport(len(clean[:most]), different, n_controls, controls_equal)


def _is_reproduced(
    context: Context, node: Node, checkpoint: Checkpoint, images: ImageCache | None, change: int | None = None
) -> bool:
    codes = node.path.codes[: node.n_items].copy()
    if change is not None:
        codes[change] = (codes[change] + 1) % context.model.vocab.n_tokens
    assert checkpoint.state is not None
    prompt = Prompt(codes, node.path.first(node.n_items).media)
    try:
        cold = cold_state(context, SeqId(0), prompt, checkpoint.chunks, images=images)
        return is_same_state(cold, checkpoint.state)
    finally:
        context.drop(SeqId(0))


# states on disk


@dataclass(frozen=True, slots=True)
class StoredKv:
    """KV of which a state uses the cells up to ``reach``."""

    name: str
    head: ObjectHeader
    reach: int
    codes: Codes
    blob: Blob

    @property
    def n_cells(self) -> int:
        return self.head.n_items - self.head.n_start

    def is_of(self, chunks: Chunks) -> bool:
        """Whether it comes from a clean reading in these chunks."""
        own = self.head.chunks
        history = None if not self.head.clean or own is None else history_over(own, self.reach)
        return history is not None and history == history_over(chunks, self.reach)


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    head: ObjectHeader
    codes: Codes
    state: Blob | None
    parts: tuple[StoredKv, ...]

    @property
    def n_items(self) -> int:
        return self.head.n_items


@dataclass(frozen=True, slots=True)
class Reading:
    """Items and the chunks to read them in; ``clean``: they were read alone in the context, so a replay must give the
    same bytes."""

    codes: Codes
    chunks: Chunks
    clean: bool


def load_stored(lineage: Lineage, kind: MemoryKind, n_vocab: int) -> Stored:
    state, head = lineage.state, lineage.state.header
    with open_object(state.path) as reader:
        codes = _codes(reader, n_vocab)
        blob = reader.read("state") if kind.needs_checkpoints else None
    parts: list[StoredKv] = []
    if kind.has_attention:
        if len(lineage.kv) != len(head.reaches) or head.reaches[-1:] != (head.n_items,):
            raise Damaged("it does not say how far its parts reach")
        for thing, reach in zip(lineage.kv, head.reaches, strict=True):
            parts.append(_load_part(thing, parts[-1].reach if parts else 0, reach, codes, n_vocab))
    return Stored(state.name, head, codes, blob, tuple(parts))


def _load_part(thing: Object, at: int, reach: int, codes: Codes, n_vocab: int) -> StoredKv:
    head = thing.header
    with open_object(thing.path) as reader:
        own = _codes(reader, n_vocab)
        if not (head.n_start <= at < reach <= min(head.n_items, len(codes))):
            raise Damaged(f"{thing.name} does not reach from {at} to {reach}")
        if not np.array_equal(own[: reach - head.n_start], codes[head.n_start : reach]):
            raise Damaged(f"{thing.name} belongs to other items")
        return StoredKv(thing.name, head, reach, own, reader.read("kv"))


def is_plausible(lineage: Lineage) -> bool:
    """Whether a context of the size that these claim may be opened."""
    head = lineage.state.header
    reaches_inside = all(0 < reach <= head.n_items for reach in head.reaches)
    return reaches_inside and all(_has_items(thing.header) for thing in (lineage.state, *lineage.kv))


def _has_items(head: ObjectHeader) -> bool:
    n = head.n_items - (head.n_start if head.kind == "kv" else 0)
    lengths = [section.length for section in head.sections if section.name == "items"]
    return 0 < n <= MAX_CTX and lengths == [4 * n]


def _codes(reader: ObjectReader, n_vocab: int) -> Codes:
    """The items an object is about, which must all be tokens of the model."""
    if not _has_items(reader.header):
        raise Damaged("it has another number of items than it says")
    codes = reader.read("items").view("<i4").astype(np.int32)
    if int(codes.min()) < 0 or int(codes.max()) >= n_vocab:
        raise Damaged("it has items that are no tokens of this model")
    return codes


# reading them again


def reading_of(stored: Stored, n_batch: int) -> Reading:
    """The chunks that the state was read in; if it does not say, those of its last KV; else the largest ones."""
    chunks = stored.head.chunks or ()
    if _leads_to(chunks, stored.n_items):
        return Reading(stored.codes, chunks, stored.head.clean)
    last = stored.parts[-1] if stored.parts else None
    if last is not None and stored.state is None and _leads_to(last.head.chunks or (), last.head.n_items):
        codes = np.concatenate([stored.codes[: last.head.n_start], last.codes])
        read = last.head.chunks or ()
        return Reading(codes, read, all(part.is_of(read) for part in stored.parts))
    whole, rest = divmod(stored.n_items, n_batch)
    plain = (((n_batch, whole),) if whole else ()) + (((rest, 1),) if rest else ())
    return Reading(stored.codes, plain, clean=False)


def _leads_to(chunks: Chunks, n_items: int) -> bool:
    """Whether these can be the chunks of so many items."""
    if any(not SEATED <= size <= MAX_BATCH or times < 1 for size, times in chunks):
        return False
    return n_items_of(chunks) == n_items and sum(times for size, times in chunks if size == SEATED) <= _MAX_SEATS


def n_chunk_of(lineage: Lineage) -> int:
    """The largest chunk that a replay may decode."""
    known = (thing.header.chunks or () for thing in (lineage.state, *lineage.kv))
    return max((size for chunks in known for size, _ in chunks if 0 < size <= MAX_BATCH), default=1)


def n_cells_of(lineage: Lineage) -> int:
    """The cells needed to restore it and to read it again, with one more item after it."""
    head = lineage.state.header
    n, at = head.n_items, 0
    for kv, reach in zip(lineage.kv, head.reaches, strict=False):
        n = max(n, kv.header.n_items, at + kv.header.n_items - kv.header.n_start)
        at = reach
    return min(MAX_CTX, n + 1)


Verdict = Literal["exact", "differs", "refused", "close", "skipped"]
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Finding:
    """``exact``: the bytes of a cold reading. ``differs``: clean, and other bytes. ``close``: not clean,
    so that only its ``spread`` can be known. ``refused``: libllama does not take it. ``skipped``: it could not be tried."""

    name: str
    verdict: Verdict
    spread: float | None = None  # the largest difference of a logit of the next token from a cold reading's
    why: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.verdict in ("differs", "refused")


@dataclass(frozen=True, slots=True)
class Opening:
    """A model file that states belong to, and the ways in which to open it; ``known``: engines did open it so, so that
    other bytes can only come from elsewhere."""

    path: Path
    ways: tuple[Way, ...]
    known: bool
    fingerprint: str  # of the states


def find_model(folder: Folder, given: Path | None) -> Opening:
    """The given file, or the one the folder remembers, if these states are its own; ``BadRequest`` says why not."""
    about = folder.about
    if given is None and (about is None or not about.path):
        raise BadRequest("it is not known which model file they belong to; name it with --model")
    path = given or Path(about.path if about is not None else "")
    if not path.is_file():
        raise BadRequest(f"there is no model file {path}; name it with --model")
    known = about is not None and bool(about.ways)
    try:
        rope_limit = rope_limit_of(path)
        ways = about.ways if about is not None and known else _ways_of(folder.fingerprint or "", rope_limit)
        own = tuple(way for way in ways if _fingerprint(path, way, rope_limit) == folder.fingerprint)
    except (OSError, ModelFileError) as error:
        raise BadRequest(f"a file of the model cannot be read: {error}") from None
    if not own:
        reasons = "or has other adapters, or the environment has other switches of libllama (GGML_…, LLAMA_…)"
        raise BadRequest(f"{path} is another model than the one they belong to, {reasons}")
    return Opening(path, own, known, folder.fingerprint or "")


def _fingerprint(path: Path, way: Way, rope_limit: int | None) -> str:
    return state_fingerprint(fingerprint_of(path, way.model), way.context, rope_limit, os.environ)


def _ways_of(fingerprint: str, rope_limit: int | None) -> tuple[Way, ...]:
    """The settings that a fingerprint names. The caller checks that they give the same fingerprint again."""
    names = ("cache_type_k", "cache_type_v", "flash_attention")  # and, where there is one, the type of states
    parts = fingerprint.split("|")
    values = dict(zip(names, parts[1:], strict=False))
    if len(parts) > N_ALWAYS and parts[N_ALWAYS].startswith(STATE_PREFIX):
        values["state_type"] = parts[N_ALWAYS].removeprefix(STATE_PREFIX)
    sizes = [{}] if rope_limit is None else [{"n_ctx": max(1, rope_limit)}, {"n_ctx": rope_limit + 1}]
    try:
        return tuple(Way(ModelOptions(), msgspec.convert(values | size, ContextOptions)) for size in sizes)
    except (msgspec.ValidationError, BadRequest):
        return ()


def replay_states(opening: Opening, lineages: Sequence[Lineage], tick: Tick) -> list[Finding]:
    """A finding for every state, and for all KV that could be compared by bytes."""
    odd = (lineage.state.name for lineage in lineages if not is_plausible(lineage))
    found = {name: Finding(name, "refused", why="it has another number of items than it says") for name in odd}
    for state in (lineage.state for lineage in lineages if lineage.state.header.media):
        found[state.name] = Finding(state.name, "skipped", why="it has images, and they are not kept")
    pending = [lineage for lineage in lineages if lineage.state.name not in found]
    for way in opening.ways:
        if not pending:
            break
        with Model(opening.path, way.model) as model, Context(model, _options(way, model, pending)) as context:
            for lineage in pending:
                for finding in _compare(context, lineage, tick):
                    if finding.verdict == "exact" or finding.name not in found:
                        found[finding.name] = finding
            _require_same_model(opening, model, way)
        pending = [lineage for lineage in pending if _is_open(lineage, found)]
    return [finding if opening.known else _doubted(finding) for finding in found.values()]


def _require_same_model(opening: Opening, model: Model, way: Way) -> None:
    """Fails if the model file changed: then the findings mean nothing."""
    own = state_fingerprint(model.fingerprint, way.context, model.rope_limit, os.environ)
    if own != opening.fingerprint or not model.files.is_right():
        raise BadRequest(f"{opening.path} was changed while its states were read again; try again")


def _doubted(finding: Finding) -> Finding:
    """Different bytes prove nothing if it is not known how the model was opened."""
    if finding.verdict != "differs":
        return finding
    return replace(finding, verdict="close", why="how its model was opened is not known")


def _is_open(lineage: Lineage, found: dict[str, Finding]) -> bool:
    """Whether another way of opening the model may still explain what differs."""
    names = (lineage.state.name, *(kv.name for kv in lineage.kv))
    return any(name in found and found[name].verdict == "differs" for name in names)


def _options(way: Way, model: Model, lineages: Sequence[Lineage]) -> ContextOptions:
    """The engine's own, with room for every chunk, and only as large as bits depend on: a window's do on its ring."""
    n_cells = max(map(n_cells_of, lineages))
    n_ubatch = max(way.context.n_ubatch, *map(n_chunk_of, lineages))
    options = replace(way.context, n_ubatch=n_ubatch, n_batch=max(way.context.n_batch, n_ubatch))
    if model.memory_kind.has_window:
        return replace(options, n_ctx=max(options.n_ctx, n_cells))
    if model.rope_limit is not None and options.n_cells > model.rope_limit:
        n_cells = max(n_cells, model.rope_limit + 1)  # a smaller context would choose the other factors
    return replace(options, n_ctx=-(-n_cells // CELLS_STEP) * CELLS_STEP, n_seq_max=1)


# one state


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a sequence holds at a point: its state, the digests of its KV by parts, and the next logits."""

    state: Blob | None
    kv: list[str]
    logits: Logits


def _compare(context: Context, lineage: Lineage, tick: Tick) -> list[Finding]:
    name = lineage.state.name
    try:
        stored = load_stored(lineage, context.kind, context.model.vocab.n_tokens)
        reading = reading_of(stored, context.n_batch)
        cold = _emptied(context, lambda: _read_cold(context, stored, reading, tick))
    except (Damaged, FileNotFoundError) as error:
        return [Finding(name, "skipped", why=str(error))]
    except MemoryFault as error:
        return [Finding(name, "skipped", why=f"a cold reading failed: {error}")]
    try:
        warm = _emptied(context, lambda: _restore(context, stored))
    except MemoryFault as error:
        return [Finding(name, "refused", why=str(error))]
    return _judge(stored, reading, cold, warm)


def _judge(stored: Stored, reading: Reading, cold: _Memory, warm: _Memory) -> list[Finding]:
    spread = _spread(cold.logits, warm.logits)
    pairs = zip(stored.parts, cold.kv, warm.kv, strict=True)
    kv = [(part, a == b) for part, a, b in pairs if reading.clean and part.is_of(reading.chunks)]
    findings = [Finding(part.name, "exact") if same else Finding(part.name, "differs", spread) for part, same in kv]
    if not reading.clean:
        return [Finding(stored.name, "close", spread), *findings]
    if cold.state is not None and warm.state is not None:
        same = is_same_state(cold.state, warm.state)
    else:
        same = all(same for _, same in kv)  # plain attention: there is nothing but KV
    return [Finding(stored.name, "exact" if same else "differs", None if same else spread), *findings]


def _emptied(context: Context, work: Callable[[], _Memory]) -> _Memory:
    try:
        return work()
    finally:
        context.drop(_SEQ)


def _read_cold(context: Context, stored: Stored, reading: Reading, tick: Tick) -> _Memory:
    prompt, state = Prompt(reading.codes), None
    if context.kind.needs_checkpoints:
        state = cold_state(context, _SEQ, prompt, reading.chunks, tick)
    else:
        replay(context, _SEQ, prompt, reading.chunks, tick)
        context.trim(_SEQ, token_mark(stored.n_items))
    return _Memory(state, _kv_digests(context, stored), _next_logits(context, stored))


def _restore(context: Context, stored: Stored) -> _Memory:
    end = token_mark(stored.n_items)
    for part in stored.parts:
        start, stop = context.end(_SEQ), token_mark(part.reach)
        context.splice_segment(_SEQ, part.blob, start, stop, n_cells=part.n_cells, clean=False)
    state = None
    if stored.state is not None:
        context.restore(_SEQ, stored.state, end, clean=False)
        state = context.capture(_SEQ)  # as this context would have taken it, so that only the numbers can differ
    return _Memory(state, _kv_digests(context, stored), _next_logits(context, stored))


def _kv_digests(context: Context, stored: Stored) -> list[str]:
    digests, at = [], 0
    for part in stored.parts:
        blob = context.capture_segment(_SEQ, token_mark(at), token_mark(part.reach))
        digests.append(blake3.blake3(blob.data, max_threads=blake3.blake3.AUTO).hexdigest())
        at = part.reach
    return digests


def _next_logits(context: Context, stored: Stored) -> Logits:
    """The logits after one more token; which one does not matter."""
    context.decode([Feed(_SEQ, stored.codes[-1:], context.end(_SEQ), wants_logits=True)])
    return context.logits(0).copy()


def _spread(a: Logits, b: Logits) -> float:
    spread = float(np.abs(a - b).max())
    return spread if math.isfinite(spread) else math.inf


Begin = Callable[[str, int], Tick]  # called with a new piece of work and its size; returns what to call on progress


@dataclass(frozen=True, slots=True)
class Report:
    folder: Folder
    broken: tuple[BrokenObject, ...]
    findings: tuple[Finding, ...]
    not_replayed: str  # why no state was read again; "": they were
    n_left: int  # states that could have been read again, beyond the limit
    not_put_aside: str = ""  # why wrong objects were not moved to quarantine; "": they were

    @property
    def wrong(self) -> tuple[str, ...]:
        """The names of the objects that no engine should use."""
        lost = (broken.path.name for broken in self.broken if broken.is_lost)
        return (*lost, *(finding.name for finding in self.findings if finding.is_wrong))

    @property
    def is_well(self) -> bool:
        return not self.broken and not self.wrong


def check_up(folders: Sequence[Folder], model: Path | None, limit: int | None, begin: Begin) -> list[Report]:
    """A given model must be that of at least one folder."""
    openings: dict[Path, Opening] = {}
    reasons: dict[Path, str] = {}
    for folder in folders:
        try:
            openings[folder.path] = find_model(folder, model)
        except BadRequest as error:
            reasons[folder.path] = str(error)
    if model is not None and not openings:
        raise BadRequest(next(iter(reasons.values()), "nothing is kept of any model"))
    return [
        _check_folder(folder, openings.get(folder.path), reasons.get(folder.path, ""), limit, begin)
        for folder in folders
    ]


def _check_folder(folder: Folder, opening: Opening | None, reason: str, limit: int | None, begin: Begin) -> Report:
    broken = _broken(folder, begin)
    bad = {item.path.name for item in broken}
    whole = [lineage for lineage in folder.lineages() if not lineage.missing]
    whole = [lineage for lineage in whole if not bad & {lineage.state.name, *(kv.name for kv in lineage.kv)}]
    chosen = whole[:limit]
    findings: list[Finding] = []
    if opening is not None and chosen:
        n_items = sum(lineage.state.header.n_items for lineage in chosen)
        try:
            findings = replay_states(opening, chosen, begin(f"reading again with {opening.path.name}", n_items))
        except (ModelError, BadRequest) as error:
            reason = str(error)
    report = Report(folder, broken, tuple(findings), reason, len(whole) - len(chosen))
    return replace(report, not_put_aside=quarantine(folder.path, report.wrong))


def _broken(folder: Folder, begin: Begin) -> tuple[BrokenObject, ...]:
    tick = begin(f"digests of {folder.path.name}", sum(thing.size for thing in folder.objects.values()))
    found = list(folder.broken.values())
    for thing in folder.objects.values():
        why = check_digests(thing.path, tick)
        if why is not None:
            found.append(BrokenObject(thing.path, thing.size, why))
    return tuple(found)
