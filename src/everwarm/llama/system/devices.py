"""The devices that this libllama can compute on, by name, and where they keep tensors."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from typing import NamedTuple

from everwarm.backend import gpus, installed
from everwarm.errors import ModelFileError
from everwarm.llama import abi
from everwarm.llama.lib import Lib

log = logging.getLogger("everwarm.llama")


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
        told = gpus.blind_build(used, sum(device.is_gpu for device in devices(lib)))
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
