"""A pool with real engines: models that were given up come back by themselves, and nobody can make them storm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from everwarm.config import GREEDY
from everwarm.engine.process import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.errors import EngineStopped
from everwarm.router.catalog.catalog import only
from everwarm.router.plan import PoolLimits
from everwarm.router.pool import Pool, Served
from everwarm.router.supervise.restart_policy import MAX_DEATHS, RestartLimits
from support.models import tiny_model

SETTINGS = EngineSettings(n_slots=2, n_ctx=512, n_threads=1, ram_bytes=16 << 20)
SOON = RestartLimits(first_back_off_s=0.01, most_back_off_s=0.02, first_retry_s=0.2, most_retry_s=0.4)
LATER = RestartLimits(first_back_off_s=0.01, most_back_off_s=0.02, first_retry_s=5.0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


@contextlib.asynccontextmanager
async def pooled(path: Path, limits: RestartLimits) -> AsyncIterator[tuple[Pool, Served]]:
    catalog = only(path, SETTINGS, "one")
    pool = Pool(lambda: catalog, PoolLimits(), restart_limits=limits)
    pool.start()
    served = pool.find("one")
    try:
        await until(lambda: served.supervisor.is_ready, "it is loaded")
        yield pool, served
    finally:
        await pool.stop(0.0)


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    async def met() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    try:
        await asyncio.wait_for(met(), timeout_s)
    except TimeoutError:
        pytest.fail(f"not within {timeout_s:g} s: {what}")


async def wear_out(served: Served) -> None:
    """Kill every engine as soon as it is started, until it is given up."""
    dead: set[int] = set()
    while served.supervisor.state != "unhealthy":
        pid = served.supervisor.pid
        if pid is not None and pid not in dead:
            dead.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.005)
    assert len(dead) == MAX_DEATHS


async def ask(pool: Pool) -> m.ToGateway:
    with pool.lease("one") as lease:
        served = await lease.ready()
        submit: dict[str, Any] = {"tokens": list(range(60, 80)), "sampling": GREEDY, "max_tokens": 2}
        return [message async for message in served.supervisor.stream(m.Submit(0, **submit))][-1]


def test_a_server_that_nobody_asks_comes_back_by_itself():
    async def test() -> None:
        async with pooled(tiny_model("llama", width=64), SOON) as (pool, served):
            await wear_out(served)
            await until(lambda: served.retry is not None, "the next try is planned")
            (served,) = pool.all_served()
            assert served.retry_in_s is not None and "SIGKILL" in (served.reason or "")
            assert served.status.phase == "asleep" and served.status.reason
            await until(lambda: served.supervisor.is_ready, "it is back, though nobody asked")
            assert served.retry is None and served.supervisor.deaths.n_given_up == 1
            pid = served.supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: served.supervisor.deaths.n_given_up == 2, "one more death and it is given up again")
            await until(lambda: served.supervisor.is_ready, "and tried again")
            assert isinstance(await ask(pool), m.Done) and served.supervisor.deaths.n_given_up == 0

    run(test)


def test_a_file_that_was_bad_for_a_while_is_found_good_again(tmp_path):
    path, good = tmp_path / "one.gguf", tiny_model("llama", width=64)

    def put(data: bytes) -> None:
        """In another file's place: what is mapped stays as it is."""
        (tmp_path / "new").write_bytes(data)
        os.replace(tmp_path / "new", path)

    async def test() -> None:
        shutil.copy(good, path)
        async with pooled(path, SOON) as (pool, served):
            put(good.read_bytes()[:-16])
            pid = served.supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: "file bounds" in (served.reason or ""), "it is tried in vain")
            path.unlink()
            await until(lambda: "No such file" in (served.reason or ""), "and again")
            assert "one.gguf" in (served.reason or "") and str(tmp_path) not in (served.reason or "")
            assert served.supervisor.deaths.n_given_up >= 2
            put(good.read_bytes())
            await until(lambda: served.supervisor.is_ready, "it is back")
            assert isinstance(await ask(pool), m.Done)

    run(test)


def test_a_request_has_it_tried_at_once_but_a_storm_of_them_only_once():
    async def test() -> None:
        async with pooled(tiny_model("llama", width=64), LATER) as (pool, served):
            await wear_out(served)
            await until(lambda: served.retry is not None, "the next try is planned")
            n_loads = served.n_loads
            for _ in range(100):
                with pytest.raises(EngineStopped, match="tried again in"), pool.lease("one"):
                    pass
            assert served.n_loads == n_loads and served.retry is not None
            served.retry = type(served.retry)(served.retry.at, 0.0)  # as if the pause between two tries were over
            done = await asyncio.gather(*(ask(pool) for _ in range(4)))
            assert all(isinstance(each, m.Done) for each in done) and served.n_loads == n_loads + 1

    run(test)


def test_what_was_unloaded_meanwhile_is_not_tried_again():
    async def test() -> None:
        async with pooled(tiny_model("llama", width=64), SOON) as (pool, served):
            await wear_out(served)
            await until(lambda: served.retry is not None, "the next try is planned")
            n_loads = served.n_loads
            pool.unload("one")
            await asyncio.sleep(2 * SOON.most_retry_s)
            assert served.n_loads == n_loads and served.supervisor.state == "unhealthy"
            pool.load("one")
            await until(lambda: served.supervisor.is_ready, "it is loaded by order")

    run(test)
