"""What the disk tier writes and how fast it brings back, beside llama-server's slot files.

Wanted: a turn writes at most 1.1 × (its new KV + one state); coming back to an 8k-token conversation on a slot that another
one took is at least 3× faster than llama-server; bringing back from disk reaches 80 % of a plain read of the same files.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.measure import hundred_megabytes, median_s, much_kv, table
from bench.peer import Peer, PeerOptions, llama_server
from bench.quiet import undisturbed
from bench.server import Server, ask, everwarm, post
from everwarm.config import GREEDY, default_threads
from everwarm.engine.engine import Engine
from everwarm.engine.settings import EngineSettings, StoreSettings
from everwarm.engine.tiers.loader import LoadRequest
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import root_key

N_TURNS, N_TURN, N_REPLY = 20, 200, 8
N_LONG, N_SWITCHES, N_READS = 8192, 7, 9


def run() -> None:
    with tempfile.TemporaryDirectory(prefix="everwarm-bench-") as name:
        where = Path(name)
        (where / "slots").mkdir()
        options = PeerOptions(hundred_megabytes(), 24576, 1, default_threads(), slot_save_path=f"{where / 'slots'}/")
        with llama_server(options) as peer:
            with _engine(where) as engine:
                _turns(engine, peer)
                print()
                rows = [_switch(engine, peer)]
                tokens = _tokens(50, N_LONG)
                _read(engine, tokens)
            rows.append(_slot_files(where, peer, tokens))
            rows.append(_restart(where, peer, tokens))
            table(
                f"Coming back to {N_LONG} tokens, until the first new token", ("", "Everwarm", "llama-server", ""), rows
            )
        print()
        _from_disk(where)


@contextmanager
def _engine(where: Path, model: Path | None = None) -> Iterator[Engine]:
    store = StoreSettings(str(where / "states"), restore_policy="always")
    settings = EngineSettings(n_slots=1, n_ctx=24576, store=store)
    with Engine(model or hundred_megabytes(), settings) as engine:
        yield engine


def _tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def _read(engine: Engine, tokens: list[int], n_reply: int = 1) -> tuple[float, int]:
    """Seconds until the first token, and how many prompt tokens were known."""
    began = time.perf_counter()
    result = engine.submit(tokens, GREEDY, max_tokens=n_reply, ignore_eos=True, stable=len(tokens) - 4).result()
    return time.perf_counter() - began, result.n_cached


def _turns(engine: Engine, peer: Peer) -> None:
    """A growing conversation, saved after each turn."""
    tokens, ours, theirs, allowed = _tokens(0, 1000), [], [], []
    shape = engine.core.sizes.shape
    for turn in range(N_TURNS):
        assert engine.core.cache.tiers.disk.is_on
        before = engine.core.cache.tiers.disk.counts.n_bytes_written
        _read(engine, tokens, N_REPLY)
        engine.call(lambda core: core.put_away())
        ours.append(engine.core.cache.tiers.disk.counts.n_bytes_written - before)
        allowed.append((N_TURN if turn else len(tokens)) * shape.kv_bytes_per_token + shape.state_bytes)
        peer.complete(tokens, N_REPLY, ignore_eos=True)
        theirs.append(peer.post("/slots/0?action=save", {"filename": "turns.bin"})["n_written"])
        tokens = tokens + _tokens(100 + turn, N_TURN)
    worst = max(a / b for a, b in zip(ours[1:], allowed[1:], strict=True))
    rows = [
        ("all turns", _mib(sum(ours)), _mib(sum(theirs)), f"{sum(theirs) / sum(ours):.1f}× less"),
        ("the last turn", _mib(ours[-1]), _mib(theirs[-1]), f"{theirs[-1] / ours[-1]:.1f}× less"),
        ("worst turn beside its new KV + one state", f"{worst:.3f}×", "–", "wanted ≤ 1.1×"),
    ]
    table(f"Written in {N_TURNS} turns of {N_TURN} new tokens", ("", "Everwarm", "llama-server slot save", ""), rows)


def _switch(engine: Engine, peer: Peer) -> tuple[str, str, str, str]:
    """Two long conversations take turns on one slot; both servers keep what leaves the slot in RAM."""
    talks = [_tokens(50 + i, N_LONG) for i in range(2)]
    ours, theirs = [], []
    for i in range(2 * (N_SWITCHES + 1)):
        tokens = talks[i % 2]
        a, _ = _read(engine, tokens)
        b = _first_s(peer, tokens)
        if i >= 2:
            ours.append(a)
            theirs.append(b)
    return ("another conversation took the slot", *_ratio(statistics.median(ours), statistics.median(theirs)))


def _restart(where: Path, peer: Peer, tokens: list[int]) -> tuple[str, str, str, str]:
    """A new process, beside llama-server's slot restore in the old one."""
    peer.complete(tokens, 1, ignore_eos=True)
    peer.post("/slots/0?action=save", {"filename": "restart.bin"})
    ours, theirs = [], []
    for _ in range(3):
        with _engine(where) as engine:
            seconds, n_cached = _read(engine, tokens)
            assert n_cached > N_LONG - 64, "it was not on disk"
            ours.append(seconds)
        peer.post("/slots/0?action=erase", {})
        began = time.perf_counter()
        peer.post("/slots/0?action=restore", {"filename": "restart.bin"})
        peer.complete(tokens, 1, ignore_eos=True)
        theirs.append(time.perf_counter() - began)
    return ("from disk, in a new process", *_ratio(statistics.median(ours), statistics.median(theirs)))


