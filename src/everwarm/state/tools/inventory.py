"""The content of a state directory, for people: listed, inspected, checked, and made smaller.

What is listed is read without a lock or a write, also while an engine uses it; a file that disappears meanwhile was
evicted. Only a directory that no engine holds is made smaller. A pure function chooses what is removed
(``choose_to_prune``), in whole lineages: no state is ever left without the KV it needs. Knows the files and what the
index says of their use; no tree, no libllama.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everwarm.errors import BadRequest
from everwarm.state import policy
from everwarm.state.store.disk import DirectoryTaken, hold
from everwarm.state.store.files import TEMPORARY, Files
from everwarm.state.store.folder_meta import FolderAbout, read_about
from everwarm.state.store.index import INDEX, peek_uses
from everwarm.state.store.object import (
    MAJOR,
    OBJECT_NAME,
    SUFFIX,
    Damaged,
    ObjectHeader,
    ObjectReader,
    Section,
    Unreadable,
    name_of,
)
from everwarm.state.store.slot_file import is_main_of
from everwarm.state.store.slot_names import COMPANION

QUARANTINE = "quarantine"

_FOLDER_NAME = re.compile(r"v(\d{1,9})-[0-9a-f]{24}")
_MOST_NAMED = 8
_UNMEASURED = 1e-3  # seconds per token, where no engine has measured any

Tick = Callable[[int], None]  # called with the work that was done: bytes, or tokens


@dataclass(frozen=True, slots=True)
class Object:
    path: Path
    size: int
    header: ObjectHeader
    used_at: float
    hits: int

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_state(self) -> bool:
        return self.header.kind == "state"


@dataclass(frozen=True, slots=True)
class BrokenObject:
    """A file that should be an object and is none, or could not be read."""

    path: Path
    size: int
    why: Damaged
    is_state: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether it is certain that it cannot be used."""
        return not isinstance(self.why, Unreadable)


@dataclass(frozen=True, slots=True)
class Lineage:
    """A state with everything it needs."""

    state: Object
    kv: tuple[Object, ...]
    missing: tuple[str, ...]  # what it needs and is not there
    n_bytes_shared: int  # of the KV, with other states
    seconds_saved: float | None  # what reading it again would take, at the measured speed

    @property
    def n_bytes(self) -> int:
        return self.state.size + sum(kv.size for kv in self.kv)


