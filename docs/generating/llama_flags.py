"""The table of llama-server's flags, for the page of its dialect."""

from __future__ import annotations

import re

from everwarm.cli.flags.llama_flags import ROWS, Row, declared
from everwarm.cli.flags.serve_options import ServeOptions
from generating.markdown import code, prose, table

BEGIN = "<!-- The table is written by docs/generate.py from src/everwarm/cli/flags/llama_flags.py: change it there. -->"
END = "<!-- The end of the table. -->"


def section() -> str:
    rows = [_row(row) for row in ROWS]
    counted = ("the same", "accepted", "refused")
    n_same, n_accepted, n_refused = (sum(kind == row[1] for row in rows) for kind in counted)
    return "\n".join(
        [
            BEGIN,
            f"{n_same} are the same here, {n_accepted} are accepted because what they ask for holds anyway, and "
            f"{n_refused} are refused with the sentence in the table.\n",
            table(["llama-server", "here", ""], rows),
            END,
        ]
    )


def in_page(page: str) -> str:
    """The page with the table in its place."""
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(pattern, lambda _: section(), page, flags=re.DOTALL)


def _row(row: Row) -> list[str]:
    names = ", ".join(map(code, (*row.names, *row.negatives)))
    if row.refusal and not set(row.names) & declared(ServeOptions):
        fine = [code(word) for word in (*row.only, *(row.negatives if not row.refuses_negatives else ()))]
        return [names, "refused", prose(row.refusal + (f"; {', '.join(fine)} is accepted" if fine else ""))]
    if row.holds:
        negative = f"; {row.negatives[-1]}: {row.refuses_negatives}" if row.refuses_negatives else ""
        return [names, "accepted", prose(row.holds + negative)]
    target = " ".join(map(code, row.to.split())) if row.to not in row.names else ""
    return [names, "the same", target]
