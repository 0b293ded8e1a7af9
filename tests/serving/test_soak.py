"""Conversations with secrets on a server whose engine is killed again and again: nobody sees another's, nothing leaks.

EVERWARM_CAMPAIGN=1: 256 clients for 30 minutes, a tenth of the replies left in the middle, a kill every minute.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from support.server import Server, metric, serving, until
from support.soak import Seen, Soak, secrets

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_CLIENTS, SECONDS, KILL_S = (256, 1800.0, 60.0) if CAMPAIGN else (8, 6.0, 2.5)
MAX_GROWTH = 4 << 20  # bytes of the gateway per 1,000 requests


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def n_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def warm_up(server: Server) -> None:
    Soak(server, 8, seed=1).run(5.0 if CAMPAIGN else 2.0, None)
    until(server.is_idle, "nobody runs")


def test_conversations_keep_their_secrets_while_engines_die(tmp_path: Path) -> None:
    flags = ("--max-requests", "600", "--slots", "4", "--disk-cache", "1GiB", "--state-dir", str(tmp_path))
    with serving(*flags, n_ctx=16384) as server:
        warm_up(server)
        pid = server.process.pid
        before = (rss_bytes(pid), n_fds(pid))
        began = time.monotonic()
        seen = Soak(server, N_CLIENTS).run(SECONDS, KILL_S)
        until(lambda: server.is_ready() and server.is_idle(), "the slots are free", 60)
        until(lambda: n_fds(pid) <= before[1] + 4, "descriptors are given back", 20)
        growth = (rss_bytes(pid) - before[0]) / max(1, sum(seen.statuses.values())) * 1000
        report(seen, time.monotonic() - began, growth, n_fds(pid) - before[1])
        assert set(seen.statuses) == {200}, seen.statuses
        assert seen.unplanned() == []
        assert not seen.leaks, seen.leaks[:5]
        assert seen.n_asked > 0 and seen.n_recalled > 0.8 * seen.n_asked, "it recalls too little for a leak to show"
        assert len(seen.errors) + len(seen.broken) <= 2 * 4 * len(seen.kills), "more streams broke than ran"
        if CAMPAIGN:
            assert growth < MAX_GROWTH
        text = server.get("/metrics").data.decode()
        assert metric(text, "everwarm_engine_restarts_total") == len(seen.kills) > 0


def report(seen: Seen, seconds: float, growth: float, more_fds: int) -> None:
    asked = f"{sum(seen.statuses.values())} requests {dict(seen.statuses)}, {seen.n_done} whole, {seen.n_left} left"
    broke = f"{len(seen.errors)} error events, {len(seen.broken)} broken, {len(seen.unplanned())} unplanned"
    print(f"\n{N_CLIENTS} clients, {seconds:.0f} s, {len(seen.kills)} kills: {asked}, {broke},")
    print(f"recalled {seen.n_recalled} of {seen.n_asked}, {len(seen.leaks)} leaks,", end=" ")
    print(f"gateway {growth / 1024:.0f} KiB per 1,000 requests, {more_fds:+} descriptors")


def test_a_secret_shown_to_another_would_be_noticed() -> None:
    """The negative control."""
    soak = Soak(None, 1)  # type: ignore[arg-type]
    mine, other, *_ = secrets()
    soak.told = {mine: 1, other: 1}
    soak.judge(f"Your secret code is {mine}.", mine, asked=True)
    assert soak.seen.leaks == [] and soak.seen.n_recalled == 1
    soak.judge(f"Your secret code is {other}.", mine, asked=True)
    assert soak.seen.leaks == [f"{mine} was shown {other}"]
    soak.seen.errors.append((100.0, "503"))
    assert len(soak.seen.unplanned()) == 1
    soak.seen.kills.append(95.0)
    assert soak.seen.unplanned() == []
