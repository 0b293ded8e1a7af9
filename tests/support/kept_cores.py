"""Engines that keep what they read on disk, in a store that others share, or in RAM that outlives them."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from everwarm.engine.core import Core
from everwarm.engine.settings import RemoteSettings, StoreSettings
from everwarm.state.tree import START
from support.drive import check, open_core, text, tidy

HISTORY, NEW = text(1, 600), text(2, 40)
STABLE = 580


@contextmanager
def kept_core(tmp_path: Path, arch: str = "qwen35", *, policy: str = "always", disk_bytes: int = 1 << 30, **settings):
    store = StoreSettings(str(tmp_path / "states"), disk_bytes, restore_policy=policy)
    with open_core(arch, store=store, **settings) as core:
        assert core.cache.tiers.disk.is_on
        yield core


def put_away(core: Core) -> None:
    core.put_away()
    check(core)


def files(tmp_path: Path, kind: str = "") -> list[Path]:
    return sorted(path for path in (tmp_path / "states").rglob("*.ew") if path.name.startswith(kind))


def fingerprint_of_slot(core: Core, n_tokens: int) -> tuple[bytes, bytes]:
    """Everything libllama holds of the sequence that ends there: its state and its KV."""
    slot = next(slot for slot in core.slots if slot.n_fed == n_tokens)
    kind, end = core.context.kind, core.context.end(slot.seq)
    kv = core.context.capture_segment(slot.seq, START, end).tobytes() if kind.has_attention else b""
    state = core.context.capture(slot.seq).tobytes() if kind.needs_checkpoints else b""
    return state, kv


def die(core: Core) -> None:
    """All that an engine has done when it is killed a moment after its last turn."""
    tidy(core)
    core.cache.ram.flush()
    check(core)
    core.cache.ram.arena.check()


@contextmanager
def sharing(url: str, arch: str = "qwen35", *, store: Path | None = None, key: Path | None = None, **settings):
    remote = RemoteSettings(url, None if key is None else str(key), restore_policy="always", wait_s=10.0)
    disk = None if store is None else StoreSettings(str(store), 1 << 30, restore_policy="always")
    with open_core(arch, store=disk, remote=remote, **settings) as core:
        assert core.cache.tiers.remote.is_on
        yield core