def _from_disk(where: Path) -> None:
    """Reading and verifying into the RAM tier, beside a plain read of the same files. Cold: after the machine started."""
    for path in (hundred_megabytes(), much_kv()):
        tokens, here = _tokens(50, N_LONG), where / path.stem
        with _engine(here, path) as engine:
            _read(engine, tokens)
        with _engine(here, path) as engine:
            _measure_reads(engine, Prompt.of_tokens(tokens))
        print()


def _measure_reads(engine: Engine, prompt: Prompt) -> None:
    tiers, loader = engine.core.cache.tiers, engine.core.cache.loader
    assert tiers.disk.is_on
    kept = tiers.disk.find(root_key(tiers.fingerprint, ""), prompt, len(prompt) - 1)
    assert kept is not None and kept.n_items > N_LONG - 64
    paths = [tiers.disk.directory / name for name in (kept.name, *kept.needs)]
    size = sum(path.stat().st_size for path in paths)
    wish = LoadRequest(prompt, "", (), most=len(prompt) - 1, n_have=0, n_kv=0, n_shared=0)
    rows = []
    for title, before in (("cold", lambda: _forget(paths)), ("in the page cache", None)):
        ours, plain = [], []
        for _ in range(N_READS):
            ours.append(median_s(lambda: loader._from_disk(kept, wish), 1, before))
            plain.append(median_s(lambda: [path.read_bytes() for path in paths], 1, before))
        a, b = statistics.median(ours), statistics.median(plain)
        speeds = (f"{size / seconds / 1e9:.2f} GB/s" for seconds in (a, b))
        rows.append((title, _mib(size), *speeds, f"{b / a:.2f}×"))
    head = ("", "bytes", "Everwarm", "plain read", "ratio")
    table(f"Reading {kept.n_items} tokens from {len(paths)} files, verified ({engine.model.path.stem})", head, rows)


def _forget(paths: Sequence[Path]) -> None:
    """Have the system forget what it has of these files."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _slot_files(where: Path, peer: Peer, tokens: list[int]) -> tuple[str, str, str, str]:
    """Both servers restore the slot file they saved and get the very same prompt again."""
    theirs_server = Server("llama-server", peer._host)
    flags = ("-np", "1", "-c", "24576", "--disk-cache", "0", "--slot-save-path", str(where / "slots"))

    def again_s(server: Server) -> float:
        post(server, "/slots/0?action=erase", {})
        began = time.perf_counter()
        post(server, "/slots/0?action=restore", {"filename": f"{server.name}.bin"})
        ask(server, tokens, 1)
        return time.perf_counter() - began

    with everwarm(str(hundred_megabytes()), *flags) as ours_server:
        for server in (ours_server, theirs_server):
            ask(server, tokens, 1)
            post(server, "/slots/0?action=save", {"filename": f"{server.name}.bin"})
        ours = undisturbed(N_SWITCHES, lambda: again_s(ours_server))
        theirs = undisturbed(N_SWITCHES, lambda: again_s(theirs_server))
    return ("slot restore, then the same prompt", *_ratio(statistics.median(ours), statistics.median(theirs)))


def _ratio(ours_s: float, theirs_s: float) -> tuple[str, str, str]:
    return f"{1e3 * ours_s:.1f} ms", f"{1e3 * theirs_s:.1f} ms", f"{theirs_s / ours_s:.1f}× sooner"


def _first_s(peer: Peer, tokens: list[int]) -> float:
    began = time.perf_counter()
    peer.complete(tokens, 1, ignore_eos=True)
    return time.perf_counter() - began


def _mib(n: float) -> str:
    return f"{n / (1 << 20):.1f} MiB"
