"""The tree around the open conversation: one line, ticks for what it left behind, a row for every other conversation."""

from __future__ import annotations

from typing import Any

from support.server import words

ARRANGED = """async ([nodes, talks]) => { const { arrange } = await import('/page/trunk.js');
    const picture = arrange(nodes, talks, talks[0], 'ns');
    return {rows: picture.rows.map((row) => row.map((place) => place.node.id)), here: picture.here?.node.id ?? null,
            ticks: (picture.ticks ?? []).map((place) => place.node.id),
            labels: (picture.labels ?? []).map((label) => [label.row, label.words]),
            turns: (picture.turns ?? []).map((turn) => [turn.start, turn.end, turn.words])} }"""


def node(
    id: int, parent: int | None, start: int, end: int, *, used: float = 1.0, words: str | None = None
) -> dict[str, Any]:
    kept = {"kind": "stable", "tiers": ["ram"], "bytes": 1}
    about = {"id": id, "parent": parent, "start": start, "end": end, "namespace": "ns", "words": words, "n_children": 0}
    return about | {
        "last_use": used,
        "hits": 0,
        "pinned": False,
        "checkpoint": kept,
        "kv": {"tiers": ["ram"], "bytes": 1},
        "running": None,
    }


def talk(title: str, lengths: list[tuple[int, int]], at_ms: float = 1000.0) -> dict[str, Any]:
    """A conversation of questions and replies; ``lengths`` are tokens of each prompt and of its reply."""
    messages: dict[str, Any] = {}
    chosen, before = {}, "root"
    for nth, (n_prompt, n_reply) in enumerate(lengths):
        question, reply = f"{title}-q{nth}", f"{title}-r{nth}"
        timings = {"cache_n": n_prompt - 5, "prompt_n": 5, "predicted_n": n_reply, "cache": {"restored": None}}
        messages[question] = {"id": question, "parent": before, "role": "user", "content": f"{title} {nth}"}
        messages[reply] = {
            "id": reply,
            "parent": question,
            "role": "assistant",
            "content": "x",
            "timings": timings,
            "at": at_ms,
        }
        chosen |= {before: question, question: reply}
        before = reply
    return {"id": title, "title": title, "at": at_ms, "messages": messages, "chosen": chosen, "cut": None}


def thinking(n_turns: int) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """The nodes that a model that thinks leaves: each turn ends in a stub beside which the next one goes on."""
    nodes, lengths, stable, at = [node(1, None, 0, 0), node(2, 1, 0, 100)], [], 2, 100
    for _ in range(n_turns):
        prompt, end = at + 3, at + 3 + 40
        stub, following = len(nodes) + 1, len(nodes) + 3
        nodes += [
            node(stub, stable, at, prompt),
            node(stub + 1, stub, prompt, end),
            node(following, stable, at, at + 60),
        ]
        lengths.append((prompt, 40))
        stable, at = following, at + 60
    return nodes, lengths


def test_fifty_turns_of_a_model_that_thinks_are_one_line(tab):
    nodes, lengths = thinking(50)
    found = tab.page.evaluate(ARRANGED, [nodes, [talk("Mine", lengths)]])
    assert len(found["rows"]) == 1 and len(found["ticks"]) == 50 and found["labels"] == []
    assert [turn[2] for turn in found["turns"]] == [f"Mine {nth}" for nth in range(50)]
    assert found["turns"][1][:2] == [lengths[0][0], lengths[1][0]]
    plain = tab.page.evaluate(ARRANGED, [nodes, [talk("Other", [(77, 5)])]])
    assert plain["here"] is None and len(plain["rows"]) == 51, "a conversation that is not in the tree has no line"


