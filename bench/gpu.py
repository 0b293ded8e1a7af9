"""A 27B-shaped model on a GPU, over HTTP, beside llama-server of the same build. ``bench/gpu.sh`` builds both and runs it.

Wanted: an identical prompt or the next turn in 25 ms of prompt time, a conversation back from RAM in 100 ms, and at least
0.98× llama-server's speed of reading and writing. Both servers have the model loaded and take turns; each number is the
server's own account of the prompt (``prompt_ms``) and what the client sees until the first token.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu_peer import about_machine, llama_server
from bench.measure import EMBEDDED
from bench.server import Server, ask, everwarm, post
from bench.workload import memory
from everwarm.config import GREEDY, ContextOptions, ModelOptions
from everwarm.engine.engine import Engine
from everwarm.engine.settings import EngineSettings
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.types import SeqId

N_LONG = 26_549
N_NEW, N_REPLY = 60, 16
N_CTX, N_SLOTS = 65_536, 8
PAUSE_S = 1.5  # a person reads; idle work is done
CACHE_GIB = 24
N_WRITTEN = 192  # tokens of a stream that only writes
SAMPLED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
AGENTS_SEED, AGENT_PAUSE_S = 103, 0.3

Row = dict[str, float]


@dataclass
class Book:
    """Every sample of every scenario and server. Written after each: a run that breaks off leaves what it has."""

    path: Path
    samples: dict[str, dict[str, list[Row]]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def add(self, scenario: str, server: str, row: Row) -> None:
        self.samples.setdefault(scenario, {}).setdefault(server, []).append(row)
        shown = ", ".join(f"{key} {value:.1f}" for key, value in row.items())
        print(f"{time.strftime('%X')} {scenario} · {server}: {shown}", flush=True)
        self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps({"about": self.about, "samples": self.samples}, indent=1) + "\n")


def tokens_of(seed: int, n: int = N_LONG) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(12, 250, n).tolist()
    return found


def timed(server: Server, tokens: list[int], n_predict: int, **more: Any) -> tuple[Row, list[int]]:
    reply = ask(server, tokens, n_predict, **more)
    t = reply.timings
    row = {"first_ms": 1e3 * reply.first_s, "total_ms": 1e3 * reply.total_s, "prompt_ms": float(t["prompt_ms"])}
    row |= {"read": float(t["prompt_n"]), "cached": float(t.get("cache_n", 0))}
    if n_predict > N_REPLY:
        row["ms_per_step"] = 1e3 * statistics.median(reply.gaps_s)
    if n_predict > 1:
        row["ms_per_token"] = float(t["predicted_ms"]) / float(t["predicted_n"])
    row |= {key: float(t[key]) for key in ("restore_ms", "keep_ms") if key in t}
    return row, reply.tokens


# scenarios: each on one server, rows into the book


def cold(book: Book, server: Server, repeats: int) -> None:
    for i in range(repeats):
        row, _ = timed(server, tokens_of(100 + i), 1)
        book.add("cold prefill", server.name, row)
        time.sleep(PAUSE_S)


def identical(book: Book, server: Server, repeats: int) -> None:
    for _ in range(repeats):
        row, _ = timed(server, tokens_of(100), 1)
        book.add("identical prompt", server.name, row)
        time.sleep(0.3)


def next_turn(book: Book, server: Server, repeats: int, n_new: int = N_NEW) -> None:
    history = tokens_of(100)
    _, reply = timed(server, history, N_REPLY)
    history += reply
    for i in range(repeats):
        time.sleep(PAUSE_S / 2)
        history += tokens_of(200 + i, n_new)
        row, reply = timed(server, history, N_REPLY)
        book.add(f"next turn, {n_new} new tokens", server.name, row)
        history += reply


def short_turn(book: Book, server: Server, repeats: int) -> None:
    next_turn(book, server, repeats, n_new=3)


def edited(book: Book, server: Server, repeats: int) -> None:
    for i in range(repeats):
        history = tokens_of(101)
        history[N_LONG // 2 + 10 * i] += 1
        row, _ = timed(server, history, 1)
        book.add("edited in the middle", server.name, row)
        time.sleep(PAUSE_S)


def switch(book: Book, server: Server, repeats: int, title: str = "switch of two conversations") -> None:
    """Two long conversations in turn, each with a few tokens more every time."""
    talks = [tokens_of(100), tokens_of(102)]
    for i, history in enumerate(talks):
        _, reply = timed(server, history, N_REPLY)
        talks[i] = history + reply
        time.sleep(PAUSE_S)
    for turn in range(repeats):
        for i in (0, 1):
            talks[i] = talks[i] + tokens_of(300 + 2 * turn + i, N_NEW)
            row, reply = timed(server, talks[i], N_REPLY)
            talks[i] = talks[i] + reply
            if turn:  # the first one warms up
                book.add(title, server.name, row)
            time.sleep(PAUSE_S)


def slot_files(book: Book, server: Server, repeats: int, title: str = "slot file") -> None:
    """Saved, erased, restored, and sent again; then saved once more, as it was restored. The first save also reads the
    model for its digest, and does not count."""
    for i in range(repeats + 1):
        history = tokens_of(100 + i)
        timed(server, history, 1, id_slot=0)
        name = "".join(filter(str.isalnum, server.name)) + f"{i}.bin"
        saved, n_bytes = _slot(server, "save", name)
        _slot(server, "erase", name)
        restored, _ = _slot(server, "restore", name)
        row, _ = timed(server, history, 1, id_slot=0)
        again, _ = _slot(server, "save", name)
        row |= {"save_ms": saved, "restore_file_ms": restored, "both_ms": restored + row["first_ms"]}
        row |= {"save_again_ms": again, "main_mb": n_bytes / 1e6}
        if i:
            book.add(title, server.name, row)


def _slot(server: Server, action: str, name: str) -> tuple[float, float]:
    """Milliseconds, and the bytes of the main file where the answer says them."""
    began = time.perf_counter()
    answer = post(server, f"/slots/0?action={action}", {"filename": name})
    return 1e3 * (time.perf_counter() - began), float(answer.get("n_written", 0))


def decode(book: Book, server: Server, repeats: int) -> None:
    for i in range(repeats):
        row, _ = timed(server, tokens_of(400 + i, 64), 192)
        book.add("decode at 64 tokens", server.name, row)
    for _ in range(repeats):
        row, _ = timed(server, tokens_of(100), 192)
        book.add(f"decode at {N_LONG} tokens", server.name, row)


def parallel(book: Book, server: Server, repeats: int) -> None:
    for i in range(repeats):
        prompts = [tokens_of(500 + 10 * i + k, 2000) for k in range(N_SLOTS)]
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(N_SLOTS) as pool:
            rows = [row for row, _ in pool.map(lambda tokens: timed(server, tokens, 128), prompts)]
        total = time.perf_counter() - began
        slowest = max(row["first_ms"] for row in rows)
        speed = {"tokens_per_s": N_SLOTS * 128 / total, "last_first_ms": slowest, "total_ms": 1e3 * total}
        if "keep_ms" in rows[0]:
            speed["keep_ms"] = max(row["keep_ms"] for row in rows)
        book.add("8 sessions at once, 2,000 + 128 tokens each", server.name, speed)
        time.sleep(PAUSE_S)


def writing(book: Book, server: Server, n_streams: int, n_prompt: int, repeats: int, **sampling: float) -> None:
    """Streams that only write: their prompts are cached."""
    prompts = [tokens_of(700 + k, n_prompt) for k in range(n_streams)]
    for prompt in prompts:
        timed(server, prompt, 1)
    time.sleep(PAUSE_S)
    for _ in range(repeats):
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(n_streams) as pool:
            rows = [row for row, _ in pool.map(lambda tokens: timed(server, tokens, N_WRITTEN, **sampling), prompts)]
        total = time.perf_counter() - began
        last_first = max(row["first_ms"] for row in rows)
        after = {"tokens_per_s": n_streams * N_WRITTEN / total, "last_first_ms": last_first, "total_ms": 1e3 * total}
        after["ms_per_step"] = statistics.median(row["ms_per_step"] for row in rows)
        if "keep_ms" in rows[0]:
            after["keep_ms"] = max(row["keep_ms"] for row in rows)
        how = ", sampled" if sampling else ""
        book.add(f"{n_streams} streams that only write{how}, after {n_prompt} cached tokens", server.name, after)
        time.sleep(PAUSE_S)


def agents(book: Book, server: Server, n_requests: int, title: str) -> None:
    """Agents in bursts, three shared beginnings of 20,000 tokens: what is read, and how long all of it takes."""
    began, n_prompt, n_read = time.perf_counter(), 0, 0
    firsts = []
    for turn in memory.agents(AGENTS_SEED, 1.0, 250, n_requests=n_requests):
        row, _ = timed(server, turn.prompt.codes.tolist(), 1)
        n_prompt, n_read = n_prompt + len(turn.prompt), n_read + int(row["read"])
        firsts.append(row["first_ms"])
        time.sleep(AGENT_PAUSE_S)
    seconds = time.perf_counter() - began - n_requests * AGENT_PAUSE_S
    median, p95 = statistics.median(firsts), sorted(firsts)[int(0.95 * len(firsts))]
    found = {
        "cached_percent": 100 * (1 - n_read / n_prompt),
        "first_ms": median,
        "first_p95_ms": p95,
        "seconds": seconds,
    }
    book.add(f"agents, 8 GiB: {title}", server.name, {"read": float(n_read), **found})


# phases: which servers are up


@dataclass(frozen=True)
class Run:
    model: Path
    llama_server: Path
    folder: Path
    book: Book
    most: int  # repeats of anything
    n_agent_requests: int

    def ours(self, *more: str, slots: int = N_SLOTS, cache_gib: int = CACHE_GIB) -> Any:
        flags = ("--cache-ram", f"{cache_gib}GiB", "--disk-cache", "0", "--slot-save-path", str(self.folder), *more)
        return everwarm(str(self.model), *_shape(slots), *flags, log="INFO")

    def theirs(self, slots: int = N_SLOTS, cache_gib: int = CACHE_GIB) -> Any:
        flags = ("--cache-ram", str(cache_gib << 10), "--kv-unified", "--slot-save-path", str(self.folder))
        return llama_server(self.llama_server, self.model, *_shape(slots), *flags)


def _shape(slots: int) -> tuple[str, ...]:
    return ("-c", str(N_CTX), "-np", str(slots), "-fa", "on", "-b", "2048", "-ub", "512", "-ctk", "f16", "-ctv", "f16")


def side_by_side(run: Run) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(run.theirs()), stack.enter_context(run.ours())]
        plan: Sequence[tuple[Callable[[Book, Server, int], None], int]] = (
            (cold, 3), (identical, 7), (next_turn, 7),
            (short_turn, 5), (edited, 3), (decode, 4), (switch, 4), (slot_files, 3),
            (parallel, 3),
        )  # fmt: skip
        for scenario, repeats in plan:
            for server in servers:
                _try(partial(scenario, run.book, server, min(repeats, run.most)))
        _note_log(run, "everwarm log", servers[1])


def next_turns(run: Run) -> None:
    for start in (run.theirs, run.ours):
        with start() as server:
            _try(partial(next_turn, run.book, server, min(7, run.most)))


def turns(run: Run) -> None:
    """What a person waits for: the same prompt, the next turn, another conversation. RAM has room."""
    for start in (run.theirs, run.ours):
        with start() as server:
            for scenario, repeats in ((identical, 3), (next_turn, 7), (short_turn, 5), (switch, 5)):
                _try(partial(scenario, run.book, server, min(repeats, run.most)))


def one_slot(run: Run) -> None:
    """Both must bring the other conversation back from RAM."""
    with ExitStack() as stack:
        for server in (stack.enter_context(run.theirs(1)), stack.enter_context(run.ours(slots=1))):
            _try(partial(switch, run.book, server, min(5, run.most), "switch with one slot"))


def slot_files_alone(run: Run) -> None:
    """With room in RAM."""
    with ExitStack() as stack:
        for server in (stack.enter_context(run.theirs()), stack.enter_context(run.ours())):
            _try(partial(slot_files, run.book, server, min(3, run.most)))


def slot_files_short_of_ram(run: Run) -> None:
    """After other conversations have filled it."""
    for start in (run.theirs, run.ours):
        with start(cache_gib=8) as server:
            for seed in range(800, 803):
                timed(server, tokens_of(seed), 1)
                time.sleep(PAUSE_S)
            _try(partial(slot_files, run.book, server, min(3, run.most), "slot file, a full RAM tier of 8 GiB"))


def eight(run: Run) -> None:
    """Eight sessions at once alone. Of ours so many rounds that the RAM tier is full for the last ones."""
    for start, repeats in ((run.theirs, 3), (run.ours, 6)):
        with start() as server:
            _try(partial(parallel, run.book, server, min(repeats, run.most)))


def eight_writers(run: Run) -> None:
    _writers(run, 8, 2000)


def many_writers(run: Run) -> None:
    _writers(run, 32, 1000)


def _writers(run: Run, n_streams: int, n_prompt: int) -> None:
    """Beside the time that a step of so many rows takes by itself."""
    for start in (run.theirs, run.ours):
        with start(slots=n_streams) as server:
            for sampling in ({}, SAMPLED):
                _try(partial(writing, run.book, server, n_streams, n_prompt, min(3, run.most), **sampling))
    title = f"one step of {n_streams} rows after {n_prompt} tokens each"
    run.book.add(title, "libllama", {"ms_per_step": step_ms(run.model, n_streams, n_prompt)})
    run.book.add(title, "the engine, without HTTP", {"ms_per_step": engine_step_ms(run.model, n_streams, n_prompt)})


def step_ms(model_path: Path, n_rows: int, depth: int) -> float:
    """What libllama takes for a token of each of so many sequences."""
    options = ContextOptions(n_ctx=N_CTX, n_seq_max=n_rows, flash_attention="on")
    with Model(model_path) as model, Context(model, options) as context:
        for seq in map(SeqId, range(n_rows)):
            for at in range(0, depth, 512):
                tokens = np.array(tokens_of(seq, depth)[at : at + 512], np.int32)
                context.decode([Feed(seq, tokens, context.end(seq), wants_logits=False)])
        times = []
        for token in range(20, 60):
            began = time.perf_counter()
            row = np.array([token], np.int32)
            context.decode([Feed(SeqId(i), row, context.end(SeqId(i)), wants_logits=True) for i in range(n_rows)])
            context.logits(0)
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def engine_step_ms(model_path: Path, n_rows: int, depth: int) -> float:
    """The same in the engine's own process."""
    settings = EngineSettings(n_slots=n_rows, n_ctx=N_CTX, model=ModelOptions(n_gpu_layers=99))
    with Engine(model_path, settings) as engine:
        for n_reply in (1, N_WRITTEN):
            asked = [tokens_of(700 + k, depth) for k in range(n_rows)]
            streams = [engine.submit(tokens, GREEDY, max_tokens=n_reply, ignore_eos=True) for tokens in asked]
            at = [time.perf_counter() for _ in streams[0]]
            for stream in streams:
                stream.result()
    return 1e3 * statistics.median(np.diff(at))


