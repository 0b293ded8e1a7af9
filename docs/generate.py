"""Write what can be written from the code: the pages of docs/reference, one table and the drawings of docs/diagrams.

``python docs/generate.py`` writes them; with ``--check`` nothing is written, and what is out of date is named and makes the
exit status 1. Needs everwarm and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from diagrams import conversation, drafts, edit, first_token, processes, tiers, turn
from generating import api, commands, families, fingerprint, llama_flags, metrics, models_file, reasons, settings

HERE = Path(__file__).parent

WRITERS: Mapping[str, Callable[[], str]] = {
    "reference/flags.md": commands.serve_page,
    "reference/commands.md": commands.other_page,
    "reference/settings.md": settings.page,
    "reference/models-file.md": models_file.page,
    "reference/api.md": api.page,
    "reference/metrics.md": metrics.page,
    "reference/reasons.md": reasons.page,
    "reference/families.md": families.page,
    "reference/fingerprint.md": fingerprint.page,
    "dialects/llama-server.md": lambda: llama_flags.in_page((HERE / "dialects/llama-server.md").read_text()),
    "diagrams/conversation.svg": conversation.draw,
    "diagrams/drafts.svg": drafts.draw,
    "diagrams/edit.svg": edit.draw,
    "diagrams/first-token.svg": first_token.draw,
    "diagrams/processes.svg": processes.draw,
    "diagrams/tiers.svg": tiers.draw,
    "diagrams/turn.svg": turn.draw,
}


def outdated() -> list[str]:
    """The files that are not what the code says."""
    return [name for name, write in WRITERS.items() if not _is(HERE / name, write())]


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


def complaints() -> list[str]:
    stale = [f"docs/{name} is out of date: run python docs/generate.py" for name in outdated()]
    return stale + [
        f"docs/generating/words.py speaks of {name}, which is not there" for name in api.words_for_nothing()
    ]


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        found = complaints()
        print("\n".join(found), end="\n" if found else "", file=sys.stderr)
        return 1 if found else 0
    for name in outdated():
        path = HERE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(WRITERS[name]())
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
