"""One conversation, a retry and an edit, as a tree with its checkpoints."""

from __future__ import annotations

from diagrams.svg import COOL, WARM, Picture


def draw() -> str:
    picture = Picture(760, 270, "A conversation as a tree: segments of KV between checkpoints, and two branches")
    _path(
        picture,
        60,
        [("system", 40, 170), ("user", 170, 300), ("assistant", 300, 430), ("user", 430, 560), ("assistant", 560, 690)],
    )
    _branch(picture, 300, 60, 130, [("assistant, said again", 340, 500), ("user", 500, 620)])
    _branch(picture, 170, 60, 200, [("user, edited", 210, 350)])
    picture.dot(52, 245)
    picture.text(66, 250, "checkpoint: recurrent state, at a point")
    picture.line((340, 245), (380, 245), colour=COOL)
    picture.text(390, 250, "segment: attention KV, of an interval")
    return picture.svg()


def _path(picture: Picture, y: float, parts: list[tuple[str, float, float]]) -> None:
    for words, start, end in parts:
        picture.line((start, y), (end, y), colour=COOL)
        picture.text((start + end) / 2, y - 12, words, anchor="middle")
    for _, _, end in parts:
        picture.dot(end, y, colour=WARM)


def _branch(picture: Picture, x: float, top: float, y: float, parts: list[tuple[str, float, float]]) -> None:
    first = parts[0][1]
    picture.line((x, top), (x, y), (first, y), colour=COOL)
    picture.dot(x, top)
    _path(picture, y, parts)
