"""A real browser on the page that also notes what a user would not see: errors, strange addresses, broken rules."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.server import words

NAMES = ("chromium", "chromium-browser", "google-chrome")
SETUP = "localStorage.setItem('everwarm.setup', JSON.stringify({system: %s, temperature: 0, max_tokens: 48}));"
SYSTEM = words(160, 3)
WATCH = """
window.broken = [];
document.addEventListener("securitypolicyviolation", (e) => window.broken.push(`${e.violatedDirective} ${e.blockedURI}`));
window.boom = () => window.broken.push("boom");
"""


def setup(system: str = SYSTEM) -> str:
    """A script that sets the chat of a fresh profile up."""
    return SETUP % json.dumps(system)


def executable() -> str:
    """Where the browser is; without one the test is skipped."""
    pytest.importorskip("playwright", reason="the Python package playwright is not installed")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: `make browser` installs it on Debian and Ubuntu")
    return found


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    path = executable()
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=flags)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """One page of one browser context."""

    page: Any
    url: str
    output: list[str] = field(default_factory=list)  # errors of the console, and exceptions
    asked: list[str] = field(default_factory=list)  # addresses

    def violations(self) -> list[str]:
        found: list[str] = self.page.evaluate("window.broken")
        return found

    def foreign(self) -> list[str]:
        return [each for each in self.asked if not each.startswith((f"{self.url}/", "data:", "blob:"))]

    def send(self, text: str) -> None:
        self.page.fill("#say", text)
        self.page.click("#send")

    def wait_written(self) -> None:
        """Until the reply is over."""
        self.page.wait_for_function("() => everwarm.chat.writing === null && document.querySelector('.message')")

    def ask(self, text: str) -> str:
        """What is shown of the reply."""
        self.send(text)
        self.wait_written()
        return str(self.replies().last.locator(".said").inner_text())

    def replies(self) -> Any:
        return self.page.locator(".message.assistant")

    def questions(self) -> Any:
        return self.page.locator(".message.user")

    def go(self, view: str) -> None:
        self.page.click(f"[data-go={view}]")

    def figures(self, nth: int = -1) -> tuple[int, int]:
        """Reused and read anew, as the bar under a reply says."""
        chips = self.replies().nth(nth).locator(".figures .chip")
        was, now = (chips.nth(i).inner_text() for i in (0, 1))
        assert was.endswith(" reused") and now.endswith(" read anew")
        return tuple(int(each.split()[0].replace(",", "")) for each in (was, now))  # type: ignore[return-value]


@contextlib.contextmanager
def opened(
    browser: Any, url: str, *, refusals: tuple[int, ...] = (), path: str = "/", setup: str = "", **options: Any
) -> Iterator[Tab]:
    """The page in a fresh profile. Nothing may go wrong but answers with these statuses; 0 is a server that is gone."""
    options = {"viewport": {"width": 1360, "height": 860}, "reduced_motion": "reduce"} | options
    context = browser.new_context(**options)
    context.set_default_timeout(20_000)
    context.add_init_script(WATCH + setup)
    page = context.new_page()
    tab = Tab(page, url)
    page.on("console", lambda message: tab.output.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: tab.output.append(str(error)))
    page.on("request", lambda request: tab.asked.append(request.url))
    try:
        page.goto(url + path)
        page.wait_for_function("() => window.everwarm")
        yield tab
        assert tab.violations() == [] and tab.foreign() == []
        expected = tuple(f"Failed to load resource: {_refusal(status)}" for status in refusals)
        wrong = [each for each in tab.output if not (expected and each.startswith(expected))]
        assert not wrong, wrong
    finally:
        context.close()


def _refusal(status: int) -> str:
    return f"the server responded with a status of {status}" if status else "net::ERR_"
