"""What gateway and engine say to each other: small frozen messages, MessagePack, length-prefixed frames.

Both sides share this module and ``engine.settings``, and nothing else. No pickle: a frame can only become one of these
types.

    header    bytes that follow · of these, the message · the number of the request or question, 0 for none
    message   MessagePack
    pixels    of a Submit's images, and samples of its sounds, one after the other, as they are: not copied to be sent

The sender checks the size first, and the receiver skips a frame that is too large: only the request with the frame's
number fails.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from everwarm.config import Constraint, ContextShift, Sampling, ThinkingBudget
from everwarm.engine.settings import EngineSettings
from everwarm.errors import EverwarmError, FrameTooLarge, PromptTooLong

MAX_FRAME_BYTES: Final = 256 << 20  # to the engine
MAX_ANSWER_BYTES: Final = 64 << 20  # to the gateway
HEADER: Final = struct.Struct("<IIQ")
SHORT_NAMESPACE: Final = 12  # characters that are shown of a namespace's name
N_SHOWN: Final = 16  # items on each side of where a prompt differs from what was known


class Message(msgspec.Struct, frozen=True, tag=True):
    """``id`` ties questions, requests and answers together; the gateway numbers them."""


# to the engine


class Open(Message, frozen=True, tag=True):
    """The first frame: what to load."""

    model: str
    settings: EngineSettings


class SentImage(msgspec.Struct, frozen=True, tag=True):
    """Decoded pixels; without them where the engine is believed to know the image."""

    digest: bytes
    width: int
    height: int
    data: bytes | None = None  # rows of red, green, blue

    @property
    def n_bytes(self) -> int:
        return 3 * self.width * self.height


class SentSound(msgspec.Struct, frozen=True, tag=True):
    """Decoded samples; without them where the engine is believed to know the sound."""

    digest: bytes
    n_samples: int
    data: bytes | None = None  # 32-bit floats, at the model's sample rate

    @property
    def n_bytes(self) -> int:
        return 4 * self.n_samples


SentMedia = SentImage | SentSound


CountItems = Callable[[Sequence[int]], list[int]]


class CutHints(msgspec.Struct, frozen=True):
    """Points of one prompt, all in characters or all in items. They change speed, never results.

    ``boundaries`` are ends of messages, ``stables`` are where likely next turns part from this one, ``stable`` is what
    all of them share, and ``breakpoints`` are what the client marked. ``volatile`` are where the text is likely to
    change, ``joints`` where a long message may be changed. Before ``opening`` there is only what all chats with the same
    system text and tools begin with.
    """

    boundaries: tuple[int, ...] = ()
    stable: int | None = None
    stables: tuple[int, ...] = ()
    breakpoints: tuple[int, ...] = ()
    volatile: tuple[int, ...] = ()
    joints: tuple[int, ...] = ()
    opening: int | None = None

    @property
    def points(self) -> Iterator[int]:
        """All of them."""
        yield from (*self.boundaries, *self.stables, *self.breakpoints, *self.volatile, *self.joints)
        yield from (at for at in (self.stable, self.opening) if at is not None)

    def counted(self, count: CountItems, sure: CountItems) -> CutHints:
        """The same points in items. ``count`` gives the items before ends of messages, ``sure`` those before any
        character that no later text can change."""
        known = dict(zip(self.boundaries, count(self.boundaries), strict=True))
        others = sorted(set(self.points) - known.keys())
        known |= dict(zip(others, sure(others), strict=True))
        return CutHints(
            tuple(known[at] for at in self.boundaries),
            None if self.stable is None else known[self.stable],
            tuple(known[at] for at in self.stables),
            tuple(known[at] for at in self.breakpoints),
            tuple(known[at] for at in self.volatile),
            tuple(known[at] for at in self.joints),
            None if self.opening is None else known[self.opening],
        )


class AskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller wants of a request beside its prompt, here and in the engine's own ``Ask``."""

    hints: CutHints = CutHints()
    sampling: Sampling = Sampling()
    max_tokens: int = 256
    stop: tuple[str, ...] = ()  # its reader ends the reply at one of these texts; no draft is verified beyond
    namespace: str = ""
    use_cache: bool = True
    deterministic: bool = False
    ignore_eos: bool = False
    n_probs: int | None = None  # None: no probabilities; n: the token's own and the n most likely
    slot: int | None = None  # wait for this very slot
    session: str | None = None  # the conversation's session: slots of an active session are reused last
    priority: int = 0  # the larger, the later
    lora: tuple[float, ...] | None = None  # scales of the model's adapters; None: as it was started with
    max_draft: int | None = None  # tokens that may be drafted in one step; None: as many as pay
    post_sampling: bool = False  # probabilities are of what the samplers left, not of the model
    thinking: ThinkingBudget | None = None  # None: it may think as long as it likes
    shift: ContextShift | None = None  # None: a full context ends the reply


