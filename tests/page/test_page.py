"""The page at ``/`` in a real browser against a real server: chat and branches, the tree, models, errors, safety."""

from __future__ import annotations

import base64
import json
import os
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import Tab, opened, setup
from support.fake_hub import FakeHub, Repo
from support.image_files import data_url
from support.models import EMBEDDED, tiny_model, tiny_vision
from support.server import Server, frozen, serving, serving_models, until, words

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "screenshots"
KEY = "a-key-of-some-length"


def act(tab: Tab, message: Any, name: str) -> None:
    message.get_by_role("button", name=name).click()


# how it is served


def test_browsers_get_the_page_and_programs_get_json(server):
    page = server.get("/", Accept="text/html,application/xhtml+xml")
    assert page.headers["content-type"] == "text/html; charset=utf-8" and b"<!doctype html>" in page.data
    assert server.get("/", Accept="*/*").data == page.data
    for accept in ("application/json", "application/json, text/plain, */*"):
        assert server.get("/", Accept=accept).json["name"] == "everwarm"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy and "form-action 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff" and page.headers["vary"] == "accept"
    again = server.get("/", Accept="text/html", If_None_Match=page.headers["etag"])
    assert again.status == 304 and again.data == b""
    assert server.get("/", Accept="text/html", If_None_Match='"other"').status == 200


def test_files_are_served_by_name_only(server):
    script = server.get("/page/main.js")
    assert script.status == 200 and script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "default-src 'none'" in script.headers["content-security-policy"]
    for path in (
        "/page/",
        "/page/nothing.js",
        "/page/..%2fcache_api.py",
        "/page/%2e%2e/%2e%2e/app.py",
        "/page/index.html",
    ):
        assert server.get(path).status == 404, path
    assert server.post("/page/main.js", {}).status == 405


def test_nothing_is_written_inline_and_nothing_is_parsed_as_markup():
    folder = ROOT / "src" / "everwarm" / "gateway" / "admin" / "page"
    text = {path.name: path.read_text() for path in folder.iterdir()}
    assert (
        "<style" not in text["index.html"]
        and " style=" not in text["index.html"]
        and " on" + "click" not in text["index.html"]
    )
    for name, script in text.items():
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http://",
            "https://",
        ):
            assert word not in re.sub(r"http://www\.w3\.org/[\w/]+", "", script), (
                f"{name}: {word}"
            )  # names of namespaces
        assert script.count("\n") <= 400, name


# chat


def test_a_turn_says_what_was_reused_and_what_was_read(tab, server):
    assert "Paris" in tab.ask("What is the capital of France?")
    n_first = sum(tab.figures())
    tab.ask("What is 3 plus 4?")
    n_cached, n_read = tab.figures()
    assert n_cached > 160 and n_read < 60 and n_cached + n_read > n_first
    shown = tab.page.evaluate("everwarm.chat.talk")
    timings = [each["timings"] for each in shown["messages"].values() if each["role"] == "assistant"]
    assert [(each["cache_n"], each["prompt_n"]) for each in timings] == [tab.figures(0), tab.figures(1)]
    row = server.get("/cache/requests?limit=1").json["requests"][0]
    assert abs(row["ttft_ms"] - timings[-1]["queue_ms"] - timings[-1]["prompt_ms"]) < 1e-6, "one first token"
    assert "first token" in tab.replies().last.locator(".first").inner_text()
    saved = tab.replies().last.locator(".saved").inner_text()
    assert saved.startswith(f"{n_cached} of {n_cached + n_read} tokens already warm: ")
    tab.replies().last.locator("details.turn summary").click()
    why = tab.replies().last.locator(".why")
    tab.page.evaluate("everwarm.chat.render(Object.values(everwarm.chat.talk.messages))")
    tab.page.evaluate("everwarm.chat.compare(Object.values(everwarm.chat.talk.messages).at(-1))")
    assert "tokens" in why.inner_text() and why.locator(".phases i").count() >= 2
    thought = tab.replies().last.locator(".thinking")
    assert not thought.locator(".thought").is_visible()
    thought.locator("summary").click()
    assert thought.locator(".thought").inner_text()


