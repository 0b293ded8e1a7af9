"""What can be done with conversations: search, undo, files; the settings that go with a request; images."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.browser import Tab, opened, setup
from support.image_files import data_url
from support.models import tiny_vision
from support.server import serving


def output(id: str, parent: str, role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "parent": parent, "role": role, "content": content, **more}


def talk(id: str, question: str, answer: str) -> dict[str, Any]:
    messages = {"q": output("q", "root", "user", question), "a": output("a", "q", "assistant", answer)}
    return {"id": id, "title": question, "at": 5, "messages": messages, "chosen": {"root": "q", "q": "a"}, "cut": None}


KEPT = [talk("one", "About lamps", "They give light."), talk("two", "About doors", "The code is 4417.")]


@pytest.fixture
def kept(browser, server):
    once = "localStorage.getItem('everwarm.talks') ?? localStorage.setItem('everwarm.talks', %s);"
    script = setup("") + once % json.dumps(json.dumps(KEPT))
    with opened(browser, server.url, setup=script) as tab:
        yield tab


def titles(tab: Tab) -> list[str]:
    return [each.split("\n")[0] for each in tab.page.locator(".talk-list .title").all_inner_texts()]


def test_conversations_are_found_by_their_words(kept):
    kept.page.fill("#search", "CODE is")
    assert titles(kept) == ["About doors"] and "4417" in kept.page.locator(".snippet").inner_text()
    kept.page.fill("#search", "nothing like it")
    assert titles(kept) == []
    kept.page.fill("#search", "")
    assert titles(kept) == ["About lamps", "About doors"]


@pytest.mark.parametrize(
    ("message", "title"),
    [
        ("# Notes on **lamps**\nmore", "Notes on lamps"),
        ("See [the log](https://example.org/a) and `x = 1`", "See the log and x = 1"),
        ("```python\nprint(2 * 3 * 4)\n```", "print(2 * 3 * 4)"),
        ("\n\n- 2 ** 3 is eight", "2 ** 3 is eight"),
        ("  \n", "New conversation"),
    ],
)
def test_a_title_is_the_first_line_in_plain_words(tab, message, title):
    made = tab.page.evaluate("async (text) => (await import('/page/talk.js')).titleOf(text)", message)
    assert made == title


def test_a_forgotten_conversation_can_be_brought_back(kept):
    page = kept.page
    page.get_by_role("button", name="Forget About lamps").click()
    assert titles(kept) == ["About doors"]
    assert len(page.evaluate("JSON.parse(localStorage.getItem('everwarm.talks'))")) == 1, "it is gone from the browser"
    page.click("#undo")
    assert titles(kept) == ["About lamps", "About doors"] and "They give light." in kept.replies().inner_text()
    page.reload()
    page.wait_for_function("() => window.everwarm")
    assert titles(kept) == ["About lamps", "About doors"] and not page.locator("#undo").is_visible()


def test_conversations_go_into_a_file_and_come_back(kept, tmp_path):
    page = kept.page
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert file.name.startswith("everwarm-conversations-")
    for name in ("lamps", "doors"):
        page.get_by_role("button", name=f"Forget About {name}").click()
    assert titles(kept) == ["New conversation"]
    page.set_input_files("#import-file", file)
    page.wait_for_function("() => everwarm.chat.talks.length === 2")
    assert titles(kept) == ["About lamps", "About doors"] and "They give light." in kept.replies().inner_text()
    page.set_input_files("#import-file", file)
    page.wait_for_function("() => everwarm.chat.file.value === ''")
    assert len(titles(kept)) == 2, "the same ones are not there twice"


def test_a_strange_file_is_refused_with_the_reason_and_a_hostile_one_does_nothing(kept, tmp_path):
    page = kept.page

    def given(text: str) -> str:
        (tmp_path / "given.json").write_text(text)
        page.evaluate("everwarm.chat.wrong.textContent = ''")
        page.set_input_files("#import-file", tmp_path / "given.json")
        page.wait_for_function("() => everwarm.chat.wrong.textContent || everwarm.chat.talks.length !== 2")
        return str(page.locator(".talks .wrong").inner_text())

    head = {"everwarm": "conversations", "version": 1}
    assert "not JSON" in given("nonsense {")
    for body in ({}, [], {"everwarm": "conversations"}, {**head, "talks": {"a": 1}}):
        assert "no conversations" in given(json.dumps(body)), body
    for talks in (
        [],
        [None, 1, "a"],
        [{"id": "x", "messages": {}}],
        [{"id": "__proto__", "messages": {}, "chosen": {}}],
    ):
        assert "can be read" in given(json.dumps({**head, "talks": talks})), talks
    evil = talk("evil", "<img src=x onerror=boom()>", "[a](javascript:boom())")
    evil["messages"] |= {
        "loop": output("loop", "loop", "user", "round"),
        "bad": {"id": "bad", "parent": "a", "role": "system", "content": "no such role"},
        "odd": output("odd", "a", "user", "odd", pictures="x"),
        "toString": output("__proto__", "a", "user", "x"),
    }
    evil["chosen"] |= {"loop": "loop", "a": "bad", "toString": "valueOf"}
    odd = {"toString": 1}  # what cannot become a text
    evil["title"] = odd
    numbers = dict.fromkeys(("cache_n", "prompt_n", "prompt_ms", "restore_ms", "queue_ms"), 1.0)
    numbers |= dict.fromkeys(("predicted_n", "predicted_ms", "predicted_per_second"), 2.0)
    evil["messages"]["a"] |= {"model": odd, "thinking": odd, "calls": [{"function": {"name": odd}}, odd], "error": odd}
    evil["messages"]["a"] |= {"timings": numbers | {"cache": {"n_shared": 1, "reason": odd}}}
    evil["messages"]["q"] |= {"pictures": [odd, "javascript:boom()"], "timings": odd, "at": odd}
    assert given(json.dumps({**head, "talks": [evil]})) == ""
    assert titles(kept)[0] == "Conversation" and page.locator(".messages img").count() == 0
    assert page.evaluate("Object.keys(everwarm.chat.talk.messages)") == ["q", "a", "odd"]
    assert page.evaluate("everwarm.chat.talk.chosen") == {"root": "q", "q": "a"}


def test_settings_are_kept_bounded_and_sent(tab):
    page = tab.page
    sent: list[dict[str, Any]] = []
    page.on(
        "request", lambda each: sent.append(each.post_data_json) if each.url.endswith("/chat/completions") else None
    )
    page.click(".setup summary")
    for name, value in (("top_p", "0.9"), ("top_k", "-7"), ("min_p", ""), ("seed", "12"), ("temperature", "99")):
        page.fill(f"#setup-{name}", value)
        page.locator(f"#setup-{name}").blur()
    page.fill("#setup-stop", "END\n\nSTOP")
    page.fill("#setup-tools", "{")
    assert "Not JSON" in page.locator("#tools-wrong").inner_text()
    page.fill("#setup-tools", '[{"parameters": {}}]')
    assert "Tool 1 has no name" in page.locator("#tools-wrong").inner_text()
    page.fill("#setup-tools", '{"name": "look", "parameters": {"type": "object", "properties": {}}}')
    assert page.locator("#tools-wrong").inner_text() == ""
    page.click(".setup summary")
    tab.send("What is 3 plus 4?")
    tab.wait_written()
    body = sent[-1]
    assert (body["top_p"], body["top_k"], body["seed"], body["temperature"]) == (0.9, 0, 12, 5) and "min_p" not in body
    assert body["stop"] == ["END", "STOP"] and [each["function"]["name"] for each in body["tools"]] == ["look"]
    assert "5 more" in page.locator(".setup summary").inner_text()
    kept_setup = page.evaluate("JSON.parse(localStorage.getItem('everwarm.setup'))")
    assert kept_setup["sampling"] == {"top_p": 0.9, "top_k": 0, "seed": 12}


CARRY = """([event, urls]) => { const carried = new DataTransfer();
    for (const url of urls) { const [head, data] = url.split(','); const kind = head.slice(5).split(';')[0];
      carried.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], 'a', {type: kind})) }
    const given = event === 'paste' ? new ClipboardEvent('paste', {clipboardData: carried, bubbles: true})
                                    : new DragEvent('drop', {dataTransfer: carried, bubbles: true, cancelable: true});
    document.querySelector(event === 'paste' ? '#say' : '.messages').dispatchEvent(given) }"""


def test_pictures_can_be_pasted_and_dropped(browser, server, tab):
    model, mmproj = tiny_vision("qwen35")
    text = "data:text/html;base64,PGI+"
    with serving("--mmproj", str(mmproj), model=model) as seeing, opened(browser, seeing.url, setup=setup("")) as other:
        page = other.page
        page.wait_for_selector("#attach")
        page.evaluate(CARRY, ["paste", [data_url(1), text]])
        page.wait_for_function("() => document.querySelectorAll('.attached img').length === 1")
        page.evaluate(CARRY, ["drop", [data_url(2)]])
        page.wait_for_function("() => document.querySelectorAll('.attached img').length === 2")
        page.get_by_role("button", name="Take this image out").first.click()
        assert page.locator(".attached img").count() == 1
    tab.page.evaluate(CARRY, ["drop", [data_url(1)]])
    tab.page.wait_for_function("() => document.getElementById('said').textContent.includes('does not take images')")
    assert tab.page.locator(".attached img").count() == 0
