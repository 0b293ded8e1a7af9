"""One object in detail: which of its sections are what they were, and whether everything it needs is there and whole."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from everwarm.errors import BadRequest
from everwarm.state.store.files import Files
from everwarm.state.store.object import OBJECT_NAME, Damaged, ObjectHeader, ObjectReader, Section
from everwarm.state.store.slot_file import main_digest, read_main
from everwarm.state.store.slot_names import COMPANION
from everwarm.state.tools.inventory import check_digests


@dataclass(frozen=True, slots=True)
class Inspected:
    path: Path
    size: int
    header: ObjectHeader
    damaged: dict[str, str]  # sections that are not what they were, and why
    needs: dict[str, str]  # everything it needs, and what is wrong with that; "": nothing

    @property
    def is_whole(self) -> bool:
        return not self.damaged and not any(self.needs.values())


def inspect(path: Path) -> Inspected:
    """``BadRequest``: it is no object at all, or not readable."""
    try:
        fd = Files().open(path.resolve())
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}") from None
    try:
        reader = ObjectReader(fd)
        damaged = {s.name: why for s in reader.header.sections if (why := _damage(reader, s))}
        return Inspected(path, os.fstat(fd).st_size, reader.header, damaged, _needs(path, reader.header))
    except Damaged as error:
        raise BadRequest(f"{path.name} is damaged or no object: {error}") from None
    finally:
        os.close(fd)


def _damage(reader: ObjectReader, section: Section) -> str:
    try:
        for _ in reader.section_pieces(section):
            pass
    except Damaged as error:
        return str(error)
    return ""


def _needs(path: Path, head: ObjectHeader) -> dict[str, str]:
    if head.kind == "slot":
        return {path.name.removesuffix(COMPANION): _main_trouble(path, head)}
    return {need: _trouble(path.parent / Path(need).name) for need in head.needs}


def _trouble(path: Path) -> str:
    if not OBJECT_NAME.fullmatch(path.name):
        return "it is not the name of an object"
    if not path.exists():
        return "it is not there"
    return str(check_digests(path) or "")


def _main_trouble(path: Path, head: ObjectHeader) -> str:
    """A companion belongs to one main file, beside it."""
    try:
        tokens, state = read_main(path.with_name(path.name.removesuffix(COMPANION)), head.n_items)
    except Damaged as error:
        return str(error)
    return "" if main_digest(tokens, state) == head.main else "it is another file than the companion belongs to"
