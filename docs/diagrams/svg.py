"""A few shapes as SVG text: enough for boxes, arrows and dots with words. Pure.

Colours are fixed and the ground is light, so that a drawing looks the same on every page. They are those of the web page: warm is
kept and reused, cold is read; tiers are shades of warm; what is neither is ink on plain or grey.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

INK, PALE, WARM, COLD, LINE = "#1f2933", "#f7f5f0", "#b8430f", "#1c6e8c", "#8a94a0"
FILLS = {"plain": "#ffffff", "grey": "#e8e6e1", "device": "#f3bfa3", "ram": "#f9d8c6", "disk": "#fdeee5"}


@dataclass
class Drawing:
    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, *lines: str, fill: str = "plain") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" fill="{FILLS[fill]}" stroke="{LINE}"/>'
        )
        first = y + h / 2 - 8 * (len(lines) - 1) + 4.5
        for i, line in enumerate(lines):
            self.text(x + w / 2, first + 16 * i, line, anchor="middle", bold=i == 0 and len(lines) > 1)

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, colour: str = INK
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(words)}</text>'
        )

    def arrow(self, *points: tuple[float, float], both: bool = False, dashed: bool = False) -> None:
        path = " ".join(f"{'M' if i == 0 else 'L'}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        start = ' marker-start="url(#back)"' if both else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.4"{dash}{start} marker-end="url(#head)"/>'
        )

    def line(self, *points: tuple[float, float], colour: str = INK, width: float = 3) -> None:
        path = " ".join(f"{'M' if i == 0 else 'L'}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')

    def bar(self, x: float, y: float, length: float, words: str, *, colour: str) -> None:
        """A bar of a chart, with what it says behind it."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{length:.1f}" height="18" rx="3" fill="{colour}"/>')
        self.text(x + length + 8, y + 14, words)

    def dot(self, x: float, y: float, *, colour: str = WARM) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{colour}" stroke="#ffffff" stroke-width="1.5"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="13"><title>{escape(self.title)}</title>'
        )
        arrows = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker><marker id="back" viewBox="0 0 8 8" refX="1" refY="4" '
            f'markerWidth="7" markerHeight="7" orient="auto"><path d="M8 0L0 4L8 8z" fill="{INK}"/></marker></defs>'
        )
        ground = f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{PALE}"/>'
        return "\n".join([head, arrows, ground, *self.parts, "</svg>"]) + "\n"
