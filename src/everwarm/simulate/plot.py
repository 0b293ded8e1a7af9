"""A line chart as SVG, written by hand: axes, ticks, one line and one name per series. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 720
HEIGHT = 420
LEFT = 80
RIGHT = 150
TOP = 40
BOTTOM = 60
COLOURS = ("#b8430f", "#1c6e8c", "#5f3dc4", "#2b8a3e", "#a61e4d", "#495057", "#1864ab", "#e67700")
GRID = "#e9ecef"
MANY_DECADES = 100
DASHES = ("", "6 3", "2 3", "8 3 2 3")


Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """``is_log``: equal steps are equal factors; every value is above 0 then."""

    label: str
    is_log: bool = False
    show: Callable[[float], str] = "{:g}".format


def line_chart(title: str, x: Axis, y: Axis, lines: Mapping[str, Points]) -> str:
    """An SVG document; each line has a name. Without a single point the frame is empty."""
    points = [point for each in lines.values() for point in each]
    to_x = _scale([p[0] for p in points], x.is_log, LEFT, WIDTH - RIGHT)
    ticks = _ticks([p[1] for p in points], y.is_log)
    to_y = _scale([*ticks, *(p[1] for p in points)], y.is_log, HEIGHT - BOTTOM, TOP)
    width = max([WIDTH, *(WIDTH - RIGHT + 45 + 7 * len(name) for name in lines)])  # room for the longest name
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, TOP / 2, title, 'text-anchor="middle" font-size="15"'),
        *_x_axis(x, sorted({p[0] for p in points}), to_x),
        *_y_axis(y, ticks, to_y),
    ]
    for i, (name, line) in enumerate(lines.items()):
        parts += _line(name, line, to_x, to_y, i)
    return "\n".join([*parts, "</svg>", ""])


def _scale(values: Sequence[float], is_log: bool, low: float, high: float) -> Callable[[float], float]:
    if is_log and any(value <= 0 for value in values):
        raise ValueError("a logarithmic axis has only values above 0")
    place = math.log if is_log else float
    placed = [place(value) for value in values] or [0.0]
    first = min(placed)
    span = (max(placed) - min(placed)) or 1.0
    return lambda value: low + (place(value) - first) / span * (high - low)


def _x_axis(x: Axis, values: Sequence[float], to_x: Callable[[float], float]) -> list[str]:
    base = HEIGHT - BOTTOM
    parts = [_rule(LEFT, base, WIDTH - RIGHT, base)]
    for value in values:
        at = to_x(value)
        parts += [_rule(at, base, at, base + 5), _text(at, base + 18, x.show(value), 'text-anchor="middle"')]
    return [*parts, _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 15, x.label, 'text-anchor="middle"')]


def _y_axis(y: Axis, ticks: Sequence[float], to_y: Callable[[float], float]) -> list[str]:
    parts = [_rule(LEFT, TOP, LEFT, HEIGHT - BOTTOM)]
    for value in ticks:
        at = to_y(value)
        parts += [_rule(LEFT, at, WIDTH - RIGHT, at, GRID), _rule(LEFT - 5, at, LEFT, at)]
        parts += [_text(LEFT - 8, at + 4, y.show(value), 'text-anchor="end"')]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [*parts, _text(18, middle, y.label, f'text-anchor="middle" transform="rotate(-90 18 {middle:g})"')]


def _ticks(values: Sequence[float], is_log: bool) -> list[float]:
    """Round numbers; on a logarithmic axis they enclose all values."""
    top = max(values, default=0.0)
    if top <= 0:
        return [] if is_log else [0.0]
    if is_log:
        return _log_ticks(min(values), top)
    step = 10 ** math.floor(math.log10(top))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if top / s <= 6)
    return [i * step for i in range(int(top / step) + 1)]


def _log_ticks(low: float, top: float) -> list[float]:
    """Powers of ten, with their 2 and 5 where few of them are between ``low`` and ``top``."""
    digits = (1,) if top / low > MANY_DECADES else (1, 2, 5)
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(top)) + 2)
    all_of_them = [float(f"{digit}e{exponent}") for exponent in exponents for digit in digits]
    first = max(tick for tick in all_of_them if tick <= low)
    last = min(tick for tick in all_of_them if tick >= top)
    return [tick for tick in all_of_them if first <= tick <= last]


def _line(
    name: str, points: Points, to_x: Callable[[float], float], to_y: Callable[[float], float], number: int
) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    path = " ".join(f"{to_x(a):.1f},{to_y(b):.1f}" for a, b in points)
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    dots = [f'<circle cx="{to_x(a):.1f}" cy="{to_y(b):.1f}" r="3" fill="{colour}"/>' for a, b in points]
    height = TOP + 20 * number + 10
    key = _text(WIDTH - RIGHT + 38, height + 4, name, "")
    sample = f'<polyline points="{WIDTH - RIGHT + 12},{height} {WIDTH - RIGHT + 32},{height}" {style}/>'
    return [f'<polyline points="{path}" {style}/>', *dots, sample, key]


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str = "#868e96") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
