"""Hostile blobs given to libllama behind every check of ours: the gateway lives, and whoever comes next is answered right.

A hook in the engine (``hostile_hook``) replaces what a restore hands to libllama. Such a blob may be refused, may end the
engine, or may be believed: then its own conversation is spoilt, which is what digests are for, but no other one may be.
Answers are compared by their tokens and their log-probabilities: tiny models hardly ever change their mind.
"""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from everwarm.llama.blobs import with_header
from everwarm.llama.model import Model
from gateway.hostile_hook import DIRECTORY, MUTATIONS, ORDER, Order, read_log
from gateway.server import Reply, Server, _end, _listen, metric, until
from llama.steps import SLOT, open_context, read
from models import tiny_model

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
TARGETS = {
    "qwen35": ("state", "segment", "sequence"),
    "mamba2": ("state", "sequence"),
    "gemma3": ("state", "segment", "sequence"),
    "llama": ("segment", "sequence"),
}
N_PREFIX, N_TAIL, N_REPLY = 100, 24, 4  # longer than the window of gemma3
N_ATTACKED, N_OTHERS = 4, 5
TOLERANCE = 0.02  # on log-probabilities: where cells lie, and how reading was cut, changes the last places
SIZE = ("--ctx-size", "4096", "--slots", "2", "--threads", "1", "--cache-ram", "1GiB", "--disk-cache", "0")

Tokens = list[int]


# prompts and answers


def random_tokens(n: int, *seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(12, 250, n).tolist()


ATTACKED = [random_tokens(N_PREFIX, 1, i) for i in range(N_ATTACKED)]
OTHERS = [random_tokens(N_PREFIX, 2, i) for i in range(N_OTHERS)]


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    margin: float  # by how much its closest decision was one

    @staticmethod
    def of(reply: Reply) -> Answer:
        said = reply.json["completion_probabilities"]
        tops = [sorted(top["logprob"] for top in one["top_logprobs"]) for one in said]
        margin = min((top[-1] - top[-2] for top in tops), default=0.0)
        return Answer(tuple(one["id"] for one in said), np.array([one["logprob"] for one in said]), margin)

    def is_like(self, other: Answer) -> bool:
        return self.tokens == other.tokens and self.distance(other) <= TOLERANCE

    def distance(self, other: Answer) -> float:
        return float(np.abs(self.logprobs - other.logprobs).max())


def ask(server: Server, prompt: Tokens, **more: Any) -> Reply:
    wanted = {"n_predict": N_REPLY, "temperature": 0, "ignore_eos": True, "n_probs": 2}
    return server.post("/completion", {"prompt": prompt, **wanted, **more})


def answer(server: Server, prompt: Tokens, **more: Any) -> Answer:
    reply = ask(server, prompt, **more)
    assert reply.status == 200, reply.data
    return Answer.of(reply)


# servers


@contextlib.contextmanager
def serving_model(model: Path, *flags: str, **env: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "everwarm.cli", "serve", str(model), "--port", "0", *SIZE, *flags]
    server = Server("", subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | env))
    listener = threading.Thread(target=_listen, args=(server,), daemon=True)
    listener.start()
    try:
        until(lambda: bool(server.url) or not listener.is_alive(), "the server has started")
        assert server.url, f"the server did not start: {server.log}"
        yield server
    finally:
        _end(server.process)
        listener.join()


@contextlib.contextmanager
def serving_hostile(model: Path, directory: Path) -> Iterator[Server]:
    tests = str(Path(__file__).parents[1])
    hook = {"EVERWARM_TEST_HOOK": "gateway.hostile_hook:install", DIRECTORY: str(directory), "PYTHONPATH": tests}
    with serving_model(model, "--slot-save-path", str(directory), **hook) as server:
        yield server


