"""How much memory this process may have: the limits of its cgroups, v1 and v2, and of its address space.

Reads ``/proc`` and the cgroup file systems below ``root``; tests give a folder that looks like them. A limit of any
ancestor holds as well, so every folder from the process's own cgroup up to where the hierarchy is mounted is read. Page
cache counts as free: the kernel takes it back before it kills. Knows no model.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
ADDRESS_SPACE = "ulimit -v"
_NONE_FROM = 1 << 60  # v1 says 9223372036854771712 where there is no limit
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit, where it is set, and how much of it all its processes use."""

    name: str
    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def __str__(self) -> str:
        return f"{self.limit_bytes / _MIB:,.0f} MiB ({self.name})"


@dataclass(frozen=True, slots=True)
class _Files:
    """The file names of a version of cgroups."""

    limits: tuple[str, ...]
    used: str
    page_cache: tuple[str, ...]  # rows of memory.stat
    kills: str


_V1 = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
    "memory.oom_control",
)
_V2 = _Files(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"), "memory.events")


def cgroup_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """The limits of this process's cgroups and all their ancestors that can be seen from here."""
    return [limit for files, path in _memory_cgroups(root) for limit in _limits_in(files, path)]


def tightest_limit(root: Path = ROOT) -> MemoryLimit | None:
    """The one of all limits that leaves the least memory; None: there is no limit."""
    space = address_space_limit(root)
    limits = [*cgroup_limits(root), *([] if space is None else [space])]
    return min(limits, key=lambda limit: limit.free_bytes, default=None)


def n_oom_kills(root: Path = ROOT) -> int:
    """How often the kernel killed a process of this cgroup for lack of memory; where no cgroup counts, of the whole
    machine."""
    own: dict[_Files, Path] = {}
    for files, path in _memory_cgroups(root):
        own.setdefault(files, path)
    counts = [_table(path / files.kills).get("oom_kill") for files, path in own.items()]
    known = [n for n in counts if n is not None]
    return sum(known) if known else _table(root / "proc/vmstat").get("oom_kill", 0)


def address_space_limit(root: Path = ROOT) -> MemoryLimit | None:
    """``ulimit -v``. It counts what is mapped, also what is never touched."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    pages = (_read(root / "proc/self/statm") or "0").split()[0]
    return MemoryLimit(ADDRESS_SPACE, soft, int(pages) * resource.getpagesize())


# the cgroup file systems


def _memory_cgroups(root: Path) -> Iterator[tuple[_Files, Path]]:
    """Folders of cgroups that limit this process, its own first."""
    paths = _own_paths(_read(root / "proc/self/cgroup") or "")
    for files, mounted, at in _mounts(_read(root / "proc/self/mountinfo") or ""):
        if files in paths:
            folder = root / at.relative_to("/")
            parts = _below(paths[files], mounted).parts
            for n in range(len(parts), -1, -1):
                here = folder.joinpath(*parts[:n])
                if n < len(parts) and _read(here / "memory.use_hierarchy") == "0":
                    break  # of v1: what is below is not counted there
                yield files, here


def _own_paths(text: str) -> dict[_Files, PurePosixPath]:
    """Where this process is in each hierarchy that may limit memory, from ``/proc/self/cgroup``."""
    found: dict[_Files, PurePosixPath] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found[_V2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            found[_V1] = PurePosixPath(path)
    return found


def _mounts(text: str) -> Iterator[tuple[_Files, PurePosixPath, PurePosixPath]]:
    """Which part of a hierarchy is mounted where, from ``/proc/self/mountinfo``."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        if kind[0] == "cgroup2" or "memory" in kind[2].split(","):
            mounted, at = (PurePosixPath(_unescaped(field)) for field in fields[3:5])
            if at.is_absolute():
                yield (_V2 if kind[0] == "cgroup2" else _V1), mounted, at


def _below(path: PurePosixPath, mounted: PurePosixPath) -> PurePosixPath:
    """A cgroup's path within what is mounted. In a container the mount may begin at its own cgroup; then the mount itself
    is all that can be seen."""
    if ".." in path.parts or not path.is_relative_to(mounted):
        return PurePosixPath()
    return path.relative_to(mounted)


def _limits_in(files: _Files, path: Path) -> Iterator[MemoryLimit]:
    stat = _table(path / "memory.stat")
    used = _number(_read(path / files.used))
    limits = {name: _number(_read(path / name)) for name in files.limits}
    # v1 also tells the limit of ancestors that are not mounted here
    limits["hierarchical_memory_limit"] = stat.get("hierarchical_memory_limit")
    for name, limit in limits.items():
        if limit is not None and limit < _NONE_FROM:
            cached = sum(stat.get(row, 0) for row in files.page_cache)
            yield MemoryLimit(f"the cgroup's {name}", limit, max(0, (used or 0) - cached))


def _table(path: Path) -> Mapping[str, int]:
    """Lines of a name and a number."""
    rows = (line.split() for line in (_read(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _unescaped(field: str) -> str:
    """mountinfo writes a blank as ``\\040``."""
    return field.encode("latin-1", "replace").decode("unicode_escape") if "\\" in field else field