def test_a_turn_says_what_reading_all_of_it_would_have_taken(tab):
    cases = [[0, 4012, 1900.0, None], [3981, 31, 50.0, 1900.0], [3981, 31, 50.0, None], [20, 5, 8.0, 4.0]]
    say = """async (cases) => { const words = await import('/page/words.js');
        return cases.map((each) => words.counterfactual(...each)) }"""
    output = tab.page.evaluate(say, cases)
    assert output == [
        "All 4,012 tokens were cold: read in 1.9 s",
        "3,981 of 4,012 tokens already warm: 50 ms instead of 1.9 s",
        "3,981 of 4,012 tokens already warm: 50 ms",
        "20 of 25 tokens already warm: 8.0 ms",
    ]


def test_three_actions_prove_the_promise_and_the_header_says_it(tab, server):
    page = tab.page
    page.wait_for_function("() => everwarm.feed.overview && everwarm.chat.n_ctx")
    assert page.locator(".tour button:enabled").count() == 1
    for step in (1, 2, 3):
        page.click(f"[data-step='{step}']")
        tab.wait_written()
    assert tab.questions().count() == 2 and "2/2" in tab.questions().last.locator(".branches").inner_text()
    assert sum(tab.figures(0)) > 1000 and tab.figures(1)[0] > 1000 and tab.figures(1)[1] < 60, "only the edit was read"
    tab.replies().last.locator(".saved", has_text=" instead of ").wait_for()
    assert page.locator(".tour .done").count() == 3
    kept = server.get("/cache").json
    page.wait_for_function("n => everwarm.feed.overview.tokens.reused === n", arg=kept["tokens"]["reused"])
    shown = page.locator("#promise").inner_text()
    assert f"{kept['tokens']['reused']:,} tokens not read" in shown and " % warm" in shown and " saved" in shown
    server.ask("/completion", {"prompt": words(20, 56), "n_predict": 1})
    server.ask("/completion", {"prompt": words(20, 56), "n_predict": 1})
    now = f"{server.get('/cache').json['tokens']['reused']:,} tokens not read"
    page.wait_for_function("text => document.getElementById('promise').textContent.includes(text)", arg=now)


def test_a_reply_streams_and_can_be_stopped(tab, server):
    tab.page.evaluate("everwarm.chat.setup.max_tokens = 4000")
    seen = """() => { const m = Object.values(everwarm.chat.talk.messages).at(-1);
        return m.isWriting && (m.content.length + (m.thinking ?? '').length) > 20 }"""
    tab.page.evaluate("everwarm.chat.extra = {ignore_eos: true}")
    tab.send("Tell me a short story about a lamp.")
    tab.page.wait_for_function(seen)
    assert tab.page.locator("#stop").is_visible() and not tab.page.locator("#send").is_visible()
    assert tab.replies().last.locator(".body").inner_text()
    tab.page.keyboard.press("Escape")
    tab.wait_written()
    assert tab.page.locator("#send").is_visible() and not tab.page.locator("#stop").is_visible()
    until(server.is_idle, "the engine has stopped, too")
    assert server.get("/cache/requests?limit=1").json["requests"][0]["status"] == "cancelled"


def test_editing_regenerating_and_branching_reuse_the_past(tab):
    tab.ask("What is the capital of France?")
    tab.ask("What is 3 plus 4?")
    n_prompt = sum(tab.figures())
    act(tab, tab.replies().last, "Regenerate")
    tab.wait_written()
    assert tab.figures()[1] <= 16 and sum(tab.figures()) == n_prompt, "the same prompt"
    assert "2/2" in tab.replies().last.locator(".branches").inner_text()
    act(tab, tab.questions().first, "Edit")
    tab.page.locator(".edit textarea").fill("What is the capital of Italy?")
    tab.page.locator(".edit").get_by_role("button", name="Send").click()
    tab.wait_written()
    assert tab.questions().count() == 1 and "Rome" in tab.replies().last.inner_text()
    assert tab.figures()[0] > 150, "the system prompt was not read again"
    tab.page.get_by_role("button", name="Previous branch").first.click()
    assert tab.questions().count() == 2 and "France" in tab.questions().first.inner_text()
    act(tab, tab.replies().first, "Branch")
    assert tab.questions().count() == 1 and tab.page.locator(".wait-branch").is_visible()
    tab.ask("What is 12 plus 9?")
    assert tab.figures()[0] > 160 and "2/2" in tab.questions().last.locator(".branches").inner_text()