@dataclass
class Golden:
    """What an honest server says, which never saw the hook. Only prompts whose answers are no close decisions."""

    tails: list[Tokens] = field(default_factory=list)  # of the attacks
    attacks: list[Answer] = field(default_factory=list)
    next_20: list[tuple[Tokens, dict[str, Any], Answer]] = field(default_factory=list)

    def record(self, server: Server, n_attacks: int) -> None:
        for i in range(N_OTHERS):
            for kind in range(2):
                self._add(server, OTHERS[i], (4, i, kind))
        for i in range(N_ATTACKED):
            for kind in range(2):
                self._add(server, ATTACKED[i], (5, i, kind), deterministic=True)
        for i in range(2):
            self._add(server, OTHERS[i], (6, i), cache_prompt=False)
        for number in range(n_attacks):
            tail, golden = _stable(server, ATTACKED[number % N_ATTACKED], (7, number), deterministic=True)
            self.tails.append(tail)
            self.attacks.append(golden)

    def _add(self, server: Server, prefix: Tokens, seed: tuple[int, ...], **how: Any) -> None:
        tail, golden = _stable(server, prefix, seed, **how)
        self.next_20.append((prefix + tail, how, golden))


def _stable(server: Server, prefix: Tokens, seed: tuple[int, ...], **how: Any) -> tuple[Tokens, Answer]:
    for attempt in range(20):
        tail = random_tokens(N_TAIL, *seed, attempt)
        golden = answer(server, prefix + tail, **how)
        if golden.margin > 2 * TOLERANCE:
            return tail, golden
    raise AssertionError(f"every answer to {seed} is a close decision")


# hostile blobs


def plan(arch: str) -> list[Order]:
    """Every kind in all its variants on every target; or, in short, what surely does harm and some of the others."""
    targets, kinds = TARGETS[arch], list(MUTATIONS)
    if CAMPAIGN:
        found = [(kind, target, i) for target in targets for kind in kinds for i in range(_n_variants(kind))]
    else:
        first = 5 * list(TARGETS).index(arch)
        some = kinds[:3] + [kinds[3 + (first + i) % (len(kinds) - 3)] for i in range(5)]
        found = [(kind, targets[i % len(targets)], i) for i, kind in enumerate(some)]
    return [Order(n, *each, n_times=9 if n % 8 == 7 else 1) for n, each in enumerate(found)]


def _n_variants(kind: str) -> int:
    return {"flipped bits": 16, "truncated": 16, "moved positions": 8, "cells twice": 2, "no cells": 1}.get(kind, 5)


def write_strangers(directory: Path, arch: str) -> None:
    """Blobs of other models, and of this one after a token more or less."""
    others = {name: tiny_model(name) for name in TARGETS if name != arch} | {"wide": tiny_model(arch, width=256)}
    for name, path in others.items():
        for what, blob in _blobs(path, N_PREFIX).items():
            for target in TARGETS[arch]:
                blob.tofile(directory / f"foreign.{target}.{name}-{what}")
    for n in (N_PREFIX - 1, N_PREFIX + 1):
        for target, blob in _blobs(tiny_model(arch), n).items():
            blob.tofile(directory / f"sibling.{target}.{n}")


def _blobs(path: Path, n_tokens: int) -> dict[str, np.ndarray]:
    tokens = np.array(ATTACKED[0] + random_tokens(N_TAIL, 3), np.int32)
    with Model(path) as model, open_context(model) as context:
        saved = read(context, tokens, (n_tokens,))
        found = {"sequence": with_header(context.capture_sequence(SLOT), SLOT)}
        if saved.state is not None:
            found["state"] = saved.state
        if saved.segments:
            found["segment"] = saved.segments[0].blob
    return found


