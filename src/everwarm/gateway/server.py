"""Runs the server: uvicorn with the application, and a summary on the console at the start."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from everwarm import __version__
from everwarm.config import size_text
from everwarm.engine.process.messages import Placement
from everwarm.engine.settings import DISK_FREE_SHARE
from everwarm.errors import EverwarmError
from everwarm.gateway.app import Gateway, build_gateway
from everwarm.gateway.http.connection import Connection, ConnectionLimits, ConnectionTable
from everwarm.gateway.settings import ServerSettings, is_unix_socket
from everwarm.logs import log_format, log_to_stderr
from everwarm.router.catalog.catalog import Catalog
from everwarm.router.plan import PoolLimits
from everwarm.router.pool import Pool, Served

log = logging.getLogger("everwarm.gateway")

_MIB, _GIB = 1 << 20, 1 << 30
SWITCH_S = 0.001  # threads hand over the interpreter lock so often, so that the event loop waits less
RESERVED_FILES = 128  # for engines, image decoders and files: connections never take these


def serve(
    read_catalog: Callable[[], Catalog],
    limits: PoolLimits,
    settings: ServerSettings,
    console: Console,
    *,
    autoload: bool = True,
) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code: 0 after a clean stop, 1 if the only model cannot be served."""
    log_to_stderr(settings.log_format)
    console.quiet = log_format() == "json"
    with _listening(settings) as socks, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(Pool(read_catalog, limits, autoload), settings, console, socks))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


@contextlib.contextmanager
def _listening(settings: ServerSettings) -> Iterator[list[socket.socket]]:
    """A socket for each address. The file of a Unix socket is removed at the end."""
    with contextlib.ExitStack() as stack:
        socks: list[socket.socket] = []
        for host in settings.hosts:
            where = host if is_unix_socket(host) else f"{host}:{settings.port}"
            try:
                sock = _unix_socket(host) if is_unix_socket(host) else _tcp_socket(host, settings)
            except OSError as error:
                raise EverwarmError(f"cannot listen on {where}: {error.strerror or error}") from None
            socks.append(stack.enter_context(sock))
            if is_unix_socket(host):
                stack.callback(Path(host).unlink, missing_ok=True)
        yield socks


def _tcp_socket(host: str, settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family is socket.AF_INET6 and len(settings.hosts) > 1:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        sock.bind((host, settings.port))
    except OSError:
        sock.close()
        raise
    return sock


def _unix_socket(path: str) -> socket.socket:
    """Only the server's own user may connect. A socket without a listener is replaced, any other file is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_answered(path):
                os.unlink(path)
        mask = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
    except OSError:
        sock.close()
        raise
    return sock


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


async def _serve(pool: Pool, settings: ServerSettings, console: Console, socks: list[socket.socket]) -> int:
    with _loading_bars(console) as pool.on_loading, _failure_told_once(pool):
        gateway = build_gateway(pool, settings)
        limits = connection_limits(settings)
        config = uvicorn.Config(
            gateway.app,
            http=partial(Connection, limits=limits, table=ConnectionTable(limits.max_connections)),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,  # uvicorn uses our logging
            log_level="warning",
            timeout_graceful_shutdown=int(settings.grace_s) + 1,
            server_header=False,
            ssl_keyfile=settings.ssl_key_file,
            ssl_certfile=settings.ssl_cert_file,
        )
        _load_certificate(config)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(socks))
        _stop_on_signals(server, gateway, settings)
        ready = asyncio.create_task(_first_loaded(pool))
        _favour_the_loop()
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        pool.on_loading = None  # progress of later loads is streamed to the requests that wait
    code = 0
    if ready.done() and not pool.is_stopping:  # else it was stopped while loading
        code = _announce(console, pool, ", ".join(_url(sock, settings) for sock in socks), settings)
    if code:
        server.should_exit = True
    await running
    ready.cancel()
    return code


def _favour_the_loop() -> None:
    """Call once after set-up: objects that exist then are never garbage-collected."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _load_certificate(config: uvicorn.Config) -> None:
    try:
        config.load()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EverwarmError(f"the certificate and its key cannot be used: {reason}") from None


def _url(sock: socket.socket, settings: ServerSettings) -> str:
    if sock.family is socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    scheme = "http" if settings.ssl_cert_file is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def _loading_bars(console: Console) -> Iterator[Callable[[str, float], None] | None]:
    """A progress bar per model that is being loaded, where the console is a terminal."""
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(model: str, done: float) -> None:
            if model not in tasks:
                tasks[model] = bar.add_task(f"loading {model}", total=1.0)
            bar.update(tasks[model], completed=done)

        yield show


@contextlib.contextmanager
def _failure_told_once(pool: Pool) -> Iterator[None]:
    """If the only model cannot be loaded, that is the last line before the end, and no line in the log before it."""
    supervising = logging.getLogger("everwarm.router")
    is_alone = len(pool.catalog.specs) == 1 and not pool.catalog.broken

    def passes(record: logging.LogRecord) -> bool:
        return not is_alone or record.levelno < logging.ERROR

    supervising.addFilter(passes)
    try:
        yield
    finally:
        supervising.removeFilter(passes)


def connection_limits(settings: ServerSettings) -> ConnectionLimits:
    """``max_connections``, or fewer if the system limits open files."""
    n_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + RESERVED_FILES
    if n_files != resource.RLIM_INFINITY and n_files < wanted:
        more = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, most))
        n_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = wanted if n_files == resource.RLIM_INFINITY else max(RESERVED_FILES + 8, n_files)
    n_connections = min(settings.max_connections, allowed - RESERVED_FILES)
    return ConnectionLimits(max_connections=n_connections, client_timeout_s=settings.client_timeout_s)


