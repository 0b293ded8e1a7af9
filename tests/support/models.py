"""Tiny model files for tests: written once per machine, shared by every test and every run."""

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import everwarm
from everwarm.demo import tiny
from everwarm.demo.tiny import TinySpec, projector_path, write_tiny, write_tiny_projector

EMBEDDED = Path(everwarm.__file__).parent / "demo" / "everwarm-tiny.gguf"


def tiny_model(arch: str, **spec: Any) -> Path:
    """A model of this architecture, 8 layers and 64 wide unless asked otherwise. Do not write to it: it is shared."""
    wanted = _spec(arch, **spec)
    name = hashlib.blake2b(f"{everwarm.__version__} {_writer_digest()} {wanted}".encode(), digest_size=12).hexdigest()
    path = _cache_dir() / f"{arch}-{name}.gguf"
    if not path.exists():
        write_tiny(path, wanted)  # appears under its name only when complete, so two runs may race
    return path


def tiny_vision(arch: str, **spec: Any) -> tuple[Path, Path]:
    """Such a model with the tokens for images, and its projector."""
    model = tiny_model(arch, vision=True, **spec)
    path = projector_path(model)
    if not path.exists():
        write_tiny_projector(path, _spec(arch, vision=True, **spec))
    return model, path


def tiny_audio(arch: str, *, vision: bool = False, **spec: Any) -> tuple[Path, Path]:
    """Such a model and its projector for sounds; with ``vision`` also for images."""
    wanted = {"audio": True, "vision": vision, **spec}
    model = tiny_model(arch, **wanted)
    path = projector_path(model)
    if not path.exists():
        write_tiny_projector(path, _spec(arch, **wanted))
    return model, path


def _spec(arch: str, **spec: Any) -> TinySpec:
    return TinySpec(arch=arch, **({"n_layers": 8, "width": 64} | spec))


def _cache_dir() -> Path:
    path = Path(tempfile.gettempdir()) / f"everwarm-tests-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@cache
def _writer_digest() -> str:
    """The version alone would keep serving old files while somebody works on the writer."""
    sources = sorted(Path(tiny.__path__[0]).glob("*.py"))
    return hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()
