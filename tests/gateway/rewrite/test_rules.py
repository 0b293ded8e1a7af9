"""Rules of the operator: which lines they change, where moved ones go, what they say, and files that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from everwarm.errors import BadRequest
from everwarm.gateway.rewrite.rules import parse_rules, read_rules, rewritten

RULES = parse_rules("""
[[rule]]
name = "date"
match = "Today's date: .*"
action = "end"
[[rule]]
name = "folder"
match = "cwd: .*"
action = "drop"
[[rule]]
name = "model"
match = "You are [a-z0-9-]+\\\\."
action = "freeze"
value = "You are a model."
""")
SYSTEM = "You are opus-4.\nBe brief.\nToday's date: Monday\ncwd: /home\nEnd."


def test_lines_of_system_text_are_frozen_dropped_and_moved():
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "cwd: stays"},
        {"role": "assistant", "content": "Today's date: stays"},
        {"role": "user", "content": "go on"},
    ]
    found = rewritten(messages, RULES)
    assert found.messages == [
        {"role": "system", "content": "You are a model.\nBe brief.\nEnd."},
        *messages[1:3],
        {"role": "user", "content": "go on\nToday's date: Monday"},
    ]
    assert found.rules == ("model", "date", "folder")
    assert messages[0]["content"] == SYSTEM, "the client's messages are not changed themselves"


def test_parts_are_changed_like_texts():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": SYSTEM, "cache_control": {}}, "cwd: /a"]},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ]
    system, user = rewritten(messages, RULES).messages
    first = {"type": "text", "text": "You are a model.\nBe brief.\nEnd.", "cache_control": {}}
    assert system["content"] == [first, ""]
    assert user["content"][1] == {"type": "text", "text": "\nToday's date: Monday"}


def test_nothing_is_changed_without_need():
    plain = [{"role": "system", "content": "You are a model."}, {"role": "user", "content": "hello"}]
    assert rewritten(plain, RULES).messages is plain
    assert rewritten(plain, RULES).rules == ()
    assert rewritten([{"role": "system", "content": SYSTEM}], ()).messages == [{"role": "system", "content": SYSTEM}]
    (alone,) = rewritten([{"role": "system", "content": "Today's date: Monday"}], RULES).messages
    assert alone["content"] == "Today's date: Monday", "there is no message behind which it could go"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "missing required field"),
        ("rule = []", "0 rules"),
        ("[[rule]]\nname = 'a'\nmatch = '('\naction = 'drop'", "no regular expression"),
        ("[[rule]]\nname = 'a'\nmatch = '.*'\naction = 'drop'", "empty lines"),
        ("[[rule]]\nname = 'a'\nmatch = 'x'\naction = 'freeze'", "value with freeze"),
        ("[[rule]]\nname = 'a'\nmatch = 'x'\naction = 'drop'\nvalue = 'y'", "only with it"),
        ("[[rule]]\nname = 'a b'\nmatch = 'x'\naction = 'drop'", "1 to 40"),
        ("[[rule]]\nname = 'a'\nmatch = 'x'\naction = 'burn'", "Invalid enum value"),
        ("[[rule]]\nname = 'a'\nmatch = 'x'\naction = 'drop'\nmore = 1", "unknown field"),
        ("[[rule", "Expected"),
        ("[[rule]]\nname = 'a'\nmatch = 'x'\naction = 'drop'\n" * 65, "65 rules"),
    ],
)
def test_a_file_that_makes_no_sense_says_why(text: str, wrong: str, tmp_path: Path):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(BadRequest, match=wrong):
        read_rules(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(BadRequest, match="cannot be read"):
        read_rules(tmp_path / "none.toml")
