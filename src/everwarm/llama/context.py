"""A libllama context: the only place where sequences are decoded, saved and restored. Knows no prefix tree and no policy.

One thread owns a context. Unified KV: all sequences share ``n_ctx`` cells.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everwarm.config import ContextOptions
from everwarm.errors import ContextFull, DecodeFailed, StateRejected, WeightsTouched
from everwarm.llama import abi
from everwarm.llama.blobs import (
    HEADER_BYTES,
    begins_sequence,
    describes_cells,
    describes_end,
    first_position,
    is_finite,
    with_header,
    without_nan,
)
from everwarm.llama.kv_splice import Copying, cut, cut_bytes, finished, joined, scattered
from everwarm.llama.media.media_model import Embedding, MediaModel, decode_image
from everwarm.llama.model import MemoryKind, Model
from everwarm.llama.mtp.head import Due, HeadFeed
from everwarm.llama.mtp.tail import Room, split, tail_bytes
from everwarm.llama.sequences import Sequences
from everwarm.llama.state_types import is_packed, pack, unpack
from everwarm.types import START, Blob, Mark, Place, Position, SeqId, TokenCount, heap

Tokens = NDArray[np.int32]
_LAST_ROW = -1  # libllama's name for the last logits there are


class Feed(NamedTuple):
    """Tokens to append to one sequence; ``start`` is where the caller believes the sequence ends. The last ``n_draft`` of
    them are guesses: there are logits after each of them and after the token before, and some may be taken back."""

    seq: SeqId
    tokens: Tokens
    start: Mark
    wants_logits: bool
    n_draft: int = 0
    is_for_head: bool = True  # the model's head reads them, too, and can guess what follows

    @property
    def n_rows(self) -> int:
        """Rows of logits."""
        return self.n_draft + 1 if self.wants_logits else 0


class BatchArrays:
    """One batch's arrays, allocated once: filling them makes no per-token Python objects."""

    def __init__(self, n_batch: int) -> None:
        self._token = np.zeros(n_batch, np.int32)
        self._pos = np.zeros(n_batch, np.int32)
        self._seq = np.zeros(n_batch, np.int32)
        self._wants = np.zeros(n_batch, np.int8)
        self._ones = np.ones(n_batch, np.int32)
        self._steps = np.arange(n_batch, dtype=np.int32)
        self._seq_pointers = self._seq.ctypes.data + 4 * np.arange(n_batch, dtype=np.uint64)
        self._struct = abi.Batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(abi.i32p),
            embd=None,
            pos=self._pos.ctypes.data_as(abi.i32p),
            n_seq_id=self._ones.ctypes.data_as(abi.i32p),
            seq_id=self._seq_pointers.ctypes.data_as(ctypes.POINTER(abi.i32p)),
            logits=self._wants.ctypes.data_as(abi.i8p),
        )

    def put(self, at: int, feed: Feed) -> None:
        if len(feed.tokens) == 1:
            return self._put_one(at, feed)
        stop = at + len(feed.tokens)
        self._token[at:stop] = feed.tokens
        np.add(self._steps[: stop - at], feed.start.pos, out=self._pos[at:stop])
        self._seq[at:stop] = feed.seq
        self._wants[at:stop] = 0
        self._wants[stop - 1 - feed.n_draft : stop] = feed.wants_logits

    def _put_one(self, at: int, feed: Feed) -> None:
        """One token of a reply: plain stores, because slices would cost more than the rest of the step."""
        self._token[at] = feed.tokens[0]
        self._pos[at] = feed.start.pos
        self._seq[at] = feed.seq
        self._wants[at] = feed.wants_logits

    def want_all(self, n: int) -> None:
        """Outputs for every one of the first tokens."""
        self._wants[:n] = 1

    def struct(self, n: int) -> abi.Batch:
        self._struct.n_tokens = n
        return self._struct


Logits = NDArray[np.float32]