class Submit(AskOptions, Message, frozen=True, tag=True):
    """A prompt, as text (with cut hints in characters) or as tokens (hints in tokens). Each ``marker`` in the text stands
    for the next of the images."""

    id: int
    text: str | None = None
    tokens: list[int] | None = None
    add_special: bool = True
    wants_progress: bool = False
    wants_diagnostics: bool = False
    marker: str = ""
    images: tuple[SentMedia, ...] = ()  # and sounds
    constraint: Constraint | None = None
    text_bias: tuple[tuple[str, float], ...] = ()  # like a bias in ``sampling``, for every token of a text
    max_write_s: float | None = None  # from the first token on; the reply ends later, with its first new line


def options_of(message: Submit) -> dict[str, Any]:
    """What an ask takes over as it is, by name."""
    return {name: getattr(message, name) for name in AskOptions.__struct_fields__}


class Prewarm(Message, frozen=True, tag=True):
    """The text that the next request of a conversation will begin with, to be read when there is nothing else to do.
    There is no answer."""

    text: str
    add_special: bool = True
    namespace: str = ""
    session: str | None = None
    n_sure: int | None = None  # characters; what follows them is a guess. None: there is none


class Cancel(Message, frozen=True, tag=True):
    id: int


class Tokenize(Message, frozen=True, tag=True):
    id: int
    text: str
    add_special: bool
    parse_special: bool = True
    with_pieces: bool = True


class Embed(Message, frozen=True, tag=True):
    """Texts, tokens, or both mixed to vectors. With a ``query`` each is ranked by how well it answers it."""

    id: int
    inputs: list[str | list[int | str]]
    query: str | None = None


class Embedded(msgspec.Struct, frozen=True):
    """For each input its rows, as packed floats, and how many tokens it had."""

    rows: list[list[bytes]]
    n_tokens: list[int]


class Tokenized(msgspec.Struct, frozen=True):
    """Tokens in few values, so that a million of them are decoded at once: ids and the pieces' sizes are packed, four
    bytes each, and the pieces stand one after the other."""

    ids: bytes
    sizes: bytes = b""
    pieces: bytes = b""


class AskPrompt(Message, frozen=True, tag=True):
    """A question about a prompt that is not read now. ``count``: how many tokens it is, images included; their pixels are
    not needed. ``cost``: what it would cost now; the answer is a ``PromptCost``. ``hold``: pin its deepest known point for
    ``ttl_s``; the answer is that of a pin, and ``pinned`` is false where nothing of the prompt is known."""

    id: int
    what: Literal["count", "cost", "hold"]
    submit: Submit
    ttl_s: float = 0.0
    pin_quota: float | None = None


class PromptCost(msgspec.Struct, frozen=True):
    n_prompt: int
    n_cached: int
    read_s: float  # for the others, at the speed that was measured
    fits: bool = True  # into the context