class Campaign:
    def __init__(self, server: Server, directory: Path, golden: Golden) -> None:
        self.server = server
        self.directory = directory
        self.golden = golden
        self.outcomes: collections.Counter[str] = collections.Counter()

    def prepare(self) -> None:
        """A file of every conversation that will be attacked; and nobody is hostile yet."""
        for i, prefix in enumerate(ATTACKED):
            assert ask(self.server, prefix, n_predict=0, id_slot=0, deterministic=True).status == 200
            self._act("save", 0, i)
        self.check_next_20("before anything hostile")

    def attack(self, order: Order) -> None:
        prefix = ATTACKED[order.number % N_ATTACKED]
        answer(self.server, prefix, deterministic=True)  # so that there is something to restore
        n_restarts = self._n_restarts()
        (self.directory / ORDER).write_bytes(msgspec.json.encode(order))
        try:
            reply = self._provoke(order, prefix + self.golden.tails[order.number])
        finally:
            (self.directory / ORDER).unlink()
        outcome = self._outcome(order, self._n_restarts() - n_restarts)
        self.outcomes[outcome] += 1
        self._check_reply(order, reply, outcome)
        self.check_next_20(f"after {order}, {outcome}")

    def _provoke(self, order: Order, prompt: Tokens) -> Reply:
        if order.target != "sequence":
            return ask(self.server, prompt, deterministic=True)
        salt = f"attack {order.number}"
        self._act("restore", 1, order.number % N_ATTACKED, cache_salt=salt)
        return ask(self.server, prompt, cache_salt=salt)

    def _act(self, action: str, slot: int, conversation: int, **more: str) -> None:
        body = {"filename": f"{conversation}.bin", **more}
        reply = self.server.post(f"/slots/{slot}?action={action}", body)
        assert reply.status == 200 or (action == "restore" and _is_clean_error(reply)), reply.data

    def _outcome(self, order: Order, n_deaths: int) -> str:
        said = [entry.said for entry in read_log(self.directory) if entry.number == order.number]
        assert "given" in said, f"{order} was never tried"
        self.outcomes["blobs"] += said.count("given")
        if n_deaths:
            return "died" if "accepted" not in said else "accepted, then died"
        return "accepted" if "accepted" in said else "refused"

    def _check_reply(self, order: Order, reply: Reply, outcome: str) -> None:
        golden = self.golden.attacks[order.number]
        if reply.status != 200:
            assert _is_clean_error(reply), (order, reply)
            self.outcomes["errors"] += 1
        elif not Answer.of(reply).is_like(golden):
            assert "accepted" in outcome, (order, outcome, Answer.of(reply), golden)
            self.outcomes["wrong"] += 1

    def check_next_20(self, when: str) -> None:
        assert len(self.golden.next_20) == 20
        for i, (prompt, how, golden) in enumerate(self.golden.next_20):
            found = answer(self.server, prompt, **how)
            assert found.is_like(golden), f"answer {i} of 20 {when}: {found}, not {golden}"
        assert self.server.process.poll() is None and self.server.get("/health").status == 200

    def _n_restarts(self) -> int:
        return int(metric(self.server.get("/metrics").data.decode(), "everwarm_engine_restarts"))


def _is_clean_error(reply: Reply) -> bool:
    return reply.status in (400, 500, 503) and bool(reply.json["error"]["message"])


@pytest.mark.timeout(3600 if CAMPAIGN else 120)
@pytest.mark.parametrize("arch", TARGETS)
def test_hostile_blobs_harm_nobody_else(arch: str, tmp_path: Path) -> None:
    orders = plan(arch)
    write_strangers(tmp_path, arch)
    golden = Golden()
    with serving_model(tiny_model(arch)) as honest:
        golden.record(honest, len(orders))
        assert "EVERWARM_TEST_HOOK" not in honest.log
    with serving_hostile(tiny_model(arch), tmp_path) as server:
        assert "EVERWARM_TEST_HOOK is set" in server.log
        campaign = Campaign(server, tmp_path, golden)
        campaign.prepare()
        for order in orders:
            campaign.attack(order)
    counts = campaign.outcomes
    print(f"\n{arch}: {len(orders)} attacks, {dict(counts)}")
    assert counts["blobs"] >= len(orders), "this test could not fail: not every blob was tried"
    assert counts["refused"] + counts["died"] > 0, "this test could not fail: libllama believed everything"
    assert counts["wrong"] > 0, "this test could not fail: no wrong answer can be told from a right one"
