"""An open GGUF model: its weights, what kind of memory it has, its vocabulary and its fingerprint.

Everything that can be wrong with a model file becomes one clear ``ModelFileError``. Knows no contexts' contents.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
from collections.abc import Callable
from pathlib import Path

from everwarm.config import EMBEDDING_ARCHITECTURES, ModelOptions
from everwarm.errors import ModelFileError
from everwarm.llama import abi
from everwarm.llama.lib import Closing, Lib, buffer_type_named, device_named, lib
from everwarm.llama.system.model_files import FileWatch, file_digest, file_identity, parts_of
from everwarm.llama.vocab import Vocab

FACTORS = (b"rope_factors_long.weight", b"rope_factors_short.weight")
GGUF_MAGIC = b"GGUF"
HEAD_ARCHITECTURES = (
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "nemotron_h_moe",
)  # whose heads are one block of attention beside a hybrid memory
HEADS_THAT_CHOOSE_ROWS = ("qwen3next",)  # whose graph gives hidden rows of the tokens with logits alone


def rope_limit_of(path: Path) -> int | None:
    """Contexts of more cells use the long factors, others the short ones. None: the model has only one set."""
    try:
        parts = parts_of(path)
        return _read(path, tuple(map(file_identity, parts)))
    except OSError as error:
        raise ModelFileError(f"a file of {path.name} cannot be read: {error.strerror or error}") from None


@functools.lru_cache(maxsize=64)
def _read(path: Path, _identities: tuple[str, ...]) -> int | None:
    limit = None
    has_factors = False
    for i, part in enumerate(parts_of(path)):
        header = lib().gguf_init_from_file(os.fsencode(part), abi.GgufInitParams(True, None))
        if not header:
            raise ModelFileError(f"{part.name} is not a GGUF file, or its header is damaged")
        try:
            has_factors = has_factors or any(lib().gguf_find_tensor(header, name) >= 0 for name in FACTORS)
            limit = _limit(header) if i == 0 else limit
        finally:
            lib().gguf_free(header)
    return limit if has_factors else None


def _limit(header: int) -> int:
    """The context length of the original training; where the file does not say, libllama takes the model's context
    length."""
    arch = _text(header, "general.architecture")
    found = _number(header, f"{arch}.rope.scaling.original_context_length")
    return found if found is not None else _number(header, f"{arch}.context_length") or 0


def _number(header: int, key: str) -> int | None:
    at = int(lib().gguf_find_key(header, key.encode()))
    is_number = at >= 0 and int(lib().gguf_get_kv_type(header, at)) == abi.GGUF_UINT32
    return int(lib().gguf_get_val_u32(header, at)) if is_number else None


def _text(header: int, key: str) -> str:
    at = int(lib().gguf_find_key(header, key.encode()))
    is_text = at >= 0 and int(lib().gguf_get_kv_type(header, at)) == abi.GGUF_STRING
    return ctypes.string_at(lib().gguf_get_val_str(header, at)).decode("utf-8", "replace") if is_text else ""


Progress = Callable[[float], None]


class MemoryKind(enum.Enum):
    """What a sequence's memory is made of, and so what has to be kept to come back to a point of it."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"
    WINDOW = "sliding-window"
    HYBRID_WINDOW = "hybrid+window"

    @property
    def has_attention(self) -> bool:
        """Whether there is KV that can be cut anywhere and saved by ranges."""
        return self is not MemoryKind.RECURRENT

    @property
    def needs_checkpoints(self) -> bool:
        """Whether a point can only be returned to where a copy of the state was kept."""
        return self is not MemoryKind.ATTENTION

    @property
    def has_window(self) -> bool:
        return self in (MemoryKind.WINDOW, MemoryKind.HYBRID_WINDOW)

    @property
    def can_share_cells(self) -> bool:
        """Whether two sequences may hold the same cells for long.

        A sliding-window cache frees a cell only when one sequence holds it, so shared cells would fill it up.
        """
        return not self.has_window


