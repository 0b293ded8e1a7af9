"""The shape of the code: imports point down, functions stay small, pure modules stay pure."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "everwarm"

# Each room may import itself and what is named here. Top modules (cli) may import everything.
BASE = {"types", "errors", "config", "logs", "lru", "memory_limits"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "logs": set(),
    "lru": set(),
    "memory_limits": set(),
    "config": {"errors", "types"},
    "prompt": BASE,
    "state": BASE | {"prompt"},
    "simulate": BASE | {"prompt", "state", "router"},
    "llama": BASE | {"prompt"},
    "engine": BASE | {"prompt", "state", "llama"},
    "gateway": BASE | {"prompt", "state", "engine", "router"},
    "router": BASE | {"prompt", "state", "engine"},
    "demo": BASE | {"prompt", "state", "llama", "engine", "gateway", "router"},
    "ray": BASE | {"prompt", "state", "engine", "gateway", "router", "demo"},
}
# No clock, disk, C, randomness or logging inside: these are tested by the thousand.
PURE = (
    "state/policy.py",
    "state/params.py",
    "state/eviction.py",
    "state/segment_merge.py",
    "llama/kv_splice.py",
    "engine/scheduling/scheduler.py",
    "engine/fingerprint.py",
    "engine/inspect/read_reason.py",
    "gateway/explain/prompt_diff.py",
    "gateway/explain/causes.py",
    "state/ghosts.py",
    "state/disk_forest.py",
    "state/store/disk_eviction.py",
    "state/remote/pointer.py",
    "state/remote/pointer.py",
    "state/remote/circuit_breaker.py",
    "router/plan.py",
    "router/supervise/restart_policy.py",
    "router/supervise/restart_policy.py",
    "router/catalog/gguf_names.py",
    "router/catalog/memory_estimate.py",
    "router/replica_score.py",
    "gateway/chat/prefix_keys.py",
    "ray/scaling.py",
    "ray/prefix_set.py",
    "llama/cells.py",
    "prompt/prompt.py",
    "gateway/chat/canonicalize.py",
    "gateway/anthropic/schema.py",
    "gateway/anthropic/to_chat.py",
    "gateway/anthropic/encode.py",
    "simulate/trace.py",
    "simulate/oracle.py",
    "simulate/policies.py",
    "simulate/simulated_cache.py",
    "simulate/fifo_cache.py",
    "simulate/optimum.py",
    "simulate/replay.py",
    "simulate/plot.py",
    "simulate/fleet.py",
    "gateway/chat/content.py",
    "gateway/chat/prepare.py",
    "gateway/http/error_body.py",
    "gateway/chat/stable_points.py",
    "gateway/chat/breakpoints.py",
)
IMPURE_MODULES = {"time", "os", "io", "pathlib", "ctypes", "logging", "random", "secrets", "threading", "socket"}
MAX_FUNCTION_LINES = 50


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    if room.startswith("cli") or room in ("__init__", "__main__"):
        return
    allowed = MAY_IMPORT[room] | {room}
    for name in imported(path):
        if name.startswith("everwarm."):
            assert name.split(".")[1] in allowed, f"{room} must not import {name}"


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_nothing_with_effects(name: str) -> None:
    assert not IMPURE_MODULES & {module.split(".")[0] for module in imported(SRC / name)}


def test_only_the_llama_room_uses_ctypes() -> None:
    users = {room_of(path) for path in modules() if "ctypes" in {m.split(".")[0] for m in imported(path)}}
    assert users == {"llama"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_functions_stay_small(path: Path) -> None:
    name = str(path.relative_to(SRC))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{name}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_every_module_says_what_it_does(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_nothing_is_pickled() -> None:
    for path in modules():
        assert not {"pickle", "marshal", "shelve", "dill"} & set(imported(path)), path


def test_no_package_index_or_machine_path_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    forbidden = re.compile("(--(extra-)?index" + r"-url|file:///(opt|root|home)|/(root|home)/\w+/)")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".gguf", ".png"} or not path.is_file() or path == Path(__file__):
            continue
        assert not forbidden.search(path.read_text(errors="replace")), f"{name} names a package index or a machine path"


def test_the_lock_pins_everything_with_hashes() -> None:
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line and not line.startswith((" ", "#")):
            assert "==" in line and line.endswith("\\"), f"{line!r} is not pinned with a hash"
