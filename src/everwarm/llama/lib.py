"""Finding, loading and checking libllama, once per process.

Refuses any build whose ABI is not the one ``abi`` declares. Keeps the last warnings libllama printed, so that an error
can say what it said. Knows no models.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everwarm.errors import LibraryMismatch
from everwarm.llama import abi, crowding

log = logging.getLogger("everwarm.llama")

ADVICE = f"install {abi.WHEEL}, or point EVERWARM_LIBLLAMA at a libllama built from tag {abi.BUILD}"

_LEVEL_WARN, _LEVEL_ERROR = 3, 4
_RECENT_LINES = 64


class Lib:
    """libllama's functions as attributes, without the ``llama_`` prefix: ``lib.decode(...)``, ``lib.seq_rm(...)``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._said: collections.deque[str] = collections.deque(maxlen=_RECENT_LINES)
        cdll = _load(path)
        for name, (result, arguments) in abi.FUNCTIONS.items():
            try:
                function = getattr(cdll, name)
            except AttributeError:
                raise LibraryMismatch(f"{path.name} has no function {name}: {ADVICE}") from None
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("llama_"), function)
        _check_defaults(self, path)
        self._log_callback = abi.LOG_CALLBACK(self._on_log)  # kept: C holds only the pointer
        self.log_set(self._log_callback, None)
        self.backend_init()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def _on_log(self, level: int, text: bytes, _user: int) -> None:
        if level in (_LEVEL_WARN, _LEVEL_ERROR):  # called from C threads: keep it trivial
            self._said.append(text.decode("utf-8", "replace").strip())

    def forget_log(self) -> None:
        self._said.clear()

    def last_words(self) -> str:
        """The last warning or error libllama printed, for an error message."""
        return self._said[-1] if self._said else "no message"

    def all_words(self) -> tuple[str, ...]:
        return tuple(self._said)


def library_path() -> Path:
    """The library to load: EVERWARM_LIBLLAMA if set, else the one inside the xllamacpp wheel."""
    chosen = os.environ.get("EVERWARM_LIBLLAMA")
    if chosen:
        return Path(chosen)
    spec = importlib.util.find_spec("xllamacpp")
    found = sorted(Path(spec.origin).parent.glob("xllamacpp*.so")) if spec and spec.origin else []
    if not found:
        raise LibraryMismatch(f"libllama was not found: {ADVICE}")
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
        with crowding.long_spin() as is_ours:
            cdll = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryMismatch(f"{path.name} cannot be loaded ({error}): {ADVICE}") from None
    if is_ours:
        crowding.guard(cdll)
    return cdll


def _check_defaults(lib: Lib, path: Path) -> None:
    wanted = (
        (lib.model_default_params(), abi.EXPECTED_MODEL_DEFAULTS),
        (lib.context_default_params(), abi.EXPECTED_CONTEXT_DEFAULTS),
    )
    for params, expected in wanted:
        for field, value in expected.items():
            found = getattr(params, field)
            if found != value:
                raise LibraryMismatch(
                    f"{path.name} is not libllama {abi.BUILD} (its default {field} is {found}, expected {value}): {ADVICE}"
                )