class Detokenize(Message, frozen=True, tag=True):
    id: int
    tokens: list[int]


class Inspect(Message, frozen=True, tag=True):
    """The slots, the engine's counts, or what is kept, in numbers. ``namespace``: slots of other namespaces show only
    whether they are busy; "": all slots are shown in full."""

    id: int
    what: Literal["slots", "counts", "cache"]
    namespace: str = ""


class SlotAction(Message, frozen=True, tag=True):
    """Save a slot's conversation to a file, restore it from there, or erase it. The gateway has checked the path, and who
    may restore what."""

    id: int
    slot: int
    action: Literal["save", "restore", "erase"]
    path: str = ""
    namespace: str = ""
    owns_unbound: bool = False  # files from before they were bound to a namespace are the caller's
    trusts_origin: bool = False  # a file without a companion is taken on the caller's word


class AskTree(Message, frozen=True, tag=True):
    """So many nodes of the tree, from the one numbered ``after`` on, parents first."""

    id: int
    limit: int
    after: int | None = None
    namespace: str = ""  # only namespaces with this prefix
    words_of: str | None = None  # texts of namespaces with this prefix; None: of none
    alone: bool = False  # as if there were no others


class CacheOrder(Message, frozen=True, tag=True):
    """Pin a node, unpin it, or drop it with everything below. Without a node: everything."""

    id: int
    action: Literal["pin", "unpin", "drop"]
    node: int | None = None
    namespace: str = ""  # only in namespaces with this prefix
    pin_quota: float | None = None  # the share of RAM that a namespace's pins may hold; None: any
    ttl_s: float | None = None  # of a pin; None: until it is unpinned


class NodeSeen(msgspec.Struct, frozen=True, array_like=True):
    """A node of the tree as people are shown it; lengths in tokens, bytes in RAM."""

    id: int
    parent: int | None
    start: int
    end: int
    namespace: str
    n_children: int
    last_use: float | None
    hits: int
    pinned: bool
    kind: str | None  # of its checkpoint; None: it has none
    state_tiers: tuple[str, ...]
    state_bytes: int
    kv_tiers: tuple[str, ...]
    kv_bytes: int
    running: (
        tuple[int, int, int] | None
    )  # the gateway's number of a request that stands here, tokens it has, its prompt
    words: str | None = None


class TreeSeen(msgspec.Struct, frozen=True):
    version: int
    n_total: int
    next: int | None
    nodes: list[NodeSeen]


class Stop(Message, frozen=True, tag=True):
    """End what runs and exit 0."""


# to the gateway


class Loading(Message, frozen=True, tag=True):
    fraction: float


class FillIn(msgspec.Struct, frozen=True):
    """The tokens of fill-in-the-middle: before the text above the cursor, before the text below it, at the cursor."""

    prefix: int
    suffix: int
    middle: int
    project: int | None = None  # before a project's name
    file: int | None = None  # before a file's name
    bos: int | None = None  # only where every text begins with it


class Gpu(msgspec.Struct, frozen=True):
    name: str
    free_bytes: int
    total_bytes: int


class Placement(msgspec.Struct, frozen=True):
    """Where the model lies, and what memory is left beside it and its context."""

    gpus: tuple[Gpu, ...]  # that it may use; none: this libllama has none, or sees none
    n_layers: int
    n_gpu_layers: int
    host_free_bytes: int
    n_ctx_fits: int | None  # about the largest context that there is memory for; None: any


class ModelInfo(Message, frozen=True, tag=True):
    """The model is loaded, and this is what the gateway, which never loads it, needs to know of it."""

    description: str
    memory_kind: str
    n_params: int
    size_bytes: int
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_slots: int
    n_spares: int
    ram_bytes: int
    state_bytes: int
    kv_bytes_per_token: int
    every_n_tokens: int
    max_checkpoints: int
    chat_template: str | None
    bos: str
    eos: str
    adds_bos: bool
    build: str
    sees: bool = False  # images
    sample_rate: int = 0  # of the sounds that it hears; 0: none
    pooling: str | None = None  # of an embedding model, which writes no text
    fill_in: FillIn | None = None  # None: the model does not know how
    n_batch: int = 2048
    eog: tuple[int, ...] = ()  # tokens that end a reply
    placement: Placement | None = None


