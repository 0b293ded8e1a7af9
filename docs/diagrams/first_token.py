"""A chart: how long the first token takes on an H200, beside llama-server (docs/benchmarks/gpu.md)."""

from __future__ import annotations

from diagrams.svg import COLD, WARM, Drawing

# what is asked; seconds until the first token with Everwarm and with llama-server
MEASURED = (
    ("the same prompt again", 0.011, 0.180),
    ("the other of two conversations, 60 tokens more", 0.166, 2.607),
    ("a line in the middle edited", 5.045, 11.026),
)
LEFT, WIDTH = 130.0, 460.0


def draw() -> str:
    drawing = Drawing(760, 74 + 84 * len(MEASURED), "Time to the first token with Everwarm and with llama-server")
    drawing.text(20, 32, "Time to the first token: shorter is better", bold=True)
    drawing.text(20, 52, "26,549 tokens, 27B hybrid model, one H200; each pair has its own scale")
    for i, (what, everwarm_s, other_s) in enumerate(MEASURED):
        y = 84.0 + 84 * i
        drawing.text(20, y, what)
        _bar(drawing, y + 10, "Everwarm", WARM, everwarm_s, other_s, f" ({other_s / everwarm_s:.0f}× sooner)")
        _bar(drawing, y + 34, "llama-server", COLD, other_s, other_s, "")
    return drawing.svg()


def _bar(drawing: Drawing, y: float, name: str, colour: str, seconds: float, longest_s: float, more: str) -> None:
    length = max(3.0, WIDTH * seconds / longest_s)
    drawing.text(20, y + 14, name, bold=True)
    drawing.bar(LEFT, y, length, _time(seconds) + more, colour=colour)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