def test_conversations_outlive_the_tab_and_can_be_forgotten(tab):
    tab.ask("What is the capital of France?")
    tab.page.keyboard.press("Escape")
    tab.page.click("#new-talk")
    assert tab.replies().count() == 0
    tab.ask("What is 3 plus 4?")
    tab.page.reload()
    tab.page.wait_for_function("() => window.everwarm")
    titles = tab.page.locator(".talk-list .title")
    assert titles.all_inner_texts() == ["What is 3 plus 4?", "What is the capital of France?"]
    titles.last.click()
    assert "Paris" in tab.replies().last.inner_text() and sum(tab.figures()) > 160
    tab.page.get_by_role("button", name="Forget What is 3").click()
    assert titles.count() == 1


def test_the_keyboard_is_enough(tab):
    page = tab.page
    page.keyboard.type("What is 3 plus 4?")  # the composer has the focus
    page.keyboard.press("Enter")
    tab.wait_written()
    assert tab.replies().count() == 1
    page.locator(".messages").focus()
    for key, view in (("2", "tree"), ("3", "live"), ("4", "models"), ("1", "chat")):
        page.keyboard.press(key)
        page.wait_for_function(f"() => document.body.dataset.view === '{view}'")
    page.keyboard.press("r")
    tab.wait_written()
    assert "2/2" in tab.replies().last.inner_text()
    page.keyboard.press("?")
    assert page.locator("#help-dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "say"


def test_images_can_be_shown_to_a_model_that_sees(browser, tmp_path):
    model, mmproj = tiny_vision("qwen35")
    with serving("--mmproj", str(mmproj), model=model) as server, opened(browser, server.url, setup=setup("")) as tab:
        tab.page.wait_for_selector("#attach")
        kind, data = data_url(1).split(",")
        file = {"name": "a.png", "mimeType": kind[5:].split(";")[0], "buffer": base64.b64decode(data)}
        tab.page.set_input_files(".composer input[type=file]", file)
        tab.page.wait_for_selector(".attached img")
        tab.ask("What is this?")
        assert tab.questions().last.locator(".pictures img").count() == 1
        assert sum(tab.figures()) > 40, "the image is part of the prompt"


def test_the_chat_of_a_blind_model_takes_no_images(tab):
    tab.page.wait_for_function("() => everwarm.chat.model")
    assert not tab.page.locator("#attach").is_visible()


# safety

EVIL = '<img src=x onerror="boom()"><script>boom()</script> [a](javascript:boom()) **b** `<b>c</b>`'


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    call = {"name": "look", "arguments": {"what": EVIL}}
    lines = [
        {"when": "It is sunny", "say": "Good.\n</think>\n\nThe sun shines."},
        {"when": "please call", "say": f"I call.\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>"},
        {"when": "onerror", "say": f"{EVIL}\n</think>\n\n{EVIL}\n\n```html\n{EVIL}\n```\n\n- one\n- {EVIL}"},
    ]
    (tmp_path / "script.json").write_text(json.dumps(lines))
    monkeypatch.setenv("EVERWARM_SCRIPT", str(tmp_path / "script.json"))
    monkeypatch.setenv("EVERWARM_TEST_HOOK", "support.scripted_hook:install")
    paths = (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    with serving("--cache-text") as server:
        yield server


def test_markup_from_anybody_stays_text(browser, scripted):
    with opened(browser, scripted.url, setup=setup(EVIL)) as tab:
        tab.page.evaluate("everwarm.chat.setup.max_tokens = 400")
        shown = tab.ask(EVIL)
        assert '<img src=x onerror="boom()">' in shown and "<script>" in shown
        assert tab.replies().last.locator("pre code").inner_text() == EVIL
        assert tab.replies().last.locator("strong").first.inner_text() == "b"
        assert tab.replies().last.locator("li").count() == 2
        tab.replies().last.locator(".thinking summary").click()
        tab.replies().last.locator("details.turn summary").click()
        tab.page.wait_for_function("() => everwarm.tree.picture.rows.length")
        output = "[...everwarm.tree.picture.places.values()].find((p) => p.node.words?.includes('onerror'))"
        tab.page.wait_for_function(f"() => {output}")
        tab.page.evaluate(f"everwarm.tree.select({output})")
        assert "onerror" in tab.page.locator(".node-card .words").inner_text()
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        tab.page.evaluate("tool => { everwarm.chat.extra = {tools: [tool]} }", tool)
        tab.send("please call")
        tab.wait_written()
        assert "onerror" in tab.page.locator(".call").last.inner_text()
        tab.go("live")
        tab.page.wait_for_selector(".requests li")
        assert tab.page.locator("main img, main script, main iframe, main a[href^=javascript]").count() == 0
        tab.page.evaluate(
            "const i = document.createElement('img'); i.src = 'http://127.0.0.2:9/x'; document.body.append(i)"
        )
        tab.page.wait_for_function(
            "() => window.broken.length"
        )  # the negative control: the policy would have been broken
        tab.page.evaluate("window.broken = []")
        tab.asked[:] = [each for each in tab.asked if "127.0.0.2" not in each]
        tab.output.clear()


def test_the_result_of_a_tool_can_be_entered(browser, scripted):
    with opened(browser, scripted.url, setup=setup("")) as tab:
        page = tab.page
        page.evaluate("everwarm.chat.setup.max_tokens = 400")
        page.evaluate('everwarm.chat.setup.tools = \'[{"name": "look", "parameters": {}}]\'')
        tab.send("please call")
        tab.wait_written()
        assert page.locator(".call b").inner_text() == "look"
        page.fill(".results textarea", "It is sunny.")
        page.click("#send-results")
        tab.wait_written()
        assert "The sun shines." in tab.replies().last.inner_text()
        assert (
            "It is sunny." in page.locator(".message.tool").inner_text() and not page.locator(".results").is_visible()
        )
        results = page.evaluate("Object.values(everwarm.chat.talk.messages).filter((m) => m.role === 'tool')")
        assert [each["content"] for each in results] == ["It is sunny."] and results[0]["call"]
        page.reload()
        page.wait_for_function("() => window.everwarm")
        assert page.locator(".message.tool").count() == 1


# the tree


def test_the_tree_grows_while_somebody_talks(tab, server):
    tab.ask("What is the capital of France?")
    tab.go("tree")
    tab.page.wait_for_function("() => everwarm.tree.picture.places.size > 1 && everwarm.feed.overview")
    before = tab.page.evaluate("everwarm.tree.picture.places.size")
    server.ask("/completion", {"prompt": words(60, 77), "n_predict": 4})
    tab.page.wait_for_function(f"() => everwarm.tree.picture.places.size > {before}")
    body = {"prompt": words(40, 78), "n_predict": 3000, "ignore_eos": True, "stream": True}
    connection = server.connect()
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    tab.page.wait_for_function("() => everwarm.tree.running().length === 1")
    first = tab.page.evaluate("everwarm.tree.running()[0].x")
    tab.page.wait_for_function(f"() => everwarm.tree.running()[0]?.x > {first}")
    connection.close()
    tab.page.wait_for_function("() => everwarm.tree.running().length === 0")


def test_nodes_are_pinned_and_dropped_from_the_page(tab, server):
    server.ask("/completion", {"prompt": f"Quite another text. {words(60, 91)}", "n_predict": 4})
    tab.go("tree")
    page = tab.page
    page.wait_for_function("() => everwarm.tree.picture.places.size > 1")
    page.wait_for_function(
        "() => [...everwarm.tree.picture.places.values()].some((p) => p.node.words?.includes('Quite'))"
    )
    spot = page.evaluate("""() => { const t = everwarm.tree;
        const p = [...t.picture.places.values()].find((p) => p.node.words?.includes('Quite'));
        const c = t.drawing.camera; const box = t.canvas.getBoundingClientRect();
        return {x: box.x + (c.px(p.from) + c.px(p.to)) / 2, y: box.y + c.py(p.row), id: p.node.id} }""")
    page.mouse.move(spot["x"], spot["y"])
    assert "Quite" in page.locator(".tip").inner_text()
    page.mouse.click(spot["x"], spot["y"])
    assert "Quite" in page.locator(".node-card .words").inner_text()

    def node() -> Any:
        found = [each for each in server.get("/cache/tree").json["nodes"] if each["id"] == spot["id"]]
        return found[0] if found else None

    page.click("#node-pin")
    page.wait_for_function("() => document.getElementById('node-pin')?.textContent === 'Unpin'")
    assert node()["pinned"] is True
    page.click("#node-pin")
    page.wait_for_function("() => document.getElementById('node-pin')?.textContent === 'Pin'")
    assert node()["pinned"] is False
    page.click("#node-drop")
    assert node() is not None, "once is not enough"
    page.click("#node-drop")
    page.wait_for_function(f"() => !everwarm.tree.picture.places.has({spot['id']})")
    assert node() is None and not page.locator(".node-card").is_visible()


def test_after_a_restart_the_tree_shows_the_conversation_and_dropping_it_removes_the_files(browser, tmp_path):
    flags = ("--disk-cache", "64MiB", "--state-dir", str(tmp_path / "states"), "--cache-text")
    with serving(*flags) as server:
        server.ask("/completion", {"prompt": f"Quite another text. {words(60, 91)}", "n_predict": 4})
        until(lambda: bool(list(tmp_path.rglob("state-*.ew"))), "it is on disk")
    with serving(*flags) as server, opened(browser, server.url, setup=setup()) as tab:
        page = tab.page
        page.wait_for_function("() => document.getElementById('promise').textContent === '1 conversation still warm'")
        assert "1 conversation still warm" in page.locator(".empty .kept").inner_text()
        tab.go("tree")
        page.wait_for_function("() => everwarm.tree.picture.places.size > 1")
        spot = page.evaluate("""() => { const t = everwarm.tree;
            const p = [...t.picture.places.values()].find((p) => p.node.words?.includes('Quite'));
            const c = t.drawing.camera; const box = t.canvas.getBoundingClientRect();
            t.drawNow();
            const dot = document.createElement('canvas').getContext('2d');
            const span = document.body.appendChild(document.createElement('span'));
            span.style.color = 'var(--warm-soft)';
            dot.fillStyle = getComputedStyle(span).color;
            dot.fillRect(0, 0, 1, 1);
            return {x: box.x + (c.px(p.from) + c.px(p.to)) / 2, y: box.y + c.py(p.row), id: p.node.id,
                    mark: [...t.canvas.getContext('2d').getImageData(c.px(p.to), c.py(p.row), 1, 1).data],
                    soft: [...dot.getImageData(0, 0, 1, 1).data]} }""")
        assert spot["id"] < 0 and spot["mark"] == spot["soft"], "a square that is not filled"
        page.mouse.move(spot["x"], spot["y"])
        tip = page.locator(".tip").inner_text()
        assert "only on disk" in tip and "Quite" in tip
        page.mouse.click(spot["x"], spot["y"])
        assert "disk" in page.locator(".node-card .facts").inner_text()
        page.screenshot(path=SHOTS / "tree-on-disk.png")
        assert list(tmp_path.rglob("*.ew"))
        page.click("#node-drop")
        page.click("#node-drop")
        page.wait_for_function("() => everwarm.tree.picture.places.size === 0")
        assert not list(tmp_path.rglob("*.ew")), "every file of it is gone"


def synthetic(n_nodes: int) -> list[dict[str, Any]]:
    """A tree of conversations of twenty checkpoints each that share a beginning."""
    made: list[dict[str, Any]] = []

    def grow(parent: dict[str, Any] | None, length: int) -> dict[str, Any]:
        nth, start = len(made), 0 if parent is None else parent["end"]
        tiers = (["device", "ram"], ["ram"], ["disk"], ["ram", "disk"])[nth % 4]
        kept = {"kind": "boundary", "tiers": tiers, "bytes": 430_000}
        node = {
            "id": nth + 1,
            "parent": parent and parent["id"],
            "start": start,
            "end": start + length,
            "namespace": "ab" * 6,
        }
        node |= {
            "words": f"words {nth} of a message",
            "n_children": 1,
            "last_use": 1.7e9,
            "hits": nth % 7,
            "pinned": nth % 500 == 0,
        }
        made.append(node | {"checkpoint": kept, "kv": {"tiers": tiers, "bytes": 1000}, "running": None})
        return made[-1]

    shared = grow(grow(None, 0), 2000)
    while len(made) < n_nodes:
        node = shared
        for step in range(min(20, n_nodes - len(made))):
            node = grow(node, 37 + (step * 53 + len(made)) % 200)
    return made


def test_ten_thousand_nodes_stay_usable(tab):
    nodes = synthetic(10_000)

    def answer(route: Any) -> None:
        after = route.request.url.partition("after=")[2]
        at = int(after or 0)
        following = str(at + 1000) if at + 1000 < len(nodes) else None
        page = {"version": 1, "n_total": len(nodes), "next": following, "nodes": nodes[at : at + 1000]}
        route.fulfill(content_type="application/json", body=json.dumps(page))

    tab.page.route("**/cache/tree?*", answer)
    tab.go("tree")
    tab.page.wait_for_function("() => everwarm.tree.picture.places.size === 10000")
    times = tab.page.evaluate("""() => { const t = everwarm.tree; const box = t.canvas.getBoundingClientRect();
        const timed = (act) => { const began = performance.now(); act(); t.drawNow(); return performance.now() - began };
        const found = {hover: [], zoom: [], pan: []};
        for (let i = 0; i < 15; i++) {
          const at = {offsetX: box.width * (0.3 + 0.04 * i), offsetY: box.height * (0.2 + 0.04 * i), pointerId: 1};
          found.hover.push(timed(() => t.move(at)));
          found.zoom.push(timed(() => t.zoom(i % 2 ? 1.3 : 1 / 1.25, at.offsetX, at.offsetY)));
          found.pan.push(timed(() => { t.drawing.camera.pan(9, -7); t.drawing.isStale = true }));
        }
        return found }""")
    medians = {name: statistics.median(values) for name, values in times.items()}
    print("ten thousand nodes, ms:", {name: round(value, 1) for name, value in medians.items()})
    assert max(medians.values()) < 250, medians
    tab.page.screenshot(path=SHOTS / "tree-10000.png")


# live


def test_the_live_view_says_what_the_server_says(tab, server):
    tab.ask("What is the capital of France?")
    tab.go("live")
    tab.page.wait_for_selector(".requests li[data-id]")
    tab.page.wait_for_function("() => everwarm.feed.overview?.tiers")
    tab.page.wait_for_function("() => document.querySelector('.tile .figure').textContent.includes('%')")
    rows = server.get("/cache/requests").json["requests"]
    first = tab.page.locator(".requests li").first
    assert first.get_attribute("data-id") == rows[0]["id"]
    assert f"{rows[0]['n_cached']} reused · {rows[0]['n_read']} read" in first.inner_text().replace(",", "")
    first.locator("button").click()
    assert rows[0]["id"] in first.locator(".why").inner_text()
    assert first.locator(".phases i").count() == sum(phase["ms"] > 0 for phase in rows[0]["phases"])
    server.ask("/completion", {"prompt": words(20, 55), "n_predict": 2})
    newest = server.get("/cache/requests?limit=1").json["requests"][0]["id"]
    tab.page.wait_for_function(f"() => document.querySelector('.requests li').dataset.id === '{newest}'")
    assert tab.page.locator("#tiers .meter").count() == 2 and "512 MiB" in tab.page.locator("#tiers").inner_text()


def test_the_stream_is_closed_when_nobody_looks(tab):
    page = tab.page
    tab.go("live")
    page.wait_for_function("() => everwarm.feed.isOpen && everwarm.feed.overview")
    turned = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate("Object.defineProperty(document, 'hidden', {configurable: true, get: () => true})")
    page.evaluate(turned)
    page.wait_for_function("() => !everwarm.feed.isOpen")
    page.evaluate(f"delete document.hidden; {turned}")
    page.wait_for_function("() => everwarm.feed.isOpen")


# models


def test_models_are_swapped_and_failures_are_told(browser, tmp_path):
    (tmp_path / "one.gguf").symlink_to(tiny_model("qwen35"))
    (tmp_path / "two.gguf").symlink_to(tiny_model("mamba2"))
    evil = "<img src=x onerror=boom()>"
    (tmp_path / f"{evil}.gguf").write_bytes(b"GGUF but not really")
    with (
        serving_models(tmp_path) as server,
        opened(browser, server.url, setup=setup(""), path="/#models", refusals=(503,)) as tab,  # just being stopped
    ):
        page = tab.page
        page.wait_for_selector(".model")

        def card(name: str, status: str) -> Any:
            page.wait_for_selector(f".model[data-model={name}][data-status={status}]")
            return page.locator(f".model[data-model={name}]")

        failed = page.locator(".model[data-status=failed]")
        assert evil in failed.inner_text() and failed.locator(".wrong").inner_text()
        card("one", "unloaded").get_by_role("button").click()
        card("one", "loaded")
        page.wait_for_function("() => document.querySelector('[data-model=one]').innerText.includes('0 conversations')")
        shown = page.locator("[data-model=one]").inner_text()
        assert "qwen35" in shown and "4,096 of " in shown and "MiB" in shown and "F32" in shown
        assert "mamba2" in page.locator("[data-model=two]").inner_text(), "from the file: it is not loaded"
        card("two", "unloaded").get_by_role("button").click()
        card("two", "loaded")
        card("one", "unloaded")
        assert server.status_of("two") == "loaded" and server.status_of("one") == "unloaded"
        page.select_option("#model", "one")
        tab.go("chat")
        tab.ask("Hello!")
        assert tab.page.evaluate("Object.values(everwarm.chat.talk.messages).at(-1).model") == "one"
        assert server.status_of("one") == "loaded" and server.status_of("two") == "unloaded"
        tab.go("models")
        card("one", "loaded").get_by_role("button").click()
        card("one", "unloaded")


def test_a_model_is_downloaded_used_and_deleted_on_the_page(browser, tmp_path, monkeypatch):
    repo = Repo({"Tiny-Q8_0.gguf": EMBEDDED.read_bytes()})
    with FakeHub({"acme/Tiny": repo}).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        with (
            serving_models(Path("hf:"), "--allow-pull") as server,
            opened(browser, server.url, setup=setup(""), path="/#models", refusals=(500,)) as tab,
        ):
            page = tab.page

            def pull(name: str, output: str) -> None:
                page.fill("#pull-name", name)
                page.click("#pull")
                page.wait_for_function(
                    "said => document.getElementById('pull-said').innerText.includes(said)", arg=output
                )

            page.wait_for_selector(".pull:not([hidden])")
            pull("acme/None", "there is no repository acme/None")
            pull("acme/Tiny", "acme/Tiny is here.")
            card = page.locator(".model[data-model='acme/Tiny:Q8_0']")
            card.wait_for()
            assert not page.locator("#pull-stop").is_visible() and page.locator("#pull-name").input_value() == ""
            tab.go("chat")
            tab.ask("What is the capital of France?")
            tab.go("models")
            card.get_by_role("button", name="Delete").click()
            page.get_by_role("button", name="Delete its files?").click()
            card.wait_for(state="detached")
            assert server.get("/api/tags").json["models"] == []


def test_where_it_is_not_allowed_no_download_is_offered(tab):
    tab.go("models")
    tab.page.wait_for_selector(".model")
    assert not tab.page.locator(".pull").is_visible() and tab.page.locator(".model button").count() == 1


# errors


def is_cut(tab, width: int) -> bool:
    """Whether the header's promise ends in dots in a window of this width."""
    tab.page.set_viewport_size({"width": width, "height": 800})
    cut: bool = tab.page.evaluate(
        "(() => { const e = document.getElementById('promise'); return e.scrollWidth > e.clientWidth; })()"
    )
    return cut


def test_a_server_that_is_gone_is_told_and_found_again(browser, server):
    with opened(browser, server.url, setup=setup(), refusals=(0,)) as tab:
        tab.page.wait_for_function("() => everwarm.feed.isOpen")
        tab.page.context.set_offline(True)
        tab.send("What is the capital of France?")
        tab.page.wait_for_selector("#banner:not([hidden])")
        assert "cannot be reached" in tab.page.locator("#banner").inner_text()
        tab.page.wait_for_selector(".failed")
        assert "cannot be reached" in tab.page.locator(".failed").inner_text()
        assert tab.page.locator("#promise").inner_text().startswith("as of ")
        assert [width for width in (390, 1024, 1280) if is_cut(tab, width)] == []
        tab.go("models")
        assert "last seen" in tab.page.locator(".model .state").inner_text()
        assert tab.page.locator(".model button").is_disabled()
        tab.go("chat")
        tab.page.context.set_offline(False)
        tab.page.wait_for_selector("#banner", state="hidden")
        assert "as of " not in tab.page.locator("#promise").inner_text()
        tab.page.get_by_role("button", name="Try again").click()
        tab.wait_written()
        assert "Paris" in tab.replies().last.inner_text()


def test_an_engine_that_is_started_again_is_told(tab, server):
    tab.go("live")
    tab.page.wait_for_function("() => everwarm.feed.overview?.engine.state === 'ready'")
    old = server.engine_pid
    server.kill_engine()
    with frozen(server.next_engine({old})):
        tab.page.wait_for_selector("#banner:not([hidden])")
        assert "started again" in tab.page.locator("#banner").inner_text()
    tab.page.wait_for_selector("#banner", state="hidden")
    until(server.is_ready, "it is back")


def test_a_locked_server_asks_for_the_key_and_keeps_it_in_the_tab(browser):
    with (
        serving("--api-key", KEY, "--max-requests", "1", n_ctx=512) as server,
        opened(browser, server.url, setup=setup(""), refusals=(400, 401, 429)) as tab,
    ):
        page = tab.page
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.getElementById('key-error').textContent")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-dialog", state="hidden")
        tab.ask("What is 3 plus 4?")
        assert tab.figures()[1] > 0
        page.wait_for_function("() => everwarm.tree.picture.places.size > 1 && everwarm.feed.isOpen")
        page.reload()
        page.wait_for_function("() => window.everwarm?.chat.model")
        assert (
            not page.locator("#key-dialog").is_visible()
            and page.evaluate("localStorage.getItem('everwarm.key')") is None
        )
        assert KEY not in "".join(tab.asked)
        _overflow_and_crowd(tab, server)


def test_a_users_key_sees_its_own_and_is_told_what_it_may_not(browser, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[keys.{name}]\nkey = "{name}-{KEY}"\nrole = "{name}"\n' for name in ("user", "admin")))
    keys.chmod(0o600)
    with (
        serving("--key-file", str(keys), n_ctx=2048) as server,
        opened(browser, server.url, setup=setup(""), refusals=(401,)) as tab,
    ):
        page = tab.page

        def enter(key: str) -> None:
            page.wait_for_selector("#key-dialog[open]")
            page.fill("#key", key)
            page.keyboard.press("Enter")
            page.wait_for_selector("#key-dialog", state="hidden")

        body = {"prompt": words(40, 6), "n_predict": 1}
        assert server.post("/completion", body, Authorization=f"Bearer admin-{KEY}").status == 200
        enter(f"user-{KEY}")
        tab.ask("What is 3 plus 4?")
        page.wait_for_function("() => everwarm.tree.picture.places.size > 1 && everwarm.feed.role === 'user'")
        assert (
            page.evaluate("new Set([...everwarm.tree.picture.places.values()].map((p) => p.node.namespace)).size") == 1
        )
        tab.go("models")
        page.wait_for_selector("#models-limits:not([hidden])")
        assert page.locator(".model button").is_disabled()
        page.click("#other-key")
        enter(f"admin-{KEY}")
        page.wait_for_selector("#models-limits", state="hidden")
        assert page.locator(".model button").is_enabled()


def _overflow_and_crowd(tab: Tab, server: Server) -> None:
    page = tab.page
    tab.send(words(900, 5))
    tab.wait_written()
    assert (
        "does not fit" in page.locator(".failed").last.inner_text()
        and "512" in page.locator(".failed").last.inner_text()
    )
    page.click("#new-talk")
    connection = server.connect()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    body = {"prompt": "Once", "n_predict": 100_000, "ignore_eos": True, "stream": True}
    with frozen(server.engine_pid):
        connection.request("POST", "/completion", json.dumps(body), headers)
        connection.getresponse()
        tab.send("What is 3 plus 4?")
        page.wait_for_selector(".failed")
        assert "busy" in page.locator(".failed").inner_text()
    connection.close()
