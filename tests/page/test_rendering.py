"""Replies as the server renders them: tables, links and code in the page, whatever a model writes."""

from __future__ import annotations

import json
from typing import Any

from support.browser import opened, setup

EVIL = "<script>boom()</script> [a](javascript:boom()) ![b](https://elsewhere.example/x.png) <img src=x onerror=boom()>"
REPLY = f"""## Title

| a | b |
|---|--:|
| 1 | {EVIL} |

See [this](https://example.org/x), where $x^2$ is.

```python
def f(x):
    return x
```

{EVIL}
"""


def kept(reply: str) -> str:
    """A script that puts a conversation into a fresh profile."""
    message = {
        "u": {"id": "u", "parent": "root", "role": "user", "content": "Hello"},
        "r": {"id": "r", "parent": "u", "role": "assistant", "content": reply},
    }
    talk = {"id": "t", "title": "Kept", "at": 1, "chosen": {"root": "u", "u": "r"}, "cut": None, "messages": message}
    return setup("") + f"localStorage.setItem('everwarm.talks', {json.dumps(json.dumps([talk]))});"


def test_a_reply_has_tables_links_and_highlighted_code_and_nothing_else(browser, server):
    with opened(browser, server.url, setup=kept(REPLY), permissions=["clipboard-read", "clipboard-write"]) as tab:
        page = tab.page
        message = page.locator(".message.assistant .said")
        message.locator("td.right").wait_for()
        assert message.locator("pre .keyword").all_inner_texts() == ["def", "return"]
        link = message.get_by_role("link", name="this")
        assert link.get_attribute("href") == "https://example.org/x" and "noopener" in link.get_attribute("rel")
        assert link.get_attribute("target") == "_blank"
        assert message.locator("math msup").evaluate("(each) => each.getBoundingClientRect().width") > 5, "it is drawn"
        assert message.locator("script, img, iframe, [onerror], a[href^=javascript]").count() == 0
        assert "<script>boom()</script>" in message.inner_text()
        message.locator(".code .copy").click()
        page.wait_for_function("() => document.querySelector('.code .copy').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == "def f(x):\n    return x"
        page.locator(".message.assistant .actions .copy").click()
        page.wait_for_function("() => document.querySelector('.assistant .actions .copy').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == REPLY


def test_the_page_builds_no_element_that_it_does_not_know(browser, server):
    evil = [
        ["script", {}, "boom()"],
        ["img", {"src": "x", "onerror": "boom()"}],
        ["a", {"href": "javascript:boom()"}, "go"],
    ]
    evil.append(["p", {"onclick": "boom()", "class": "top"}, "words"])
    evil.append(["math", {"onclick": "boom()", "href": "javascript:boom()"}, ["maction", {}, "x"], ["mi", {}, "y"]])

    def answer(route: Any) -> None:
        n = len(route.request.post_data_json["texts"])
        route.fulfill(content_type="application/json", body=json.dumps({"trees": [evil] * n}))

    with opened(browser, server.url, setup=setup("")) as tab:
        tab.page.route("**/render", answer)
        found = tab.page.evaluate("""async () => { const { fetchRendered, rendered } = await import('/page/render.js');
            await fetchRendered(['**bold**']);
            const box = document.createElement('div'); box.append(...rendered('**bold**')); document.body.append(box);
            return box.outerHTML }""")
        assert (
            found
            == "<div><span>boom()</span><span></span><span>go</span><p>words</p><math><span>x</span><mi>y</mi></math></div>"
        )


def test_a_reply_that_the_server_does_not_render_is_shown_all_the_same(browser, server):
    long = "**bold** words\n\n" * 3000
    with opened(browser, server.url, setup=kept(long)) as tab:
        message = tab.page.locator(".message.assistant .said")
        assert message.locator("strong").count() == 3000


def test_bad_bodies_are_refused_and_large_ones_are_bounded(server):
    assert server.post("/render", {"texts": ["*a*"]}).json["trees"] == [[["p", {}, ["em", {}, "a"]]]]
    assert server.post("/render", {"texts": ["a" * 40_000, "b"]}).json["trees"] == [None, [["p", {}, "b"]]]
    for body in ({}, {"texts": "a"}, {"texts": [1]}, {"texts": ["a"] * 65}, {"texts": ["a" * 70_000] * 2}):
        assert server.post("/render", body).status == 400, body