def short_of_ram(run: Run) -> None:
    """Eight agents whose conversations do not fit into 8 GiB, without a disk and with one."""
    small = ("--cache-ram", "8GiB")
    with run.theirs(cache_gib=8) as server:
        _try(partial(agents, run.book, server, run.n_agent_requests, "RAM alone"))
    with everwarm(str(run.model), *_shape(N_SLOTS), *small, "--disk-cache", "0", log="INFO") as server:
        _try(partial(agents, run.book, server, run.n_agent_requests, "RAM alone"))
    disk = ("--disk-cache", "64GiB", "--state-dir", str(run.folder / "state"))
    with everwarm(str(run.model), *_shape(N_SLOTS), *small, *disk, log="INFO") as server:
        _try(partial(agents, run.book, server, run.n_agent_requests, "RAM and disk"))


def unpinned(run: Run) -> None:
    with run.ours("--pin-ram", "off") as server:
        unpinned_server = Server("Everwarm, not pinned", server.host, server.pid, server.log)
        _try(lambda: switch(run.book, unpinned_server, 4))
        _try(lambda: slot_files(run.book, unpinned_server, 2))


def swapped(run: Run) -> None:
    """Another model takes the GPU, and the first comes back: its conversation is still in RAM."""
    models = run.folder / "models"
    models.mkdir()
    (models / "main.gguf").symlink_to(run.model)
    (models / "other.gguf").symlink_to(EMBEDDED)
    flags = ("--cache-ram", "8GiB", "--disk-cache", "0", *_shape(2))
    with everwarm("--models", str(models), *flags, log="INFO") as server:
        history = tokens_of(100)
        for i in range(4):
            history += tokens_of(600 + i, N_NEW)
            row, reply = timed(server, history, N_REPLY, model="main")
            history += reply
            if i:
                run.book.add("model swapped out and back", server.name, row)
            time.sleep(PAUSE_S)
            timed(server, tokens_of(1, 64), 1, model="other")
        _note_log(run, "swap log", server)


