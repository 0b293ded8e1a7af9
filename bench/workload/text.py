"""Seeded text with the shape of what agents read: prose, source files, tool results, tool declarations."""

from __future__ import annotations

import random
from typing import Any

_SOUNDS = ("ba", "co", "di", "fe", "gu", "ka", "lo", "mi", "ne", "pa", "ri", "so", "tu", "ve", "wa", "zi")
WORDS = tuple(a + b + c for a in _SOUNDS for b in _SOUNDS for c in ("", "n", "r", "s"))
TOOL_NAMES = ("read_file", "write_file", "run_shell", "search", "list_dir", "apply_patch", "fetch_page", "ask_user")


def prose(rng: random.Random, n_words: int) -> str:
    """Sentences in paragraphs."""
    sentences, left = [], n_words
    while left > 0:
        n = min(left, rng.randint(6, 18))
        words = rng.choices(WORDS, k=n)
        sentences.append(" ".join(words).capitalize() + ".")
        left -= n
    return "\n".join(" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5))


def source_file(rng: random.Random, n_lines: int) -> str:
    """Python that is never run: imports, then functions."""
    lines = [f"import {rng.choice(WORDS)}", ""]
    while len(lines) < n_lines:
        name, a, b = rng.choices(WORDS, k=3)
        lines += [f"def {name}({a}, {b}={rng.randint(0, 99)}):", f'    """{prose(rng, 8)}"""']
        lines += [f"    {rng.choice(WORDS)} = {a}.{rng.choice(WORDS)}({b})" for _ in range(rng.randint(2, 9))]
        lines += [f"    return {a}", ""]
    return "\n".join(lines[:n_lines])


def tool_result(rng: random.Random, n_lines: int) -> str:
    """What a search or a shell prints."""
    rows = (f"{'/'.join(rng.choices(WORDS, k=3))}.py:{rng.randint(1, 900)}: {prose(rng, 7)}" for _ in range(n_lines))
    return "\n".join(rows)


def tools(rng: random.Random, n_tools: int, n_words: int) -> list[dict[str, Any]]:
    """Declarations as clients send them."""
    return [_tool(rng, TOOL_NAMES[i % len(TOOL_NAMES)] + f"_{i}", n_words) for i in range(n_tools)]


def _tool(rng: random.Random, name: str, n_words: int) -> dict[str, Any]:
    given = {word: {"type": "string", "description": prose(rng, 9)} for word in rng.sample(WORDS, 3)}
    parameters = {"type": "object", "properties": given, "required": sorted(given)[:1]}
    function = {"name": name, "description": prose(rng, n_words), "parameters": parameters}
    return {"type": "function", "function": function}