class Fatal(Message, frozen=True, tag=True):
    """This engine ends. ``cannot_serve``: so would another one; ``out_of_memory``: so would another one that gets no
    more memory; ``model_changed``: a file of the model was overwritten, and another one should open what it is now."""

    message: str
    reason: Literal["cannot_serve", "out_of_memory", "model_changed"] = "cannot_serve"


class Backlog(msgspec.Struct, frozen=True):
    """What is ahead of a new request, in tokens, and the seconds that each takes."""

    n_slots: int
    n_running: int
    n_waiting: int
    n_reply: float  # of a reply, on average
    n_to_read: float  # of prompts, running and waiting
    n_to_write: float  # of replies; as many as replies have had lately, unless they are limited to fewer
    n_next_read: float  # of the running request that will end first
    n_next_write: float
    read_s: float
    write_s: float  # each, of all replies that are written together


class Beat(Message, frozen=True, tag=True):
    """I am alive. ``step_age_s``: how long the running step has been running."""

    step_age_s: float | None
    n_running: int
    n_queued: int
    version: int = 0  # of the tree
    degraded: dict[str, str] = {}  # tiers, and why each does not work as configured
    backlog: Backlog | None = None  # None: no model is loaded yet


class Begun(Message, frozen=True, tag=True):
    id: int
    n_prompt: int
    n_cached: int
    slot: int
    n_stable: int = 0  # tokens up to the stable point


class PromptRead(Message, frozen=True, tag=True):
    id: int
    n_read: int
    n_prompt: int
    n_cached: int
    seconds: float


class TokenProb(msgspec.Struct, frozen=True):
    token: int
    piece: bytes
    logprob: float
    top: list[tuple[int, bytes, float]]


class TextPiece(Message, frozen=True, tag=True):
    """New reply tokens, and the text that is certain by now."""

    id: int
    text: str
    tokens: list[int]
    probs: list[TokenProb] | None = None


class Diverged(msgspec.Struct, frozen=True):
    """Where a prompt differs from what was known. The texts only where the request wants them."""

    at: int
    before: str | None = None
    known: str | None = None
    given: str | None = None


class CheckpointUse(msgspec.Struct, frozen=True):
    """The checkpoint that a request started from."""

    n_tokens: int
    kind: str  # of its cut; "end": the slot's own end, or plain attention
    how: str  # in place, unparked, from ram, ...


class Reason(enum.StrEnum):
    """Why a request read what it read: what the engine decides and the gateway shows."""

    HIT = "hit"
    EXTENDED = "extended"
    EDITED = "edited_at"
    NEW = "new"
    NO_CHECKPOINT = "no_checkpoint"
    EVICTED = "evicted"
    FINGERPRINT = "fingerprint"
    LOAD_SLOWER = "load_slower_than_compute"
    CACHE_OFF = "cache_off"
    DETERMINISTIC = "deterministic"
    REFUSED = "refused"
    CHECKPOINTS_OFF = "checkpoints_off"

    @property
    def words(self) -> str:
        return _REASON_WORDS[self]


_REASON_WORDS = {
    Reason.HIT: "all of it was cached",
    Reason.EXTENDED: "it extends a prompt that is cached",
    Reason.EDITED: "it differs from the cached prompt",
    Reason.NEW: "no conversation like it was read before",
    Reason.NO_CHECKPOINT: "no checkpoint was kept inside the shared part",
    Reason.EVICTED: "its KV or its checkpoints were evicted",
    Reason.FINGERPRINT: "it is kept for another model, build or KV type only",
    Reason.LOAD_SLOWER: "reading it again is faster than loading it from disk",
    Reason.CACHE_OFF: "the request wanted no cache",
    Reason.DETERMINISTIC: "the cached state was computed beside other requests, so it is not bit-exact",
    Reason.REFUSED: "what was kept of it could not be restored",
    Reason.CHECKPOINTS_OFF: "checkpoints are off (max_checkpoints is 0)",
}


