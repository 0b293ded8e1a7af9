"""A libllama context: the only place where sequences are decoded, saved and restored. Knows no prefix tree and no policy.

One thread owns a context. Unified KV: all sequences share ``n_ctx`` cells, and are names for them, cut, shared and dropped.
Every refusal of libllama becomes a ``MemoryFault`` and every call that could abort the process is checked first. Each
sequence's end is counted here; libllama's own counters are used only to assert.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from everwarm.config import ContextOptions, RopeOptions
from everwarm.errors import ContextFull, ContextTooBig, DecodeFailed, StateRejected, TrimRefused, WeightsTouched
from everwarm.llama import abi
from everwarm.llama.batch import BatchArrays, DraftRequest, Feed
from everwarm.llama.blobs import (
    HEADER_BYTES,
    Copying,
    Room,
    begins_sequence,
    cut,
    cut_bytes,
    describes_cells,
    describes_end,
    finished,
    first_position,
    is_finite,
    is_packed,
    joined,
    pack,
    scattered,
    split,
    tail_bytes,
    unpack,
    with_header,
    without_nan,
)
from everwarm.llama.cells import Cells
from everwarm.llama.lib import Closing
from everwarm.llama.media.media_model import Embedding, MediaModel, decode_image
from everwarm.llama.model import MemoryKind, Model
from everwarm.llama.mtp_head import Head
from everwarm.types import START, Blob, Mark, Place, Position, SeqId, TokenCount, heap

log = logging.getLogger("everwarm.llama")

_LAST_ROW = -1  # libllama's name for the last logits there are
_BEYOND_ALL = (1 << 31) - 2  # a position that no cell has


Logits = NDArray[np.float32]


class Context(Closing):
    """``n_seq_max`` sequences for the caller, and one more inside for moving KV ranges in and out."""

    def __init__(self, model: Model, options: ContextOptions, place: Place = heap) -> None:
        """``place``: where captured states and segments go."""
        self.model = model
        self.options = options
        self.kind = model.memory_kind
        self._has_attention = self.kind.has_attention  # needed at every step
        self._lib = model.lib
        self.head: Head | None = None
        n_seqs = options.n_seq_max + self.kind.has_attention
        self._scratch = options.n_seq_max
        self._ptr: int | None = open_context(model, options, n_seqs)
        self._mem = self._lib.get_memory(self._ptr)
        self._scales = model.scales
        self.n_ctx = int(self._lib.n_ctx(self._ptr))
        self.n_batch = min(options.n_batch, int(self._lib.n_batch(self._ptr)))
        self.cells = Cells(self.n_ctx, n_seqs)
        self._end = [START] * n_seqs
        self._state_clean = [True] * n_seqs
        self._stateless = [False] * n_seqs  # has KV but no state yet: must not be decoded
        self._is_taken_back = [False] * n_seqs  # its state is a snapshot
        self._has_snapshots = [False] * n_seqs
        self._leaving: dict[SeqId, int] = {}  # emptied here and not yet in libllama: the cells that it holds there
        self._drops_later = False
        self.n_snapshots = int(self._lib.n_rs_seq(self._ptr))  # 0 where the architecture has none
        self.head = self._open_head(n_seqs) if model.has_head else None
        self.place = place
        self.n_decodes = self.n_fed = 0  # since the start: calls, and sequences in all of them
        self._batch = BatchArrays(self.n_batch)
        self._rows: list[int] = []
        self._views: dict[int, Logits] = {}
        self._empty_state = self._read(SeqId(0), abi.STATE_PARTIAL)
        self._empty_tail = self._empty_state[HEADER_BYTES:]

    def _open_head(self, n_seqs: int) -> Head | None:
        """None: there is no room for it, and the model works without."""
        assert self._ptr is not None
        try:
            ptr = open_context(self.model, self.options, n_seqs, abi.CONTEXT_MTP)
        except ContextTooBig as error:
            log.warning("the MTP head of %s is not used: %s", self.model.path.name, error)
            return None
        rows = self.model.head_chooses_rows
        return Head(self._lib, ptr, self._ptr, n_seqs, self.n_batch, self.model.vocab.n_tokens, chooses_rows=rows)

    # decoding

    def decode(self, feeds: Sequence[Feed]) -> None:
        """Append every feed in one batch. ``ContextFull``: nothing changed; ``DecodeFailed``: the sequences are empty."""
        n, rows = self._fill(feeds)
        if self._has_attention and n > self.cells.free:
            raise ContextFull(f"{n} tokens need {n} cells but {self.cells.free} of {self.n_ctx} are free")
        self._finish_drops_for(n)
        if self.head is not None:
            self.head.listen(is_wanted=any(feed.is_for_head for feed in feeds))
        files = self.model.files
        before = self.model.files.before_use()
        code = int(self._lib.decode(self._ptr, self._batch.struct(n)))
        if code == 1:
            raise ContextFull(f"libllama found no room for {n} tokens beside {self.cells.used} of {self.n_ctx} cells")
        if code != 0:
            for feed in feeds:
                self.drop(feed.seq)
            raise DecodeFailed(f"libllama could not decode {n} tokens (code {code}): {self._lib.last_words()}")
        if files.look() != before:
            self._distrust([feed.seq for feed in feeds])
        self._rows = rows
        self.n_decodes, self.n_fed = self.n_decodes + 1, self.n_fed + len(feeds)
        alone = len(feeds) == 1
        is_even = len({len(feed.tokens) for feed in feeds}) == 1
        for feed in feeds:
            self._advance(feed, alone)
            self._has_snapshots[feed.seq] = is_even
        if self.head is not None:
            self.head.read(feeds)

    def warm_up(self) -> None:
        """Decodes steps of the shapes that replies have, and forgets them. A GPU takes several times as long for what it
        does for the first time, and the first replies should neither wait for that nor be judged by it."""
        seq = SeqId(0)
        for n_draft in (0, 0, self.n_snapshots, self.n_snapshots):
            tokens = np.zeros(1 + n_draft, np.int32)
            self.draft([DraftRequest(seq, tokens[:1], 1, max(1, n_draft))])
            self.decode([Feed(seq, tokens, self._end[seq], True, n_draft)])
            self.logits(0)
        self.clear()

    def draft(self, wanted: Sequence[DraftRequest]) -> dict[SeqId, list[int]]:
        """What the model's head expects."""
        if self.head is None:
            return {}
        return self.head.draft(wanted, {each.seq: self._end[each.seq].pos for each in wanted})

    def take_back_draft(self, seq: SeqId, pos: int) -> None:
        """The tokens from this position on were not accepted: the head forgets them."""
        if self.head is not None:
            self.head.trim(seq, pos)

    def see(self, seq: SeqId, media: MediaModel, embedding: Embedding, end: Mark, *, wants_logits: bool) -> None:
        """Append a whole image or sound. ``ContextFull``: nothing changed; ``DecodeFailed``: the sequence is empty."""
        self._use(seq)
        assert not self._stateless[seq], f"sequence {seq} has KV but no state"
        n = embedding.shape.n_tokens
        start = self._end[seq]
        assert end.n_tokens == start.n_tokens + n and end.pos == start.pos + embedding.shape.n_pos
        if self._has_attention and n > self.cells.free:
            raise ContextFull(f"an image of {n} cells does not fit into {self.cells.free}")
        self._finish_drops_for(n)
        files = self.model.files
        before = self.model.files.before_use()
        code = decode_image(
            self._lib,
            self.native,
            seq,
            embedding,
            start.pos,
            wants_logits=wants_logits,
            uses_mrope=media.uses_mrope,
            causal=media.is_causal or embedding.shape.is_sound,
            n_batch=self.n_batch,
            n_ubatch=self.options.n_ubatch,
        )
        if code == 1:
            raise ContextFull(f"libllama found no room for an image of {n} cells")
        if code != 0:
            self.drop(seq)
            raise DecodeFailed(f"libllama could not read an image (code {code}): {self._lib.last_words()}")
        if files.look() != before:
            self._distrust([seq])
        self._rows = [_LAST_ROW] if wants_logits else []
        alone = self.cells.append(seq, n, clean=self._is_trusted(seq)) if self._has_attention else True
        self._state_clean[seq] &= alone
        self._is_taken_back[seq] = False
        if not alone:
            self._disturb_windows()
        self._end[seq] = end

    def _distrust(self, seqs: Sequence[SeqId]) -> None:
        """The weights may have been written to during a step: drop its results."""
        for seq in seqs:
            self.drop(seq)
        raise WeightsTouched(f"a file of {self.model.path.name} was touched during a step")

    def _fill(self, feeds: Sequence[Feed]) -> tuple[int, list[int]]:
        """Returns how many tokens there are, and which of them will have logits."""
        n = 0
        rows: list[int] = []
        for feed in feeds:
            self._check_feed(feed)
            size = len(feed.tokens)
            assert n + size <= self.n_batch, f"a batch of {n + size} tokens is larger than n_batch {self.n_batch}"
            self._batch.put(n, feed)
            n += size
            rows.extend(range(n - feed.n_rows, n))
        assert n > 0, "a batch needs at least one token"
        return n, rows

    def _check_feed(self, feed: Feed) -> None:
        self._use(feed.seq)
        assert len(feed.tokens) > feed.n_draft, "a feed needs at least one token"
        assert feed.start == self._end[feed.seq], f"sequence {feed.seq} ends at {self._end[feed.seq]}, not {feed.start}"
        assert not self._stateless[feed.seq], f"sequence {feed.seq} has KV but no state"

    def _advance(self, feed: Feed, alone: bool) -> None:
        n = len(feed.tokens)
        if 0 < feed.n_draft <= self.n_snapshots or (feed.n_draft > 0 and not self.kind.needs_checkpoints):
            alone = False  # it may be cut: then no chunk tells how it was decoded
        if self._has_attention:
            alone = self.cells.append(feed.seq, n, clean=alone and self._is_trusted(feed.seq))
        self._state_clean[feed.seq] &= alone
        self._is_taken_back[feed.seq] = False
        if not alone:
            self._disturb_windows()
        self._end[feed.seq] = Mark(TokenCount(feed.start.n_tokens + n), Position(feed.start.pos + n))

    def _is_trusted(self, seq: SeqId) -> bool:
        """False: KV that is computed now is not clean. It may come from a packed state, or lie beside dropped cells."""
        return not self._leaving and (not self.packs_states or self._state_clean[seq])

    def logits(self, row: int) -> Logits:
        """The ``row``-th row of the last decode, over all feeds that wanted logits. A live view: copy it to keep it."""
        address = self._lib.get_logits_ith(self.native, self._rows[row])
        assert address, "libllama has no logits for a row that should have some"
        view = self._views.get(address)
        if view is None:
            memory = (ctypes.c_float * self.model.vocab.n_tokens).from_address(address)
            view = self._views[address] = np.ctypeslib.as_array(memory)
        return view

    def largest(self, rows: Sequence[int]) -> list[int]:
        """The token with the largest logit of each of these rows. Rows that lie behind each other are walked over in one
        go, without the interpreter. Where a row has numbers that are none, any token."""
        addresses = [self._lib.get_logits_ith(self.native, self._rows[row]) for row in rows]
        n_vocab, first = self.model.vocab.n_tokens, addresses[0]
        if addresses != [first + 4 * n_vocab * i for i in range(len(rows))]:
            return [int(self.logits(row).argmax()) for row in rows]
        memory = (ctypes.c_float * (n_vocab * len(rows))).from_address(first)
        found: list[int] = np.ctypeslib.as_array(memory).reshape(len(rows), n_vocab).argmax(axis=1).tolist()
        return found

    def batch_index(self, row: int) -> int:
        """libllama's index of that row, for its own sampler."""
        return self._rows[row]

    # sequences: names for cells, and where each one ends

    @property
    def native(self) -> int:
        """The C pointer, for the sampler."""
        assert self._ptr is not None, "the context is closed"
        return self._ptr

    def end(self, seq: SeqId) -> Mark:
        return self._end[seq]

    def is_clean(self, seq: SeqId) -> bool:
        """Whether a cold replay with the same chunks would reproduce this sequence bit for bit."""
        return self._state_clean[seq] and self.cells.is_clean(seq) and not self._stateless[seq]

    def use_scales(self, scales: tuple[float, ...]) -> None:
        """Of the model's adapters, for all decodes from now on."""
        if scales != self._scales:
            set_scales(self.model, self.native, scales)
            self._scales = scales

    def drop(self, seq: SeqId) -> None:
        self._use(seq)
        n_cells = self.cells.count(seq)
        self._forget(seq)
        if self.head is not None:
            self.head.drop(seq)
        if self._drops_later and n_cells:
            self._leaving[seq] = n_cells
        else:
            self._empty(seq)

    @contextlib.contextmanager
    def dropping_later(self) -> Iterator[None]:
        """What is dropped inside is gone at once for everyone here, but libllama empties it later: with ``finish_drop``,
        before the sequence is used again, or when its cells are needed. Until then nothing that is decoded is clean."""
        self._drops_later = True
        try:
            yield
        finally:
            self._drops_later = False

    @property
    def n_to_empty(self) -> int:
        """Sequences that were dropped and are still in libllama."""
        return len(self._leaving)

    def finish_drop(self) -> None:
        """Empties one sequence that was dropped before, if there is one."""
        if self._leaving:
            self._empty(next(iter(self._leaving)))

    def finish_drops(self) -> None:
        while self.n_to_empty:
            self.finish_drop()

    def _empty(self, seq: SeqId) -> None:
        self._leaving.pop(seq, None)
        self._lib.memory_seq_rm(self._mem, seq, -1, -1)
        if self.cells.used == 0 and not self._leaving and not any(end.n_tokens for end in self._end):
            self._lib.memory_clear(self._mem, False)  # the next one starts at the first cell again

    def _finish_drops_for(self, n_cells: int) -> None:
        """Empties what was dropped if libllama may need its cells."""
        if self._leaving and n_cells > self.cells.free - sum(self._leaving.values()):
            self.finish_drops()

    def trim(self, seq: SeqId, mark: Mark) -> None:
        """Cut the sequence back to ``mark``, or raise ``TrimRefused`` and change nothing."""
        self._use(seq)
        assert not self._stateless[seq], f"sequence {seq} has KV but no state: restore one"
        assert mark.n_tokens <= self._end[seq].n_tokens, f"sequence {seq} ends at {self._end[seq]}, before {mark}"
        if mark == self._end[seq]:
            return None
        if mark == START:
            return self.drop(seq)
        if self.n_snapshots:
            raise TrimRefused(f"sequence {seq} has a state, which only ``take_back`` cuts")
        if not self.window_reaches(seq, mark) or not self._lib.memory_seq_rm(self._mem, seq, mark.pos, -1):
            raise TrimRefused(f"sequence {seq} cannot be cut from {self._end[seq].n_tokens} to {mark.n_tokens} tokens")
        self._set_end(seq, mark)
        self._state_clean[seq] &= not self.kind.has_window  # the window stays where in the ring it was
        if self.head is not None:
            self.head.trim(seq, mark.pos)

    def take_back(self, seq: SeqId, mark: Mark) -> None:
        """Cut a recurrent sequence back into its last decode, to one of its snapshots. It can be decoded, captured and
        dropped then, but gets no second name before: libllama would give that the state from before the cut.

        Only if all sequences of that decode got as many tokens. Otherwise libllama splits it, moves states between the
        parts, and leaves the snapshots of those that it moved behind, where others write."""
        self._use(seq)
        n = self._end[seq].n_tokens - mark.n_tokens
        assert 0 < n <= self.n_snapshots, f"sequence {seq} has {self.n_snapshots} snapshots, not {n}"
        assert self._has_snapshots[seq], f"sequence {seq} was decoded beside others that got more or fewer tokens"
        if not self._lib.memory_seq_rm(self._mem, seq, mark.pos, -1):
            raise TrimRefused(f"the last {n} tokens of sequence {seq} could not be taken back")
        self._set_end(seq, mark)
        self._is_taken_back[seq] = True
        if self.head is not None:
            self.head.trim(seq, mark.pos)

    def can_be_parked(self, seq: SeqId) -> bool:
        """Whether it may have a second name now."""
        return self.kind.can_share_cells and not self._is_taken_back[seq]

    def window_reaches(self, seq: SeqId, mark: Mark) -> bool:
        """Whether a sequence can be cut to ``mark`` as far as its sliding window is concerned. Such a cache cuts anywhere
        without complaint, also where it no longer holds the window."""
        if not self.kind.has_window:
            return True
        return int(self._lib.memory_seq_pos_min(self._mem, seq)) <= max(0, mark.pos - self.model.n_swa)

    def park(self, slot: SeqId, spare: SeqId) -> None:
        """Make ``spare`` a second name for the whole of ``slot``. Copies nothing; works the other way round too."""
        self._use(slot)
        self._use(spare)
        assert self.kind.can_share_cells, "a sliding-window cache must not share cells"
        assert not self._is_taken_back[slot], f"sequence {slot} stands at a snapshot: decode it first"
        assert slot != spare, "a sequence cannot be parked in itself"
        self._lib.memory_seq_rm(self._mem, spare, -1, -1)
        self._forget(spare)
        self._lib.memory_seq_cp(self._mem, slot, spare, -1, -1)
        self.cells.share(slot, spare, self.cells.count(slot))
        self._end[spare] = self._end[slot]
        self._state_clean[spare] = self._state_clean[slot]
        self._stateless[spare] = self._stateless[slot]
        if self.head is not None:
            self.head.park(slot, spare, self._end[slot].pos)

    unpark = park

    def hold_state(self, seq: SeqId, holder: SeqId) -> None:
        """Make ``holder``, which is empty, a second name for the recurrent state of ``seq`` alone. Copies nothing, and
        takes no time for the cells of attention, however many there are. Only to be put back, or dropped."""
        self._use(seq)
        self._use(holder)
        assert self.can_be_parked(seq), f"the state of sequence {seq} cannot be held"
        self._lib.memory_seq_cp(self._mem, seq, holder, _BEYOND_ALL, -1)  # states are shared whatever the range
        self._state_clean[holder] = self._state_clean[seq]

    def put_state_back(self, holder: SeqId, seq: SeqId, mark: Mark) -> None:
        """The state that ``holder`` holds, of ``mark``, becomes that of ``seq`` again, and its cells are cut to it. The
        head goes its own way: it is cut to what was accepted."""
        self._lib.memory_seq_cp(self._mem, holder, seq, _BEYOND_ALL, -1)
        if not self._lib.memory_seq_rm(self._mem, seq, mark.pos, -1):
            raise TrimRefused(f"sequence {seq} could not be cut to {mark.n_tokens} tokens after a draft")
        self._set_end(seq, mark)
        self._state_clean[seq] = self._state_clean[holder]

    def share_kv(self, src: SeqId, dst: SeqId, mark: Mark) -> None:
        """Give ``dst`` the KV of ``src`` up to ``mark``. A state must be restored before it can be decoded."""
        self._use(src)
        assert self.kind.can_share_cells, "a sliding-window cache must not share cells"
        assert src != dst, "a sequence cannot share with itself"
        assert mark.n_tokens <= self.cells.count(src), f"sequence {src} holds less than {mark}"
        self.drop(dst)
        self._lib.memory_seq_cp(self._mem, src, dst, 0, mark.pos)
        self.cells.share(src, dst, mark.n_tokens)
        self._end[dst] = mark
        self._stateless[dst] = self.kind.needs_checkpoints
        if self.head is not None:
            self.head.share(src, dst, mark.pos, self._end[src].pos)

    def keep_kv(self, seq: SeqId, mark: Mark) -> None:
        """Cut a sequence back to ``mark`` where libllama would refuse: the KV stays, the state must be restored."""
        self._use(seq)
        assert mark.n_tokens <= self.cells.count(seq), f"sequence {seq} holds less than {mark}"
        if mark == START:
            return self.drop(seq)
        self._lib.memory_seq_cp(self._mem, seq, self._scratch, 0, mark.pos)
        self._lib.memory_seq_rm(self._mem, seq, -1, -1)
        self._lib.memory_seq_cp(self._mem, self._scratch, seq, -1, -1)
        self._lib.memory_seq_rm(self._mem, self._scratch, -1, -1)
        self._set_end(seq, mark)
        self._stateless[seq] = self.kind.needs_checkpoints
        if self.head is not None:
            self.head.trim(seq, mark.pos)

    def _disturb_windows(self) -> None:
        """A sequence that comes and goes moves the ring on for all of them."""
        if self.kind.has_window:
            self._state_clean = [end == START for end in self._end]

    # states: points

    @property
    def packs_states(self) -> bool:
        """Whether a captured state is not quite what the sequence had: see ``llama.blobs``."""
        return self.options.state_type != "f32" and self.kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT)

    def capture_packed(self, seq: SeqId) -> Blob:
        """The state at the sequence's end, in as few bytes as the options say."""
        if not self.packs_states:
            return self.capture(seq)
        self._use(seq)
        room = self._room_for_state(seq)
        return room.closed(pack(self._read(seq, abi.STATE_PARTIAL), self.options.state_type, room))

    def _room_for_state(self, seq: SeqId) -> Room:
        return Room(self.place, None if self.head is None else self.head.row(seq, self._end[seq].pos))

    def capture(self, seq: SeqId) -> Blob:
        """The recurrent and sliding-window state at the sequence's end. A window cache is a ring, and its sums depend on
        where in it the window lies: so it is placed anew right after it was read, as a later restore will place it."""
        self._use(seq)
        assert self.kind.needs_checkpoints, "plain attention has no state to capture"
        room = self._room_for_state(seq)
        blob = self._read(seq, abi.STATE_PARTIAL, room)
        if self.kind.has_window and not self._write(seq, blob, abi.STATE_PARTIAL):
            self.drop(seq)
            raise StateRejected(f"a window of {len(blob)} bytes could not be seated anew: {self._lib.last_words()}")
        return room.closed(blob)

    def is_finite(self, seq: SeqId) -> bool:
        """Whether the state holds only numbers. One with NaN spoils the next user of its cells: see ``scrub``."""
        has_state = self.kind.needs_checkpoints and self._end[seq] != START
        return not has_state or is_finite(self._read(seq, abi.STATE_PARTIAL))

    def scrub(self, seq: SeqId) -> None:
        """Drop a sequence whose state is not a number. libllama empties a recurrent cell by multiplying it with 0, and
        NaN times 0 is NaN: so the state is made finite before it is dropped."""
        self._use(seq)
        if self.kind.needs_checkpoints and self._end[seq] != START:
            self._write(seq, without_nan(self._read(seq, abi.STATE_PARTIAL)), abi.STATE_PARTIAL)
        self.drop(seq)
        if not any(end.n_tokens for end in self._end):
            self.clear()

    def clear(self) -> None:
        """Empty everything and zero it: NaN in a freed KV cell spoils all that attend over it, masked or not."""
        for seq in range(self.options.n_seq_max):
            self._forget(SeqId(seq))
        self._leaving.clear()
        self._lib.memory_clear(self._mem, True)
        if self.head is not None:
            self.head.clear()

    def touch(self, seq: SeqId) -> None:
        """What capturing changes in a sequence, without the copy: only the place of a sliding window."""
        if self.kind.has_window:
            self.capture(seq)

    def restore(self, seq: SeqId, blob: Blob, mark: Mark, *, clean: bool) -> None:
        """Put a captured state back and cut the KV to it. The KV up to ``mark`` must be there already.

        On ``StateRejected`` the KV is still there but the sequence has no state: restore another one or drop it. A
        half-written state must never be decoded.
        """
        self._use(seq)
        if self.kind.has_attention:
            assert mark.n_tokens <= self.cells.count(seq), f"sequence {seq} holds less KV than {mark}"
        self._stateless[seq] = True
        blob, row = split(blob)
        if is_packed(blob):
            blob, clean = unpack(blob), False
        if not describes_end(blob, self.kind, mark):
            raise StateRejected(f"a state of {len(blob)} bytes is not one of {mark.n_tokens} tokens")
        if not self._write(seq, blob, abi.STATE_PARTIAL):
            raise StateRejected(f"a state of {len(blob)} bytes was refused: {self._lib.last_words()}")
        if self.kind.has_attention and not self._lib.memory_seq_rm(self._mem, seq, mark.pos, -1):
            raise StateRejected(f"the sequence could not be cut to its restored state at {mark.n_tokens} tokens")
        self._set_end(seq, mark)
        self._state_clean[seq] = clean
        if self.head is not None:
            self.head.stand(seq, mark.pos, row)

    # whole sequences

    def capture_sequence(self, seq: SeqId, place: Place = heap) -> Blob:
        """KV and state of a whole sequence, as libllama writes them into a file."""
        self._use(seq)
        return self._read(seq, abi.STATE_FULL, place)[HEADER_BYTES:]

    def scattered_sequence(
        self, parts: Sequence[tuple[Blob, Mark, Mark]], state: Blob | None, seq: SeqId
    ) -> list[Blob]:
        """The bytes of ``capture_sequence`` out of segments and a state that are in RAM, without a copy and without the
        device. ``StateRejected``: they cannot be put together."""
        kv = [(split(blob)[0], int(start.pos), int(stop.pos)) for blob, start, stop in parts]
        found = scattered(kv, self._n_tail, seq)
        return found if state is None else [*found, split(state)[0][HEADER_BYTES:]]

    def capture_head(self, seq: SeqId) -> Blob | None:
        """What the model's head knows of a sequence: its KV, and behind that the row that goes with the next token. None:
        it does not know all of it, or there is no head."""
        self._use(seq)
        if self.head is None:
            return None
        end = self._end[seq].pos
        row, kv = self.head.row(seq, end), self.head.capture(seq, 0, end)
        return None if row is None or kv is None else Room(heap, row).closed(kv)

    def restore_sequence(self, seq: SeqId, data: Blob, mark: Mark, head: Blob | None = None) -> int:
        """Put a whole sequence in place of an empty one; returns its bytes. ``head``: what the model's head knew of it. On
        ``StateRejected`` it is still empty."""
        self._use(seq)
        assert self._end[seq] == START, f"sequence {seq} is not empty"
        self._finish_drops_for(mark.n_tokens)
        blob = with_header(data, seq)
        n = 0
        if begins_sequence(blob, self.kind, mark):
            n = int(self._lib.state_seq_set_data_ext(self._ptr, blob.ctypes.data, len(blob), seq, abi.STATE_FULL))
        if n <= HEADER_BYTES or int(self._lib.memory_seq_pos_max(self._mem, seq)) != mark.last_pos:
            self.drop(seq)
            raise StateRejected(
                f"{len(data)} bytes are no sequence of {mark.n_tokens} tokens: {self._lib.last_words()}"
            )
        if self.kind.has_attention:
            self.cells.append(seq, mark.n_tokens, clean=False)
        self._disturb_windows()
        self._end[seq], self._state_clean[seq] = mark, False
        if self.head is not None and head is not None:
            kv, row = split(head)
            self.head.splice(seq, kv, 0, mark.pos, mark.n_tokens)
            self.head.stand(seq, mark.pos, row)
        return n - HEADER_BYTES

    # segments: intervals

    def capture_segment(self, seq: SeqId, start: Mark, stop: Mark) -> Blob:
        """The attention KV between two marks, and nothing else."""
        self._use(seq)
        assert START <= start < stop and stop.n_tokens <= self.cells.count(seq), f"{start}..{stop} is not in {seq}"
        room = Room(self.place, None if self.head is None else self.head.capture(seq, start.pos, stop.pos))
        self._lib.memory_seq_cp(self._mem, seq, self._scratch, start.pos, stop.pos)
        try:
            self._strip_state_of_scratch()
            return room.closed(self._without_tail(self._read(SeqId(self._scratch), abi.STATE_FULL, room), room))
        finally:
            self._lib.memory_seq_rm(self._mem, self._scratch, -1, -1)

    def splice_segment(self, seq: SeqId, blob: Blob, start: Mark, stop: Mark, *, n_cells: int, clean: bool) -> None:
        """Append saved KV to a sequence that ends at ``start``. A state must be restored before it can be decoded.

        ``blob`` has ``n_cells`` and may reach beyond both ends; only what lies between is used. On ``StateRejected``
        nothing was appended.
        """
        self._use(seq)
        assert start == self._end[seq], f"sequence {seq} ends at {self._end[seq]}, not {start}"
        if n_cells > self.cells.free:
            raise ContextFull(f"{n_cells} cells are needed but {self.cells.free} are free")
        self._finish_drops_for(n_cells)
        if clean and self.cells.is_alone(seq):
            self.finish_drops()  # else it would lie beside cells that are still to be emptied
        tail = self._empty_tail if self.kind.needs_checkpoints else None
        blob, of_head = split(blob)
        if not describes_cells(blob, n_cells, tail) or not self._load_cells(seq, blob, start, stop, n_cells):
            raise StateRejected(f"a segment of {len(blob)} bytes was refused: {self._lib.last_words()}")
        # else cells before it were written too, and left a hole; one behind it is where the next ones go
        begins_here = first_position(blob, n_cells) == start.pos
        alone = self.cells.is_alone(seq)
        self.cells.append(seq, stop.n_tokens - start.n_tokens, clean=clean and begins_here and not self._leaving)
        if not alone:
            self._disturb_windows()
        self._end[seq] = stop
        self._stateless[seq] = self.kind.needs_checkpoints
        if self.head is not None:
            self.head.splice(seq, of_head, start.pos, stop.pos, n_cells)

    def join_segments(self, blobs: Sequence[Blob]) -> Blob:
        """Joins consecutive segments into one, with the bytes of one capture."""
        return finished(self.joining_segments(blobs))

    def joining_segments(self, blobs: Sequence[Blob]) -> Copying:
        """The same, piece by piece. The head's part stays where all of them have one."""
        parts = [split(blob) for blob in blobs]
        tails = [tail for _, tail in parts if tail is not None]
        tail = (yield from joined(tails, 0, heap)) if len(tails) == len(parts) else None
        room = Room(self.place, tail)
        return room.closed((yield from joined([blob for blob, _ in parts], self._n_tail, room)))

    def cut_segment(self, blob: Blob, start: Mark, stop: Mark, place: Place = heap) -> Blob:
        """The part of a segment between two marks, with the bytes of a capture of only that."""
        return finished(self.cutting_segment(blob, start, stop, place))

    def cutting_segment(self, blob: Blob, start: Mark, stop: Mark, place: Place) -> Copying:
        """The same, piece by piece."""
        blob, tail = split(blob)
        if tail is not None:
            tail = yield from cut(tail, start.pos, stop.pos, 0, heap)
        room = Room(place, tail)
        return room.closed((yield from cut(blob, start.pos, stop.pos, self._n_tail, room)))

    def cut_bytes(self, blob: Blob, start: Mark, stop: Mark) -> int:
        """The bytes that ``cut_segment`` gives."""
        blob, tail = split(blob)
        n = stop.n_tokens - start.n_tokens
        of_head = 0 if tail is None else tail_bytes(cut_bytes(tail, n, 0))
        return cut_bytes(blob, n, self._n_tail) + of_head

    @property
    def _n_tail(self) -> int:
        return len(self._empty_tail) if self.kind.needs_checkpoints else 0

    def _load_cells(self, seq: SeqId, blob: Blob, start: Mark, stop: Mark, n_cells: int) -> bool:
        if start == START and stop.n_tokens == n_cells:
            return self._write(seq, blob, abi.STATE_FULL)  # the sequence is empty and takes all: no detour
        written = self._write(SeqId(self._scratch), blob, abi.STATE_FULL)
        if written:
            self._lib.memory_seq_cp(self._mem, self._scratch, seq, start.pos, stop.pos)
        self._lib.memory_seq_rm(self._mem, self._scratch, -1, -1)
        return written

    def _strip_state_of_scratch(self) -> None:
        """A range copy of a hybrid sequence carries its newest recurrent state along. The state of an empty sequence, put
        over it, takes it off again before it is read."""
        if self.kind is MemoryKind.HYBRID:
            self._write(SeqId(self._scratch), self._empty_state, abi.STATE_PARTIAL)

    def _without_tail(self, blob: Blob, place: Place) -> Blob:
        """A full blob is [header][attention][recurrent or window]; put an empty tail in place of the last part."""
        if not self.kind.needs_checkpoints:
            return blob
        tail = self._size(SeqId(self._scratch), abi.STATE_PARTIAL) - HEADER_BYTES
        if tail == len(self._empty_tail):
            return blob
        whole = place(len(blob) - tail + len(self._empty_tail))
        return np.concatenate([blob[: len(blob) - tail], self._empty_tail], out=whole)

    # the C side of blobs

    def _size(self, seq: SeqId, flags: int) -> int:
        return int(self._lib.state_seq_get_size_ext(self._ptr, seq, flags))

    def _read(self, seq: SeqId, flags: int, place: Place = heap) -> Blob:
        blob = place(self._size(seq, flags))
        n = int(self._lib.state_seq_get_data_ext(self._ptr, blob.ctypes.data, len(blob), seq, flags))
        assert n == len(blob), f"libllama wrote {n} of {len(blob)} bytes of a state"
        return blob

    def _write(self, seq: SeqId, blob: Blob, flags: int) -> bool:
        assert blob.flags.c_contiguous
        n = int(self._lib.state_seq_set_data_ext(self._ptr, blob.ctypes.data, len(blob), seq, flags))
        return n == len(blob) > HEADER_BYTES

    # counters

    def _use(self, seq: SeqId) -> None:
        """Before anything is done with a sequence."""
        assert self._ptr is not None, "the context is closed"
        assert 0 <= seq < self.options.n_seq_max, f"sequence {seq} is not one of {self.options.n_seq_max}"
        if seq in self._leaving:
            self._empty(seq)

    def _set_end(self, seq: SeqId, mark: Mark) -> None:
        if self.kind.has_attention:
            self.cells.trim(seq, mark.n_tokens)
        self._end[seq] = mark
        self._stateless[seq] = self._is_taken_back[seq] = False

    def _forget(self, seq: SeqId) -> None:
        self.cells.drop(seq)
        self._end[seq] = START
        self._state_clean[seq] = True
        self._stateless[seq] = self._is_taken_back[seq] = False

    def check(self) -> None:
        """Compare these counters with libllama's, in tests and while debugging."""
        self.cells.check()
        for i, end in enumerate(self._end[: self.options.n_seq_max]):
            seen = int(self._lib.memory_seq_pos_max(self._mem, i))
            assert i in self._leaving or self._stateless[i] or seen == end.last_pos, (
                f"sequence {i}: libllama ends at {seen}, expected {end}"
            )
        if self.head is not None:
            self.head.check()

    # life

    def close(self) -> None:
        self._views.clear()
        if self.head is not None:
            self.head.close()
        if self._ptr:
            self._lib.free(self._ptr)
            self._ptr = self._mem = None


