"""Where builds of libllama lie, and which one is used: one folder per kind and build tag, and a file that names a kind.

Without that file it is the library of the wheel. Knows folders and names; loads nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from everwarm.config import require

log = logging.getLogger("everwarm.backend")

Kind = Literal["cuda", "vulkan", "native"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WHEEL = "wheel"
LIBRARY = "libllama.so"
_USED = "used"


@dataclass(frozen=True, slots=True)
class Backend:
    """One build. ``build`` is the tag of libllama that it was made from."""

    kind: Kind
    build: str
    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / LIBRARY

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir() if not path.is_symlink())


def backends_directory() -> Path:
    """The user's folder for what was built here."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "everwarm" / "backends"


def folder_of(kind: Kind, build: str) -> Path:
    return backends_directory() / f"{kind}-{build}"


def all_backends() -> list[Backend]:
    """Every build that is complete, also those of another tag."""
    found = []
    for kind in KINDS:
        for folder in sorted(backends_directory().glob(f"{kind}-*")):
            backend = Backend(kind, folder.name.removeprefix(f"{kind}-"), folder)
            if backend.library.is_file():
                found.append(backend)
    return found


def used_kind() -> Kind | None:
    """The kind that was chosen; None: the wheel's library."""
    try:
        name = (backends_directory() / _USED).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return next((kind for kind in KINDS if kind == name), None)


def used_library(build: str) -> Path | None:
    """The library of the chosen kind, if it was built for this tag."""
    kind = used_kind()
    if kind is None:
        return None
    library = folder_of(kind, build) / LIBRARY
    if not library.is_file():
        log.warning("the %s backend was not built for libllama %s; `everwarm backend install %s`", kind, build, kind)
        return None
    return library


def use(name: str, build: str) -> None:
    """From the next start on, engines load this one."""
    if name == WHEEL:
        (backends_directory() / _USED).unlink(missing_ok=True)
        return
    there = [backend.kind for backend in all_backends() if backend.build == build]
    require(
        name in there,
        f"there is no {name!r} backend for libllama {build}; there is {', '.join((WHEEL, *there))}: "
        f"`everwarm backend install {name if name in KINDS else '|'.join(KINDS)}` builds one",
    )
    place = backends_directory() / _USED
    unfinished = place.with_suffix(".new")
    unfinished.write_text(f"{name}\n", "utf-8")
    unfinished.replace(place)


def remove(name: str) -> int:
    """Delete every build of a kind. Returns the bytes freed."""
    gone = [backend for backend in all_backends() if backend.kind == name]
    require(bool(gone), f"there is no {name!r} backend; `everwarm backend list` shows what there is")
    if used_kind() == name:
        (backends_directory() / _USED).unlink(missing_ok=True)
    n_bytes = sum(backend.n_bytes for backend in gone)
    for backend in gone:
        shutil.rmtree(backend.folder)
    return n_bytes
