"""What models write in Markdown, as a tree of elements for the web page. Pure.

An element is ``[tag, attributes, *children]``, a text is a string. Only the tags and classes below and links of the web and
of mail ever leave; HTML in the text stays text. The page builds elements from the tree and parses no markup.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

Tree = list[Any]  # of texts and elements

MAX_CHARS = 32_768  # of one text; the slowest one found of this length takes 0.8 s
MAX_TOKENS = 20_000  # a table of empty cells has more of them than characters
MAX_CODE_CHARS = 4_096  # of a block that is highlighted; the slowest one found of this length takes 0.5 s
_MAX_NESTING = 20
_WILD = re.compile(r"[^\n]{201}|\s{65}")  # lines and gaps that no program has, and on which lexers take seconds

_LINK = re.compile(r"(?:https?://|mailto:)[^\s\x00-\x20\x7f]{1,2000}", re.IGNORECASE)
_FORMULA = re.compile(
    r"\$\$(?P<dollars>.{1,500}?)\$\$|\\\[(?P<brackets>.{1,500}?)\\\]|\\\((?P<parens>.{1,500}?)\\\)"
    r"|\$(?P<dollar>[^\s$`](?:[^$\n`]{0,498}[^\s$\\`])?)\$(?!\d)",  # not the prices in "$5 or $6"
    re.DOTALL,
)
_BARE_LINK = re.compile(r"(https?://[^\s<>()\[\]{}\"'`|\\^\x00-\x20\x7f]{3,2000}(?<![.,;:!?*_]))", re.IGNORECASE)
MAX_FORMULA = 500  # of one formula; the slowest one found of this length takes 10 ms
_MAX_DEPTH = 60  # of a formula
_MATHS_TAG = re.compile(
    r"math|mrow|mi|mn|mo|mtext|mspace|ms|mfrac|msqrt|mroot|mstyle|mpadded|mphantom|msub|msup|msubsup|munder|mover|munderover"
    r"|mtable|mtr|mtd"
)
_MATHS_ATTRIBUTE = re.compile(
    r"display|stretchy|fence|form|accent|accentunder|linethickness|mathvariant|columnalign|lspace|rspace|width|displaystyle"
    r"|scriptlevel|minsize|maxsize|movablelimits|largeop"
)
_MATHS_VALUE = re.compile(r"[\w.%+ -]{1,32}")
_TAGS = {
    **{f"h{level}": f"h{min(6, level + 2)}" for level in range(1, 7)},  # the page has its own first two levels
    **{tag: tag for tag in ("p", "ul", "ol", "li", "blockquote", "em", "strong", "s")},
    **{tag: tag for tag in ("table", "thead", "tbody", "tr", "th", "td")},
}
_LANGUAGES = re.compile(
    r"bash|c|c\+\+|cpp|cs|csharp|css|diff|dockerfile|go|html|ini|java|javascript|js|json|kotlin|lua|make|makefile|php|powershell|py"
    r"|python|r|rb|rs|ruby|rust|sh|shell|sql|swift|toml|ts|tsx|typescript|xml|yaml|yml|zig"
)
_CLASSES = {  # of Pygments' kinds of tokens, by how the name of the kind begins
    "Token.Comment": "comment",
    "Token.Keyword": "keyword",
    "Token.Operator.Word": "keyword",
    "Token.Name.Tag": "keyword",
    "Token.Literal.String": "string",
    "Token.Generic.Inserted": "string",
    "Token.Generic.Deleted": "comment",
    "Token.Literal.Number": "number",
    "Token.Name.Function": "name",
    "Token.Name.Class": "name",
    "Token.Name.Attribute": "name",
}


def render(text: str) -> Tree | None:
    """``None`` for a text that is too long, or has too many parts."""
    if len(text) > MAX_CHARS:
        return None
    tokens = _parser().parse(text)
    return None if len(tokens) > MAX_TOKENS else _tree(tokens)


def is_quick(text: str) -> bool:
    """Whether it takes about a millisecond: short, and nothing has to be imported for it."""
    is_loaded = _parser.cache_info().currsize > 0
    return is_loaded and len(text) <= 500 and not any(mark in text for mark in ("```", "~~~", "$", "\\(", "\\["))


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    options = {"html": False, "maxNesting": _MAX_NESTING}
    parser = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
    parser.validateLink = is_safe_link  # type: ignore[method-assign]
    parser.inline.ruler.before("escape", "formula", _formula_rule)
    return parser


def _formula_rule(state: StateInline, silent: bool) -> bool:
    """Takes a formula between dollars or escaped brackets as one token, so that nothing in it is read as Markdown."""
    found = _FORMULA.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content = found[found.lastgroup or 0]
        token.markup = found[0]
        token.info = found.lastgroup or ""
    state.pos = found.end()
    return True


def is_safe_link(url: str) -> bool:
    """Whether it is an absolute address of the web or of mail."""
    return _LINK.fullmatch(url) is not None


def _tree(tokens: list[Token]) -> Tree:
    """Nested lists of a flat sequence of tokens that open and close elements."""
    open_: list[Tree] = [[]]
    for token in tokens:
        if token.hidden:  # the paragraphs of a tight list
            continue
        if token.nesting == 1:
            made = _element(token)
            open_[-1].append(made)
            open_.append(made)
        elif token.nesting == -1:
            open_.pop()
        elif token.type == "text" and not any(each[0] == "a" for each in open_[1:]):
            open_[-1].extend(_linked(token.content))
        else:
            open_[-1].extend(_leaf(token))
    return open_[0]


def _linked(text: str) -> Tree:
    """A text with the addresses that stand in it as links."""
    parts = _BARE_LINK.split(text)
    return [["a", {"href": part}, part] if nth % 2 else part for nth, part in enumerate(parts) if part]


def _element(token: Token) -> Tree:
    if token.tag == "a":
        return ["a", {"href": str(token.attrs.get("href", ""))}]
    attributes: dict[str, Any] = {}
    if token.tag == "ol" and isinstance(token.attrs.get("start"), int):
        attributes["start"] = token.attrs["start"]
    if token.tag in ("th", "td") and "right" in str(token.attrs.get("style", "")):
        attributes["class"] = "right"
    return [_TAGS.get(token.tag, "span"), attributes]


def _leaf(token: Token) -> Tree:
    match token.type:
        case "inline":
            return _tree(token.children or [])
        case "fence" | "code_block":
            language = (token.info.split() or [""])[0].lower()[:24]
            code = token.content.removesuffix("\n")
            return [["pre", {"language": language}, ["code", {}, *_highlighted(code, language)]]]
        case "formula":
            made = _formula_tree(token.content, is_block=token.info in ("dollars", "brackets"))
            return [token.markup if made is None else made]
        case "code_inline":
            return [["code", {}, token.content]]
        case "softbreak":
            return ["\n"]
        case "hardbreak":
            return [["br", {}]]
        case "hr":
            return [["hr", {}]]
        case "image":  # nothing is fetched from elsewhere: a link to it
            url = str(token.attrs.get("src", ""))
            return [["a", {"href": url}, token.content or url]]
    return [token.content]


def _highlighted(code: str, language: str) -> Iterator[Any]:
    """The code in pieces: texts, and spans with one of the classes."""
    if _LANGUAGES.fullmatch(language) is None or len(code) > MAX_CODE_CHARS or _WILD.search(code):
        yield code
        return
    from pygments.lexers import get_lexer_by_name

    before, piece = "", ""
    for kind, text in get_lexer_by_name(language, stripnl=False).get_tokens(code):
        found = _class(str(kind))
        if found != before and piece:
            yield piece if not before else ["span", {"class": before}, piece]
            piece = ""
        before, piece = found, piece + text
    if piece := piece.removesuffix("\n"):  # lexers end every text with a new line
        yield piece if not before else ["span", {"class": before}, piece]


@cache
def _class(kind: str) -> str:
    return next((name for start, name in _CLASSES.items() if kind.startswith(start)), "")


# formulas in LaTeX as MathML elements, which browsers draw themselves: only the tags and attributes above ever leave


def _formula_tree(latex: str, *, is_block: bool) -> list[Any] | None:
    """The element of a formula; ``None`` for what is too long or is no LaTeX."""
    if len(latex) > MAX_FORMULA:
        return None
    from latex2mathml.converter import convert_to_element

    try:
        return _maths_element(convert_to_element(latex, display="block" if is_block else "inline"), 0)
    except Exception:  # noqa: BLE001 - the parser fails in many ways on what is no LaTeX; then the text is shown
        return None


def _maths_element(found: Element, depth: int) -> list[Any]:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    tag = found.tag if _MATHS_TAG.fullmatch(found.tag) else "mrow"
    given = {
        name: each
        for name, each in found.attrib.items()
        if _MATHS_ATTRIBUTE.fullmatch(name) and _MATHS_VALUE.fullmatch(each)
    }
    text = [html.unescape(found.text)] if found.text else []
    return [tag, given, *text, *(_maths_element(child, depth + 1) for child in found)]
