"""Markdown becomes elements from a short list, whatever is written in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from everwarm.gateway.admin.markdown import MAX_CHARS, MAX_CODE_CHARS, _parser, is_quick, is_safe_link, render

SAFE = {
    *("p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "em", "strong", "s", "a", "br", "hr", "code", "pre"),
    *("span", "table", "thead", "tbody", "tr", "th", "td"),
}
HOSTILE = [
    "<script>boom()</script>",
    '<img src=x onerror="boom()">',
    "[a](javascript:boom())",
    "[a](JaVaScRiPt:boom())",
    "[a](&#106;avascript:boom())",
    "[a](java\nscript:boom())",
    "[a](data:text/html;base64,PHNjcmlwdD4=)",
    "[a](vbscript:boom)",
    "[a](file:///etc/passwd)",
    "[a](/cache)",
    "[a](//elsewhere.example/x)",
    "<javascript:boom()>",
    "[r]: javascript:boom()\n\n[a][r]",
    '[a](https://b.example "x\\" onclick=boom()")',
    "![a](javascript:boom())",
    '```"><script>boom()</script>\ncode\n```',
    '| a |\n|---|\n| <svg onload="boom()"> |',
]


def elements(tree: list[Any]) -> Iterator[list[Any]]:
    for node in tree:
        if isinstance(node, list):
            yield node
            yield from elements(node[2:])


def text_of(tree: list[Any]) -> str:
    return "".join(node if isinstance(node, str) else text_of(node[2:]) for node in tree)


def test_tables_lists_links_and_code_become_elements():
    tree = render(
        "# Title\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n3. x\n\n[l](https://b.example) and https://c.example/d.\n\n~~s~~"
    )
    assert tree is not None
    found = {each[0]: each for each in elements(tree)}
    assert text_of([found["h3"]]) == "Title" and found["td"] == ["td", {"class": "right"}, "2"]
    assert found["ol"][1] == {"start": 3} and found["s"] == ["s", {}, "s"]
    links = [each[1]["href"] for each in elements(tree) if each[0] == "a"]
    assert links == ["https://b.example", "https://c.example/d"]


def test_code_is_highlighted_and_stays_the_same_text():
    code = 'def f(x):  # why\n\n    return "a" + 12'
    tree = render(f"```python\n{code}\n```")
    assert tree is not None and text_of(tree) == code
    kinds = {each[1]["class"]: text_of([each]) for each in elements(tree) if each[0] == "span"}
    assert kinds == {"keyword": "return", "name": "f", "comment": "# why", "string": '"a"', "number": "12"}
    for language in ("", "nonsense", "brainfuck"):
        plain = render(f"```{language}\n{code}\n```")
        assert plain is not None and [each[0] for each in elements(plain)] == ["pre", "code"] and text_of(plain) == code
    for wild in ("x = 1\n" * (MAX_CODE_CHARS // 6 + 1), "-" * 400, "a" + "\n" * 100 + "b"):
        assert [each[0] for each in elements(render(f"```python\n{wild}\n```") or [])] == ["pre", "code"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_markdown_becomes_nothing_but_safe_elements(text):
    tree = render(text)
    assert tree is not None
    for tag, attributes, *_ in elements(tree):
        assert tag in SAFE and attributes.keys() <= {"href", "class", "start", "language"}
        assert "href" not in attributes or is_safe_link(attributes["href"])
        assert attributes.get("class", "right") == "right"


def test_formulas_become_mathml_and_prices_do_not():
    tree = render(r"$a_1*b*$ and \(x^2\) cost $5 or $6, `$y$`" + "\n\n$$\n\\frac{1}{2}\n$$\n\n\\[z\\]")
    assert tree is not None
    shown = [(each[1]["display"], text_of([each])) for each in elements(tree) if each[0] == "math"]
    assert shown == [("inline", "a1*b*"), ("inline", "x2"), ("block", "12"), ("block", "z")]
    assert "cost $5 or $6, $y$" in text_of(tree) and not any(each[0] == "em" for each in elements(tree))


@pytest.mark.parametrize(
    "latex",
    [
        r"\href{javascript:boom()}{x}",
        r"\style{color: red}{x}",
        r"\class{top}{x}",
        r"\text{<script>boom()</script>}",
        r"\color{red}x",
        "{" * 400,
        r"\frac",
        r"\left(",
        r"\sqrt{" * 80,
        r"\def\a{\a\a}\a",
        "x^" * 200,
        "a" * 501,
    ],
)
def test_hostile_formulas_are_nothing_but_maths(latex):
    text = f"before $${latex}$$ after"
    tree = render(text)
    assert tree is not None and text_of(tree).startswith("before ") and text_of(tree).endswith(" after")
    for tag, attributes, *_ in elements(tree):
        assert re.fullmatch(r"p|math|m[a-z]+", tag) and not attributes.keys() & {"href", "style", "class", "id"}
        assert not any("(" in value or ":" in value for value in attributes.values())


def test_html_is_shown_as_it_was_written():
    for text in HOSTILE[:2]:
        assert text_of(render(text) or []) == text


def test_what_is_too_long_or_has_too_many_parts_is_left_to_the_page():
    assert render("a" * MAX_CHARS) is not None and render("a" * (MAX_CHARS + 1)) is None
    assert render("|a|b|\n|-|-|\n" + "|\n" * (MAX_CHARS // 3)) is None
    assert render(">" * 5000 + " a") is not None and render("- " * 5000) is not None


def test_only_short_texts_without_code_are_quick_and_only_after_the_first():
    _parser.cache_clear()
    assert not is_quick("**a**"), "the parser is not loaded yet"
    render("a")
    assert (
        is_quick("**a**")
        and not is_quick("a" * 501)
        and not is_quick("```\na\n```")
        and not is_quick("~~~\na\n~~~")
        and not is_quick("$a$")
    )