class Model(Closing):
    """A loaded model. Use as a context manager; closing it while a context is open is a bug. With ``vocab_only`` there are
    no weights: only the vocabulary and the template are read."""

    def __init__(
        self,
        path: Path,
        options: ModelOptions | None = None,
        progress: Progress | None = None,
        *,
        vocab_only: bool = False,
        embeds: bool = False,
        head_from: int | None = None,
        on_same: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_same`` is called when its files were touched and are the same. ``embeds``: it is to write no text.
        ``head_from``: its MTP head is used, if the file has one and the model so many layers; None: never."""
        self.path = path
        self.lib: Lib = lib()
        self.options = options or ModelOptions()
        for file in (path, *(Path(file) for file, _ in self.options.lora)):
            _check_file(file)
        self.files = self._watch(on_same)
        self.ptr: int | None = None
        try:
            with_head = head_from is not None and self.lib.knows_heads
            self.ptr = _open(self.lib, path, self.options, progress, vocab_only=vocab_only, with_head=with_head)
            if not embeds:
                self._require_writer()
            self._read_facts()
            self.has_head = with_head and self.n_layers >= (head_from or 0) and self._has_usable_head()
            self.rope_limit = None if vocab_only else rope_limit_of(path)
            self.adapters = [(self._open_adapter(Path(file)), scale) for file, scale in self.options.lora]
            self.files.require_same_names()
        except BaseException:
            self.close()
            raise

    def _require_writer(self) -> None:
        arch = self.metadata("general.architecture") or ""
        if arch in EMBEDDING_ARCHITECTURES or self.metadata(f"{arch}.attention.causal") == "false":
            raise ModelFileError(
                f"{self.path.name} makes embeddings and writes no text ({arch}); start it with --embeddings"
            )
        if self.lib.model_has_encoder(self.ptr) or not self.lib.model_has_decoder(self.ptr):
            raise ModelFileError(
                f"{self.path.name} is not a decoder-only model; Everwarm serves causal language models"
            )
        if self.lib.model_is_diffusion(self.ptr):
            raise ModelFileError(f"{self.path.name} is a diffusion model; Everwarm serves causal language models")

    def _read_facts(self) -> None:
        assert self.ptr is not None
        self.vocab = Vocab(self.lib, self.ptr)
        self.n_ctx_train = int(self.lib.model_n_ctx_train(self.ptr))
        self.n_layers = int(self.lib.model_n_layer(self.ptr))
        self.n_swa = int(self.lib.model_n_swa(self.ptr))
        self.n_params = int(self.lib.model_n_params(self.ptr))
        self.size_bytes = int(self.lib.model_size(self.ptr))
        self.memory_kind = self._memory_kind()

    def _memory_kind(self) -> MemoryKind:
        if self.lib.model_is_hybrid(self.ptr):
            return MemoryKind.HYBRID_WINDOW if self.n_swa > 0 else MemoryKind.HYBRID
        if self.lib.model_is_recurrent(self.ptr):
            return MemoryKind.RECURRENT
        return MemoryKind.WINDOW if self.n_swa > 0 else MemoryKind.ATTENTION

    def _has_usable_head(self) -> bool:
        """libllama aborts on the head of an architecture that it has no graph for, and on a head of several blocks."""
        is_known = self.metadata("general.architecture") in HEAD_ARCHITECTURES
        return is_known and int(self.lib.model_n_layer_nextn(self.ptr)) == 1

    @property
    def head_chooses_rows(self) -> bool:
        return self.metadata("general.architecture") in HEADS_THAT_CHOOSE_ROWS

    @functools.cached_property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        self.lib.model_desc(self.ptr, buffer, len(buffer))
        text = buffer.value.decode("utf-8", "replace")
        return text.replace("?B", _parameters(self.n_params))  # of shapes that libllama has no name for

    @functools.cached_property
    def chat_template(self) -> str | None:
        return self.template(None)

    def template(self, name: str | None) -> str | None:
        text = self.lib.model_chat_template(self.ptr, None if name is None else name.encode())
        return None if text is None else bytes(text).decode("utf-8", "replace")

    def metadata(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(4096)
        n = int(self.lib.model_meta_val_str(self.ptr, key.encode(), buffer, len(buffer)))
        return None if n < 0 else buffer.value.decode("utf-8", "replace")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of weights, adapters and build. A state of one fingerprint is never offered to another."""
        return _over_files(self.path, self.options, self.files.digest)

    @property
    def scales(self) -> tuple[float, ...]:
        """Of its adapters, as it was opened."""
        return tuple(scale for _, scale in self.adapters)

    @property
    def identity(self) -> str:
        """The same for a process that opens the same files, without reading them."""
        return _over_files(self.path, self.options, self.files.identity)

    def _watch(self, on_same: Callable[[], None]) -> FileWatch:
        try:
            return FileWatch([*parts_of(self.path), *(Path(file) for file, _ in self.options.lora)], on_same)
        except OSError as error:
            raise ModelFileError(f"a file of {self.path.name} cannot be read: {error.strerror or error}") from None

    def _open_adapter(self, path: Path) -> int:
        """A LoRA; libllama frees it with the model."""
        self.lib.forget_log()
        ptr: int | None = self.lib.adapter_lora_init(self.ptr, os.fsencode(path))
        if not ptr:
            reason = _reason(self.lib.all_words())
            raise ModelFileError(f"{path} is not a LoRA for {self.path.name}: {reason}")
        return ptr

    def close(self) -> None:
        if self.ptr:
            self.lib.model_free(self.ptr)
            self.ptr = None
        self.files.close()


def identity_of(path: Path, options: ModelOptions) -> str:
    """What the identity of a model opened so would be, without opening it."""
    return _over_files(path, options, file_identity)


def fingerprint_of(path: Path, options: ModelOptions) -> str:
    """What the fingerprint of a model opened so would be, without opening it."""
    return _over_files(path, options, file_digest)


def _over_files(path: Path, options: ModelOptions, name_of: Callable[[Path], str]) -> str:
    parts = "+".join(map(name_of, parts_of(path)))
    adapters = "".join(f"-{name_of(Path(file))}*{scale!r}" for file, scale in options.lora)
    return f"{parts}{adapters}-{abi.BUILD}"


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ModelFileError(f"cannot open model {path}: {reason}; give the path of a GGUF file") from None
    if magic != GGUF_MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file (it starts with {magic!r}, a GGUF starts with {GGUF_MAGIC!r})")


def _open(
    lib: Lib, path: Path, options: ModelOptions, progress: Progress | None, *, vocab_only: bool, with_head: bool
) -> int | None:
    params = lib.model_default_params()
    params.vocab_only = vocab_only
    params.load_mtp = with_head
    params.n_gpu_layers = options.n_gpu_layers
    params.load_mode = abi.LOAD_MODES[options.load_mode]
    params.split_mode = abi.SPLIT_MODES[options.split_mode]
    params.main_gpu = options.main_gpu
    params.check_tensors = options.check_tensors
    params.use_extra_bufts = options.repack
    params.no_host = options.no_host
    raised: list[BaseException] = []

    def on_progress(fraction: float, _user: int) -> bool:
        try:
            if progress is not None:
                progress(fraction)
        except BaseException as error:  # noqa: BLE001 - nothing may unwind through C; it is raised again below
            raised.append(error)
        return not raised

    kept = _placement(lib, params, options)  # C holds only the pointers until the model is open
    callback = abi.PROGRESS_CALLBACK(on_progress)
    params.progress_callback = callback
    lib.forget_log()
    ptr: int | None = lib.model_load_from_file(os.fsencode(path), params)
    if raised:
        if ptr:
            lib.model_free(ptr)
        raise raised[0]
    del kept
    if not ptr:
        raise ModelFileError(f"{path} cannot be loaded: {_reason(lib.all_words())}")
    return ptr


def _placement(lib: Lib, params: abi.ModelParams, options: ModelOptions) -> list[object]:
    """Where tensors go: which devices, shares per GPU, and tensors that are kept elsewhere."""
    kept: list[object] = []
    if options.devices:
        handles = [device_named(lib, name) for name in options.devices]
        chosen = (ctypes.c_void_p * (len(handles) + 1))(*handles)  # the last stays empty: the end
        params.devices = ctypes.addressof(chosen)
        kept.append(chosen)
    if options.tensor_split:
        shares = (ctypes.c_float * int(lib.max_devices()))(*options.tensor_split[: int(lib.max_devices())])
        params.tensor_split = ctypes.addressof(shares)
        kept.append(shares)
    rows = [abi.BufferOverride(pattern.encode(), buffer_type_named(lib, name)) for pattern, name in _overrides(options)]
    if rows:
        overrides = (abi.BufferOverride * (len(rows) + 1))(*rows)  # the last stays empty: the end
        params.tensor_buft_overrides = ctypes.addressof(overrides)
        kept += [overrides, rows]
    return kept


def _overrides(options: ModelOptions) -> list[tuple[str, str]]:
    """Patterns and buffer types; the first that fits a tensor decides."""
    experts = [rf"blk\.{i}\.ffn_(up|down|gate|gate_up)_(ch|)exps" for i in range(options.n_cpu_moe)]
    dense = [rf"blk\.{i}\.ffn_(up|down|gate)\." for i in range(options.n_cpu_ffn)]
    return [*options.override_tensors, *((pattern, "CPU") for pattern in (*experts, *dense))]


def _reason(messages: tuple[str, ...]) -> str:
    """libllama logs the cause first ("error loading model: ...") and then only that it failed."""
    for line in messages:
        reason = line.partition("error loading model")[2].lstrip(" :")
        if reason and not reason.startswith("failed to load model"):
            return reason
    return messages[0] if messages else "libllama gave no reason"


def _parameters(n: int) -> str:
    """A number of parameters as names have it: ``7.4M``, ``27B``."""
    size, letter = (n / 1e9, "B") if n >= 1e9 else (n / 1e6, "M")
    return f"{size:.1f}".removesuffix(".0") + letter
