"""How fast a conversation comes back from an object store, beside what the store gives at all.

Wanted: restoring an 8k-token conversation reaches 70 % of the store's raw GET throughput; a dead store costs a request at
most 250 ms, once. The store is SeaweedFS on this machine (``make test-scale`` installs it): the figures say what Everwarm
adds, not what a network does.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.measure import hundred_megabytes, median_s, much_kv, table
from bench.seaweed import BUCKET, environment, seaweed
from everwarm.config import GREEDY
from everwarm.engine.engine import Engine
from everwarm.engine.settings import EngineSettings, RemoteSettings
from everwarm.engine.tiers.loader import LoadedPoint, LoadRequest
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import root_key
from everwarm.state.remote.bucket import Bucket
from everwarm.state.remote.pointer import Pointer

N_LONG, N_READS = 8192, 9
_MIB = 1 << 20


def run() -> None:
    with tempfile.TemporaryDirectory(prefix="everwarm-bench-") as name:
        where = Path(name)
        (where / "key").write_bytes(bytes(range(32)))
        (where / "key").chmod(0o600)
        with seaweed(where / "store") as store, environment(store.environment):
            for model in (hundred_megabytes(), much_kv()):
                _restore(where, model)
                print()
        _dead_store(where)


@contextmanager
def _engine(where: Path, model: Path, url: str, endpoint: str | None = None, wait_s: float = 0.25) -> Iterator[Engine]:
    remote = RemoteSettings(url, str(where / "key"), endpoint, "always", wait_s)
    with Engine(model, EngineSettings(n_slots=1, n_ctx=12288, remote=remote)) as engine:
        yield engine


def _timed(engine: Engine, tokens: list[int]) -> tuple[float, int]:
    """Seconds until the first token, and how many prompt tokens were known."""
    began, stable = time.perf_counter(), len(tokens) - 4
    request = engine.submit(tokens, GREEDY, max_tokens=1, ignore_eos=True, stable=stable, boundaries=(stable,))
    n_cached = request.result().n_cached
    return time.perf_counter() - began, n_cached


def _tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def _restore(where: Path, model: Path) -> None:
    url, tokens = f"s3://{BUCKET}/{uuid.uuid4().hex}", _tokens(1, N_LONG)
    with _engine(where, model, url, wait_s=10.0) as engine:
        cold_s, _ = _timed(engine, tokens)
        engine.call(lambda core: core.put_away())
    firsts = []
    for _ in range(3):
        with _engine(where, model, url, wait_s=10.0) as engine:
            first_s, n_cached = _timed(engine, tokens)
            assert n_cached > N_LONG - 64, "it was not in the store"
            firsts.append(first_s)
    with _engine(where, model, url, wait_s=10.0) as engine:
        _measure(engine, url, Prompt.of_tokens(tokens), cold_s, statistics.median(firsts))


def _measure(engine: Engine, url: str, prompt: Prompt, cold_s: float, first_s: float) -> None:
    tiers, loader = engine.core.cache.tiers, engine.core.cache.loader
    assert tiers.remote.is_on
    remote, bucket = tiers.remote, Bucket(url)
    post = remote.find(root_key(tiers.fingerprint, ""), prompt, (len(prompt) - 4,), least=0, most=len(prompt) - 1)
    assert post is not None
    names = [f"{remote._folder}/{name}" for name in (post.name, *(need.name for need in post.needs))]
    wish = LoadRequest(prompt, "", (len(prompt) - 4,), most=len(prompt) - 1, n_have=0, n_kv=0, n_shared=0)
    size = post.n_bytes(0)

    def restore() -> None:
        assert isinstance(loader._from_remote(wish, loader._on_disk(wish)), LoadedPoint)

    ours, raw = [], []
    for _ in range(N_READS):
        ours.append(median_s(restore, 1))
        raw.append(_raw_s(bucket, names, post))
    a, b = statistics.median(ours), statistics.median(raw)
    speeds = (f"{size / seconds / 1e6:.0f} MB/s" for seconds in (a, b))
    rows = [(f"{size / _MIB:.1f} MiB in {len(names)} objects", *speeds, f"{100 * b / a:.0f} %")]
    title = f"{post.n_items} tokens from the store, found, fetched, verified and in RAM ({engine.model.path.stem})"
    table(title, ("", "Everwarm", "raw GET of the same objects, all at once", "of it"), rows)
    print(f"\nFirst token in a new process {1e3 * first_s:.0f} ms, read anew {1e3 * cold_s:.0f} ms.")


def _raw_s(bucket: Bucket, names: list[str], post: Pointer) -> float:
    """All objects at once, each with one plain request, thrown away."""
    sizes = [post.size, *(need.size for need in post.needs)]

    async def get() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(bucket.get(name, 0, size, 60, 60) for name, size in zip(names, sizes, strict=True)))
        return time.perf_counter() - began

    return asyncio.run(get())


def _dead_store(where: Path) -> None:
    """It takes connections and never answers."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as dead, environment(dict.fromkeys(names, "x")):
        endpoint = f"http://127.0.0.1:{dead.getsockname()[1]}"
        with _engine(where, hundred_megabytes(), "s3://dead/x", endpoint) as engine:
            times = [_timed(engine, _tokens(10 + i, 64))[0] for i in range(6)]
    rows = [(f"{1e3 * times[0]:.0f} ms", ", ".join(f"{1e3 * s:.0f}" for s in times[1:]) + " ms")]
    table("A dead store: prompts of 64 tokens, until the first token", ("the first", "the next ones"), rows)
