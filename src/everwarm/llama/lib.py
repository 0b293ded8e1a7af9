"""Finding, loading and checking libllama, once per process, and libmtmd when a model has media; and the devices that it can
compute on, by name, with where they keep tensors.

Refuses any build whose ABI is not the one ``abi`` and ``mtmd_abi`` declare. Keeps the last warnings that libllama logged,
for error messages. Knows no models.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from everwarm.backend import installed
from everwarm.errors import ModelError, ModelFileError
from everwarm.llama import abi
from everwarm.llama.media import mtmd_abi
from everwarm.llama.system import spin_wait

log = logging.getLogger("everwarm.llama")

ADVICE = f"install {abi.WHEEL}, or point EVERWARM_LIBLLAMA at a libllama built from tag {abi.BUILD}"

_LEVEL_WARN = 3
_LEVEL_ERROR = 4
_RECENT_LINES = 64
_HARMLESS = b"non-consecutive token position"  # logged for every M-RoPE image and for the first text after it


class Lib:
    """libllama's functions as attributes, without the ``llama_`` prefix: ``lib.decode(...)``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._recent_lines: collections.deque[str] = collections.deque(maxlen=_RECENT_LINES)
        self._cdll = _load(path)
        _bind(self, self._cdll, abi.FUNCTIONS, "llama_", path)
        self.knows_heads = _bind_head(self, self._cdll)
        _check_versions(self, path)
        _check_defaults(self.model_default_params(), abi.EXPECTED_MODEL_DEFAULTS, path)
        _check_defaults(self.context_default_params(), abi.EXPECTED_CONTEXT_DEFAULTS, path)
        self._log_callback = abi.LOG_CALLBACK(self.note_log)  # kept: C holds only the pointer
        self.log_set(self._log_callback, None)
        self.backend_init()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    @functools.cached_property
    def mtmd(self) -> Mtmd:
        """The functions for media, which a build of libllama may lack."""
        found = Mtmd(*media_library(self._cdll, self.path))
        found.helper_log_set(self._log_callback, None)
        return found

    def note_log(self, level: int, text: bytes, _user: int) -> None:
        if level in (_LEVEL_WARN, _LEVEL_ERROR) and _HARMLESS not in text:  # called from C threads: keep it trivial
            self._recent_lines.append(text.decode("utf-8", "replace").strip())

    def forget_log(self) -> None:
        self._recent_lines.clear()

    def last_words(self) -> str:
        """The last warning or error libllama printed, for an error message."""
        return self._recent_lines[-1] if self._recent_lines else "no message"

    def all_words(self) -> tuple[str, ...]:
        return tuple(self._recent_lines)


class Mtmd:
    """libmtmd's functions as attributes, without the ``mtmd_`` prefix: ``mtmd.encode_chunk(...)``."""

    def __init__(self, cdll: ctypes.CDLL, path: Path) -> None:
        _bind(self, cdll, mtmd_abi.FUNCTIONS, "mtmd_", path)
        marker = int(self.default_marker())
        _check_defaults(self.context_params_default(), mtmd_abi.EXPECTED_DEFAULTS | {"media_marker": marker}, path)
        if ctypes.string_at(marker) != mtmd_abi.MARKER:
            raise ModelError(f"{path.name} has another marker for media than {mtmd_abi.MARKER!r}: {ADVICE}")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


def library_path() -> Path:
    """The library to load: EVERWARM_LIBLLAMA if set, else the backend in use, else the one inside the xllamacpp wheel."""
    chosen = os.environ.get("EVERWARM_LIBLLAMA")
    if chosen:
        return Path(chosen)
    built = installed.used_library(abi.BUILD)
    if built is not None:
        return built
    spec = importlib.util.find_spec("xllamacpp")
    found = sorted(Path(spec.origin).parent.glob("xllamacpp*.so")) if spec and spec.origin else []
    if not found:
        raise ModelError(f"libllama was not found: {ADVICE}")
    return found[0]


@functools.cache
def lib() -> Lib:
    return Lib(library_path())


def _load(path: Path) -> ctypes.CDLL:
    try:
        # A CUDA build exports its own libstdc++ symbols; without the system's loaded first, opening a model crashes.
        ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        log.debug("no libstdc++.so.6 to load first; fine where libllama brings its own")
    try:
        with spin_wait.long_spin() as is_ours:
            cdll = ctypes.CDLL(str(path))
    except OSError as error:
        raise ModelError(f"{path.name} cannot be loaded ({error}): {ADVICE}") from None
    if is_ours:
        spin_wait.guard(cdll)
    return cdll


