"""Which builds of libllama there are, which one is used, and whether that is one for this machine's GPUs.

A build has a folder of its own, named by kind and build tag; a file names the kind that is used, and without it that is the
library of the wheel. GPUs are found as far as the system and nvidia-smi tell them. Loads no library and no driver.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections import Counter
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
_AMD = "0x1002"
_SMI_S = 10.0
_WSL = "/usr/lib/wsl/lib"  # where nvidia-smi lies in WSL, which has no kernel module


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
    """Chooses the build that engines load from their next start on."""
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


def nvidia_gpus(root: Path = Path("/")) -> list[str]:
    """The names of NVIDIA's, from its kernel module, else from nvidia-smi; without names, as many as there are devices."""
    names = []
    for about in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = about.read_text("utf-8", "replace").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names or _named_by_smi() or ["NVIDIA GPU"] * len(list((root / "dev").glob("nvidia[0-9]*")))


def _named_by_smi() -> list[str]:
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_WSL)
    if program is None:
        return []
    try:
        command = [program, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SMI_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def amd_gpus(root: Path = Path("/")) -> list[str]:
    vendors = (root / "sys/class/drm").glob("card[0-9]*/device/vendor")
    return ["AMD GPU" for vendor in vendors if vendor.read_text().strip() == _AMD]


def unused_gpu(nvidia: list[str], amd: list[str], used: Kind | None, there: list[Backend]) -> str | None:
    """What to say if a GPU does nothing; ``used`` and ``there`` are the builds of libllama. Pure."""
    if used in ("cuda", "vulkan") or not (nvidia or amd):
        return None
    kind: Kind = "cuda" if nvidia else "vulkan"
    found = ", ".join(name if n == 1 else f"{n} × {name}" for name, n in Counter(nvidia or amd).items())
    order = "use" if any(backend.kind == kind for backend in there) else "install"
    return f"{found} found, but this libllama is a CPU build: `everwarm backend {order} {kind}`"


def blind_build(used: Kind | None, n_seen: int) -> str | None:
    """What to say if a build for GPUs sees none. Pure."""
    if used not in ("cuda", "vulkan") or n_seen:
        return None
    return f"this libllama is a {used} build, but it sees no GPU: check the driver (nvidia-smi, vulkaninfo)"
