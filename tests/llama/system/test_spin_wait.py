"""The guard against spinning on a busy machine: its judgement, its team, and that it works on a real process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from everwarm.llama.lib import lib
from everwarm.llama.system import spin_wait

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="schedstat and libgomp are Linux's")


def test_one_busy_look_is_enough_and_calm_takes_a_while():
    verdict = spin_wait.Contention(n_calm_needed=3)
    seen = [verdict.sample(share) for share in (0.0, 0.34, 0.36, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0)]
    assert seen == [False, False, True, True, True, True, True, True, False, False]


def _tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _until(condition) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@linux
def test_the_second_team_comes_once_and_goes():
    team = spin_wait.SecondTeam(ctypes.CDLL(str(lib().path)))
    before = _tasks()
    team.start()
    team.start()
    n_team = (os.cpu_count() or 1) + 1
    assert _until(lambda: len(_tasks() - before) == n_team)
    team.stop()
    assert _until(lambda: _tasks() <= before)


@linux
def test_waiting_for_a_core_is_seen():
    """Two threads of one process on one core: each waits about half of the time."""
    code = (
        "import os, subprocess, sys, time\n"
        "from everwarm.llama.system.spin_wait import waited_s\n"
        "os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))})\n"
        "other = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "before, end = waited_s(), time.monotonic() + 1.0\n"
        "while time.monotonic() < end: pass\n"
        "print(waited_s() - before)\n"
        "other.kill()\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert float(out) > 0.1


@linux
@pytest.mark.parametrize("chosen", [{}, {"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "passive"}])
def test_a_chosen_policy_is_kept_and_ours_is_not_passed_on(chosen):
    code = (
        "import os, threading\nfrom everwarm.llama.lib import lib\nlib()\n"
        "print(os.environ.get('GOMP_SPINCOUNT'), any(t.name == 'everwarm-spin-guard' for t in threading.enumerate()))"
    )
    env = {k: v for k, v in os.environ.items() if k not in spin_wait.POLICY} | chosen
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == [str(chosen.get("GOMP_SPINCOUNT")), str(not chosen)]


@linux
def test_without_libgomp_nothing_happens():
    before = threading.active_count()
    spin_wait.guard(ctypes.CDLL("libm.so.6"))  # a library that has no GOMP_parallel
    assert threading.active_count() == before
    spin_wait.guard(ctypes.CDLL(str(lib().path)))
    assert threading.active_count() == before + 1, "this test could not fail"
