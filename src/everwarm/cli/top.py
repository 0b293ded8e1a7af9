"""``everwarm top``: one screen of what a server is doing and what its cache saves, from its cache API."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from everwarm.cli.cache_output import readable
from everwarm.config import size_text
from everwarm.errors import EverwarmError
from everwarm.gateway.client import Client
from everwarm.types import Json

REFRESH_S = 1.0
N_REQUESTS = 12
BAR_WIDTH = 16

_COLORS = {"running": "bold", "failed": "red", "cancelled": "dim"}
WARM, COLD = "#f58a54", "#6fb3d6"  # reused and read, as on the web page


def top(server: Client, model: str | None, console: Console) -> int:
    """Show the screen until q or Ctrl-C."""
    with _keys() as wants_to_quit, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_look(server, model), refresh=True)
            if wants_to_quit(REFRESH_S):
                return 0


def print_once(server: Client, model: str | None, console: Console) -> int:
    console.print(screen(*_fetch(server, model)))
    return 0


def _look(server: Client, model: str | None) -> RenderableType:
    """The screen, or the error: a server that does not answer now may answer again."""
    try:
        return screen(*_fetch(server, model))
    except EverwarmError as error:
        return Text(readable(str(error)), "red")


def _fetch(server: Client, model: str | None) -> tuple[Json, list[Json], list[Json]]:
    overview = server.get("/cache", model=model)
    slots = server.get("/slots", model=overview["model"]) if overview["tiers"] is not None else []
    return overview, slots, server.get("/cache/requests", limit=N_REQUESTS)["requests"]


# the screen


def screen(overview: Json, slots: list[Json], requests: list[Json]) -> Group:
    parts: list[RenderableType] = [_head(overview), _savings(overview)]
    if overview["tiers"] is not None:
        parts += [_tiers(overview), _slots(slots, overview["engine"]["n_queued"])]
    return Group(*parts, _requests(requests))


def _head(overview: Json) -> Text:
    engine = overview["engine"]
    text = Text.assemble((readable(overview["model"]), "bold"), f"  {engine['state']}")
    if engine["restarts"]:
        text.append(f", started again {engine['restarts']} times", "red")
    if engine["state"] in ("unhealthy", "starting", "restarting") and engine.get("reason"):
        text.append(f": {readable(engine['reason'])}", "red")
        if (at := engine.get("retry_at")) is not None:
            text.append(f"; tried again in {max(0.0, at - time.time()):,.0f} s (try {engine['attempts']})", "red")
    for model in overview["models"]:
        if model["id"] != overview["model"]:
            text.append(f" · {readable(model['id'])} {model['status']}", "dim")
    return text


def _savings(overview: Json) -> Text:
    tokens = overview["tokens"]
    parts = [
        f"{overview['hit_rate']:.1%} of {tokens['prompt']:,} prompt tokens reused",
        f"{tokens['reused']:,} reused",
        f"{tokens['read']:,} read",
        f"{overview['seconds_saved']:,.1f} s saved",
        f"{overview['requests']['total']:,} requests",
    ]
    drafts = overview.get("speculation") or {}
    if drafts.get("n_verified"):
        parts.append(f"{1 + drafts['n_draft_accepted'] / drafts['n_verified']:.1f} tokens per verified draft")
    lost = {"evicted": overview["evictions"], "quarantined": overview["quarantines"], "read again": tokens["avoidable"]}
    parts += [f"{n:,} {what}" for what, n in lost.items() if n]
    return Text(" · ".join(parts))


def _tiers(overview: Json) -> Table:
    tiers = overview["tiers"]
    engine = overview["engine"]
    table = _table("tier", "", "used", "of", "holds")
    n_cells = tiers["device"]["n_cells"]
    n_ctx = engine["n_ctx"]
    table.add_row(
        "device", _bar(n_cells, n_ctx), f"{n_cells:,}", f"{n_ctx:,} cells", f"{tiers['device']['n_states']} states"
    )
    ram = tiers["ram"]
    disk = tiers["disk"]
    held = f"{ram['n_states']} states, {ram['n_segments']} segments"
    table.add_row("RAM", *_fill(ram), held)
    if disk is not None:
        table.add_row("disk", *_fill(disk), _disk_status(disk))
    return table


def _fill(tier: Json) -> tuple[RenderableType, str, str]:
    used = tier["bytes"]
    most = tier["budget_bytes"]
    return _bar(used, most), size_text(used), size_text(most)


def _slots(slots: list[Json], n_queued: int) -> Table:
    table = _table("slot", "", "tokens", "")
    for slot in slots:
        busy = slot["is_processing"]
        status = "idle"
        if slot.get("is_others"):
            status = "busy for others" if busy else "holds others' conversation"
        elif busy:
            n_written = slot["next_token"][0]["n_decoded"]
            n_read = slot["n_prompt_tokens_processed"]
            reused = f"{slot['n_prompt_tokens_cache']:,} reused, {n_read:,} read"
            status = f"{reused}, {n_written:,} written"
        color = "bold" if busy else "dim"
        filled = _bar(slot["n_prompt_tokens"], slot["n_ctx"])
        table.add_row(str(slot["id"]), filled, f"{slot['n_prompt_tokens']:,}", Text(status, color))
    if n_queued:
        table.add_row("", "", "", Text(f"{n_queued} waiting", "bold"))
    return table


def _requests(rows: list[Json]) -> Table:
    has_several = len({row["model"] for row in rows}) > 1  # else the first line names it
    titles = ("when", *(["model"] if has_several else []), "status", "prompt", "reused", "", "read", "reply")
    table = _table(*titles, "first token")
    for row in rows:
        first = "" if row["ttft_ms"] is None else f"{row['ttft_ms']:,.0f} ms"
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(row["at"])),
            *([Text(readable(row["model"]))] if has_several else []),
            Text(row["status"], _COLORS.get(row["status"], "")),
            f"{row['n_prompt']:,}",
            f"{row['n_cached']:,}",
            _bar(row["n_cached"], row["n_prompt"], rest=COLD),
            f"{row['n_read']:,}",
            f"{row['n_reply']:,}",
            first,
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, no_wrap=True, justify="right" if title in _NUMBERS else "left")
    return table


_NUMBERS = {"used", "of", "tokens", "prompt", "reused", "read", "reply", "first token"}


def _bar(n: float, most: float, rest: str = "bar.back") -> ProgressBar:
    return ProgressBar(
        total=max(1, most),
        completed=min(n, most),
        width=BAR_WIDTH,
        style=rest,
        complete_style=WARM,
        finished_style=WARM,
    )


# the keyboard


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds and tells whether q was pressed; without a keyboard it only waits."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield _was_q_pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _was_q_pressed(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if ready and sys.stdin.read(1) in ("q", "Q"):
            return True
    return False


def _disk_status(disk: dict[str, Any]) -> str:
    return f"degraded: {disk['reason']}" if disk["degraded"] else f"{disk['n_objects']} objects"
