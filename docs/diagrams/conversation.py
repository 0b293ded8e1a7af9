"""One conversation, a retry and an edit, as a tree with its checkpoints."""

from __future__ import annotations

from diagrams.svg import WARM, Drawing


def draw() -> str:
    drawing = Drawing(760, 270, "A conversation as a tree: segments of KV between checkpoints, and two branches")
    _path(
        drawing,
        60,
        [("system", 40, 170), ("user", 170, 300), ("assistant", 300, 430), ("user", 430, 560), ("assistant", 560, 690)],
    )
    _branch(drawing, 300, 60, 130, [("assistant, said again", 340, 500), ("user", 500, 620)])
    _branch(drawing, 170, 60, 200, [("user, edited", 210, 350)])
    drawing.dot(52, 245)
    drawing.text(66, 250, "checkpoint: recurrent state, at a point")
    drawing.line((340, 245), (380, 245), colour=WARM)
    drawing.text(390, 250, "segment: attention KV, of an interval")
    return drawing.svg()


def _path(drawing: Drawing, y: float, parts: list[tuple[str, float, float]]) -> None:
    for words, start, end in parts:
        drawing.line((start, y), (end, y), colour=WARM)
        drawing.text((start + end) / 2, y - 12, words, anchor="middle")
    for _, _, end in parts:
        drawing.dot(end, y, colour=WARM)


def _branch(drawing: Drawing, x: float, top: float, y: float, parts: list[tuple[str, float, float]]) -> None:
    first = parts[0][1]
    drawing.line((x, top), (x, y), (first, y), colour=WARM)
    drawing.dot(x, top)
    _path(drawing, y, parts)
