"""``python -m bench traces``: recordings on Everwarm and llama-server, one at a time, another one first in every round."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.measure import table
from bench.suite.servers import Runner, Setup, runner
from bench.traces import depth, sample
from bench.traces.recorded import AgentSession, Turn, parse
from bench.traces.replay import Played, Replay
from everwarm.config import default_threads

SERVERS = ("Everwarm", "llama-server")
PARTS = ("calm", "disturbed", "depth")
HELLO = {"messages": [{"role": "user", "content": "Hello."}]}
Shown = tuple[str, Callable[[Played], float], str]
COLUMNS: tuple[Shown, ...] = (
    ("cached", lambda played: played.cached_percent, "{:.1f} %"),
    ("read again", lambda played: played.regret or 0, "{:,.0f} tokens"),
    ("first token p50", lambda played: 1e3 * played.first_s(0.5), "{:.0f} ms"),
    ("p95", lambda played: 1e3 * played.first_s(0.95), "{:.0f} ms"),
    ("requests/s", lambda played: played.requests_per_s, "{:.2f}"),
)


def run() -> None:
    _run(_parser().parse_args([]))


def main() -> None:
    _run(_parser().parse_args())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.traces", description="Replay recorded agent sessions.")
    parser.add_argument("files", nargs="*", type=Path, help="recordings; without: the samples, in both forms")
    parser.add_argument("--url", help="HOST:PORT of another OpenAI server, instead of both; it is not disturbed")
    parser.add_argument("--model", default="", help="the model's name, for --url")
    parser.add_argument("--size", type=float, default=1.0, help="of the samples")
    parser.add_argument("--clients", type=int, default=2, help="sessions at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="disturbed: a kill -9 and a model swap in the midst; depth: tokens/s at the end of a long context",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of blocks that are known by their hash only")
    parser.add_argument("--ctx", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--write-samples", type=Path, metavar="FOLDER", help="write the samples there, and do no more")
    return parser


def _run(given: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers must go, too
    samples = {"messages.jsonl": sample.messages_recording(size=given.size), "blocks.json": sample.blocks_recording()}
    if given.write_samples is not None:
        for name, text in samples.items():
            (given.write_samples / name).write_text(text)
        return
    recordings = {path.name: path.read_text() for path in given.files} or samples
    for name, text in recordings.items():
        sessions = parse(text, given.scale)
        if given.url:
            played = Replay(lambda: given.url, {}, given.model).play(sessions, given.clients)
            _show(f"{name} on {given.url}", {given.url: [played]})
            continue
        for part in ("calm", "disturbed"):
            if part in given.parts:
                disturbed = part == "disturbed"
                _show(_title(name, sessions, disturbed, given), _rounds(sessions, disturbed, given))
    if "depth" in given.parts and not given.url and not given.files:
        _show_depth(given)
    print(f"\nLoad of the machine at the end: {os.getloadavg()[0]:.1f}")


def _title(name: str, sessions: Sequence[AgentSession], disturbed: bool, given: argparse.Namespace) -> str:
    n_turns = sum(len(session.turns) for session in sessions)
    what = ", with a kill -9 and a model swap" if disturbed else ""
    shape = f"{len(sessions)} sessions, {n_turns} requests, {given.clients} clients, {given.threads} threads"
    return f"{name}: {shape}{what}; medians of {given.rounds} rounds"


def _rounds(sessions: Sequence[AgentSession], disturbed: bool, given: argparse.Namespace) -> dict[str, list[Played]]:
    setup = Setup(given.ctx, given.threads, swaps=disturbed)
    found: dict[str, list[Played]] = {name: [] for name in SERVERS}
    tokens: dict[Turn, list[int]] = {}
    for number in range(given.rounds):
        at = number % len(SERVERS)
        for name in (*SERVERS[at:], *SERVERS[:at]):
            server = runner(name, setup)
            server.start()
            try:
                tokens = tokens or {turn: server.tokens(turn.body) for each in sessions for turn in each.turns}
                found[name].append(_play(server, sessions, tokens, disturbed, given.clients))
            finally:
                server.stop()
    return found


def _play(
    server: Runner,
    sessions: Sequence[AgentSession],
    tokens: Mapping[Turn, list[int]],
    disturbed: bool,
    n_clients: int,
) -> Played:
    def swapped() -> None:
        """Until the model is there again: on both servers its loading is no part of a request."""
        server.swap()
        server.ask(HELLO)

    between = (server.kill, swapped) if disturbed else ()
    return Replay(lambda: server.host, tokens, server.model).play(sessions, n_clients, between)


def _show(title: str, found: Mapping[str, Sequence[Played]]) -> None:
    rows = [
        (name, *(shown.format(statistics.median(map(of, each))) for _, of, shown in COLUMNS))
        for name, each in found.items()
    ]
    table(title, ("", *(column for column, _, _ in COLUMNS)), rows)
    print(flush=True)


def _show_depth(given: argparse.Namespace) -> None:
    found = depth.measured(given.threads, given.rounds)
    rows = [(name, f"{statistics.median(each):.0f} tokens/s") for name, each in found.items()]
    title = (
        f"{depth.N_REPLY} tokens at depth {depth.N_DEPTH:,}, {given.threads} threads; medians of {given.rounds} rounds"
    )
    table(title, ("", "from the first token to the last"), rows)
