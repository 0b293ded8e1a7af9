"""Images and sounds for a model: an open projector (libmtmd), what each takes, its embeddings, and their way into a
sequence.

A projector is opened beside its text model. ``shape`` and ``encode`` take decoded pixels; an image is one chunk of cells,
and one that libmtmd would split into several is refused. ``sound_shape`` and ``hear`` take samples at the model's
rate; libmtmd cuts a sound into windows, whose cells lie one behind the other and are one embedding here. Everything that
libmtmd or libllama would answer with the end of the process is refused before they see it. Knows no sequences' contents
and no prompts.

Encoding may run on another thread than decoding; one image or sound at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everwarm.errors import BadRequest, ModelError, ModelFileError, WeightsTouched
from everwarm.llama import abi
from everwarm.llama.lib import Closing, Lib
from everwarm.llama.media import mtmd_abi, projector_file
from everwarm.llama.media.projector_file import Projector
from everwarm.llama.model import Model
from everwarm.llama.system.model_files import FileWatch
from everwarm.sound_files import SAMPLE_RATE

MIN_SIDE = 2
MAX_SIDE = 1 << 14
MAX_PIXELS = 1 << 26
MAX_RATIO = 200  # of the sides: libmtmd pads a thin line to one row of patches, and its length is not bounded by then

MIN_SAMPLES = 1600  # a tenth of a second
MAX_SAMPLES = 1 << 25
MAX_LOUDNESS = 1000.0  # of a sample; full scale is 1, and a square of a sample must stay a number

LOST = 2  # libllama's code for "parts of the batch are in memory": the sequence must be dropped

_PROBE = 96  # pixels per side
_PROBE_PREFIXES = ("", "a", "aa", "aaa")  # one style pads an image by where it stands: it would show here
_PROBE_POS = 5
_N_LENGTHS = 256  # of sounds, whose cells are remembered: libmtmd counts them by going through all samples

Values = NDArray[np.float32]
Positions = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MediaShape:
    """The cells and positions an image takes, and its grid; ``nx * ny == n_tokens``. A sound is one row."""

    n_tokens: int
    n_pos: int
    nx: int
    ny: int
    is_sound: bool = False

    @classmethod
    def of_sound(cls, n_tokens: int) -> MediaShape:
        return cls(n_tokens, n_tokens, n_tokens, 1, is_sound=True)

    def positions(self, start: int, *, uses_mrope: bool) -> Positions:
        """The position planes of its cells, in libllama's order t, y, x, z; one plane without M-RoPE."""
        index = np.arange(self.n_tokens, dtype=np.int32)
        if not uses_mrope:
            return (start + index)[None]
        if self.is_sound:  # a position for each cell, like text
            return np.repeat((start + index)[None], 4, axis=0)
        t = np.full_like(index, start)
        z = np.zeros_like(index)
        return np.stack([t, start + index // self.nx, start + index % self.nx, z])


@dataclass(frozen=True, slots=True)
class Embedding:
    shape: MediaShape
    values: Values  # n_tokens × n_embd


@dataclass(frozen=True, slots=True)
class Delimiters:
    """What a projector puts around an image or a sound: tokens, and texts that become these tokens."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    begin: str = ""
    end: str = ""


class MediaModel(Closing):
    """An open projector. Use as a context manager, and close it before its text model."""

    def __init__(self, path: Path, model: Model, *, n_threads: int, use_gpu: bool = True) -> None:
        self.path = path
        self._model = model
        self._mtmd = model.lib.mtmd
        self._encoding = threading.Lock()
        self.files = self._watch()
        self._ptr: int | None = None
        try:
            file = Projector(path, self._size_of)
            projector_file.check(file)
            self._ptr = self._open(n_threads, use_gpu)
            self._read_facts(file.style)
            self.files.require_same_names()
        except BaseException:
            self.close()
            raise

    def _watch(self) -> FileWatch:
        try:
            return FileWatch([self.path])
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ModelFileError(f"cannot open projector {self.path}: {reason}") from None

    def _size_of(self, number_format: int) -> tuple[int, int]:
        return int(self._mtmd.ggml_blck_size(number_format)), int(self._mtmd.ggml_type_size(number_format))

    def _open(self, n_threads: int, use_gpu: bool) -> int:
        params = self._mtmd.context_params_default()
        params.use_gpu = use_gpu
        params.n_threads = n_threads
        params.print_timings = False
        self._model.lib.forget_log()
        ptr: int | None = self._mtmd.init_from_file(os.fsencode(self.path), self._model.ptr, params)
        if not ptr:
            reason = _reason(self._model.lib.all_words())
            raise ModelFileError(f"{self.path.name} is no projector for {self._model.path.name}: {reason}")
        return ptr

    # facts

    def _read_facts(self, style: str) -> None:
        self.sees = bool(self._mtmd.support_vision(self._ptr))
        rate = int(self._mtmd.get_audio_sample_rate(self._ptr)) if self._mtmd.support_audio(self._ptr) else 0
        self.sample_rate = rate if rate == SAMPLE_RATE else 0  # of the sounds that it hears; 0: none
        if not self.sees and not self.sample_rate:
            raise self._unfit(f"sees nothing and hears at {rate} Hz; Everwarm decodes sounds at {SAMPLE_RATE} Hz only")
        self.n_embd = int(self._model.lib.model_n_embd_inp(self._model.ptr))
        self.uses_mrope = bool(self._mtmd.decode_use_mrope(self._ptr))
        self.is_causal = not self._mtmd.decode_use_non_causal(self._ptr, None)  # where images are read
        if style.startswith("qwen") and self.sees and not self.uses_mrope:
            raise self._unfit(f"was made for a model with M-RoPE, which {self._model.path.name} has not")
        self._n_cells = functools.lru_cache(_N_LENGTHS)(self._count_cells)
        self.around_image = self.around_sound = Delimiters()
        try:
            if self.sees:
                self._learn_images()
            if self.sample_rate:
                self._learn_sounds()
        except BadRequest as error:
            raise self._unfit(f"cannot be used: {error}") from None

    def _learn_images(self) -> None:
        shapes = {self._probe(prefix) for prefix in _PROBE_PREFIXES}
        if len(shapes) > 1:
            raise self._unfit("gives an image another size by where it stands, which Everwarm cannot do")

    def _probe(self, prefix: str) -> MediaShape:
        """The shape of an image after this text, and the tokens that the projector puts around it."""
        with self._chunks(_PROBE, _PROBE, None, prefix.encode()) as chunks:
            before, image, after = self._parts(chunks)
            self.around_image = self._delimiters(prefix, before, after, "images")
            shape = self._shape_of(image)
            tokens = self._mtmd.input_chunk_get_tokens_image(image)
            cells = [self._mtmd.image_tokens_get_decoder_pos(tokens, _PROBE_POS, i) for i in range(shape.n_tokens)]
            positions = np.array([[cell.t, cell.y, cell.x, cell.z] for cell in cells], np.int32).T
            planes = shape.positions(_PROBE_POS, uses_mrope=self.uses_mrope)
            if not np.array_equal(positions[: len(planes)], planes):
                raise self._unfit("numbers the cells of an image in a way Everwarm does not know")
        return shape

    def _learn_sounds(self) -> None:
        """The tokens that the projector puts around a sound."""
        prefix = "a"
        with self._sound_chunks(np.zeros(SAMPLE_RATE, np.float32), prefix.encode()) as chunks:
            before, windows, after = self._split(chunks)
            self.around_sound = self._delimiters(prefix, before, after, "sounds")
            self._check_windows(windows)

    def _delimiters(self, prefix: str, before: tuple[int, ...], after: tuple[int, ...], what: str) -> Delimiters:
        expected = tuple(self._model.vocab.tokenize(prefix, add_special=False, parse_special=True).tolist())
        if before[: len(expected)] != expected:
            raise self._unfit(f"changes the text before {what} ({before} instead of {expected})")
        own = before[len(expected) :]
        return Delimiters(own, after, self._text_of(own, what), self._text_of(after, what))

    def _text_of(self, tokens: Sequence[int], what: str) -> str:
        """What stands before or after an image or a sound, as text that becomes the same tokens again."""
        vocab = self._model.vocab
        if any(token not in range(vocab.n_tokens) for token in tokens):
            raise self._unfit(f"puts a token around {what} that {self._model.path.name} has not")
        text = vocab.detokenize(tokens).decode("utf-8", "replace")
        if text.strip() and not any(token in vocab.special for token in tokens):
            raise self._unfit(f"puts {text} around {what}, which is no token of {self._model.path.name}")
        if vocab.tokenize(text, add_special=False, parse_special=True).tolist() != list(tokens):
            raise self._unfit(f"puts {text!r} around {what}, which would be read as other tokens")
        return text

    def _unfit(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self.path.name} {why}")

    @functools.cached_property
    def fingerprint(self) -> str:
        """The digest of the file. Embeddings of one fingerprint are never taken for another's."""
        return self.files.digest(self.path)

    # images

    def shape(self, width: int, height: int) -> MediaShape:
        """What an image of this size takes, without its pixels. For any thread."""
        _check_size(width, height)
        with self._chunks(width, height, None) as chunks:
            return self._shape_of(self._only_image(chunks, width, height))

    def encode(self, rgb: bytes | memoryview, width: int, height: int) -> Embedding:
        """The embeddings of an image of rows of red, green, blue bytes."""
        _check_size(width, height)
        pixels = _flat(rgb)
        if len(pixels) != 3 * width * height:
            raise BadRequest(f"an image of {width}×{height} pixels has {3 * width * height} bytes, not {len(pixels)}")
        with self._encoding, self._chunks(width, height, pixels.ctypes.data) as chunks:
            image = self._only_image(chunks, width, height)
            shape = self._shape_of(image)
            before = self.files.before_use()
            if self._mtmd.encode_chunk(self._ptr, image) != 0:
                reason = self._model.lib.last_words()
                raise ModelError(f"an image of {width}×{height} pixels could not be encoded: {reason}")
            address = self._mtmd.get_output_embd(self._ptr)
            values = np.ctypeslib.as_array(address, (shape.n_tokens, self.n_embd)).copy()  # the next one overwrites it
        if self.files.look() != before:
            raise WeightsTouched(f"{self.path.name} was touched while it encoded an image")
        if not np.isfinite(values).all():  # as KV, NaN would spoil every sequence that attends to it
            raise ModelError(f"{self.path.name} gave no numbers for an image of {width}×{height} pixels (NaN)")
        return Embedding(shape, values)

    @contextlib.contextmanager
    def _chunks(self, width: int, height: int, pixels: int | None, prefix: bytes = b"") -> Iterator[int]:
        """What libmtmd makes of one image behind ``prefix``; without pixels it only counts."""
        bitmap = self._mtmd.bitmap_init(width, height, pixels)
        with self._chunks_of(bitmap, prefix, f"an image of {width}×{height} pixels") as chunks:
            yield chunks

    @contextlib.contextmanager
    def _chunks_of(self, bitmap: int, prefix: bytes, what: str) -> Iterator[int]:
        assert self._ptr is not None, "the projector is closed"
        marked = prefix + mtmd_abi.MARKER
        text = mtmd_abi.InputText(marked, len(marked), False, True)
        chunks = self._mtmd.input_chunks_init()
        try:
            bitmaps = (ctypes.c_void_p * 1)(bitmap)
            if self._mtmd.tokenize(self._ptr, chunks, ctypes.byref(text), bitmaps, 1) != 0:
                raise BadRequest(f"{what} was refused by its model: {self._model.lib.last_words()}")
            yield chunks
        finally:
            self._mtmd.input_chunks_free(chunks)
            self._mtmd.bitmap_free(bitmap)

    def _only_image(self, chunks: int, width: int, height: int) -> int:
        before, image, after = self._parts(chunks)
        if (before, after) != (self.around_image.before, self.around_image.after):
            raise BadRequest(f"an image of {width}×{height} pixels is cut up by its model; give a smaller one")
        return image

    def _parts(self, chunks: int) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """The tokens before the image, the image, and the tokens after it."""
        before, images, after = self._split(chunks)
        if len(images) != 1:
            raise BadRequest(
                f"its model cuts the image into {len(images)} pieces, and one is needed; give a smaller one"
            )
        return before, images[0], after

    def _split(self, chunks: int) -> tuple[tuple[int, ...], list[int], tuple[int, ...]]:
        """The tokens before the first chunk that is no text, such chunks, and the tokens after the first of them."""
        mtmd = self._mtmd
        listed = [mtmd.input_chunks_get(chunks, i) for i in range(mtmd.input_chunks_size(chunks))]
        media = [i for i, chunk in enumerate(listed) if mtmd.input_chunk_get_type(chunk) != mtmd_abi.CHUNK_TEXT]
        start = media[0] if media else len(listed)
        texts = [(i, self._tokens(chunk)) for i, chunk in enumerate(listed) if i not in media]
        before, after = (tokens for i, tokens in texts if i < start), (tokens for i, tokens in texts if i > start)
        return sum(before, ()), [listed[i] for i in media], sum(after, ())

    def _tokens(self, chunk: int) -> tuple[int, ...]:
        n = ctypes.c_size_t()
        tokens = self._mtmd.input_chunk_get_tokens_text(chunk, ctypes.byref(n))
        return tuple(tokens[: n.value])

    def _shape_of(self, image: int) -> MediaShape:
        mtmd = self._mtmd
        tokens = self._mtmd.input_chunk_get_tokens_image(image)
        if not tokens:
            raise ModelError(f"{self.path.name} made something else than an image of an image")
        shape = MediaShape(
            n_tokens=int(mtmd.input_chunk_get_n_tokens(image)),
            n_pos=int(mtmd.input_chunk_get_n_pos(image)),
            nx=int(mtmd.image_tokens_get_nx(tokens)),
            ny=int(mtmd.image_tokens_get_ny(tokens)),
        )
        n_pos = max(shape.nx, shape.ny) if self.uses_mrope else shape.n_tokens
        if shape.n_tokens != shape.nx * shape.ny or shape.n_tokens < 1 or shape.n_pos != n_pos:
            raise ModelError(f"{self.path.name} lays an image out in a way Everwarm does not know: {shape}")
        return shape

    # sounds

    def sound_shape(self, n_samples: int) -> MediaShape:
        """What a sound of so many samples takes. For any thread."""
        _check_length(n_samples)
        return MediaShape.of_sound(self._n_cells(n_samples))

    def _count_cells(self, n_samples: int) -> int:
        with self._sound_chunks(np.zeros(n_samples, np.float32)) as chunks:
            return sum(self._n_tokens(window) for window in self._windows(chunks))

    def hear(self, pcm: bytes | memoryview) -> SoundEncoding:
        """A sound of samples at ``sample_rate``, as 32-bit floats, to be encoded window by window."""
        return SoundEncoding(self, _samples(pcm))

    def _encode_window(self, window: int) -> Values:
        with self._encoding:
            before = self.files.before_use()
            if self._mtmd.encode_chunk(self._ptr, window) != 0:
                raise ModelError(f"a sound could not be encoded: {self._model.lib.last_words()}")
            address = self._mtmd.get_output_embd(self._ptr)
            values = np.ctypeslib.as_array(address, (self._n_tokens(window), self.n_embd)).copy()
        if self.files.look() != before:
            raise WeightsTouched(f"{self.path.name} was touched while it encoded a sound")
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path.name} gave no numbers for a sound (NaN)")
        return values

    @contextlib.contextmanager
    def _sound_chunks(self, samples: Values, prefix: bytes = b"") -> Iterator[int]:
        bitmap = self._mtmd.bitmap_init_from_audio(len(samples), samples.ctypes.data)
        with self._chunks_of(bitmap, prefix, f"a sound of {len(samples)} samples") as chunks:
            yield chunks

    def _windows(self, chunks: int) -> list[int]:
        """The parts of a sound. They lie side by side: what stands before and after them is what every sound has."""
        before, windows, after = self._split(chunks)
        if (before, after) != (self.around_sound.before, self.around_sound.after):
            raise BadRequest("its model puts text into the sound; give a shorter one")
        self._check_windows(windows)
        return windows

    def _check_windows(self, windows: list[int]) -> None:
        mtmd = self._mtmd
        for window in windows:
            n_tokens = self._n_tokens(window)
            is_sound = mtmd.input_chunk_get_type(window) == mtmd_abi.CHUNK_AUDIO
            if not is_sound or n_tokens < 1 or int(mtmd.input_chunk_get_n_pos(window)) != n_tokens:
                raise ModelError(f"{self.path.name} lays a sound out in a way Everwarm does not know")
            if mtmd.decode_use_non_causal(self._ptr, window):
                raise ModelError(f"{self.path.name} reads a sound at once, which Everwarm cannot do")
        if not windows:
            raise BadRequest("its model makes nothing of the sound; give a longer one")

    def _n_tokens(self, chunk: int) -> int:
        return int(self._mtmd.input_chunk_get_n_tokens(chunk))

    def close(self) -> None:
        with self._encoding:
            if self._ptr:
                self._mtmd.free(self._ptr)
                self._ptr = None
            self.files.close()


class SoundEncoding(Closing):
    """A sound on its way to an embedding. Use as a context manager, and close it before its projector."""

    def __init__(self, media: MediaModel, samples: Values) -> None:
        self._media = media
        self._parts: list[Values] = []
        self._open = contextlib.ExitStack()
        try:
            self._windows = media._windows(self._open.enter_context(media._sound_chunks(samples)))
        except BaseException:
            self.close()
            raise

    def step(self) -> Embedding | None:
        """Encodes the next window; None: it was not the last one."""
        self._parts.append(self._media._encode_window(self._windows[len(self._parts)]))
        if len(self._parts) < len(self._windows):
            return None
        values = np.concatenate(self._parts)
        return Embedding(MediaShape.of_sound(len(values)), values)

    def close(self) -> None:
        self._open.close()


def decode_image(
    lib: Lib,
    ctx_ptr: int,
    seq: int,
    embedding: Embedding,
    start_pos: int,
    *,
    wants_logits: bool,
    uses_mrope: bool,
    causal: bool,
    n_batch: int,
    n_ubatch: int,
) -> int:
    """Append an image to a sequence whose next position is ``start_pos``; text goes on at ``start_pos + n_pos``.

    Returns libllama's code: 0 is done and 1 is no room, with nothing changed; after any other the sequence must be
    dropped. The logits wanted are those of the last cell, libllama's row -1. Without causal attention every cell sees all
    the others: such an image must fit into one ubatch and is refused, before anything is changed, if it does not.
    """
    shape = embedding.shape
    values = embedding.values
    n_embd = int(lib.model_n_embd_inp(lib.get_model(ctx_ptr)))
    assert values.shape == (shape.n_tokens, n_embd), f"{values.shape} numbers for {shape} in a width of {n_embd}"
    assert values.dtype == np.float32 and values.flags.c_contiguous and shape.nx * shape.ny == shape.n_tokens
    assert start_pos >= 0 and n_batch >= 1
    planes = shape.positions(start_pos, uses_mrope=uses_mrope)
    if causal:
        return _decode_parts(lib, ctx_ptr, seq, values, planes, wants_logits, n_batch)
    n_most = min(n_batch, n_ubatch)
    if shape.n_tokens > n_most:
        raise BadRequest(
            f"the image takes {shape.n_tokens} tokens at once but a step has {n_most}; "
            f"start with a batch and ubatch size of at least {shape.n_tokens}"
        )
    lib.set_causal_attn(ctx_ptr, False)
    try:
        return _decode_cells(lib, ctx_ptr, seq, values, planes, wants_logits)
    finally:
        lib.set_causal_attn(ctx_ptr, True)


def _decode_parts(
    lib: Lib, ctx_ptr: int, seq: int, values: Values, planes: Positions, wants_logits: bool, n_batch: int
) -> int:
    """Cells see only those before them, so they may come in parts. No room for a later one is not "nothing changed"."""
    for start in range(0, len(values), n_batch):
        part = slice(start, start + n_batch)
        is_last = start + n_batch >= len(values)
        code = _decode_cells(lib, ctx_ptr, seq, values[part], planes[:, part], wants_logits and is_last)
        if code != 0:
            return LOST if code == 1 and start > 0 else code
    return 0


def _decode_cells(lib: Lib, ctx_ptr: int, seq: int, values: Values, planes: Positions, wants_logits: bool) -> int:
    n = len(values)
    positions = np.ascontiguousarray(planes).ravel()  # plane by plane, of these cells alone
    seqs = np.full(n, seq, np.int32)
    ones = np.ones(n, np.int32)
    wants = np.zeros(n, np.int8)
    wants[-1] = wants_logits
    pointers = seqs.ctypes.data + 4 * np.arange(n, dtype=np.uint64)
    batch = abi.Batch(
        n_tokens=n,
        token=None,
        embd=values.ctypes.data_as(abi.f32p),
        pos=positions.ctypes.data_as(abi.i32p),
        n_seq_id=ones.ctypes.data_as(abi.i32p),
        seq_id=pointers.ctypes.data_as(ctypes.POINTER(abi.i32p)),
        logits=wants.ctypes.data_as(abi.i8p),
    )
    return int(lib.decode(ctx_ptr, batch))


def _check_size(width: int, height: int) -> None:
    short, long = sorted((width, height))
    if short < MIN_SIDE or long > MAX_SIDE or width * height > MAX_PIXELS:
        raise BadRequest(
            f"an image of {width}×{height} pixels cannot be read; give sides of {MIN_SIDE} to {MAX_SIDE} pixels, "
            f"and at most {MAX_PIXELS} pixels in all"
        )
    if long > MAX_RATIO * short:
        raise BadRequest(f"an image of {width}×{height} pixels is too thin; give sides of at most 1 to {MAX_RATIO}")


def _check_length(n_samples: int) -> None:
    if not MIN_SAMPLES <= n_samples <= MAX_SAMPLES:
        raise BadRequest(f"a sound of {n_samples} samples cannot be read; give {MIN_SAMPLES} to {MAX_SAMPLES}")


def _samples(pcm: bytes | memoryview) -> Values:
    try:
        samples = np.frombuffer(pcm, np.float32)
    except (ValueError, BufferError, TypeError):
        raise BadRequest("a sound's samples must be 32-bit floats that lie one behind the other") from None
    _check_length(len(samples))
    if not np.abs(samples).max() <= MAX_LOUDNESS:  # also NaN
        raise BadRequest(f"the sound has samples that are no numbers, or beyond ±{MAX_LOUDNESS:g}; full scale is 1")
    return samples


def _flat(rgb: bytes | memoryview) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(rgb, np.uint8)
    except (ValueError, BufferError, TypeError):
        raise BadRequest("an image's bytes must lie one behind the other, and there must be some") from None


def _reason(messages: tuple[str, ...]) -> str:
    """The first line of libmtmd's that is an error; it also gives advice and repeats itself."""
    for line in messages:
        if "failed" in line or "error" in line:
            return " ".join(line.split())
    return "libmtmd gave no reason"