async def _first_loaded(pool: Pool) -> None:
    """Waits until every model with ``load_on_start`` is loaded or has failed."""
    while not pool.has_started:  # the application's start-up starts it
        await asyncio.sleep(0.01)
    first = [s.supervisor for s in pool.all_served() if s.spec.load_on_start]
    await asyncio.gather(*(supervisor.until("ready") for supervisor in first))


def _announce(console: Console, pool: Pool, url: str, settings: ServerSettings) -> int:
    all_served = pool.all_served()
    for served in all_served:
        supervisor = served.supervisor
        if supervisor.state == "unhealthy" and len(all_served) == 1:
            _print(console, f"everwarm: {supervisor.reason}", "red")
            return 1
    _print(console, f"Everwarm {__version__}")
    for served in all_served:
        _print(console, _about(served))
    for note in (*pool.catalog.notes, *(f"{b.id} cannot be served: {b.reason}" for b in pool.catalog.broken)):
        _print(console, f"  {note}", "yellow")
    access = "API key required" if settings.api_key or settings.keys else "open to this machine only"
    _print(console, f"  {url} · page at /, API at /v1 · {access}")
    return 0


def _print(console: Console, text: str, style: str | None = None) -> None:
    """Prints a line on the console; with JSON logs, logs it instead."""
    for line in text.splitlines():
        n_indent = len(line) - len(line.lstrip())
        indented = Padding(Text(line.strip(), style or ""), (0, 0, 0, n_indent))  # also what is wrapped
        console.print(indented if console.is_terminal else Text(line, style or ""), soft_wrap=not console.is_terminal)
    if console.quiet:
        log.log(logging.ERROR if style == "red" else logging.INFO, "%s", text.strip())


def _about(served: Served) -> str:
    """A summary of a loaded model; for one that is not loaded, its size or why it failed."""
    spec, info = served.spec, served.supervisor.info
    if info is None or not served.supervisor.is_running:
        reason = served.supervisor.reason
        return f"· {spec.id}: {reason or f'about {spec.n_bytes / _MIB:,.0f} MiB, loaded on demand'}"
    if info.pooling is not None:
        return f"· {spec.id} ({info.description}): embeddings, pooling {info.pooling}, texts of up to {info.n_ctx:,} tokens"
    return (
        f"· {spec.id} ({info.description}, {info.memory_kind} memory)\n"
        f"  context: {info.n_ctx:,} tokens, shared by {info.n_slots} slots\n"
        f"  a token of KV has {info.kv_bytes_per_token:,} bytes, a recurrent state {size_text(info.state_bytes)}\n"
        f"  checkpoints: up to {info.max_checkpoints} per conversation, every {info.every_n_tokens} tokens\n"
        f"  kept on the device: {info.n_spares} states; in RAM: up to {size_text(info.ram_bytes)}\n"
        f"  kept on disk: {_disk(served)}{gpu_line(info.placement)}"
    )


def gpu_line(placement: Placement | None) -> str:
    """What lies on GPUs, what memory is left there, and how much context would fit; empty without a GPU. Pure."""
    if placement is None or not placement.gpus:
        return ""
    layers = "all" if placement.n_gpu_layers == placement.n_layers else f"{placement.n_gpu_layers} of"
    gpus = ", ".join(
        f"{gpu.name} ({gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB left for KV and states)"
        for gpu in placement.gpus
    )
    fits = placement.n_ctx_fits
    room = "" if fits is None else f"; about {fits:,} tokens of context would fit"
    return f"\n  GPU: {layers} {placement.n_layers} layers on {gpus}{room}"


def _disk(served: Served) -> str:
    """What the disk tier may take and where; or why it takes nothing."""
    store = served.spec.settings.store
    load = served.supervisor.load
    if store is None:
        return "nothing is kept (--disk-cache 0)"
    if load is not None and "disk" in load.degraded:
        return f"nothing is kept for now: {load.degraded['disk']}"
    place = Path(store.directory).expanduser()
    there = next(path for path in (place, *place.absolute().parents) if path.exists())
    room = int(DISK_FREE_SHARE * shutil.disk_usage(there).free)
    if room < store.disk_bytes:
        return f"up to {size_text(room)} more in {place} (--disk-cache {size_text(store.disk_bytes)} has no room there)"
    return f"up to {size_text(store.disk_bytes)} in {place}"


def _stop_on_signals(server: uvicorn.Server, gateway: Gateway, settings: ServerSettings) -> None:
    """Running requests may finish within ``grace_s`` and get an error after it; a second signal stops at once."""
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    async def stop() -> None:
        await gateway.drain()
        server.should_exit = True

    def on_signal() -> None:
        if stopping:
            server.should_exit = server.force_exit = True
        else:
            stopping.append(asyncio.create_task(stop()))

    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, on_signal)
    if settings.key_file is not None:
        loop.add_signal_handler(signal.SIGHUP, gateway.reload_keys)
