"""The processes of a server and who speaks to whom."""

from __future__ import annotations

from diagrams.svg import Drawing


def draw() -> str:
    drawing = Drawing(
        760, 300, "Clients speak HTTP to the gateway, which starts and watches an engine process for each model"
    )
    drawing.box(20, 60, 130, 130, "clients", "OpenAI", "Anthropic", "Ollama", "llama-server")
    drawing.box(
        230,
        40,
        170,
        170,
        "gateway",
        "HTTP, JSON, text",
        "chat templates",
        "guard and limits",
        "owns the RAM tier",
        "never loads libllama",
        fill="grey",
    )
    drawing.box(500, 40, 210, 80, "engine, one per model", "tokens, slots, states", "libllama", fill="plain")
    drawing.box(500, 140, 210, 70, "engine, asleep", "no process;", "all it kept is still there", fill="plain")
    drawing.box(230, 240, 170, 40, "memory file (RAM tier)", fill="plain")
    drawing.box(500, 240, 210, 40, "state directory (disk tier)", fill="plain")
    drawing.arrow((150, 125), (230, 125), both=True)
    drawing.text(190, 116, "HTTP", anchor="middle")
    drawing.arrow((400, 80), (500, 80), both=True)
    drawing.text(450, 71, "frames", anchor="middle")
    drawing.arrow((400, 165), (500, 165), dashed=True)
    drawing.text(450, 156, "wakes", anchor="middle")
    drawing.arrow((315, 210), (315, 240), both=True)
    drawing.text(323, 230, "owns, lends")
    drawing.arrow((710, 80), (735, 80), (735, 260), (710, 260), both=True)
    return drawing.svg()
