"""Seeded filler text in the words the embedded model knows."""

from __future__ import annotations

import random

_NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Karin",
    "Lukas",
    "Mia",
    "Nils",
    "Olga",
    "Paul",
]
_THINGS = ("red key", "blue cup", "green hat", "old map", "small drum", "yellow kite", "black box", "white shell")
_PLACES = ["Oslo", "Rome", "Paris", "Lima", "Cairo", "Delhi", "Tokyo", "Madrid"]


def story(n_sentences: int, *, seed: int) -> str:
    """About eleven tokens a sentence on the embedded model."""
    pick = random.Random(seed).choice
    return " ".join(f"{pick(_NAMES)} found a {pick(_THINGS)} in {pick(_PLACES)}." for _ in range(n_sentences))
