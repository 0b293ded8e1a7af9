"""Where text is likely to change: before dates, ids, folders and counters, and at the joints of long messages."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.volatile_text import MAX_HEAD, MAX_JOINTS, MIN_LONG, joints, volatile_places
from support.campaign import by_chance

PROSE = "You help with code. Be brief, and never guess: read the file first.\nAnswer in one paragraph or two.\n"
IN_LOOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}<|assistant|>"
BEFORE_LOOP = (
    "{% if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}<|end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("Today's date: 2026-02-17", "2026-02-17"),
        ("It is 09:41.", "09:41"),
        ("Now: 17/02/2026", "17/02/2026"),
        ("Heute ist der 17.02.2026", "17.02.2026"),
        ("Today is Tuesday, February 17, 2026.", "Tuesday"),
        ("as of 17 February 2026", "17 February"),
        ("started at 1771321267", "1771321267"),
        ("Session: 1b4e28ba-2fa1-11d2-883f-0016d3cca427", "1b4e28ba"),
        ("Working directory: /srv/ada/engine", "/srv/ada"),
        ("  <cwd>/srv/app</cwd>", "/srv/app"),
        ("Current branch: feature-7", "feature-7"),
        ("HEAD is now at 1f0c2ab Repair it", "1f0c2ab"),
        ("You have 14 messages left.", "14 messages"),
        ("Turn 12 of 50", "12 of"),
    ],
)
def test_a_place_lies_right_before_a_value(line, value):
    text = f"{PROSE}{line}\n{PROSE}"
    at = text.index(value)
    assert any(at - 2 <= place <= at for place in volatile_places(text)), volatile_places(text)


def test_prose_has_no_such_place():
    assert volatile_places(40 * PROSE) == []


def test_a_text_full_of_dates_has_few_places():
    assert len(volatile_places("2026-02-17 09:41 branch: x turn 7\n" * 1000)) <= 13


@by_chance(60, 2000)
@given(st.text(alphabet="a1 :/-.\n{}[],<>#%Tue", max_size=400))
def test_any_text_gives_places_inside_it(text):
    assert all(0 <= at <= len(text) for at in volatile_places(text))
    assert all(0 < at <= len(text) for at in joints(text, 0, len(text)))


@pytest.mark.parametrize(
    "unit", ["1", "12:", "a_", "0123456789abcdef", "turn ", "branch:", "}, ", "Jan ", "\n", "9" * 60 + " "]
)
def test_hostile_text_is_searched_to_its_end(unit):
    """Backtracking would take hours."""
    text = unit * (MAX_HEAD // len(unit))
    assert len(volatile_places(text)) <= 13
    assert len(list(joints(text, 0, len(text)))) <= MAX_JOINTS


def files(names: str) -> str:
    return "\n".join(f"==> {name}.py <==\n" + "\n".join(f"line {i} of {name}" for i in range(30)) for name in names)


def test_joints_are_at_files_elements_and_lines():
    text = files("abcdef")
    found = list(joints(text, 0, len(text)))
    starts = {text.index(f"==> {name}") for name in "bcdef"}
    assert starts <= set(found)
    rows = json.dumps([{"id": i, "name": "n" * 60} for i in range(40)])
    assert all(rows[at] == "{" for at in joints(rows, 0, len(rows)))
    lines = "some words of a line\n" * 100
    assert all(lines[at - 1] == "\n" for at in joints(lines, 0, len(lines)))


def test_joints_before_an_edit_stay_and_there_are_not_many():
    text, n_same = files("abcdefgh"), 2000
    edited = text[:n_same] + "another text\n" + text[n_same:]
    same = [at for at in joints(text, 0, len(text)) if at < n_same - 128]
    assert same
    assert same == [at for at in joints(edited, 0, len(edited)) if at < n_same - 128]
    assert 0 < len(list(joints("word\n" * 100_000, 0, 500_000))) <= MAX_JOINTS


@pytest.mark.parametrize("source", [IN_LOOP, BEFORE_LOOP])
def test_hints_of_a_prompt_point_into_its_text(source):
    system, result = f"{PROSE}Today's date: 2026-02-17\n{PROSE}", files("abc")
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Look at 2020-01-01."},
        {"role": "assistant", "content": files("xyz")},
        {"role": "tool", "content": result},
    ]
    rendered = ChatTemplate(source).conversation(messages)
    text, hints = rendered.text, rendered.hints
    assert [text[at : at + 4] for at in hints.volatile] == ["2026", "2020"]
    inside = range(text.index("==> a.py"), text.index("==> a.py") + len(result))
    assert len(result) >= MIN_LONG and hints.joints
    assert all(at in inside for at in hints.joints), "what the model wrote has none"
