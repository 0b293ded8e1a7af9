"""The names of slot files, which the gateway checks and the engine opens. What is in the files is in ``slot_file``."""

from __future__ import annotations

import re
from pathlib import Path

import blake3

from everwarm.errors import BadRequest
from everwarm.state.store.files import sweep

COMPANION = ".checkpoints"
NAMESPACE = ".ns-"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name.endswith(COMPANION):
        raise BadRequest("filename must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit")
    return name


def companion_of(path: Path) -> Path:
    return path.with_name(path.name + COMPANION)


def namespace_folder(namespace: str) -> str:
    """The folder of a namespace's files: no name that a client gives leads there."""
    return NAMESPACE + blake3.blake3(b"slot files of\0" + namespace.encode()).hexdigest()[:32]


def sweep_all(directory: Path) -> int:
    """Remove what a crash left in a directory of slot files, and in the folders of namespaces."""
    folders = [path for path in directory.glob(f"{NAMESPACE}*") if path.is_dir() and not path.is_symlink()]
    return sum(map(sweep, (directory, *folders)))