class Evicted(msgspec.Struct, frozen=True):
    """What RAM evicted of a prompt, the deepest point of it, and why. A worth is the seconds of reading that a GiB was
    expected to save per request."""

    at: int  # its tokens
    ago_s: float
    worth: float
    least_kept: float | None  # the worth of what would have been evicted next; None: nothing was left
    budget_bytes: int

    @property
    def words(self) -> str:
        least = (
            "nothing else was left" if self.least_kept is None else f"the least kept was worth {self.least_kept:.2g}"
        )
        budget = f"the budget of {self.budget_bytes / (1 << 30):.3g} GiB was full"
        return f"evicted {_ago(self.ago_s)} ago: worth {self.worth:.2g} s per GiB, {budget}, {least}"


def _ago(seconds: float) -> str:
    unit, size = next(((u, n) for u, n in (("h", 3600), ("min", 60)) if seconds >= 2 * n), ("s", 1))
    return f"{seconds / size:.0f} {unit}"


class ReadReason(msgspec.Struct, frozen=True):
    """Why the prompt was read as far as it was."""

    reason: Reason = Reason.NEW
    again: Reason | None = None  # why tokens that were known were read again, if more than a few were
    n_shared: int = 0  # that were ever read, whether or not anything is left of them
    n_kv: int | None = None  # whose KV was available; None: this model has none
    n_checkpoint: int = 0  # up to its deepest kept state, usable or not
    restored: CheckpointUse | None = None
    diverged: Diverged | None = None
    evicted: Evicted | None = None  # None: nothing of it was read again for that, or it is too long ago


class PromptNotes(msgspec.Struct, frozen=True):
    """What the gateway changed in a request, or found out about it. The gateway adds it to ``Done``; no engine sends it."""

    n_recalled: int = 0  # replies in the prompt that are as the model wrote them, and not as the client did
    background: str | None = None  # what a background call is for
    rewritten: tuple[str, ...] = ()  # rules by which text of the client was changed


class Done(Message, frozen=True, tag=True):
    """The end of a reply. ``text`` is what was held back until the end."""

    id: int
    text: str
    finish: str
    stop_text: str | None
    n_prompt: int
    n_cached: int
    n_shared: int
    n_reply: int
    slot: int
    checkpoint: str | None
    queue_s: float
    restore_s: float
    prefill_s: float
    decode_s: float
    why: ReadReason = ReadReason()
    kept: str = "none"  # where the turn is now: ram, disk or none
    keep_s: float = 0.0  # how long this waited for that
    notes: PromptNotes = PromptNotes()
    n_drafted: int = 0
    n_draft_accepted: int = 0
    n_shifts: int = 0  # times that its context was full, and what it began with was dropped


class Failed(Message, frozen=True, tag=True):
    """A request or question that could not be answered, in the error's own words."""

    id: int
    status: int
    code: str
    message: str
    n_prompt: int | None = None
    n_context: int | None = None
    retry_after_s: int | None = None


class Answer(Message, frozen=True, tag=True):
    id: int
    data: Any


def failed(id: int, error: EverwarmError) -> Failed:
    """An error, in its own words."""
    n_prompt, n_context = (error.n_prompt, error.n_context) if isinstance(error, PromptTooLong) else (None, None)
    return Failed(id, error.status, error.code, str(error), n_prompt, n_context)