def media_library(cdll: ctypes.CDLL, path: Path) -> tuple[ctypes.CDLL, Path]:
    """The wheel has everything in one library; in a build of one's own ``libmtmd.so`` lies beside ``libllama.so``."""
    if hasattr(cdll, "mtmd_init_from_file"):
        return cdll, path
    beside = path.with_name(path.name.replace("llama", "mtmd", 1))
    try:
        return ctypes.CDLL(str(beside)), beside
    except OSError as error:
        raise ModelError(f"media need {beside.name}, which cannot be loaded ({error}): {ADVICE}") from None


def _bind(target: object, cdll: ctypes.CDLL, functions: dict[str, abi.Signature], prefix: str, path: Path) -> None:
    for name, (result, arguments) in functions.items():
        try:
            function = getattr(cdll, name)
        except AttributeError:
            raise ModelError(f"{path.name} has no function {name}: {ADVICE}") from None
        function.restype = result
        function.argtypes = arguments
        setattr(target, name.removeprefix(prefix), function)


def _bind_head(target: object, cdll: ctypes.CDLL) -> bool:
    """Whether this build has the functions for MTP heads."""
    for name, (symbol, (result, arguments)) in abi.HEAD_FUNCTIONS.items():
        function = getattr(cdll, symbol, None)
        if function is None:
            return False
        function.restype, function.argtypes = result, arguments
        setattr(target, name, function)
    return True


def _check_versions(loaded: Lib, path: Path) -> None:
    for name, wanted in abi.EXPECTED_VERSIONS.items():
        found = getattr(loaded, name.removeprefix("llama_"))().decode("utf-8", "replace")
        if found.partition("-")[0] != wanted:
            raise ModelError(f"{path.name} is not libllama {abi.BUILD} ({name} is {found}, not {wanted}): {ADVICE}")


def _check_defaults(params: ctypes.Structure, expected: Mapping[str, object], path: Path) -> None:
    for field, value in expected.items():
        found = getattr(params, field)
        if found != value:
            raise ModelError(
                f"{path.name} is not libllama {abi.BUILD} (its default {field} is {found}, expected {value}): {ADVICE}"
            )


class Closing:
    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Device(NamedTuple):
    handle: int
    name: str
    description: str
    is_gpu: bool
    free_bytes: int
    total_bytes: int


def devices(lib: Lib) -> Iterator[Device]:
    """All but the CPU."""
    for handle in _all(lib):
        kind = int(lib.ggml_backend_dev_type(handle))
        if kind != abi.DEVICE_CPU:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            lib.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
            about = _text(lib.ggml_backend_dev_description(handle))
            name = _text(lib.ggml_backend_dev_name(handle))
            yield Device(handle, name, about, kind == abi.DEVICE_GPU, free.value, total.value)


def warn_of_blind_build(lib: Lib) -> None:
    """A build for GPUs that sees none computes on the CPU, which is slow and easily overlooked."""
    used = installed.used_kind()
    if used is not None and lib.path == installed.folder_of(used, abi.BUILD) / installed.LIBRARY:
        told = installed.blind_build(used, sum(device.is_gpu for device in devices(lib)))
        if told is not None:
            log.warning("%s", told)


def device_named(lib: Lib, name: str) -> int:
    known = {device.name: device.handle for device in devices(lib)}
    if name not in known:
        raise ModelFileError(f"there is no device {name!r}; this build has {', '.join(known) or 'none but the CPU'}")
    return known[name]


def buffer_type_named(lib: Lib, name: str) -> int:
    """Where a device keeps tensors: ``CPU``, or for most others the device's own name."""
    found = (lib.ggml_backend_dev_buffer_type(handle) for handle in _all(lib))
    known = {_text(lib.ggml_backend_buft_name(kind)): kind for kind in found if kind}
    if name not in known:
        raise ModelFileError(f"there is no buffer type {name!r}; this build has {', '.join(known)}")
    return int(known[name])


def _all(lib: Lib) -> list[int]:
    return [lib.ggml_backend_dev_get(i) for i in range(int(lib.ggml_backend_dev_count()))]


def _text(found: bytes | None) -> str:
    return (found or b"").decode("utf-8", "replace")
