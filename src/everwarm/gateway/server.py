"""Running the server: uvicorn around the application, with what matters printed at the start."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import uvicorn
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from everwarm import __version__
from everwarm.config import log_to_stderr
from everwarm.errors import EverwarmError
from everwarm.gateway.app import Gateway, build_gateway
from everwarm.gateway.lag import favour_the_loop
from everwarm.gateway.settings import ServerSettings
from everwarm.router.catalog import Catalog
from everwarm.router.plan import Limits
from everwarm.router.pool import Pool, Standing
from everwarm.router.supervisor import State

_MIB = 1 << 20


def serve(
    read_catalog: Callable[[], Catalog],
    limits: Limits,
    settings: ServerSettings,
    console: Console,
    *,
    autoload: bool = True,
) -> int:
    """Until SIGTERM or SIGINT. Returns the exit code: 0 after a clean stop, 1 when the only model cannot be served."""
    log_to_stderr()
    try:
        sock = _bind(settings)
    except OSError as error:
        raise EverwarmError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from None
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(Pool(read_catalog, limits, autoload), settings, console, sock))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


def _bind(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
    except OSError:
        sock.close()
        raise
    return sock


async def _serve(pool: Pool, settings: ServerSettings, console: Console, sock: socket.socket) -> int:
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(model: str, done: float) -> None:
            if model not in tasks:
                tasks[model] = bar.add_task(f"loading {model}", total=1.0)
            bar.update(tasks[model], completed=done)

        pool.on_loading = show
        gateway = build_gateway(pool, settings)
        config = uvicorn.Config(
            gateway.app,
            http="httptools",
            lifespan="on",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=int(settings.grace_s) + 1,
            server_header=False,
        )
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve([sock]))
        _stop_on_signals(server, gateway)
        ready = asyncio.create_task(_first_loaded(pool))
        favour_the_loop()
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        pool.on_loading = None  # later loads are told to those who wait for them
    code = 0
    if ready.done() and not pool.is_stopping:  # else it was told to stop while loading
        host, port = sock.getsockname()[:2]
        code = _announce(console, pool, f"http://{f'[{host}]' if ':' in host else host}:{port}", settings)
    if code:
        server.should_exit = True
    await running
    ready.cancel()
    return code


async def _first_loaded(pool: Pool) -> None:
    """Until the models that are loaded at the start are, or cannot be."""
    while not pool.has_started:  # the application's start-up starts it
        await asyncio.sleep(0.01)
    first = [s.supervisor for s in pool.standings() if s.spec.load_on_start]
    await asyncio.gather(*(supervisor.until(State.READY) for supervisor in first))


def _announce(console: Console, pool: Pool, url: str, settings: ServerSettings) -> int:
    standings = pool.standings()
    for standing in standings:
        supervisor = standing.supervisor
        if supervisor.state is State.UNHEALTHY and len(standings) == 1:
            console.print(f"everwarm: {supervisor.reason}", style="red", markup=False, highlight=False)
            return 1
    console.print(f"Everwarm {__version__}", highlight=False)
    for standing in standings:
        console.print(_about(standing), markup=False, highlight=False)
    for note in (*pool.catalog.notes, *(f"{b.id} cannot be served: {b.reason}" for b in pool.catalog.broken)):
        console.print(f"  {note}", style="yellow", markup=False, highlight=False)
    access = "API key required" if settings.api_key else "open to this machine only"
    console.print(f"  {url} · page at /, API at /v1 · {access}", highlight=False)
    return 0


def _about(standing: Standing) -> str:
    """What matters of a model that is loaded; of one that is not, that it will be when it is asked for."""
    spec, info = standing.spec, standing.supervisor.info
    if info is None or not standing.supervisor.is_running:
        reason = standing.supervisor.reason
        return f"· {spec.id}: {reason or f'about {spec.n_bytes / _MIB:,.0f} MiB, loaded when it is asked for'}"
    store = spec.settings.store
    disk = f"up to {store.disk_bytes / _MIB:,.0f} MiB in {store.directory}" if store else "nothing on disk"
    return (
        f"· {spec.id} ({info.description}, {info.n_params / 1e6:,.1f} M parameters, {info.memory_kind} memory)\n"
        f"  {info.n_slots} slots share {info.n_ctx:,} tokens of context; "
        f"{info.kv_bytes_per_token:,} bytes of KV per token, {info.state_bytes / _MIB:.1f} MiB per recurrent state\n"
        f"  checkpoints: up to {info.max_checkpoints} per conversation, every {info.every_n_tokens} tokens; "
        f"{info.n_spares} on the device, {info.ram_bytes / _MIB:,.0f} MiB of RAM, {disk}"
    )


def _stop_on_signals(server: uvicorn.Server, gateway: Gateway) -> None:
    """What runs may finish within the grace and is told when it cannot; a second signal does not wait."""
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