class Context(Sequences):
    def __init__(self, model: Model, options: ContextOptions, place: Place = heap) -> None:
        """``place``: where captured states and segments go."""
        super().__init__(model, options)
        self.place = place
        self.n_decodes = self.n_fed = 0  # since the start: calls, and sequences in all of them
        self._batch = BatchArrays(self.n_batch)
        self._rows: list[int] = []
        self._views: dict[int, Logits] = {}
        self._empty_state = self._read(SeqId(0), abi.STATE_PARTIAL)
        self._empty_tail = self._empty_state[HEADER_BYTES:]

    # decoding

    def decode(self, feeds: Sequence[Feed]) -> None:
        """Append every feed in one batch. ``ContextFull``: nothing changed; ``DecodeFailed``: the sequences are empty."""
        n, rows = self._fill(feeds)
        if self._has_attention and n > self.cells.free:
            raise ContextFull(f"{n} tokens need {n} cells but {self.cells.free} of {self.n_ctx} are free")
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
            self.head.read([HeadFeed(f.seq, f.tokens, f.start.pos, f.n_draft, f.is_for_head) for f in feeds])

    def warm_up(self) -> None:
        """Decodes steps of the shapes that replies have, and forgets them. A GPU takes several times as long for what it
        does for the first time, and the first replies should neither wait for that nor be judged by it."""
        seq = SeqId(0)
        for n_draft in (0, 0, self.n_snapshots, self.n_snapshots):
            tokens = np.zeros(1 + n_draft, np.int32)
            self.draft([(seq, tokens[:1], max(1, n_draft))])
            self.decode([Feed(seq, tokens, self._end[seq], True, n_draft)])
            self.logits(0)
        self.clear()

    def draft(self, wanted: Sequence[tuple[SeqId, Tokens, int]]) -> dict[SeqId, list[int]]:
        """What the model's head expects: for a sequence and the tokens that are due in it, so many tokens after them."""
        if self.head is None:
            return {}
        return self.head.draft([Due(seq, tokens, self._end[seq].pos, n) for seq, tokens, n in wanted])

    def take_back_draft(self, seq: SeqId, pos: int) -> None:
        """The tokens from this position on were not accepted: the head forgets them."""
        if self.head is not None:
            self.head.trim(seq, pos)

    def see(self, seq: SeqId, media: MediaModel, embedding: Embedding, end: Mark, *, wants_logits: bool) -> None:
        """Append a whole image or sound. ``ContextFull``: nothing changed; ``DecodeFailed``: the sequence is empty."""
        self._check_seq(seq)
        assert not self._stateless[seq], f"sequence {seq} has KV but no state"
        n = embedding.shape.n_tokens
        start = self._end[seq]
        assert end.n_tokens == start.n_tokens + n and end.pos == start.pos + embedding.shape.n_pos
        if self._has_attention and n > self.cells.free:
            raise ContextFull(f"an image of {n} cells does not fit into {self.cells.free}")
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
        self._check_seq(feed.seq)
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
        """False: KV that is computed now may come from a packed state, so it is not clean."""
        return not self.packs_states or self._state_clean[seq]

    def logits(self, row: int) -> Logits:
        """The ``row``-th row of the last decode, over all feeds that wanted logits. A live view: copy it to keep it."""
        address = self._lib.get_logits_ith(self.native, self._rows[row])
        assert address, "libllama has no logits for a row that should have some"
        view = self._views.get(address)
        if view is None:
            memory = (ctypes.c_float * self.model.vocab.n_tokens).from_address(address)
            view = self._views[address] = np.ctypeslib.as_array(memory)
        return view

    def batch_index(self, row: int) -> int:
        """libllama's index of that row, for its own sampler."""
        return self._rows[row]

    # states: points

    @property
    def packs_states(self) -> bool:
        """Whether a captured state is not quite what the sequence had: see ``llama.state_types``."""
        return self.options.state_type != "f32" and self.kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT)

    def capture_packed(self, seq: SeqId) -> Blob:
        """The state at the sequence's end, in as few bytes as the options say."""
        if not self.packs_states:
            return self.capture(seq)
        self._check_seq(seq)
        room = self._room_for_state(seq)
        return room.closed(pack(self._read(seq, abi.STATE_PARTIAL), self.options.state_type, room))

    def _room_for_state(self, seq: SeqId) -> Room:
        return Room(self.place, None if self.head is None else self.head.row(seq, self._end[seq].pos))

    def capture(self, seq: SeqId) -> Blob:
        """The recurrent and sliding-window state at the sequence's end. A window cache is a ring, and its sums depend on
        where in it the window lies: so it is placed anew right after it was read, as a later restore will place it."""
        self._check_seq(seq)
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
        self._check_seq(seq)
        if self.kind.needs_checkpoints and self._end[seq] != START:
            self._write(seq, without_nan(self._read(seq, abi.STATE_PARTIAL)), abi.STATE_PARTIAL)
        self.drop(seq)
        if not any(end.n_tokens for end in self._end):
            self.clear()

    def clear(self) -> None:
        """Empty everything and zero it: NaN in a freed KV cell spoils all that attend over it, masked or not."""
        for seq in range(self.options.n_seq_max):
            self._forget(SeqId(seq))
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
        self._check_seq(seq)
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
        if self.head is None:
            return None
        end = self._end[seq].pos
        row, kv = self.head.row(seq, end), self.head.capture(seq, 0, end)
        return None if row is None or kv is None else Room(heap, row).closed(kv)

    def restore_sequence(self, seq: SeqId, data: Blob, mark: Mark, head: Blob | None = None) -> int:
        """Put a whole sequence in place of an empty one; returns its bytes. ``head``: what the model's head knew of it. On
        ``StateRejected`` it is still empty."""
        self._check_seq(seq)
        assert self._end[seq] == START, f"sequence {seq} is not empty"
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
        self._check_seq(seq)
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
        self._check_seq(seq)
        assert start == self._end[seq], f"sequence {seq} ends at {self._end[seq]}, not {start}"
        if n_cells > self.cells.free:
            raise ContextFull(f"{n_cells} cells are needed but {self.cells.free} are free")
        tail = self._empty_tail if self.kind.needs_checkpoints else None
        blob, of_head = split(blob)
        if not describes_cells(blob, n_cells, tail) or not self._load_cells(seq, blob, start, stop, n_cells):
            raise StateRejected(f"a segment of {len(blob)} bytes was refused: {self._lib.last_words()}")
        # else cells before it were written too, and left a hole; one behind it is where the next ones go
        begins_here = first_position(blob, n_cells) == start.pos
        alone = self.cells.is_alone(seq)
        self.cells.append(seq, stop.n_tokens - start.n_tokens, clean=clean and begins_here)
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

    # life

    def close(self) -> None:
        self._views.clear()
        super().close()
