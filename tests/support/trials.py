"""Things that might abort the process, each tried in a fork: `python -m support.run_trials`.

A trial is a function of an architecture. What it returns or raises is its outcome; `test_context_traps` says what that
has to be. This module knows how to run them; `trials_calls` and `trials_blobs` have them.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from everwarm.errors import EverwarmError
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.types import SeqId
from support.models import tiny_model
from support.steps import SLOT, text

Trial = Callable[[str], str]

TESTS = Path(__file__).parents[1]
TIME_LIMIT_S = 60
TOKENS = text(400)
TRIALS: dict[str, Trial] = {}
ARCHS_OF: dict[str, tuple[str, ...]] = {}


def trial(*archs: str) -> Callable[[Trial], Trial]:
    """Register a trial for these architectures (qwen35 if none are named)."""

    def register(function: Trial) -> Trial:
        TRIALS[function.__name__] = function
        ARCHS_OF[function.__name__] = archs or ("qwen35",)
        return function

    return register


@cache
def model(arch: str) -> Model:
    return Model(tiny_model(arch))


def feed(context: Context, n: int, seq: int = SLOT) -> Feed:
    return Feed(SeqId(seq), TOKENS[:n], context.end(SeqId(seq)), wants_logits=True)


def verdict(same: bool) -> str:
    return "same bits" if same else "other bits"


def run_in_child(module: str, *arguments: str) -> dict[str, str]:
    """Run a module of this folder in a process of its own; it prints outcomes as JSON."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "GGML_NO_BACKTRACE": "1"}
    argv = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def outcome(function: Trial, arch: str) -> str:
    """Run in a fork; what it returned, raised or died of."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        signal.alarm(TIME_LIMIT_S)
        os.write(into, _attempt(function, arch).encode()[:4000])
        os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        message = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return f"killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else message


def _attempt(function: Trial, arch: str) -> str:
    try:
        return function(arch)
    except (AssertionError, EverwarmError) as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:  # noqa: BLE001 - the fork must not run on as a second parent
        return f"unexpected {type(error).__name__}: {error}"


def expect_crashes() -> None:
    """For a process whose forks may abort: no core files, and none of a library's last words."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
