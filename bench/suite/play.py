"""One scenario on all servers, in turns: each request goes to every server before the next one goes to any."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.suite.account import Account
from bench.suite.servers import Answer, Runner
from bench.suite.sessions import request
from bench.workload.chat import Step

PAUSE_S = 0.03  # and the time that the other servers take: what a server does on idle is mostly done by then
N_EXPLAINED = 16  # regret beyond this is written down with the server's own reason

Row = dict[str, Any]


class Differs(RuntimeError):
    """Two servers make different tokens of the same request: nothing can be compared."""


def play(steps: Sequence[Step], runners: Sequence[Runner], pause_s: float = PAUSE_S) -> dict[str, Any]:
    """Rows by server, and what each weighed at the end. The servers are started and stopped here."""
    started: list[Runner] = []
    try:
        for runner in runners:
            runner.start()
            started.append(runner)
        streams = [_same_tokens(step, runners) for step in steps]
        empty = {runner.name: asdict(runner.weight()) for runner in runners}
        rows = _play(steps, streams, runners, pause_s)
        weights = {runner.name: {"empty": empty[runner.name], "end": asdict(runner.weight())} for runner in runners}
    finally:
        for runner in started:
            runner.stop()
    return {"rows": rows, "weights": weights}


def _play(
    steps: Sequence[Step], streams: Sequence[list[int]], runners: Sequence[Runner], pause_s: float
) -> dict[str, list[Row]]:
    accounts = {runner.name: Account(message_start=streams[0][0]) for runner in runners}
    rows: dict[str, list[Row]] = {runner.name: [] for runner in runners}
    for number, (step, tokens) in enumerate(zip(steps, streams, strict=True)):
        turn = number % len(runners)
        for runner in (*runners[turn:], *runners[:turn]):
            if step.before == "kill":
                runner.kill()
            elif step.before == "swap":
                runner.swap()
            time.sleep(pause_s)
            rows[runner.name].append(_row(step, tokens, _asked(runner, step), accounts[runner.name], runner.name))
    return rows


def _asked(runner: Runner, step: Step) -> Answer:
    body = request(step)
    return runner.ask(body) if step.stops_at is None else runner.hang_up(body, step.stops_at)


def _row(step: Step, tokens: list[int], answer: Answer, account: Account, name: str) -> Row:
    if answer.n_prompt not in (0, len(tokens)):  # 0: the client hung up before the first answer
        raise Differs(f"{name} read a prompt of {answer.n_prompt} tokens; rendered it had {len(tokens)}")
    reading = account.add(tokens, answer.n_cached, answer.n_reached)
    row = asdict(reading) | {
        "avoidable": reading.n_avoidable,
        "regret": reading.n_regret,
        "ahead": reading.n_ahead,
        "ms": round(1e3 * answer.seconds, 2),
        "restore_ms": None if answer.restore_ms is None else round(answer.restore_ms, 3),
        "cancelled": step.stops_at is not None,
        "before": step.before,
    }
    return row | ({"why": dict(answer.why)} if reading.n_regret > N_EXPLAINED and answer.why else {})


def _same_tokens(step: Step, runners: Sequence[Runner]) -> list[int]:
    body = request(step)
    streams = [runner.tokens(body) for runner in runners]
    for runner, stream in zip(runners, streams, strict=True):
        if stream != streams[0]:
            raise Differs(f"{runner.name} and {runners[0].name} make different tokens of {step.conversation}")
    return streams[0]