def test_conversations_are_counted_without_what_they_left_behind(tab):
    counted = """async (nodes) => { const { countEnds, layout } = await import('/page/layout.js');
        return countEnds(layout(nodes).places.values()) }"""
    stubs = {"prompt-end", "reply-end"}

    def real(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With the kinds that an engine gives: stubs have no message's end."""
        kinds = {3 * turn + step: kind for turn in range(1, 60) for step, kind in enumerate(sorted(stubs))}
        return [
            each | {"checkpoint": {**each["checkpoint"], "kind": kinds.get(each["id"], "stable")}} for each in nodes
        ]

    nodes, _ = thinking(4)
    assert tab.page.evaluate(counted, real(nodes)) == 1
    n = len(nodes)
    other = [
        node(n + 1, 2, 100, 300),
        node(n + 2, n + 1, 300, 303),
        node(n + 3, n + 2, 303, 340),
        node(n + 4, n + 1, 300, 330),
    ]
    for each, kind in zip(other[1:], ("prompt-end", "reply-end", "prewarm"), strict=True):
        each["checkpoint"]["kind"] = kind
    assert tab.page.evaluate(counted, real(nodes) + other) == 2, (
        "the reply as it was and as the next prompt has it are one"
    )
    plain = [node(1, None, 0, 0), node(2, 1, 0, 60), node(3, 1, 0, 70)]
    for each in plain[1:]:
        each["checkpoint"]["kind"] = "prompt-end"
    assert tab.page.evaluate(counted, plain) == 2


def test_other_conversations_are_rows_with_names(tab):
    nodes, lengths = thinking(2)
    n = len(nodes)
    nodes += [
        node(n + 1, 2, 100, 300),
        node(n + 2, n + 1, 300, 340),
        node(n + 3, 2, 100, 500),
        node(n + 4, n + 3, 500, 900),
    ]
    nodes += [node(n + 5, 2, 100, 700, words="Quite another text")]
    found = tab.page.evaluate(ARRANGED, [nodes, [talk("Mine", lengths), talk("Hers", [(300, 40)])]])
    assert sorted(label[1] for label in found["labels"]) == [
        "Hers",
        "Quite another text",
        "a conversation from elsewhere",
    ]
    assert sorted(map(len, found["rows"][1:])) == [1, 2, 2], "each of them is one row"


def test_of_two_conversations_of_the_same_lengths_the_one_used_then_is_taken(tab):
    nodes = [node(1, None, 0, 0), node(2, 1, 0, 50), node(3, 2, 50, 80, used=10.0), node(4, 2, 50, 80, used=20.0)]
    for at_ms, id in ((10_000.0, 3), (20_000.0, 4)):
        assert tab.page.evaluate(ARRANGED, [nodes, [talk("Mine", [(80, 9)], at_ms)]])["here"] == id


def test_the_open_conversation_is_the_trunk_and_messages_are_linked_to_it(tab, server):
    page = tab.page
    tab.ask("What is the capital of Italy?")
    page.click("#new-talk")
    for question in ("What is the capital of France?", "What is 3 plus 4?", "What is 12 plus 9?"):
        tab.ask(question)
    server.ask("/completion", {"prompt": words(60, 92), "n_predict": 1})
    named = (
        "everwarm.tree.picture.labels?.some((label) => label.words === 'What is the capital of Italy?' && label.talk)"
    )
    page.wait_for_function(f"() => everwarm.tree.picture.turns?.length === 3 && {named}")
    n_before = page.evaluate("everwarm.tree.picture.turns[1].end")
    page.wait_for_function(f"() => everwarm.tree.picture.here?.node.end > {n_before}")
    assert page.evaluate("everwarm.tree.picture.rows[0].every((p, n, all) => n === 0 || p.parent === all[n - 1])")
    tab.questions().nth(1).hover()
    page.wait_for_function("() => everwarm.tree.span?.words === 'What is 3 plus 4?'")
    spot = page.evaluate("""() => { const t = everwarm.tree; const c = t.drawing.camera;
        const box = t.canvas.getBoundingClientRect();
        const turn = t.picture.turns[0]; const p = t.picture.rows[0].findLast((p) => p.node.end <= turn.end);
        return {x: box.x + c.px(p.to) - 2, y: box.y + c.py(0)} }""")
    page.mouse.move(spot["x"], spot["y"])
    page.wait_for_function("() => document.querySelectorAll('.message[data-marked]').length === 2")
    assert "France" in page.locator(".message[data-marked]").first.inner_text()
    page.evaluate(
        "everwarm.tree.select(everwarm.tree.picture.rows[everwarm.tree.picture.labels.find((l) => l.talk).row][0])"
    )
    page.click("#node-open")
    assert "Rome" in tab.replies().inner_text(), "its row opens the other conversation"
    page.evaluate("everwarm.tree.select(null)")
    page.wait_for_function("() => everwarm.tree.picture.turns?.length === 1")
    page.locator(".talk-list .title").first.click()
    page.wait_for_function("() => everwarm.tree.picture.turns?.length === 3")
    n_rows = page.evaluate("everwarm.tree.picture.rows.length")
    page.click("#every-node")
    page.wait_for_function(f"() => !everwarm.tree.picture.labels && everwarm.tree.picture.rows.length > {n_rows}")
    page.click("#every-node")
    page.wait_for_function("() => everwarm.tree.picture.labels")
