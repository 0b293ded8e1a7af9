"""A model's MTP head: one more block of the model, which guesses the token after the next one, in a context of its own with
the same sequences as the model's. Decides nothing: ``engine.speculation`` says when to draft.

The head is attention alone, so its sequences can be cut anywhere. It may lag behind the model: see ``Track``. Whatever
fails here costs only guesses, so nothing is raised: the head forgets the sequence and begins anew where it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everwarm.errors import StateRejected
from everwarm.llama import abi
from everwarm.llama.batch import BatchArrays, DraftRequest, Feed, Tokens
from everwarm.llama.blobs import HEADER_BYTES, describes_cells, first_position
from everwarm.llama.lib import Closing, Lib
from everwarm.types import Blob, SeqId

Rows = NDArray[np.float32]

MOST_UNWANTED = (
    1024  # decodes in a row: for each change libllama measures its graphs anew, which takes many steps' time
)
MOST_WAITING = 32  # tokens of a sequence that the head has not read


class _Part(NamedTuple):
    seq: SeqId
    pos: int
    tokens: Tokens
    rows: Rows
    wants_guess: bool


# what the head knows of a sequence; pure


@dataclass(frozen=True, slots=True)
class Track:
    """What the head knows of a sequence. It reads a token together with the model's last hidden row before it, and has
    cells for the positions from ``start`` to ``end``; behind them wait tokens that the model has read and the head has not,
    each with its row, so that the head reads them when it is needed and many at a time.

    ``rows`` has one more than ``tokens``: the last goes with the token that comes next. A row of zeroes is unknown."""

    start: int
    end: int
    tokens: Tokens
    rows: Rows

    @property
    def known(self) -> int:
        """The position of the next token."""
        return self.end + len(self.tokens)

    def covers(self, start: int, stop: int) -> bool:
        """Whether the head has, or can have, cells for all these positions."""
        return self.start <= start and stop <= self.known

    def row(self, pos: int) -> Rows | None:
        """The row that goes with the token at this position; None: it is not known any more."""
        return self.rows[pos - self.end] if self.end <= pos <= self.known else None


def cold(pos: int, width: int, row: Rows | None = None) -> Track:
    """Nothing is known before ``pos``, but perhaps the row that goes with the token there."""
    rows = np.zeros((1, width), np.float32) if row is None else row.reshape(1, width)
    return Track(pos, pos, np.empty(0, np.int32), rows)


def cut(track: Track, pos: int) -> Track:
    """Nothing is known from ``pos`` on. Where the head has cells there, they must be removed."""
    width = track.rows.shape[1]
    if pos < track.start:
        return cold(pos, width)
    if pos < track.end:
        return Track(track.start, pos, np.empty(0, np.int32), np.zeros((1, width), np.float32))
    n = pos - track.end
    return Track(track.start, track.end, track.tokens[:n], track.rows[: n + 1]) if n < len(track.tokens) else track


def extended(track: Track, pos: int, tokens: Tokens, after: Rows) -> Track:
    """The model has read these tokens from ``pos`` on; ``after``: its row after each of them. Tokens that were read before,
    in a draft that was taken back, are known already. After a gap all before it is forgotten."""
    if pos > track.known:
        track = cold(pos, track.rows.shape[1])
    elif pos < track.end:
        track = cut(track, pos)
    held = track.tokens[pos - track.end :]
    n = min(len(held), len(tokens))
    if not np.array_equal(held[:n], tokens[:n]):
        track, n = cut(track, pos), 0
    elif n == len(tokens):
        return track
    return Track(
        track.start,
        track.end,
        np.concatenate([track.tokens, tokens[n:]]),
        np.concatenate([track.rows, after[n:]]),
    )


def passed(track: Track, n: int) -> Track:
    """The head has read the first ``n`` tokens that waited."""
    return Track(track.start, track.end + n, track.tokens[n:].copy(), track.rows[n:].copy())


# the head


class Head(Closing):
    def __init__(
        self, lib: Lib, ptr: int, target: int, n_seqs: int, n_batch: int, n_vocab: int, *, chooses_rows: bool
    ) -> None:
        """``ptr``: an MTP context of its own; ``target``: the model's. ``chooses_rows``: its graph gives hidden rows only
        of tokens with logits; libllama aborts where it is told otherwise."""
        self._lib = lib
        self._ptr: int | None = ptr
        self._target = target
        self._mem = lib.get_memory(ptr)
        self._width = int(lib.model_n_embd_out(lib.get_model(ptr)))
        self._n_vocab = n_vocab
        self._n_batch = n_batch
        self._scratch = n_seqs - 1
        lib.set_embeddings_nextn(ptr, True, chooses_rows)
        self._is_listening = False
        self._n_unwanted = 0  # decodes in a row
        self._empty = cold(0, self._width)
        self._tracks = [self._empty] * n_seqs
        self._hidden = np.empty((n_batch, self._width), np.float32)
        self._batch = BatchArrays(n_batch, self._hidden)
        self.n_decodes = 0

    # reading

    def listen(self, *, is_wanted: bool) -> None:
        """Before the model decodes: whether it is to give rows. That takes time, and changing it as well."""
        self._n_unwanted = 0 if is_wanted else self._n_unwanted + 1
        if is_wanted != self._is_listening and (is_wanted or self._n_unwanted > MOST_UNWANTED):
            self._lib.set_embeddings_nextn(self._target, is_wanted, False)
            self._is_listening = is_wanted

    def read(self, feeds: Sequence[Feed]) -> None:
        """Takes the rows of the model's last decode, of these feeds in their order."""
        if not any(feed.is_for_head for feed in feeds):
            return
        n = sum(len(feed.tokens) for feed in feeds)
        rows = _floats(self._lib.get_embeddings_nextn(self._target), (n, self._width))
        at, late = 0, []
        for feed in feeds:
            after, at = rows[at : at + len(feed.tokens)], at + len(feed.tokens)
            if not feed.is_for_head:
                continue
            track = extended(self._tracks[feed.seq], feed.start.pos, feed.tokens, after)
            self._set(feed.seq, track)
            if not feed.n_draft and len(track.tokens) > MOST_WAITING:
                late.append((feed.seq, track.known))
        if late:
            self._catch_up(late)

    def _set(self, seq: SeqId, track: Track) -> None:
        """Cells that the new track does not have are removed."""
        old = self._tracks[seq]
        if old.end > old.start and (track.start != old.start or track.end < old.end):
            self._lib.memory_seq_rm(self._mem, seq, track.end if track.start == old.start else -1, -1)
        self._tracks[seq] = track

    def _catch_up(self, wanted: Sequence[tuple[SeqId, int]]) -> None:
        """The head reads what waits of these sequences, each up to a position."""
        parts = []
        for seq, pos in wanted:
            track = self._tracks[seq]
            stop = min(pos, track.known)  # the model may have read more that was not for the head
            for at in range(track.end, stop, self._n_batch):
                n, first = min(self._n_batch, stop - at), at - track.end
                parts.append(_Part(seq, at, track.tokens[first : first + n], track.rows[first : first + n], False))
        while parts:
            n_parts, n = 0, 0
            while n_parts < len(parts) and n + len(parts[n_parts].tokens) <= self._n_batch:
                n += len(parts[n_parts].tokens)
                n_parts += 1
            if self._decode(parts[:n_parts]):
                for part in parts[:n_parts]:
                    self._tracks[part.seq] = passed(self._tracks[part.seq], len(part.tokens))
            else:
                self._begin_anew(parts[:n_parts])
            parts = [part for part in parts[n_parts:] if self._tracks[part.seq].end == part.pos]

    def _decode(self, parts: Sequence[_Part]) -> bool:
        n = 0
        for part in parts:
            stop = self._batch.place(n, part.seq, part.pos, part.tokens)
            self._hidden[n:stop] = part.rows
            if part.wants_guess:
                self._batch.want(stop - 1)
            n = stop
        self.n_decodes += 1
        return int(self._lib.decode(self._ptr, self._batch.struct(n))) == 0

    def _begin_anew(self, parts: Sequence[_Part]) -> None:
        """These could not be read: no cell was free, or worse."""
        for part in parts:
            track = self._tracks[part.seq]
            self._lib.memory_seq_rm(self._mem, part.seq, -1, -1)
            self._tracks[part.seq] = cold(track.known, self._width, track.rows[-1])

    # guessing

    def draft(self, wanted: Sequence[DraftRequest], ends: Mapping[SeqId, int]) -> dict[SeqId, list[int]]:
        """The most likely tokens after what is due, for all sequences together. Nothing of it stays in the head. ``ends``:
        the positions up to which the model has read each sequence."""
        going = self._fitting([each for each in wanted if self._knows(each, ends[each.seq])])
        parts = [self._first(each) for each in going]
        if not parts or not self._decode(parts):
            self._begin_anew(parts)
            return {}
        found: dict[SeqId, list[int]] = {each.seq: [] for each in going}
        while parts:
            parts = self._guess(parts, going, found)
            going = [each for each in going if len(found[each.seq]) < each.n]
            if parts and not self._decode(parts):
                break
        for seq in found:
            self._take_back(seq, ends[seq])
        return found

    def _fitting(self, wanted: list[DraftRequest]) -> list[DraftRequest]:
        """As many as one batch takes."""
        sizes = np.cumsum([len(self._tracks[each.seq].tokens) + 1 for each in wanted])
        return wanted[: int(np.searchsorted(sizes, self._n_batch, "right"))]

    def _guess(
        self, parts: Sequence[_Part], going: Sequence[DraftRequest], found: dict[SeqId, list[int]]
    ) -> list[_Part]:
        """Takes a token of each sequence from the last decode; returns what continues from it."""
        following, row = [], -1
        for part, each in zip(parts, going, strict=True):
            row += len(part.tokens)
            guess = int(_floats(self._lib.get_logits_ith(self._ptr, row), (self._n_vocab,)).argmax())
            found[each.seq].append(guess)
            if len(found[each.seq]) < each.n:
                after = _floats(self._lib.get_embeddings_nextn_ith(self._ptr, row), (1, self._width)).copy()
                following.append(_Part(each.seq, part.pos + len(part.tokens), np.array([guess], np.int32), after, True))
        return following

    def _knows(self, wanted: DraftRequest, end: int) -> bool:
        """Whether what waits is what is due, up to the token that was picked just now."""
        track = self._tracks[wanted.seq]
        n_again = wanted.n_due - 1
        if track.known != end + n_again or track.end > end:
            return False
        return bool(np.array_equal(track.tokens[len(track.tokens) - n_again :], wanted.due[:-1]))

    def _first(self, wanted: DraftRequest) -> _Part:
        track = self._tracks[wanted.seq]
        return _Part(wanted.seq, track.end, np.append(track.tokens, wanted.history[-1]), track.rows, True)

    def _take_back(self, seq: SeqId, end: int) -> None:
        """Only what the model has read stays."""
        track = self._tracks[seq]
        self._lib.memory_seq_rm(self._mem, seq, end, -1)
        self._tracks[seq] = passed(track, end - track.end)

    # sequences, with those of the model

    def drop(self, seq: SeqId) -> None:
        if self._tracks[seq] is not self._empty:
            self._lib.memory_seq_rm(self._mem, seq, -1, -1)
            self._tracks[seq] = self._empty

    def trim(self, seq: SeqId, pos: int) -> None:
        self._set(seq, cut(self._tracks[seq], pos))

    def park(self, src: SeqId, dst: SeqId, end: int) -> None:
        """``dst`` is a second name for all that the model has read of ``src``."""
        self._catch_up([(src, end)])
        self.drop(dst)
        track = self._tracks[src]
        if track.end > track.start:
            self._lib.memory_seq_cp(self._mem, src, dst, -1, -1)
        self._tracks[dst] = track

    def share(self, src: SeqId, dst: SeqId, pos: int, end: int) -> None:
        """The same up to a position."""
        self.park(src, dst, min(pos, end))
        self.trim(dst, pos)

    def stand(self, seq: SeqId, pos: int, tail: Blob | None) -> None:
        """A state was restored at this position; ``tail``: the row that was kept with it."""
        track = cut(self._tracks[seq], pos)
        row = None
        if tail is not None and len(tail) == 4 * self._width:
            row = np.frombuffer(tail.tobytes(), np.float32)
            row = row if np.isfinite(row).all() else None
        if track.known == pos and row is not None:
            rows = np.concatenate([track.rows[:-1], row.reshape(1, -1)])
            track = Track(track.start, track.end, track.tokens, rows)
        self._set(seq, track if track.known == pos else cold(pos, self._width, row))

    def clear(self) -> None:
        self._lib.memory_clear(self._mem, True)
        self._tracks = [self._empty] * len(self._tracks)

    # bytes

    def row(self, seq: SeqId, pos: int) -> Blob | None:
        """What is kept with a state: the row that goes with the next token. None: it is not known."""
        row = self._tracks[seq].row(pos)
        return None if row is None or not row.any() else np.frombuffer(row.tobytes(), np.uint8)

    def capture(self, seq: SeqId, start: int, stop: int) -> Blob | None:
        """The head's KV between two positions; None: it does not have all of it."""
        if not self._tracks[seq].covers(start, stop):
            return None
        self._catch_up([(seq, stop)])
        track = self._tracks[seq]
        if not track.start <= start <= stop <= track.end:
            return None
        self._lib.memory_seq_cp(self._mem, seq, self._scratch, start, stop)
        try:
            blob = np.empty(int(self._lib.state_seq_get_size_ext(self._ptr, self._scratch, abi.STATE_FULL)), np.uint8)
            n = self._lib.state_seq_get_data_ext(self._ptr, blob.ctypes.data, len(blob), self._scratch, abi.STATE_FULL)
            return blob if int(n) == len(blob) else None
        finally:
            self._lib.memory_seq_rm(self._mem, self._scratch, -1, -1)

    def bytes_per_token(self, seq: SeqId) -> int:
        """What the second token of a sequence that has two adds to its bytes."""
        one = self.capture(seq, 0, 1)
        two = self.capture(seq, 0, 2)
        return 0 if one is None or two is None else len(two) - len(one)

    def splice(self, seq: SeqId, blob: Blob | None, start: int, stop: int, n_cells: int) -> None:
        """Appends kept KV of these positions, as far as the blob has them. Without it there is a gap: the head begins anew
        behind it."""
        self._catch_up([(seq, start)])
        track = self._tracks[seq]
        if track.end != start:
            track = cold(start, self._width)
            self._set(seq, track)
        if blob is None or not self._load(seq, blob, start, stop, n_cells):
            return self._set(seq, cold(stop, self._width))
        self._tracks[seq] = Track(track.start, stop, np.empty(0, np.int32), self._empty.rows)
        return None

    def _load(self, seq: SeqId, blob: Blob, start: int, stop: int, n_cells: int) -> bool:
        try:
            if not describes_cells(blob, n_cells, None) or first_position(blob, n_cells) > start:
                return False
        except (StateRejected, StopIteration):
            return False
        blob = np.ascontiguousarray(blob)
        n = self._lib.state_seq_set_data_ext(self._ptr, blob.ctypes.data, len(blob), self._scratch, abi.STATE_FULL)
        is_whole = int(n) == len(blob) > HEADER_BYTES
        if is_whole:
            self._lib.memory_seq_cp(self._mem, self._scratch, seq, start, stop)
        self._lib.memory_seq_rm(self._mem, self._scratch, -1, -1)
        return is_whole

    def check(self) -> None:
        """Compares its tracks with libllama's cells, in tests and while debugging."""
        for seq, track in enumerate(self._tracks):
            seen = int(self._lib.memory_seq_pos_max(self._mem, seq))
            wanted = track.end - 1 if track.end > track.start else -1
            assert seen == wanted, f"sequence {seq} of the head ends at {seen}, expected {wanted}"

    def close(self) -> None:
        if self._ptr:
            self._lib.free(self._ptr)
            self._ptr = self._mem = None


def _floats(address: int, shape: tuple[int, ...]) -> Rows:
    """A live view of libllama's memory."""
    assert address, "libllama has no rows where there should be some"
    size = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_float * size).from_address(address)).reshape(shape)