def _note_log(run: Run, title: str, server: Server) -> None:
    words = ("pinned", "loaded", "sleep", "put away", "WARN", "ERROR", "Trace")
    run.book.about[title] = [line.strip() for line in server.log if any(word in line for word in words)][:40]


def _try(action: Callable[[], None]) -> None:
    """One scenario that fails must not cost the others' numbers; it is named in the output and missing in the table."""
    try:
        action()
    except Exception:  # noqa: BLE001 - shown
        traceback.print_exc()


PHASES: dict[str, Callable[[Run], None]] = {
    "side-by-side": side_by_side,
    "one-slot": one_slot,
    "slot-files": slot_files_alone,
    "slot-files-full": slot_files_short_of_ram,
    "eight": eight,
    "turns": turns,
    "next-turn": next_turns,
    "writers-8": eight_writers,
    "writers-32": many_writers,
    "short-of-ram": short_of_ram,
    "unpinned": unpinned,
    "swapped": swapped,
}
DEFAULT_PHASES = [
    name for name in PHASES if name not in ("eight", "slot-files", "slot-files-full", "turns", "next-turn")
]  # the first one has them


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--llama-server", type=Path, required=True, help="its program, of the same build")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu"))
    parser.add_argument("--repeats", type=int, default=9, help="of anything, at most")
    parser.add_argument("--agent-requests", type=int, default=36, help="of short-of-ram")
    parser.add_argument("phases", nargs="*", default=DEFAULT_PHASES, help=f"any of: {', '.join(PHASES)}")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    book = Book(options.out / "gpu.json")
    book.about = about_machine(options.model)
    with tempfile.TemporaryDirectory(prefix="everwarm-gpu-", dir=options.model.parent) as folder:
        run = Run(options.model, options.llama_server, Path(folder), book, options.repeats, options.agent_requests)
        for name in options.phases:
            began = time.monotonic()
            _try(partial(PHASES[name], run))
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    book.write()
    table = markdown(book)
    (options.out / "gpu.md").write_text(table)
    print(table)


SHOWN = ("prompt_ms", "restore_ms", "first_ms", "read", "ms_per_token", "save_ms", "restore_file_ms", "tokens_per_s")
SHOWN += ("both_ms", "save_again_ms", "main_mb", "keep_ms", "ms_per_step", "cached_percent", "seconds")


def markdown(book: Book) -> str:
    lines = ["| scenario | server | n | " + " | ".join(SHOWN) + " |", "|---|---|---|" + "---|" * len(SHOWN)]
    for scenario, servers in book.samples.items():
        for server, rows in servers.items():
            cells = [_cell([row[key] for row in rows if key in row]) for key in SHOWN]
            lines.append(f"| {scenario} | {server} | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float]) -> str:
    """The median, and from the least to the most."""
    if not values:
        return ""
    return f"{statistics.median(values):.1f} ({min(values):.1f}…{max(values):.1f})"


if __name__ == "__main__":
    main()
