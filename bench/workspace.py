"""An agent that reads ten files, with and without ``--workspace``: what is left to be read when a result comes?

The model chooses the file itself: it must call a tool, and the tool's schema names the files. The agent runs the tool,
which takes a while, and sends the result. With the flag the server reads the file meanwhile.

    python -m bench workspace
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measure import EMBEDDED, table
from bench.server import Server, everwarm, post
from bench.workload.text import prose
from everwarm.config import default_threads

N_FILES, N_WORDS, TOOL_S, N_ROUNDS = 10, 190, 3.0, 3
N_CTX = 16384


@dataclass(slots=True)
class Seen:
    """Tokens that were read after all results of a round, and milliseconds until the first token after each."""

    n_tokens: list[int] = field(default_factory=list)
    prompt_ms: list[float] = field(default_factory=list)


def run() -> None:
    measure(N_FILES, N_ROUNDS, TOOL_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.workspace", description="Files that are read ahead.")
    parser.add_argument("--files", type=int, default=N_FILES)
    parser.add_argument("--rounds", type=int, default=N_ROUNDS)
    parser.add_argument("--tool-s", type=float, default=TOOL_S, help="how long a tool runs")
    given = parser.parse_args()
    measure(given.files, given.rounds, given.tool_s)


def measure(n_files: int, n_rounds: int, tool_s: float) -> None:
    threads = default_threads()
    found = {"without": Seen(), "with --workspace": Seen()}
    with tempfile.TemporaryDirectory(prefix="everwarm-bench-") as made:
        folder = Path(made)
        names = [f"{i}.txt" for i in range(n_files)]
        for i, name in enumerate(names):
            (folder / name).write_text(prose(random.Random(i), N_WORDS) + "\n")
        common = (str(EMBEDDED), "-c", str(N_CTX), "-np", "2", "-t", str(threads), "--disk-cache", "0")
        with everwarm(*common) as usual, everwarm(*common, "--workspace", made) as ahead:
            servers = {"without": usual, "with --workspace": ahead}
            for repeat in range(n_rounds):
                for name in list(servers)[:: -1 if repeat % 2 else 1]:
                    _session(servers[name], folder, names, repeat, tool_s, found[name])
    rows = [
        (name, f"{statistics.median(seen.n_tokens):,.0f}", f"{statistics.median(seen.prompt_ms):.0f} ms")
        for name, seen in found.items()
    ]
    title = f"An agent reads {n_files} files of about {N_WORDS * 7 // 2} tokens, each tool takes {tool_s:g} s"
    head = ("", f"tokens read after {n_files} results", "until the first token, at the median")
    table(f"{title}; medians of {n_rounds} rounds, {threads} threads", head, rows)
    print(f"\nLoad of the machine at the end: {os.getloadavg()[0]:.1f}")


def _session(server: Server, folder: Path, names: list[str], seed: int, tool_s: float, seen: Seen) -> None:
    path = {"type": "string", "enum": names}
    parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    function = {"name": "read", "description": "Reads a file.", "parameters": parameters}
    body: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    body |= {"parallel_tool_calls": False, "temperature": 1.0, "max_tokens": 256, "enable_thinking": False}
    messages: list[Any] = [{"role": "user", "content": f"Session {seed}: read the files, one after the other."}]
    n_read = 0
    for i in range(len(names) + 1):
        answer = post(server, "/v1/chat/completions", {**body, "messages": messages, "seed": 1000 * seed + i})
        timings, message = answer["timings"], answer["choices"][0]["message"]
        if i:
            n_read += timings["prompt_n"]
            seen.prompt_ms.append(timings["prompt_ms"])
        call = message["tool_calls"][0]
        time.sleep(tool_s)
        result = (folder / json.loads(call["function"]["arguments"])["path"]).read_text()
        messages = [*messages, message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    seen.n_tokens.append(n_read)


if __name__ == "__main__":
    main()
