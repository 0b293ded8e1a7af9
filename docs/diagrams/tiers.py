"""Where a checkpoint may live, how long it stays there, and what coming back costs."""

from __future__ import annotations

from diagrams.svg import Drawing

_TIERS = (
    ("device", "parked in a spare:", "a second name, no copy", "until the spare is needed", "device"),
    ("RAM", "a copy in the memory file", "of the gateway (--cache-ram)", "outlives engine and swap", "ram"),
    ("disk", "a file per state and segment", "(--state-dir, --disk-cache)", "outlives everything", "disk"),
)


def draw() -> str:
    drawing = Drawing(
        760, 210, "A checkpoint is parked on the device, copied to RAM on idle and written to disk after a turn"
    )
    for i, (name, first, second, life, fill) in enumerate(_TIERS):
        x = 20 + i * 250
        drawing.box(x, 40, 215, 90, name, first, second, life, fill=fill)
    for i, words in enumerate(("on idle", "after a turn")):
        x = 235 + i * 250
        drawing.arrow((x, 65), (x + 35, 65))
        drawing.text(x + 17, 30, words, anchor="middle")
        drawing.arrow((x + 35, 110), (x, 110))
    drawing.text(
        380,
        165,
        "Coming back, cheapest first: stay → in place → unparked → shared → from RAM → from disk → read again",
        anchor="middle",
    )
    drawing.text(380, 187, "What cannot be verified is not used: the next way is tried.", anchor="middle")
    return drawing.svg()
