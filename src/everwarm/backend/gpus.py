"""Which GPUs this machine has, as far as its system and nvidia-smi say, and whether they are used. Loads no driver."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

from everwarm.backend.installed import Backend, Kind

_AMD = "0x1002"
_SMI_S = 10.0
_WSL = "/usr/lib/wsl/lib"  # where nvidia-smi lies in WSL, which has no kernel module


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
