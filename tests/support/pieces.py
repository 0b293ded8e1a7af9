"""Text in pieces, as it comes while a model writes it."""

from collections.abc import Sequence


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    """Pieces of these sizes, and the rest."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]
