"""GGUF files on this machine: what their names mean, what is in a folder, what belongs together, and what cannot be used
and why.

Names say which files are parts of one model, which quantisation it is, and which projector belongs to it, wherever they
were listed. Reads names and headers, never tensors. Knows no settings and no configuration. A file that cannot be used
never keeps the others from being listed.
"""

from __future__ import annotations

import collections
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everwarm.config import require
from everwarm.errors import ModelFileError
from everwarm.router.catalog.gguf_header import GgufHeader, read_header

_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})")
_QUANT = re.compile(
    r"(?:^|[-._])(?P<quant>(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP\d\w*|NVFP\d\w*|BF16|FP?16|FP?32))", re.IGNORECASE
)
_PROJECTOR = re.compile(r"[-._]?mmproj[-._]?", re.IGNORECASE)
_PROJECTOR_PREFERENCE = ("", "f16", "bf16", "q8_0", "f32")
_QUANT_PREFERENCE = ("q4_k_m", "q8_0")
_MANY = 3
LATEST = ":latest"  # what Ollama's clients add to a name without a tag
MAX_DEPTH = 8
MAX_FOLDERS = 4096
_NOT_MODELS = {"adapter": "a LoRA adapter", "mmproj": "a projector", "imatrix": "an importance matrix"}


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one model. ``names`` are those that exist, in order; ``n_parts`` says how many there should be."""

    folder: str
    stem: str
    names: tuple[str, ...]
    n_parts: int = 1

    @property
    def label(self) -> str:
        """What tells it from other versions of the same model."""
        return quant_of(self.stem) or self.stem

    @property
    def missing(self) -> str | None:
        """Which parts are not there, in words."""
        if self.n_parts == 1:
            return None
        present = {int(name[-len("00001-of-00003.gguf") :][:5]) for name in self.names}
        absent = [part for part in range(1, self.n_parts + 1) if part not in present]
        if not absent:
            return None
        listed = ", ".join(f"{self.stem}-{part:05}-of-{self.n_parts:05}.gguf" for part in absent[:_MANY])
        more = f" and {len(absent) - _MANY} more" if len(absent) > _MANY else ""
        return f"{len(absent)} of {self.n_parts} parts {'is' if len(absent) == 1 else 'are'} missing: {listed}{more}"


def is_gguf(name: str) -> bool:
    """Hidden files and unfinished downloads (``.part``, ``.incomplete``) are not."""
    base = posixpath.basename(name)
    return base.lower().endswith(".gguf") and not base.startswith(".")


def is_projector(name: str) -> bool:
    return "mmproj" in posixpath.basename(name).lower()


def groups(names: Iterable[str]) -> list[Group]:
    """The models among these files, by name; projectors are left out."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(names):
        if not is_gguf(name) or is_projector(name):
            continue
        folder, stem = posixpath.split(name[: -len(".gguf")])
        part = _PART.fullmatch(stem)
        is_part = part is not None and 1 <= int(part["part"]) <= int(part["total"])
        key = (folder, part["stem"], part["total"]) if part is not None and is_part else (folder, stem, name)
        found.setdefault(key, []).append(name)
    return [
        Group(folder, stem, tuple(files), int(total) if total.isdecimal() else 1)
        for (folder, stem, total), files in found.items()
    ]


def quant_of(stem: str) -> str | None:
    """``Q4_K_M`` of ``Qwen3.5-4B-Q4_K_M``."""
    found = _quant_at_end(stem)
    return None if found is None else found["quant"].upper()


def without_quant(stem: str) -> str:
    found = _quant_at_end(stem)
    return stem if found is None else stem[: found.start()]


def _quant_at_end(stem: str) -> re.Match[str] | None:
    return next((found for found in _QUANT.finditer(stem) if found.end() == len(stem)), None)


def tagged(id: str) -> str:
    """A model's name as Ollama's clients know it: always with a tag."""
    return id if ":" in id else id + LATEST


