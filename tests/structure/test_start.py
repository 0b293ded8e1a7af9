"""What a process loads when it starts: users wait for it, and the test-suite starts hundreds of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

GATEWAY = "everwarm.cli.app, everwarm.gateway.server"
ENGINE = "everwarm.engine.process.worker"
BACKEND = "everwarm.cli.app, everwarm.cli.backend"
TRIAL = "everwarm.llama.constraints.trial_worker"


def loaded(modules: str) -> set[str]:
    """The modules that importing these loads."""
    command = [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (GATEWAY, {"numpy", "obstore", "PIL", "rich.progress", "everwarm.llama", "everwarm.engine.core"}),
        (ENGINE, {"asyncio", "obstore", "llguidance", "rich", "cyclopts", "starlette", "everwarm.gateway"}),
        (BACKEND, {"numpy", "blake3", "starlette", "anyio", "jinja2", "huggingface_hub", "everwarm.engine.core"}),
        (TRIAL, {"everwarm.engine", "everwarm.state", "everwarm.gateway"}),
    ],
    ids=["gateway", "engine", "backend", "trial"],
)
def test_a_process_starts_without_what_it_does_not_use(modules, unwanted):
    assert loaded(modules) & unwanted == set()


def test_what_is_loaded_is_noticed():
    assert {"numpy", "everwarm.llama"} <= loaded(ENGINE)