CacheQuestion = AskTree | CacheOrder
Question = Embed | Tokenize | Detokenize | AskPrompt | Inspect | CacheQuestion | SlotAction
ToEngine = Open | Submit | Prewarm | Cancel | Question | Stop
ToGateway = Loading | ModelInfo | Fatal | Beat | Begun | PromptRead | TextPiece | Done | Failed | Answer

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)


Frame = tuple[bytes | bytearray, ...]  # a message ready to be sent: its parts, in order


def frame(message: Message, most: int = MAX_FRAME_BYTES) -> Frame:
    """Or ``FrameTooLarge``, which is the fault of this message alone."""
    pixels: list[bytes] = []
    if isinstance(message, Submit) and message.images:
        pixels = [image.data for image in message.images if image.data]
        shown = (msgspec.structs.replace(p, data=b"") if p.data else p for p in message.images)
        message = msgspec.structs.replace(message, images=tuple(shown))
    n_text = len(getattr(message, "text", None) or "")  # as many bytes or more
    _check_size(n_text + sum(map(len, pixels)), most)
    data = bytearray(HEADER.size)
    _encoder.encode_into(message, data, HEADER.size)
    n_message = len(data) - HEADER.size
    size = n_message + sum(map(len, pixels))
    _check_size(size, most)
    HEADER.pack_into(data, 0, size, n_message, getattr(message, "id", 0))
    return (data, *pixels)


def _check_size(n_bytes: int, most: int) -> None:
    if n_bytes > most:
        raise FrameTooLarge(n_bytes, most)


class FrameHeader(msgspec.Struct, frozen=True):
    """``n_bytes`` follow, of which the first ``n_message`` are the message."""

    n_bytes: int
    n_message: int
    id: int

    def check(self, most: int) -> None:
        """``FrameTooLarge`` where it is not to be read, only skipped."""
        _check_size(max(self.n_bytes, self.n_message), most)


def header_of(data: bytes | bytearray) -> FrameHeader:
    return FrameHeader(*HEADER.unpack_from(data))


def wanted_pixels(message: ToEngine) -> list[int]:
    """How many bytes of pixels and samples follow the message, image by image."""
    images = message.images if isinstance(message, Submit) else ()
    return [p.n_bytes for p in images if p.data == b""]


def with_pixels(message: ToEngine, pixels: Sequence[bytes]) -> ToEngine:
    if not isinstance(message, Submit) or not pixels:
        return message
    following = iter(pixels)
    shown = (msgspec.structs.replace(p, data=next(following)) if p.data == b"" else p for p in message.images)
    return msgspec.structs.replace(message, images=tuple(shown))


class FrameBuffer:
    """Messages out of a stream of bytes, however it was cut: for the gateway, which gets no pixels."""

    def __init__(self, most: int = MAX_ANSWER_BYTES) -> None:
        self._most = most
        self._data = bytearray()
        self._n_skipped = 0  # bytes that are still to be thrown away

    def feed(self, data: bytes) -> Iterator[bytes | Failed]:
        """Bodies of messages; in place of one that is too large, the error for its request."""
        n_skipped = min(self._n_skipped, len(data))
        self._n_skipped -= n_skipped
        self._data += memoryview(data)[n_skipped:]
        at = 0
        while len(self._data) - at >= HEADER.size:
            n_bytes, n_message, id = HEADER.unpack_from(self._data, at)
            start, end = at + HEADER.size, at + HEADER.size + n_bytes
            n_most = max(n_bytes, n_message)
            if n_most > self._most:
                yield failed(id, FrameTooLarge(n_most, self._most))
                at = min(end, len(self._data))
                self._n_skipped = end - at
                continue
            if end > len(self._data):
                break
            yield bytes(memoryview(self._data)[start:end])
            at = end
        del self._data[:at]


def read_to_engine(body: bytes | memoryview) -> ToEngine:
    return _to_engine.decode(body)


def read_to_gateway(body: bytes) -> ToGateway:
    return _to_gateway.decode(body)
