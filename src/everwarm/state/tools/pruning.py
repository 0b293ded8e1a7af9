"""Frees space in a state directory that no engine holds. A pure function chooses what is removed, in whole lineages: no
state is ever left without the KV it needs."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from everwarm.errors import BadRequest
from everwarm.state import policy
from everwarm.state.store.disk import DirectoryTaken, hold
from everwarm.state.store.files import TEMPORARY, Files
from everwarm.state.tools.inventory import BrokenObject, Folder, Lineage, Object, is_folder_name

_UNMEASURED = 1e-3  # seconds per token, where no engine has measured any


def choose(
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


# acting


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


def remove(doomed: Iterable[Object | BrokenObject]) -> None:
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
