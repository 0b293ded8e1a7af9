"""A moving image: a line in the middle of a long chat is edited, on Everwarm and on llama-server, at the speed that was
measured (docs/benchmarks/gpu.md)."""

from __future__ import annotations

from diagrams.svg import COLD, INK, LINE, WARM, Drawing

N_TOKENS = 26_549
N_READ = 13_275
EVERWARM_S, LLAMA_SERVER_S = 5.0, 11.0
BEGIN_S, LOOP_S = 1.5, 15.0
LEFT, RIGHT, HEIGHT = 140.0, 610.0, 26.0


def draw() -> str:
    drawing = Drawing(760, 250, "A line is edited: Everwarm reads what follows it, llama-server reads everything again")
    drawing.parts.append(_style())
    drawing.text(20, 32, f"You edit a line in the middle of a chat of {N_TOKENS:,} tokens, and send it.", bold=True)
    drawing.text(20, 52, "27B hybrid model on one H200; the bars move at the speed that was measured.")
    edit = LEFT + (RIGHT - LEFT) * (1 - N_READ / N_TOKENS)
    _row(drawing, 90, "Everwarm", edit, "everwarm", f"answers after {EVERWARM_S:.0f} s")
    _row(drawing, 150, "llama-server", LEFT, "server", f"answers after {LLAMA_SERVER_S:.0f} s")
    drawing.line((edit, 78), (edit, 188), width=1.5)
    drawing.text(edit, 204, "your edit", anchor="middle")
    _key(drawing, 140, WARM, "warm: kept, not read")
    _key(drawing, 320, COLD, "cold: read again")
    return drawing.svg()


def _row(drawing: Drawing, y: float, name: str, start: float, label: str, end: str) -> None:
    """All that is kept, over it what is read, growing from ``start``."""
    drawing.text(20, y + 17, name, bold=True)
    for x, colour, mark in ((LEFT, WARM, ""), (start, COLD, f' class="read {label}"')):
        drawing.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{RIGHT - x:g}" height="{HEIGHT:g}" fill="{colour}"{mark}/>'
        )
    drawing.parts.append(
        f'<rect x="{LEFT:g}" y="{y:g}" width="{RIGHT - LEFT:g}" height="{HEIGHT:g}" fill="none" stroke="{LINE}"/>'
        f'<text x="{RIGHT + 10:g}" y="{y + 17:g}" fill="{INK}" class="done {label}-done">{end}</text>'
    )


def _key(drawing: Drawing, x: float, colour: str, words: str) -> None:
    drawing.parts.append(f'<rect x="{x:g}" y="224" width="14" height="12" fill="{colour}"/>')
    drawing.text(x + 20, 235, words)


def _style() -> str:
    """Bars grow from the edit's sending to the first token; who wants no motion sees the end."""
    rules = []
    for name, seconds in (("everwarm", EVERWARM_S), ("server", LLAMA_SERVER_S)):
        begin, end = 100 * BEGIN_S / LOOP_S, 100 * (BEGIN_S + seconds) / LOOP_S
        rules += [
            f"@keyframes {name}{{0%,{begin:.2f}%{{transform:scaleX(0)}}{end:.2f}%,100%{{transform:scaleX(1)}}}}",
            f"@keyframes {name}-done{{0%,{end:.2f}%{{opacity:0}}{end + 0.01:.2f}%,100%{{opacity:1}}}}",
            f".{name}{{animation:{name} {LOOP_S:g}s linear infinite}}",
            f".{name}-done{{animation:{name}-done {LOOP_S:g}s linear infinite}}",
        ]
    still = "@media (prefers-reduced-motion: reduce){.read,.done{animation:none}}"
    return f"<style>.read{{transform-box:fill-box;transform-origin:left}}{''.join(rules)}{still}</style>"
