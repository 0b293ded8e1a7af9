"""A pytest plugin for llama-server's tests: free ports, tiny models, any words, and servers that more than one test uses.

The stand-in models write other words than the models that the tests were written for, so what a reply says is not compared.
Starting a server takes longer than most tests: one that a passed test leaves behind serves the next test that starts one
with the same flags. A test that stops a server itself really stops it. With ``COMPAT_FRESH`` every test has its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import types
from collections.abc import Generator
from typing import Any

import pytest
import requests
from PIL import Image
from requests.structures import CaseInsensitiveDict

sys.modules["wget"] = types.ModuleType("wget")  # imported by the tests; nothing is downloaded here

import utils  # type: ignore[import-not-found]  # noqa: E402

from bench.compat.stand_ins import downloaded  # noqa: E402

MAX_IDLE = 2
OWN_SERVERS = ("test_metrics", "test_slot_save", "test_kv_keep_only_active", "test_sleep", "test_lora", "test_router")
PATIENCE_S = 80  # for a start, on a busy machine


class Pool:
    """Running servers that no test uses, by their flags; the oldest first."""

    def __init__(self) -> None:
        self._idle: dict[str, Any] = {}
        self._is_shared = False
        self.is_in_test = False
        self.has_failed = False

    def begin(self, test: pytest.Item) -> None:
        self._is_shared = "COMPAT_FRESH" not in os.environ and test.path.stem not in OWN_SERVERS
        self.has_failed = False

    def start(self, server: Any) -> None:
        key = _flags(server)
        found = self._idle.pop(key, None) if self._is_shared else None
        if found is not None and found.process.poll() is None:
            server.process, server.server_port, server._log = found.process, found.server_port, sys.stdout
            utils.server_instances.add(server)
        else:
            _start(server, PATIENCE_S)
        server.compat_key = key

    def stop(self, server: Any) -> None:
        is_usable = self._is_shared and not self.is_in_test and not self.has_failed
        if not is_usable or server.process is None or server.process.poll() is not None or server.log_path:
            return _stop(server)
        utils.server_instances.discard(server)
        self._idle[server.compat_key] = server
        while len(self._idle) > MAX_IDLE:
            self._end(next(iter(self._idle)))

    def clear(self) -> None:
        for key in list(self._idle):
            self._end(key)

    def _end(self, key: str) -> None:
        server = self._idle.pop(key)
        server._log = sys.stdout  # that of the test that started it is closed
        _stop(server)


pool = Pool()


class _Picture:
    """The answer to a request for one of the images that tests download."""

    status_code = 200

    def __init__(self, url: str) -> None:
        image, file = Image.new("RGB", (64, 48), (len(url) % 255, 90, 160)), io.BytesIO()
        image.save(file, "png")
        self.content = file.getvalue()

    def raise_for_status(self) -> None:
        pass


def _get(url: str, *args: Any, **more: Any) -> Any:
    is_picture = url.startswith("https://huggingface.co/") and url.endswith(".png")
    return _Picture(url) if is_picture else _real_get(url, *args, **more)


def _asked(self: Any, *args: Any, **more: Any) -> Any:
    """Names of headers are compared as HTTP does it: whatever their case."""
    answer = _ask(self, *args, **more)
    answer.headers = CaseInsensitiveDict(answer.headers)
    return answer


def _flags(server: Any) -> str:
    hidden = ("process", "server_port", "_log", "compat_key", "ready")
    return repr(sorted((name, value) for name, value in vars(server).items() if name not in hidden))


def _with_free_port(self: Any) -> None:
    _begin(self)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        self.server_port = probe.getsockname()[1]


def pytest_runtest_setup(item: pytest.Item) -> None:
    pool.begin(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    pool.is_in_test = True
    try:
        return (yield)
    except AssertionError:
        raise  # the server answered
    except BaseException:
        pool.has_failed = True
        raise
    finally:
        pool.is_in_test = False


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Written at once, so that a run that is broken off is not lost. Each test once."""
    if "PYTEST_XDIST_WORKER" in os.environ or not (report.when == "call" or report.outcome != "passed"):
        return
    file, _, test = report.nodeid.removeprefix("unit/").partition("::")
    with open(os.environ["COMPAT_RECORD"], "a") as record:
        record.write(json.dumps([f"{file.removesuffix('.py')}::{test}", report.outcome]) + "\n")


def pytest_sessionfinish() -> None:
    with contextlib.suppress(OSError):
        pool.clear()


_ask, utils.ServerProcess.make_request = utils.ServerProcess.make_request, _asked
_real_get, requests.get = requests.get, _get
_begin, _start, _stop = utils.ServerProcess.__init__, utils.ServerProcess.start, utils.ServerProcess.stop
utils.ServerProcess.__init__ = _with_free_port
utils.ServerProcess.start = lambda self, *_timeout, **_: pool.start(self)
utils.ServerProcess.stop = lambda self: pool.stop(self)
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.download_file = lambda url, *_path: downloaded(url)
utils.match_regex = lambda _regex, _text: True
