"""What the second turn reads when the template drops the thinking of the first."""

from __future__ import annotations

from diagrams.svg import COLD, LINE, WARM, Drawing


def draw() -> str:
    drawing = Drawing(
        760, 230, "The second prompt shares the first one up to the stable point and reads only what follows"
    )
    drawing.text(20, 30, "first prompt and reply", bold=True)
    _row(
        drawing,
        60,
        [
            ("system, tools", 20, 260, COLD),
            ("question", 260, 380, COLD),
            ("<think>…</think>", 380, 560, LINE),
            ("answer", 560, 700, LINE),
        ],
    )
    drawing.text(20, 125, "second prompt, without the thinking", bold=True)
    _row(
        drawing,
        155,
        [
            ("system, tools", 20, 260, WARM),
            ("question", 260, 380, WARM),
            ("answer", 380, 520, COLD),
            ("next question", 520, 660, COLD),
        ],
    )
    drawing.dot(380, 60)
    drawing.dot(380, 155)
    drawing.line((380, 66), (380, 149), width=1.2)
    drawing.text(392, 92, "stable point: a checkpoint is there")
    drawing.text(
        20,
        205,
        "Blue is read, orange is reused, grey is written. Idle pre-warm reads the answer before it is asked for.",
    )
    return drawing.svg()


def _row(drawing: Drawing, y: float, parts: list[tuple[str, float, float, str]]) -> None:
    for words, start, end, colour in parts:
        drawing.line((start, y), (end - 2, y), colour=colour, width=5)
        drawing.text((start + end) / 2, y - 12, words, anchor="middle")
