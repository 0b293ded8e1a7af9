"""How the page looks and whether everybody can use it: sizes, themes, contrast, names for screen readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.browser import Tab, opened, setup

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
WIDTHS = ((1440, "wide"), (1024, "laptop"), (390, "phone"))
VIEWS = ("chat", "tree", "live", "models")


def _settled(tab: Tab) -> None:
    """Until two frames have been drawn."""
    tab.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def _findings(page: Any) -> list[str]:
    """What axe-core calls serious or critical, contrast below 4.5:1 included."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    worst = [each for each in found if each["impact"] in ("serious", "critical")]
    return [f"{each['id']}: {node['html'][:120]} {node['failureSummary']}" for each in worst for node in each["nodes"]]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_use_it(browser, server, theme):
    with opened(browser, server.url, setup=setup(), color_scheme=theme) as tab:
        page = tab.page
        page.wait_for_selector(".tour")
        assert _findings(page) == [], "an empty conversation"
        tab.ask("What is the capital of France?")
        tab.replies().last.locator("details.turn summary").click()
        page.wait_for_function("() => everwarm.tree.picture.places.size > 1 && everwarm.feed.overview.tiers")
        for view in VIEWS:
            tab.go(view)
            page.wait_for_function(f"() => document.body.dataset.view === '{view}'")
            assert _findings(page) == [], view
        page.set_viewport_size({"width": 390, "height": 780})
        page.click("#menu")
        assert _findings(page) == [], "the menu of a phone"
        page.evaluate(
            "document.getElementById('promise').append('x'); document.querySelector('.top').style.opacity = 0.2"
        )
        assert _findings(page), "the negative control: pale text is found"


def test_a_phone_has_one_bar_and_the_rest_opens_from_it(browser, server):
    with opened(browser, server.url, setup=setup(), viewport={"width": 390, "height": 780}, has_touch=True) as tab:
        page = tab.page
        tab.ask("What is the capital of France?")
        assert not page.locator(".talks").is_visible() and not page.locator("nav").is_visible()
        assert " % warm" in page.locator("#promise").inner_text()
        page.click("#menu")
        assert page.locator(".talk-list .title").inner_text() == "What is the capital of France?"
        assert page.locator("#menu").get_attribute("aria-expanded") == "true"
        page.click("[data-go=live]")
        page.wait_for_function("() => document.body.dataset.view === 'live'")
        assert not page.locator("nav").is_visible()
        page.click("#menu")
        page.click("[data-go=chat]")
        page.click("#menu")
        page.click("#new-talk")
        assert not page.locator(".talks").is_visible() and page.locator(".tour").is_visible()


def test_it_looks_right_on_wide_and_narrow_screens(browser, server):
    SHOTS.mkdir(parents=True, exist_ok=True)
    with opened(browser, server.url, setup=setup()) as tab:
        for question in (
            "Remember this: the code of the blue door is 4417.",
            "What is 3 plus 4?",
            "What is the code of the blue door?",
        ):
            tab.ask(question)
        tab.questions().nth(1).get_by_role("button", name="Edit").click()
        tab.page.locator(".edit textarea").fill("What is the capital of Italy?")
        tab.page.locator(".edit").get_by_role("button", name="Send").click()
        tab.wait_written()
        tab.page.wait_for_function("() => everwarm.tree.picture.places.size > 4")
        tab.page.mouse.click(5, 5)
        ground = set()
        for theme in ("light", "dark"):
            tab.page.emulate_media(color_scheme=theme)
            ground.add(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))
            for width, name in WIDTHS:
                tab.page.set_viewport_size({"width": width, "height": 820})
                for view in ("chat", "tree", "live", "models"):
                    tab.page.evaluate("view => { location.hash = view }", view)
                    tab.page.wait_for_selector(f"#view-{view}")
                    if view == "live":
                        tab.page.wait_for_selector(".requests li[data-id]")
                    _settled(tab)
                    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)
                    assert tab.page.locator(".top").bounding_box()["height"] <= 56, "one bar"
                    tab.page.screenshot(path=SHOTS / f"{view}-{name}-{theme}.png")
        assert len(ground) == 2
        before = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        tab.page.set_viewport_size({"width": 1024, "height": 760})
        tab.page.click("#theme")
        assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") != before
