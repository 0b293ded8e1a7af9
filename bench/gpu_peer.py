"""llama-server as a program of its own, and what the machine is: for ``bench.gpu``."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.server import Server
from everwarm import __version__
from everwarm.llama import abi

START_S = 300


@contextlib.contextmanager
def llama_server(program: Path, model: Path, *flags: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = Path(f"{model}.llama-server.log")
    command = [str(program), "-m", str(model), *flags, "-ngl", "99", "--port", str(port), "--no-ui"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, port, log)
        yield Server("llama-server", f"127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < START_S:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended: {log.read_text(errors='replace')[-2000:]}")
        if _is_ready(port):
            return
        time.sleep(0.2)
    raise RuntimeError(f"llama-server was not ready after {START_S} s")


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def about_machine(model: Path) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": _said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "nvcc": _said("nvcc", "--version").rsplit("\n", 1)[-1],
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "everwarm": __version__,
        "libllama": abi.BUILD,
        "model_bytes": model.stat().st_size,
    }


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except OSError as error:
        return str(error)
