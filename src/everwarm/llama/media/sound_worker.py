"""The process that decodes sounds: ``python -m everwarm.llama.media.sound_worker BOUNDS LIFELINE``.

WAV, MP3 and FLAC become 32-bit samples of one channel at 16 kHz, by libmtmd's own function, so they are those that
llama-server makes. The gateway starts it, and never loads libmtmd itself. Imports little, so that little is in its memory.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import importlib.util
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from everwarm.confined_process import Bounds, Unusable, say, serve
from everwarm.llama.abi import LOG_CALLBACK, Signature
from everwarm.llama.media import mtmd_abi
from everwarm.sound_files import SAMPLE_RATE, is_sound

WANTED = "send WAV, MP3 or FLAC"
_U32, _F32, _BOOL, _TEXT = 4, 6, 7, 8  # GGUF's types of values


def main() -> None:
    bounds = Bounds.of_this_process()
    serve(SoundDecoder().answer, bounds)


class VideoParams(c.Structure):
    _fields_ = [("fps", c.c_float), ("folder", c.c_void_p), ("interval_ms", c.c_int64)]


class Decoded(c.Structure):
    _fields_ = [("bitmap", c.c_void_p), ("video", c.c_void_p)]


_SHARED = (
    "mtmd_helper_log_set mtmd_context_params_default mtmd_init_from_file mtmd_get_audio_sample_rate mtmd_bitmap_free"
)
_FUNCTIONS: dict[str, Signature] = {
    **{name: mtmd_abi.FUNCTIONS[name] for name in _SHARED.split()},
    "mtmd_helper_init_opt_default": (VideoParams, ()),
    "mtmd_helper_bitmap_init_from_buf": (Decoded, (c.c_void_p, c.c_char_p, c.c_size_t, c.c_bool, VideoParams)),
    "mtmd_bitmap_get_n_bytes": (c.c_size_t, (c.c_void_p,)),
    "mtmd_bitmap_get_data": (c.c_void_p, (c.c_void_p,)),
}


class SoundDecoder:
    def __init__(self) -> None:
        self._lib = c.CDLL(str(_library()))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        self._log = LOG_CALLBACK(lambda *_: None)
        self._lib.mtmd_helper_log_set(self._log, None)
        self._ptr = self._open()

    def _open(self) -> int:
        """libmtmd decodes for a projector, of which it needs the sample rate alone: one without weights will do."""
        params = self._lib.mtmd_context_params_default()
        assert params.n_threads == 4 and params.batch_max_tokens == 1024, "libmtmd of another build"
        params.use_gpu = params.warmup = params.print_timings = False
        with _file_of(empty_projector()) as path:
            ptr: int | None = self._lib.mtmd_init_from_file(os.fsencode(path), None, params)
        assert ptr and self._lib.mtmd_get_audio_sample_rate(ptr) == SAMPLE_RATE, "libmtmd decodes no sounds"
        return ptr

    def answer(self, wire: socket.socket, data: bytes, bounds: Bounds) -> None:
        try:
            bitmap = self._decoded(data)
        except Unusable as wrong:
            return say(wire, {"wrong": str(wrong)})
        try:
            n_bytes = self._lib.mtmd_bitmap_get_n_bytes(bitmap)
            if n_bytes // 4 > bounds.max_samples:
                most = f"{bounds.max_samples / SAMPLE_RATE:g} s"
                return say(wire, {"wrong": f"it is longer than {most}: send a shorter one"})
            say(wire, {"n_samples": n_bytes // 4})
            address = self._lib.mtmd_bitmap_get_data(bitmap)
            wire.sendall(memoryview((c.c_char * n_bytes).from_address(address)).cast("B"))
        finally:
            self._lib.mtmd_bitmap_free(bitmap)

    def _decoded(self, data: bytes) -> int:
        if not is_sound(data):  # libmtmd would take it for an image or a film
            raise Unusable(f"it is no sound of a known kind: {WANTED}")
        options = self._lib.mtmd_helper_init_opt_default()
        found = self._lib.mtmd_helper_bitmap_init_from_buf(self._ptr, data, len(data), False, options)
        if not found.bitmap:
            raise Unusable(f"it is damaged, or of a kind that cannot be read: save it again, or {WANTED}")
        return int(found.bitmap)


@contextlib.contextmanager
def _file_of(data: bytes) -> Iterator[str]:
    """A file in memory where there are such: the disk may be read-only."""
    if sys.platform == "linux":
        with open(os.memfd_create("projector"), "wb", buffering=0) as memory:
            memory.write(data)
            yield f"/proc/self/fd/{memory.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            yield file.name


def _library() -> Path:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None, "xllamacpp is not installed"
    return min(Path(spec.origin).parent.glob("xllamacpp*.so"))


def empty_projector() -> bytes:
    """A GGUF file that libmtmd opens as a projector of sounds: Ultravox' style without blocks."""
    numbers = ("embedding_length", "feed_forward_length", "projection_dim", "attention.head_count", "num_mel_bins")
    one, none = struct.pack("<I", 1), struct.pack("<I", 0)
    pairs = [
        ("general.architecture", _TEXT, _text("clip")),
        ("clip.has_audio_encoder", _BOOL, b"\1"),
        ("clip.projector_type", _TEXT, _text("ultravox")),
        *((f"clip.audio.{name}", _U32, one) for name in numbers),
        ("clip.audio.projector.stack_factor", _U32, one),
        ("clip.audio.block_count", _U32, none),
        ("clip.audio.attention.layer_norm_epsilon", _F32, struct.pack("<f", 1e-5)),
    ]
    convolutions = (f"a.conv1d.{i}.{part}" for i in (1, 2) for part in ("weight", "bias"))
    names = [*convolutions, *(f"mm.a.{name}.weight" for name in ("mlp.1", "mlp.2", "norm_pre", "norm_mid"))]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), len(pairs))
    head += b"".join(_text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)
    head += b"".join(_text(name) + struct.pack("<IQIQ", 1, 8, 0, 32 * i) for i, name in enumerate(names))
    return head + bytes(-len(head) % 32) + bytes(32 * len(names))


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


if __name__ == "__main__":
    main()
