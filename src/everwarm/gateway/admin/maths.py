"""Formulas in LaTeX as a tree of MathML elements, which browsers draw themselves. Pure.

Only the tags and attributes below ever leave: no links, no styles, no classes.
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

MAX_CHARS = 500  # of one formula; the slowest one found of this length takes 10 ms
_MAX_DEPTH = 60
_TAG = re.compile(
    r"math|mrow|mi|mn|mo|mtext|mspace|ms|mfrac|msqrt|mroot|mstyle|mpadded|mphantom|msub|msup|msubsup|munder|mover|munderover"
    r"|mtable|mtr|mtd"
)
_ATTRIBUTE = re.compile(
    r"display|stretchy|fence|form|accent|accentunder|linethickness|mathvariant|columnalign|lspace|rspace|width|displaystyle"
    r"|scriptlevel|minsize|maxsize|movablelimits|largeop"
)
_VALUE = re.compile(r"[\w.%+ -]{1,32}")


def formula(latex: str, *, is_block: bool) -> list[Any] | None:
    """The element of a formula; ``None`` for what is too long or is no LaTeX."""
    if len(latex) > MAX_CHARS:
        return None
    from latex2mathml.converter import convert_to_element

    try:
        return _element(convert_to_element(latex, display="block" if is_block else "inline"), 0)
    except Exception:  # noqa: BLE001 - the parser fails in many ways on what is no LaTeX; then the text is shown
        return None


def _element(found: Element, depth: int) -> list[Any]:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    tag = found.tag if _TAG.fullmatch(found.tag) else "mrow"
    given = {name: each for name, each in found.attrib.items() if _ATTRIBUTE.fullmatch(name) and _VALUE.fullmatch(each)}
    text = [html.unescape(found.text)] if found.text else []
    return [tag, given, *text, *(_element(child, depth + 1) for child in found)]
