"""States with everything they need in one file, to take elsewhere: a plain tar of object files and what their folder says.

    about.json · kv-….ew … · state-….ew …        KV before the states that need it

A bundle that is imported is treated as hostile: only plain members with the names of objects, every number checked against
the file's size before anything is read, every byte verified in little memory before the first one is written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tarfile import TarInfo

from everwarm.errors import BadRequest
from everwarm.state.store.files import Files, make_folder
from everwarm.state.store.folder_meta import (
    ABOUT,
    MAX_ABOUT,
    FolderAbout,
    decode_about,
    encode_about,
    folder_name,
    read_about,
    write_about,
)
from everwarm.state.store.object import OBJECT_NAME, Damaged, ObjectHeader, ObjectReader, name_of
from everwarm.state.tools.inventory import Folder, Object, Tick, holding, open_object, read_folder

MAX_MEMBERS = 1_000_000
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The verified content of a file: objects of one model, each of them whole."""

    fingerprint: str
    about: FolderAbout | None
    members: tuple[TarInfo, ...]


@dataclass(frozen=True, slots=True)
class Imported:
    folder: Path
    n_new: int
    n_known: int
    n_bytes: int  # of the new ones


# out


def closure(folder: Folder, wanted: Sequence[str]) -> list[Object]:
    """The states of these names and all KV they need, in the order of the file; no names: every state that is whole."""
    lineages = folder.lineages()
    if wanted:
        lineages = [lineage for lineage in lineages if lineage.state.name in wanted]
        for lineage in lineages:
            if lineage.missing:
                raise BadRequest(
                    f"{lineage.state.name} is not whole: it needs {lineage.missing[0]}, which is not there"
                )
    whole = [lineage for lineage in lineages if not lineage.missing]
    kv = {thing.name: thing for lineage in whole for thing in lineage.kv}
    return [*kv.values(), *(lineage.state for lineage in whole)]


def write_bundle(path: Path, folder: Folder, things: Sequence[Object], tick: Tick) -> int:
    """Whole or not at all; returns its size. Every object is verified as it is copied."""
    if path.exists():
        raise BadRequest(f"{path} is there already; give another name")
    about = folder.about or FolderAbout(fingerprint=folder.fingerprint or "")
    return Files().write(path, _packed(encode_about(about.without_paths()), things, tick))


def _packed(about: bytes, things: Iterable[Object], tick: Tick) -> Iterator[bytes]:
    yield _tar_header(ABOUT, len(about)) + about + _padding(len(about))
    for thing in things:
        yield _tar_header(thing.name, thing.size)
        try:
            with open_object(thing.path) as reader:
                for piece in reader.pieces():
                    tick(len(piece))
                    yield piece
        except FileNotFoundError:
            raise BadRequest(f"{thing.name} was removed meanwhile by a running server; try again") from None
        except Damaged as error:
            raise BadRequest(f"{thing.name} is damaged ({error}); see `everwarm cache verify`") from None
        yield _padding(thing.size)
    yield _END


def _tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


# in


@contextlib.contextmanager
def open_bundle(path: Path) -> Iterator[int]:
    fd = Files().open(path.resolve())
    try:
        yield fd
    finally:
        os.close(fd)


def members_of(fd: int) -> Iterator[TarInfo]:
    """Every member, before anything of it is read. What ``export`` does not write is refused."""
    file_size, at = os.fstat(fd).st_size, 0
    seen: set[str] = set()
    while any(block := _read(fd, at, _BLOCK)):
        try:
            info = TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.TarError, ValueError) as error:
            raise BadRequest(f"not a bundle of states: the header at byte {at} cannot be read ({error})") from None
        if (
            info.type != tarfile.REGTYPE
            or info.linkname
            or not (info.name == ABOUT or OBJECT_NAME.fullmatch(info.name))
        ):
            raise BadRequest(f"a bundle holds only plain object files, not {info.name[:100]!r}")
        at += _BLOCK
        if not 0 <= info.size <= file_size - at:
            raise BadRequest(f"{info.name} says that it has {info.size} bytes: more than the bundle has")
        if info.name in seen or len(seen) >= MAX_MEMBERS:
            raise BadRequest(f"{info.name} is in the bundle twice, or there are over {MAX_MEMBERS} objects")
        seen.add(info.name)
        info.offset_data = at
        yield info
        at += info.size + len(_padding(info.size))