@dataclass(frozen=True, slots=True)
class Folder:
    """Everything that is kept of one model."""

    path: Path
    about: FolderAbout | None
    objects: dict[str, Object]
    broken: dict[str, BrokenObject] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return sum(t.size for t in self.objects.values()) + sum(b.size for b in self.broken.values())

    @property
    def fingerprint(self) -> str | None:
        if self.about is not None:
            return self.about.fingerprint
        return next((thing.header.fingerprint for thing in self.objects.values()), None)

    @property
    def title(self) -> str:
        return self.about.model if self.about is not None and self.about.model else self.path.name

    def lineages(self) -> list[Lineage]:
        """Every state, the last used first."""
        states = sorted((t for t in self.objects.values() if t.is_state), key=lambda t: -t.used_at)
        users = Counter(need for thing in states for need in set(thing.header.needs))
        return [self._lineage(thing, users) for thing in states]

    def _lineage(self, state: Object, users: Counter[str]) -> Lineage:
        needs = tuple(dict.fromkeys(state.header.needs))
        kv = tuple(self.objects[need] for need in needs if need in self.objects)
        speed = self.about.seconds_per_token if self.about is not None else None
        return Lineage(
            state,
            kv,
            tuple(need for need in needs if need not in self.objects),
            sum(thing.size for thing in kv if users[thing.name] > 1),
            None if speed is None else state.header.n_items * speed,
        )

    def quarantined(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(path for path in (self.path / QUARANTINE).iterdir() if path.name.endswith(SUFFIX))
        return []


# finding


def folders(directory: Path) -> list[Path]:
    """The folders of this format."""
    return [path for path in _all_folders(directory) if _major(path) == MAJOR]


def foreign_folders(directory: Path) -> list[Path]:
    """Those of other format versions, which cannot be read here."""
    return [path for path in _all_folders(directory) if _major(path) != MAJOR]


def _all_folders(directory: Path) -> list[Path]:
    try:
        found = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    return [path for path in found if is_folder_name(path.name) and path.is_dir() and not path.is_symlink()]


def is_folder_name(name: str) -> bool:
    return _FOLDER_NAME.fullmatch(name) is not None


def _major(folder: Path) -> int:
    found = _FOLDER_NAME.fullmatch(folder.name)
    return int(found[1]) if found is not None else -1


def choose_folders(directory: Path, wanted: str | None) -> list[Path]:
    """All folders, or those whose name or model file name has this prefix."""
    found = folders(directory)
    if wanted is None:
        return found
    chosen = [path for path in found if path.name.startswith(wanted) or _model_name(path).startswith(wanted)]
    if not chosen:
        raise BadRequest(f"{directory} has no folder and no model that begins with {wanted!r}; see `everwarm cache ls`")
    return chosen


def _model_name(folder: Path) -> str:
    about = read_about(folder)
    return about.model if about is not None else ""


def read_folder(path: Path) -> Folder:
    uses = peek_uses(path / INDEX)
    objects, broken = {}, {}
    for file in sorted(path.iterdir()):
        if not file.name.endswith(SUFFIX):
            continue
        try:
            with open_object(file) as reader:
                stat = file.stat()
                used_at, hits = uses.get(file.name, (stat.st_mtime, 0))
                objects[file.name] = Object(file, stat.st_size, reader.header, used_at, hits)
        except Damaged as error:
            with contextlib.suppress(FileNotFoundError):
                broken[file.name] = BrokenObject(file, file.lstat().st_size, error)
        except FileNotFoundError:
            continue
    return Folder(path, read_about(path), objects, broken)


def find(read: Iterable[Folder], wanted: str) -> list[Object]:
    """Objects whose name or key has this prefix; a state rather than KV that ends at the same point."""
    things = [thing for folder in read for thing in folder.objects.values()]
    found = [t for t in things if t.name.startswith(wanted) or t.header.key.startswith(wanted)]
    states = [thing for thing in found if thing.is_state]
    return states if len(states) == 1 else found


def find_one(read: Iterable[Folder], wanted: str) -> Object:
    found = find(read, wanted)
    if len(found) == 1:
        return found[0]
    if not found:
        raise BadRequest(f"nothing kept has a name that begins with {wanted!r}; see `everwarm cache ls`")
    shown = ", ".join(thing.name for thing in found[:_MOST_NAMED])
    raise BadRequest(f"{len(found)} objects begin with {wanted!r}; give more of the name: {shown}")


# reading


@contextlib.contextmanager
def open_object(path: Path) -> Iterator[ObjectReader]:
    """Opens an object and checks its name. ``FileNotFoundError``: it was evicted meanwhile."""
    try:
        fd = Files().open(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None
    try:
        reader = ObjectReader(fd)
        if name_of(reader.header) != path.name:
            raise Damaged("it is another object than its name says")
        yield reader
    finally:
        os.close(fd)


def check_digests(path: Path, tick: Tick = lambda _: None) -> Damaged | None:
    """Verifies every byte; returns what is wrong. None: nothing."""
    try:
        with open_object(path) as reader:
            for piece in reader.pieces():
                tick(len(piece))
    except FileNotFoundError:
        return None
    except Damaged as error:
        return error
    return None


# moving away what is damaged


def quarantine(folder: Path, names: Sequence[str]) -> str:
    """Moves objects to where no engine looks for them. Returns why that failed; "": it worked."""
    try:
        if names:
            _move_aside(folder, names)
    except DirectoryTaken:
        return "a running server holds the folder"
    except OSError as error:
        return f"the folder cannot be changed ({error.strerror})"
    return ""


def _move_aside(folder: Path, names: Sequence[str]) -> None:
    held = hold(folder)
    try:
        aside = folder / QUARANTINE
        aside.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder / name, aside / name)
        Files().sync_directory(aside)
        Files().sync_directory(folder)
    finally:
        os.close(held)


# inspecting one file


@dataclass(frozen=True, slots=True)
class Inspected:
    path: Path
    size: int
    header: ObjectHeader
    damaged: dict[str, str]  # sections whose bytes have changed, and why
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
        return Inspected(path, os.fstat(fd).st_size, reader.header, damaged, _needs(path, reader))
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


def _needs(path: Path, reader: ObjectReader) -> dict[str, str]:
    head = reader.header
    if head.kind == "slot":
        return {path.name.removesuffix(COMPANION): _main_trouble(path, reader)}
    return {need: _trouble(path.parent / Path(need).name) for need in head.needs}


def _trouble(path: Path) -> str:
    if not OBJECT_NAME.fullmatch(path.name):
        return "it is not the name of an object"
    if not path.exists():
        return "it is not there"
    return str(check_digests(path) or "")


def _main_trouble(path: Path, reader: ObjectReader) -> str:
    """A companion belongs to one main file, beside it."""
    try:
        is_right = is_main_of(path.with_name(path.name.removesuffix(COMPANION)), reader)
    except Damaged as error:
        return str(error)
    return "" if is_right else "it is another file than the companion belongs to"


# making room


def choose_to_prune(
    found: Sequence[Folder], now: float, *, keep_bytes: int | None = None, used_since: float | None = None
) -> list[Object | BrokenObject]:
    """Chooses what to remove: what was not used since then, and more until only ``keep_bytes`` are left. States come
    first, so that none ever exists without its KV."""
    lineages = [lineage for folder in found for lineage in folder.lineages() if not lineage.missing]
    kept = [lineage for lineage in lineages if used_since is None or lineage.state.used_at >= used_since]
    if keep_bytes is not None:
        kept = _within(kept, keep_bytes, now)
    stay = {thing.path for lineage in kept for thing in (lineage.state, *lineage.kv)}
    things = [thing for folder in found for thing in folder.objects.values() if thing.path not in stay]
    lost = [broken for folder in found for broken in folder.broken.values() if broken.is_lost]
    return sorted([*things, *lost], key=lambda doomed: (not doomed.is_state, doomed.path))


def _within(lineages: list[Lineage], keep_bytes: int, now: float) -> list[Lineage]:
    """As many states as fit, the least valuable removed first; KV counts once, while a state needs it."""
    users = Counter(kv.path for lineage in lineages for kv in lineage.kv)
    n_bytes = sum({thing.path: thing.size for lin in lineages for thing in (lin.state, *lin.kv)}.values())
    entries = [_weighed(i, lineage, now) for i, lineage in enumerate(lineages)]
    gone = set()
    for i in policy.victims(entries, sum(entry.size_bytes for entry in entries)):
        if n_bytes <= keep_bytes:
            break
        gone.add(i)
        n_bytes -= lineages[i].state.size
        for kv in lineages[i].kv:
            users[kv.path] -= 1
            n_bytes -= kv.size if users[kv.path] == 0 else 0
    return [lineage for i, lineage in enumerate(lineages) if i not in gone]


def _weighed(key: int, lineage: Lineage, now: float) -> policy.Entry:
    state = lineage.state
    seconds = state.header.n_items * _UNMEASURED if lineage.seconds_saved is None else lineage.seconds_saved
    age_s = now - state.used_at
    return policy.Entry(key, lineage.n_bytes, seconds, policy.assumed_returns(state.hits, age_s), age_s)


@contextlib.contextmanager
def holding(paths: Iterable[Path]) -> Iterator[None]:
    """Locks these folders against engines; refuses with a reason if an engine has one open."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            try:
                stack.callback(os.close, hold(path))
            except DirectoryTaken:
                raise BadRequest(
                    f"a running server keeps its states in {path}: stop it first, or leave that folder out"
                ) from None
        yield


def remove_objects(doomed: Iterable[Object | BrokenObject]) -> None:
    """Removes files in the given order; the index is updated when it is next opened."""
    folders = set()
    for item in doomed:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(item.path)
        folders.add(item.path.parent)
    for folder in folders:
        Files().sync_directory(folder)


def remove_folder(path: Path) -> None:
    """Removes a whole folder while holding it. It is renamed first: an engine that starts now makes a new one."""
    aside = path.with_name(f"{TEMPORARY}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)  # a removal that was interrupted
    os.rename(path, aside)
    shutil.rmtree(aside)


def leftovers(directory: Path) -> list[Path]:
    """Folders whose removal was interrupted."""
    found = sorted(directory.glob(f"{TEMPORARY}*")) if directory.is_dir() else []
    return [path for path in found if is_folder_name(path.name.removeprefix(TEMPORARY)) and not path.is_symlink()]


def folder_size(path: Path) -> int:
    """The size of all files in it, of any kind."""
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total