def choose(candidates: Sequence[Group], quant: str | None) -> Group | None:
    """The version whose name ends with the wanted text; without one, the usual version."""
    for wish in _QUANT_PREFERENCE if quant is None else (quant.lower(),):
        fitting = [group for group in candidates if _ends_with(group.stem.lower(), wish)]
        if fitting:
            return min(fitting, key=lambda group: (group.label.lower() != wish, len(group.stem), group.stem))
    return candidates[0] if quant is None and candidates else None


def _ends_with(stem: str, wish: str) -> bool:
    return stem == wish or (stem.endswith(wish) and stem[-len(wish) - 1] in "-._")


def projector_for(group: Group, projectors: Iterable[str], *, is_alone: bool) -> str | None:
    """The projector that bears the model's name; any, if there is no other model it could belong to."""
    wanted = {group.stem.lower(), without_quant(group.stem).lower()}
    ranked = []
    for name in projectors:
        bare = _PROJECTOR.sub("-", posixpath.basename(name)[: -len(".gguf")]).strip("-._").lower()
        is_exact = bare == group.stem.lower()
        is_own = bool({bare, without_quant(bare)} & wanted)
        if is_own or is_alone:
            quant = "" if is_exact else (quant_of(bare) or "").lower()
            order = _PROJECTOR_PREFERENCE.index(quant) if quant in _PROJECTOR_PREFERENCE else len(_PROJECTOR_PREFERENCE)
            ranked.append((not is_own, order, name))
    return min(ranked)[2] if ranked else None