def open_context(model: Model, options: ContextOptions, n_seqs: int, kind: int = abi.CONTEXT_DEFAULT) -> int:
    """A C context with unified KV, or a clear refusal. ``kind``: of the model itself, or of its MTP head."""
    assert n_seqs <= 256, "one of libllama's 256 sequences is needed inside"
    params = model.lib.context_default_params()
    params.n_ctx = options.n_ctx
    params.n_batch = max(options.n_batch, n_seqs)  # libllama asserts room for one output per sequence
    params.n_ubatch = max(options.n_ubatch, n_seqs)
    params.n_seq_max = n_seqs
    params.n_rs_seq = options.n_snapshots if kind == abi.CONTEXT_DEFAULT else 0
    params.ctx_type = kind
    params.n_threads = options.n_threads
    params.n_threads_batch = options.n_threads_batch
    params.type_k = abi.GGML_TYPES[options.cache_type_k]
    params.type_v = abi.GGML_TYPES[options.cache_type_v]
    params.flash_attn_type = abi.FLASH_ATTENTION[options.flash_attention]
    params.offload_kqv = options.kv_offload
    params.op_offload = options.op_offload
    _set_rope(params, options.rope)
    params.kv_unified = True
    params.swa_full = False
    model.lib.forget_log()
    ptr: int | None = model.lib.init_from_model(model.ptr, params)
    if not ptr:
        raise ContextTooBig(
            f"a context of {options.n_ctx} tokens and {n_seqs} sequences could not be made "
            f"({model.lib.last_words()}); give fewer tokens, slots or spares"
        )
    n_cells = int(model.lib.n_ctx_seq(ptr))
    assert n_cells == options.n_cells, f"libllama made {n_cells} cells of {options.n_ctx}, not {options.n_cells}"
    try:
        set_scales(model, ptr, model.scales)
    except ContextTooBig:
        model.lib.free(ptr)
        raise
    return ptr


def _set_rope(params: abi.ContextParams, rope: RopeOptions) -> None:
    """Sets what is given; the rest stays as the model's file says."""
    if rope.scaling is not None:
        params.rope_scaling_type = abi.ROPE_SCALING[rope.scaling]
    if rope.freq_base is not None:
        params.rope_freq_base = rope.freq_base
    if rope.freq_scale is not None:
        params.rope_freq_scale = rope.freq_scale
    for name in ("yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
        if getattr(rope, name) is not None:
            setattr(params, name, getattr(rope, name))


def set_scales(model: Model, ptr: int, scales: tuple[float, ...]) -> None:
    """What the next decodes add of each adapter."""
    used = [(adapter, scale) for (adapter, _), scale in zip(model.adapters, scales, strict=True) if scale]
    adapters = (ctypes.c_void_p * len(used))(*(adapter for adapter, _ in used))
    factors = (ctypes.c_float * len(used))(*(scale for _, scale in used))
    if int(model.lib.set_adapters_lora(ptr, adapters, len(used), factors)) != 0:
        raise ContextTooBig(f"the LoRA adapters could not be applied: {model.lib.last_words()}")
