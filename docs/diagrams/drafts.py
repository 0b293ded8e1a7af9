"""A chart: how fast replies are written with drafts by an MTP head on an H200, beside llama-server (docs/benchmarks/gpu.md)."""

from __future__ import annotations

from diagrams.svg import COLD, WARM, Drawing

# what is accepted of drafts; tokens per second of Everwarm and of llama-server with its MTP mode
MEASURED = (
    ("no drafts", 73.5, 68.7),
    ("0 %", 71.4, 47.4),
    ("50 %", 95.5, 85.2),
    ("70 %", 120.9, 114.5),
    ("90 %", 167.4, 154.6),
)
LEFT, WIDTH = 150.0, 480.0


def draw() -> str:
    drawing = Drawing(760, 72 + 58 * len(MEASURED), "Tokens per second with drafts by an MTP head")
    drawing.text(20, 30, "Tokens per second by how much of the drafts is accepted: longer is better", bold=True)
    drawing.text(20, 50, "27B hybrid model with an MTP head, one H200; drafts of up to three tokens")
    most = max(max(ours, theirs) for _, ours, theirs in MEASURED)
    for i, (accepted, ours, theirs) in enumerate(MEASURED):
        y = 68.0 + 58 * i
        drawing.text(20, y + 25, accepted, bold=True)
        drawing.bar(LEFT, y, WIDTH * ours / most, f"{ours:.0f} Everwarm", colour=WARM)
        drawing.bar(LEFT, y + 21, WIDTH * theirs / most, f"{theirs:.0f} llama-server", colour=COLD)
    return drawing.svg()
