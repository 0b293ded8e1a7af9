"""What the second turn reads when the template drops the thinking of the first."""

from __future__ import annotations

from diagrams.svg import COOL, LINE, WARM, Picture


def draw() -> str:
    picture = Picture(
        760, 230, "The second prompt shares the first one up to the stable point and reads only what follows"
    )
    picture.text(20, 30, "first prompt and reply", bold=True)
    _row(
        picture,
        60,
        [
            ("system, tools", 20, 260, COOL),
            ("question", 260, 380, COOL),
            ("<think>…</think>", 380, 560, LINE),
            ("answer", 560, 700, COOL),
        ],
    )
    picture.text(20, 125, "second prompt, without the thinking", bold=True)
    _row(
        picture,
        155,
        [
            ("system, tools", 20, 260, COOL),
            ("question", 260, 380, COOL),
            ("answer", 380, 520, WARM),
            ("next question", 520, 660, WARM),
        ],
    )
    picture.dot(380, 60)
    picture.dot(380, 155)
    picture.line((380, 66), (380, 149), width=1.2)
    picture.text(392, 92, "stable point: a checkpoint is there")
    picture.text(20, 205, "Blue is reused, orange is read. Idle pre-warm reads the answer before it is asked for.")
    return picture.svg()


def _row(picture: Picture, y: float, parts: list[tuple[str, float, float, str]]) -> None:
    for words, start, end, colour in parts:
        picture.line((start, y), (end - 2, y), colour=colour, width=5)
        picture.text((start + end) / 2, y - 12, words, anchor="middle")
