"""A cluster to test against: nodes of Ray, ``everwarm serve --ray`` on them, and what can be done to its replicas."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.server import Server, _listen, until

START_S = 180.0
CONFIG = """
[server]
port = {port}
stats-every = 0.5
{server}
[remote]
url = "{store}"
key = "{key}"
policy = "always"
wait = 10.0
[engine]
slots = 2
threads = 1
ctx-size = 8192
cache-ram = "256MiB"
disk-cache = 0
{models}
"""
MODEL = """
[models.{name}]
path = "demo:"
[models.{name}.replicas]
{size}
cpus = 0.2
resources = {{ engine = {share} }}
"""


def model(name: str = "tiny", size: str = "count = 3", share: float = 1.0) -> str:
    return MODEL.format(name=name, size=size, share=share)


@dataclass
class Fleet(Server):
    """The server that clients see, and the replicas behind it."""

    logs: Path = Path()

    def replicas(self) -> set[str]:
        text = self.get("/metrics").data.decode()
        return {part.split('"')[0] for part in text.split('replica="')[1:]}

    def pid_of(self, replica: str) -> int:
        """The process that writes the replica's log."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                folder = f"/proc/{pid}/fd"
                if any(f"{replica}.log" in os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)):
                    return int(pid)
        raise AssertionError(f"no process has the log of {replica}")

    def of(self, replica: str, path: str) -> Any:
        return self.get(path, x_everwarm_replica=replica)

    def metric(self, replica: str, name: str) -> float:
        for line in self.of(replica, "/metrics").data.decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        return 0.0

    def is_idle_at(self, replica: str) -> bool:
        return not any(slot["is_processing"] for slot in self.of(replica, "/slots").json)


@contextlib.contextmanager
def fleet(folder: Path, store: str, *models: str, n_nodes: int = 3, server: str = "") -> Iterator[Fleet]:
    """Ready to answer; everything that was started is gone at the end. ``store``: the URL of what all replicas share."""
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(32))
    key.chmod(0o600)
    port = _free_port()
    config = folder / "cluster.toml"
    words = {"port": port, "server": server, "store": store, "key": key, "models": "".join(models)}
    config.write_text(CONFIG.format(**words))
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:  # sockets need short names
        (Path(short) / "ray").mkdir()  # Ray writes its address there before it makes the folder
        env = os.environ | QUIET | {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": short}
        with _nodes(n_nodes, env, Path(short) / "nodes.log") as address:
            command = [sys.executable, "-m", "everwarm", "serve", "--ray", str(config)]
            process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
                                       env=env | {"RAY_ADDRESS": address})  # fmt: skip
            running = Fleet("", process, logs=Path(short))
            assert process.stdout is not None
            process.stderr = process.stdout
            listener = threading.Thread(target=_listen, args=(running, "http"), daemon=True)
            listener.start()
            try:
                ready = f"http://127.0.0.1:{port}/v1\n"
                until(lambda: ready in running.message or not listener.is_alive(), "the cluster serves", START_S)
                assert ready in running.message, running.log[-4000:]
                running.url = ready.removesuffix("/v1\n")
                yield running
            finally:
                process.terminate()
                process.wait(START_S)
                listener.join(START_S)


QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes another address of this machine for 127.0.0.1
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "PYTHONWARNINGS": "ignore",
}


@contextlib.contextmanager
def _nodes(n: int, env: dict[str, str], log: Path) -> Iterator[str]:
    here = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (here, env.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "support.nodes", str(n)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, text=True, env=env | {"PYTHONPATH": path}, stderr=stderr, **pipes) as process,
    ):
        try:
            assert process.stdout is not None and process.stdin is not None
            address = process.stdout.readline().strip()
            assert address, f"the nodes did not start: {log.read_text(errors='replace')[-4000:]}"
            yield address
        finally:
            process.stdin.close()
            process.wait(START_S)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