def _read(fd: int, at: int, size: int) -> bytes:
    data = os.pread(fd, size, at)
    if len(data) < size:
        raise BadRequest("the bundle ends early: it was not written or copied to the end")
    return data


def check_bundle(fd: int, directory: Path, tick: Tick) -> Bundle:
    """Verifies every byte; nothing has been written if this refuses."""
    fingerprint, about = "", None
    members: list[TarInfo] = []
    have: set[str] = set()
    for member in members_of(fd):
        if member.name == ABOUT:
            about = _read_about(fd, member)
            continue
        head = _verified(fd, member, tick)
        if not members:
            fingerprint = head.fingerprint
            have = _names_in(directory / folder_name(fingerprint))
        if head.fingerprint != fingerprint:
            raise BadRequest(f"{member.name} belongs to another model than what is before it")
        missing = next((need for need in head.needs if need not in have), None)
        if missing is not None:
            raise BadRequest(f"{member.name} needs {missing[:100]!r}, which is not before it")
        have.add(member.name)
        members.append(member)
    if not members:
        raise BadRequest("the bundle holds no states")
    return Bundle(
        fingerprint, about if about is not None and about.fingerprint == fingerprint else None, tuple(members)
    )


def _read_about(fd: int, member: TarInfo) -> FolderAbout:
    about = decode_about(_read(fd, member.offset_data, member.size)) if member.size <= MAX_ABOUT else None
    if about is None:
        raise BadRequest(f"the {ABOUT} in the bundle cannot be understood")
    return about.without_paths()


def _names_in(folder: Path) -> set[str]:
    return set(read_folder(folder).objects) if folder.is_dir() else set()


def _verified(fd: int, member: TarInfo, tick: Tick) -> ObjectHeader:
    with _blaming(member):
        reader = _open_member(fd, member)
        for piece in reader.pieces():
            tick(len(piece))
        return reader.header


def _open_member(fd: int, member: TarInfo) -> ObjectReader:
    reader = ObjectReader(fd, member.offset_data, member.size)
    head = reader.header
    if head.kind == "slot" or name_of(head) != member.name:
        raise Damaged("it is another object than its name says")
    if len(head.needs) != len(head.reaches) or (head.kind == "kv" and head.needs):
        raise Damaged("what it needs makes no sense")
    return reader


@contextlib.contextmanager
def _blaming(member: TarInfo) -> Iterator[None]:
    try:
        yield
    except Damaged as error:
        raise BadRequest(f"{member.name} in the bundle is damaged: {error}") from None


def write_members(fd: int, bundle: Bundle, directory: Path, tick: Tick) -> Imported:
    """Copies checked members into their folder. Each is verified once more: the file may have changed meanwhile."""
    folder = directory / folder_name(bundle.fingerprint)
    make_folder(folder, Files())
    with holding([folder]):
        known = _names_in(folder)
        new = [member for member in bundle.members if member.name not in known]
        _require_room(folder, sum(member.size for member in new))
        for member in new:
            with _blaming(member):
                Files().write(folder / member.name, _again(fd, member, bundle.fingerprint, tick))
        if bundle.about is not None and read_about(folder) is None:
            write_about(folder, bundle.about)
    return Imported(folder, len(new), len(bundle.members) - len(new), sum(member.size for member in new))


def _require_room(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise BadRequest(f"{n_bytes} bytes are to be written to {folder} but only {free} are free")


def _again(fd: int, member: TarInfo, fingerprint: str, tick: Tick) -> Iterator[bytes]:
    reader = _open_member(fd, member)
    if reader.header.fingerprint != fingerprint:
        raise Damaged("it is another object than before")
    for piece in reader.pieces():
        tick(len(piece))
        yield piece