def is_alone(group: Group, others: Iterable[Group]) -> bool:
    """Whether all of these are versions of one model."""
    return {without_quant(other.stem).lower() for other in others} <= {without_quant(group.stem).lower()}


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One model that can be opened: its first part, and the bytes of all its parts."""

    id: str
    path: Path
    header: GgufHeader
    n_bytes: int
    changed_ns: int
    mmproj: Path | None = None


@dataclass(frozen=True, slots=True)
class UnusableFile:
    """A model that is there and cannot be used."""

    id: str
    path: Path
    reason: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing:
    models: tuple[ModelFile, ...] = ()
    broken: tuple[UnusableFile, ...] = ()
    notes: tuple[str, ...] = ()  # why files are not listed, for the user


def scan(root: Path) -> Listing:
    """Every model under a folder."""
    require(root.is_dir(), f"{root} is not a folder; give one with GGUF files")
    notes: list[str] = []
    names = list(_gguf_files(root, notes))
    readable = [name for name in names if _is_text(name)]
    broken = [
        UnusableFile(_as_text(name), root / name, "its name is not UTF-8; rename it")
        for name in set(names) - set(readable)
    ]
    models: list[ModelFile] = []
    found = groups(readable)
    for group, model_id in zip(found, _ids(found, notes), strict=True):
        try:
            models.append(_open(root, group, model_id, found, readable))
        except _NotAModel as error:
            notes.append(str(error))
        except ModelFileError as error:
            broken.append(UnusableFile(model_id, root / group.names[0], str(error)))
    notes += _unclaimed(root, models, readable)
    return Listing(tuple(models), tuple(broken), tuple(notes))


def one_file(path: Path) -> ModelFile:
    """The model that this file is, or is a part of."""
    try:
        beside = [entry.name for entry in os.scandir(path.parent) if is_gguf(entry.name) and _is_text(entry.name)]
    except OSError:
        beside = []
    found = groups(beside)
    alone = Group("", path.name.removesuffix(".gguf"), (path.name,))
    group = next((group for group in found if path.name in group.names), alone)
    return _open(path.parent, group, group.stem, found, beside)


class _NotAModel(ModelFileError):
    pass


def _open(root: Path, group: Group, model_id: str, found: list[Group], names: list[str]) -> ModelFile:
    if group.missing is not None:
        raise ModelFileError(group.missing)
    parts = [root / name for name in group.names]
    headers = [read_header(part) for part in parts]
    kind = headers[0].text("general.type") or ("mmproj" if headers[0].architecture == "clip" else "model")
    if kind in _NOT_MODELS:
        raise _NotAModel(f"{group.names[0]} is {_NOT_MODELS[kind]}, not a model")
    if not any(header.n_tensors for header in headers):
        raise ModelFileError(f"{parts[0].name} has no tensors: it is a vocabulary, not a model")
    n_split = headers[0].values.get("split.count")
    if isinstance(n_split, int) and n_split > len(parts):
        raise ModelFileError(f"{parts[0].name} is one of {n_split} parts under another name; give them back theirs")
    siblings = [other for other in found if other.folder == group.folder]
    mmproj = _projector(root, group, siblings, names)
    facts = [_stat(part) for part in parts]
    n_bytes = sum(fact.st_size for fact in facts)
    changed_ns = max(fact.st_mtime_ns for fact in facts)
    return ModelFile(model_id, parts[0], headers[0], n_bytes, changed_ns, mmproj)


def size_bytes(path: Path) -> int:
    return _stat(path).st_size


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ModelFileError(f"{path.name} cannot be read: {error.strerror}") from None


def _projector(root: Path, group: Group, siblings: list[Group], names: list[str]) -> Path | None:
    beside = [n for n in names if is_projector(n) and os.path.dirname(n) == group.folder and _is_readable(root / n)]
    name = projector_for(group, beside, is_alone=is_alone(group, siblings))
    return None if name is None else root / name


def _is_readable(path: Path) -> bool:
    try:
        read_header(path)
    except ModelFileError:
        return False
    return True


def _unclaimed(root: Path, models: list[ModelFile], names: list[str]) -> Iterator[str]:
    claimed = {model.mmproj for model in models}
    for name in names:
        if is_projector(name) and root / name not in claimed:
            why = "belongs to no model beside it" if _is_readable(root / name) else "is not a readable GGUF file"
            yield f"the projector {name} {why}"


def _ids(found: list[Group], notes: list[str]) -> list[str]:
    """Stems; where two are alike the path below the folder as well; where even that is alike the whole file name."""
    stems = collections.Counter(group.stem for group in found)
    paths = collections.Counter(os.path.join(group.folder, group.stem) for group in found)

    def named(group: Group) -> str:
        path = os.path.join(group.folder, group.stem)
        if stems[group.stem] == 1:
            return group.stem
        return path if paths[path] == 1 else group.names[0]

    ids = [named(group) for group in found]
    for stem, count in stems.items():
        if count > 1:
            alike = ", ".join(model_id for model_id, group in zip(ids, found, strict=True) if group.stem == stem)
            notes.append(f"{count} models are called {stem}; they are served as {alike}")
    return ids


def _gguf_files(root: Path, notes: list[str]) -> Iterator[str]:
    """Their paths below the folder. Links are followed, but no folder is visited twice."""
    todo = [("", 0)]
    seen = set()
    while todo:
        below, depth = todo.pop()
        try:
            where = (root / below).stat()
            entries = sorted(os.scandir(root / below), key=lambda entry: entry.name)
        except OSError as error:
            notes.append(f"the folder {below or root} cannot be read: {error.strerror}")
            continue
        if (where.st_dev, where.st_ino) in seen:
            continue
        seen.add((where.st_dev, where.st_ino))
        if len(seen) > MAX_FOLDERS:
            notes.append(f"{root} has more than {MAX_FOLDERS} folders; the rest was not looked at")
            return
        for entry in entries:
            name = os.path.join(below, entry.name)
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                todo += [(name, depth + 1)] if depth < MAX_DEPTH else []
            elif is_gguf(entry.name):
                yield name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_text(name: str) -> bool:
    return name == _as_text(name)


def _as_text(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")
