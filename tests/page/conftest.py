"""A browser for the tests of a module, and a server and a fresh tab for those that need no server of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.browser import Tab, launched, opened, setup
from support.server import Server, serving


@pytest.fixture(scope="module")  # while it is there its thread has an event loop, which other tests cannot have
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--cache-text", n_ctx=8192) as server:
        yield server


@pytest.fixture
def tab(browser: Any, server: Server) -> Iterator[Tab]:
    with opened(browser, server.url, setup=setup()) as tab:
        yield tab
