"""Lines that clients change without need: found, joined over many requests, charged, and forgotten."""

from __future__ import annotations

from everwarm.gateway.rewrite.rules import parse_rules, rewritten
from everwarm.gateway.rewrite.volatile_lines import VolatileLine, VolatileLines, changed_lines


def prompt(date: str, folder: str = "/home/a", n_lines: int = 20) -> list[dict[str, str]]:
    lines = [*(f"Rule {i}." for i in range(n_lines)), f"Today's date: {date}.", f"Working in {folder}", "End."]
    return [{"role": "system", "content": "\n".join(lines)}, {"role": "user", "content": "hi"}]


def test_the_words_around_a_difference_are_found():
    known, given = (["a", f"It is {day}, 2026-03-{i} in Rome", "b"] for i, day in ((1, "Monday"), (2, "Tuesday")))
    assert changed_lines(known, given) == [VolatileLine(2, "It is ", " in Rome")]


def test_an_added_line_does_not_hide_a_changed_one():
    known = ["a", "b", "c", "date: 1", "d", "e"]
    given = ["a", "b", "new", "c", "date: 2", "d", "e"]
    assert changed_lines(known, given) == [VolatileLine(5, "date: ", "")]


def test_another_text_is_not_a_change():
    assert changed_lines(["a", "b", "c"], ["x", "y", "c"]) is None
    assert changed_lines(["a"], ["a"]) is None
    assert changed_lines([str(i) for i in range(90)], ["x"] * 90) is None


def test_a_line_is_counted_over_many_requests_and_charged():
    lines = VolatileLines()
    assert lines.note("ours", prompt("Monday")) == ()
    assert lines.note("ours", prompt("Monday")) == (), "the same text is no change"
    for date in ("Tuesday", "Friday", "Sunday"):
        changed = lines.note("ours", prompt(date))
        assert len(changed) == 1
        lines.charge(changed, 1000)
    lines.note("ours", prompt("Sunday", "/home/b"))
    first, second = (line for _, line in lines.shown("ours"))
    assert (first.number, first.n_changes, first.n_tokens) == (21, 3, 3000)
    assert (second.before, second.n_changes, second.n_tokens) == ("Working in ", 1, 0)


def test_its_rule_is_one_that_cures_it():
    """The control: without the rule the system text differs."""
    lines = VolatileLines()
    lines.note("", prompt("1. (Mon)"))
    (line,) = lines.note("", prompt("2. [Tue]"))
    rules = parse_rules(line.rule())
    (one, _), (other, asked) = (rewritten(prompt(day), rules).messages for day in ("1. (Mon)", "2. [Tue]"))
    assert one == other and prompt("1. (Mon)")[0] != prompt("2. [Tue]")[0]
    assert asked["content"] == "hi\nToday's date: 2. [Tue]."
    assert VolatileLine(3, "", "").rule() is None


def test_namespaces_are_apart_and_forgotten():
    lines = VolatileLines()
    for date in ("Monday", "Tuesday"):
        lines.note("ours", prompt(date))
    assert lines.note("theirs", prompt("Friday")) == (), "another's text is not compared with"
    assert [name for name, _ in lines.shown("")] == ["ours"] and lines.shown("theirs") == []
    lines.forget("ours")
    assert lines.shown("") == [] and lines.note("ours", prompt("Friday")) == ()


def test_what_is_held_is_bounded():
    lines = VolatileLines()
    for i in range(50):
        lines.note("ours", prompt(f"{i}", n_lines=2000))
    assert lines._texts.n_bytes <= 16 << 20
    assert lines.note("ours", [{"role": "system", "content": "x" * (1 << 20)}]) == ()
    assert lines.note("ours", [{"role": "system", "content": None}, {"role": "user", "content": "hi"}]) == ()


def test_aligning_takes_few_lines_however_alike_all_of_them_are():
    """Where one line repeats itself, aligning all of them would take minutes."""
    known = ["}" if i % 2 else f"known {i}" for i in range(4000)]
    given = ["}" if i % 2 else f"given {i}" for i in range(3998)]
    assert changed_lines(known, given) is None
    near = [*known[:2011], "added", *known[2011:]]
    near[1999] = "} // changed"
    assert changed_lines(known, near) == [VolatileLine(2000, "}", "")], "the control: near each other"


def test_a_line_of_which_much_stays_the_same_is_not_kept():
    long = "x" * 2000
    assert changed_lines(["a", f"{long} 1", "c", "d"], ["a", f"{long} 2", "c", "d"]) is None
    assert changed_lines(["a", "short 1", "c", "d"], ["a", "short 2", "c", "d"]) is not None
