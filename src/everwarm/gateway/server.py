"""Running the server: uvicorn around the application, with what matters printed at the start."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from everwarm import __version__
from everwarm.engine.messages import ModelInfo
from everwarm.engine.settings import EngineSettings, StoreSettings
from everwarm.errors import EngineStopped, EverwarmError
from everwarm.gateway.app import Gateway, build_gateway
from everwarm.gateway.settings import ServerSettings
from everwarm.router.supervisor import State, Supervisor

log = logging.getLogger("everwarm.gateway")

_MIB = 1 << 20


def serve(model: Path, engine: EngineSettings, settings: ServerSettings, console: Console) -> int:
    """Until SIGTERM or SIGINT. Returns the exit code: 0 after a clean stop, 1 when the model cannot be served."""
    try:
        sock = _bind(settings)
    except OSError as error:
        raise EverwarmError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from None
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(model, engine, settings, console, sock))


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


async def _serve(
    model: Path, engine: EngineSettings, settings: ServerSettings, console: Console, sock: socket.socket
) -> int:
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as bar:
        task = bar.add_task(f"loading {model.name}", total=1.0)
        supervisor = Supervisor(str(model), engine, on_loading=lambda done: bar.update(task, completed=done))
        gateway = build_gateway(supervisor, settings)
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
        host, port = sock.getsockname()[:2]
        ready = asyncio.create_task(_when_ready(supervisor))
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if ready.done() and supervisor.state is not State.STOPPED:  # else it was told to stop while loading
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        code = _announce(console, ready, url, settings, engine.store)
    if code:
        server.should_exit = True
    await running
    ready.cancel()
    return code


async def _when_ready(supervisor: Supervisor) -> ModelInfo:
    while supervisor._task is None:  # the application's start-up starts it
        await asyncio.sleep(0.01)
    return await supervisor.wait_ready()


def _announce(
    console: Console, ready: asyncio.Task[ModelInfo], url: str, settings: ServerSettings, store: StoreSettings | None
) -> int:
    try:
        info = ready.result()
    except EngineStopped as error:
        console.print(f"everwarm: {error}", style="red", markup=False, highlight=False)
        return 1
    console.print(
        f"Everwarm {__version__} · {settings.model_name} ({info.description}, {info.n_params / 1e6:,.1f} M parameters, "
        f"{info.memory_kind} memory)\n"
        f"  {info.n_slots} slots share {info.n_ctx:,} tokens of context; "
        f"{info.kv_bytes_per_token:,} bytes of KV per token, {info.state_bytes / _MIB:.1f} MiB per recurrent state\n"
        f"  checkpoints: up to {info.max_checkpoints} per conversation, every {info.every_n_tokens} tokens; "
        f"{info.n_spares} on the device, {info.ram_bytes / _MIB:,.0f} MiB of RAM, "
        f"{f'up to {store.disk_bytes / _MIB:,.0f} MiB in {store.directory}' if store else 'nothing on disk'}\n"
        f"  {url}/v1 · {'API key required' if settings.api_key else 'open to this machine only'}",
        highlight=False,
    )
    return 0


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
