"""The sequences of a libllama context: names for cells, cut, shared and dropped, with a count of where each one ends.

Every refusal of libllama becomes a ``MemoryFault`` and every call that could abort the process is checked first. Each
sequence's end is counted here; libllama's own counters are used only to assert. Decodes nothing and moves no bytes.
"""

from __future__ import annotations

import ctypes
import logging

from everwarm.config import ContextOptions, RopeOptions
from everwarm.errors import ContextTooBig, TrimRefused
from everwarm.llama import abi
from everwarm.llama.cells import Cells
from everwarm.llama.lib import Closing
from everwarm.llama.model import Model
from everwarm.llama.mtp.head import Head
from everwarm.types import START, Mark, SeqId

log = logging.getLogger("everwarm.llama")

_BEYOND_ALL = (1 << 31) - 2  # a position that no cell has


class Sequences(Closing):
    """``n_seq_max`` for the caller, and one more inside for moving KV ranges in and out."""

    def __init__(self, model: Model, options: ContextOptions) -> None:
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
        self.n_snapshots = int(self._lib.n_rs_seq(self._ptr))  # 0 where the architecture has none
        self.head = self._open_head(n_seqs) if model.has_head else None

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

    # questions

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

    # changes

    def use_scales(self, scales: tuple[float, ...]) -> None:
        """Of the model's adapters, for all decodes from now on."""
        if scales != self._scales:
            set_scales(self.model, self.native, scales)
            self._scales = scales

    def drop(self, seq: SeqId) -> None:
        self._check_seq(seq)
        self._lib.memory_seq_rm(self._mem, seq, -1, -1)
        self._forget(seq)
        if self.head is not None:
            self.head.drop(seq)
        if self.cells.used == 0 and not any(end.n_tokens for end in self._end):
            self._lib.memory_clear(self._mem, False)  # the next one starts at the first cell again

    def trim(self, seq: SeqId, mark: Mark) -> None:
        """Cut the sequence back to ``mark``, or raise ``TrimRefused`` and change nothing."""
        self._check_seq(seq)
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
        self._check_seq(seq)
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
        self._check_seq(slot)
        self._check_seq(spare)
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
        self._check_seq(seq)
        self._check_seq(holder)
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
        self._check_seq(src)
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
        self._check_seq(seq)
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

    # counters

    def _check_seq(self, seq: SeqId) -> None:
        assert self._ptr is not None, "the context is closed"
        assert 0 <= seq < self.options.n_seq_max, f"sequence {seq} is not one of {self.options.n_seq_max}"

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
            assert self._stateless[i] or seen == end.last_pos, f"sequence {i}: libllama ends at {seen}, expected {end}"
        if self.head is not None:
            self.head.check()

    # life

    def close(self) -> None:
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
