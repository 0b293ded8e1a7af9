"""Which GPUs this machine has, as far as its system says without a driver's library, and whether they are used."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from everwarm.backend.installed import Backend, Kind

_AMD = "0x1002"


def nvidia_gpus(root: Path = Path("/")) -> list[str]:
    """The names of NVIDIA's, from its kernel module; without names, as many as there are devices."""
    names = []
    for about in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = about.read_text("utf-8", "replace").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names or ["NVIDIA GPU"] * len(list((root / "dev").glob("nvidia[0-9]*")))


def amd_gpus(root: Path = Path("/")) -> list[str]:
    vendors = (root / "sys/class/drm").glob("card[0-9]*/device/vendor")
    return ["AMD GPU" for vendor in vendors if vendor.read_text().strip() == _AMD]


def unused_gpu(nvidia: list[str], amd: list[str], used: Kind | None, there: list[Backend]) -> str | None:
    """What to say to somebody whose GPU does nothing; ``used`` and ``there`` are the builds of libllama. Pure."""
    if used in ("cuda", "vulkan") or not (nvidia or amd):
        return None
    kind: Kind = "cuda" if nvidia else "vulkan"
    found = ", ".join(name if n == 1 else f"{n} × {name}" for name, n in Counter(nvidia or amd).items())
    order = "use" if any(backend.kind == kind for backend in there) else "install"
    return f"{found} found, but this libllama is a CPU build: `everwarm backend {order} {kind}`"
