"""Hostile blobs given to libllama behind every check of ours: the gateway lives, and whoever comes next is answered right.

A hook in the engine (``hostile_hook``) replaces what a restore hands to libllama. Such a blob may be refused, may end the
engine, or may be believed: then its own conversation is spoilt, which is what digests are for, but no other one may be.
Answers are compared by their tokens and their log-probabilities: tiny models hardly ever change their mind.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from everwarm.llama.blobs import with_header
from everwarm.llama.model import Model
from support.fork_server import fork_server
from support.hostile_hook import DIRECTORY, MUTATIONS, ORDER, Order, read_log
from support.models import tiny_model
from support.server import Reply, Server, listening, metric
from support.steps import SLOT, open_context, read

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
TARGETS = {
    "qwen35": ("state", "segment", "sequence", "second"),
    "mamba2": ("state", "sequence"),
    "gemma3": ("state", "segment", "sequence"),
    "llama": ("segment", "sequence"),
}
N_OTHERS = 4  # kinds for each model beside those that surely do harm
UNCURED = "negative positions"  # see the last test
N_PREFIX, N_TAIL, N_REPLY = 100, 24, 4  # longer than the window of gemma3
TOLERANCE = 0.02  # on log-probabilities: where cells lie, and how reading was cut, changes the last places
SIZE = ("--ctx-size", "4096", "--slots", "2", "--threads", "1", "--cache-ram", "1GiB", "--disk-cache", "0")

ALONE: dict[str, Any] = {"deterministic": True}  # in an empty context: everything comes from RAM first

Tokens = list[int]


# prompts and answers


def random_tokens(n: int, *seed: int) -> Tokens:
    return random.Random(repr(seed)).choices(range(12, 250), k=n)


def prefix_of(*seed: int) -> Tokens:
    """No two of these begin alike, so that no conversation owns a part of another's KV."""
    return [12 + (37 * seed[0] + seed[1]) % 238, *random_tokens(N_PREFIX - 1, *seed)]


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    margin: float  # by how much its closest decision was one

    @staticmethod
    def of(reply: Reply) -> Answer:
        message = reply.json["completion_probabilities"]
        tops = [sorted(top["logprob"] for top in one["top_logprobs"]) for one in message]
        margin = min((top[-1] - top[-2] for top in tops), default=0.0)
        return Answer(tuple(one["id"] for one in message), np.array([one["logprob"] for one in message]), margin)

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
    process = fork_server().start("serve", str(model), "--port", "0", *SIZE, *flags, **env)
    with listening(process) as server:
        yield server


@contextlib.contextmanager
def serving_hostile(model: Path, directory: Path) -> Iterator[Server]:
    tests = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    hook = {"EVERWARM_TEST_HOOK": "support.hostile_hook:install", DIRECTORY: str(directory), "PYTHONPATH": tests}
    hook["GGML_NO_BACKTRACE"] = "1"  # else a debugger, where there is one, looks at every death first
    with serving_model(model, "--slot-save-path", str(directory), **hook) as server:
        yield server


@dataclass(frozen=True)
class Question:
    """A prompt whose golden answer is known, and no close decision."""

    prompt: Tokens
    how: dict[str, Any]
    golden: Answer


@dataclass(frozen=True)
class Golden:
    """What an honest server says, which never saw the hook."""

    server: Server

    def next_19(self) -> list[Question]:
        """Others' conversations: beside whatever is left of an attack, read afresh beside it, and alone."""
        plain = [self.question(prefix_of(1, i), (1, i), {}) for i in range(5)]
        again = [self.question(prefix_of(1, i), (2, i), {"cache_prompt": False}) for i in range(5)]
        return plain + again + [self.question(prefix_of(3, i), (3, i), ALONE) for i in range(9)]

    def question(self, prefix: Tokens, seed: tuple[int, ...], how: dict[str, Any]) -> Question:
        for attempt in range(20):
            prompt = prefix + random_tokens(N_TAIL, *seed, attempt)
            golden = answer(self.server, prompt, **how)
            if golden.margin > 2 * TOLERANCE:
                return Question(prompt, how, golden)
        raise AssertionError(f"every answer to {seed} is a close decision")


# hostile blobs


def plan(arch: str, *kinds: str) -> list[Order]:
    """Every kind in all its variants on every target; or, in short, what surely does harm and some of the others."""
    targets, n = TARGETS[arch], list(TARGETS).index(arch)
    if CAMPAIGN:
        found = [(kind, target, i) for target in targets for kind in kinds for i in range(N_VARIANTS.get(kind, 5))]
    else:
        some = kinds[:3] + tuple(kinds[3:][(N_OTHERS * n + i) % len(kinds[3:])] for i in range(N_OTHERS))
        found = [(kind, targets[i % len(targets)], i) for i, kind in enumerate(some)]
    return [Order(i, *each, n_times=9 if (i + n) % 8 == 0 else 1) for i, each in enumerate(found)]


N_VARIANTS = {"flipped bits": 16, "truncated": 16, "moved positions": 8, "no cells": 1}


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
    """As they are after so many tokens, with a cut right before the last four."""
    with Model(path) as model, open_context(model) as context:
        saved = read(context, np.array(random_tokens(2 * N_PREFIX, 5), np.int32), (n_tokens - 4, n_tokens))
        found = {"sequence": with_header(context.capture_sequence(SLOT), SLOT)}
        if saved.state is not None:
            found["state"] = saved.state
        for target, segment in zip(("segment", "second"), saved.segments, strict=False):
            found[target] = segment.blob
    return found


class Campaign:
    def __init__(self, server: Server, directory: Path, golden: Golden) -> None:
        self.server = server
        self.directory = directory
        self.golden = golden
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.next_19 = golden.next_19()

    def attack(self, order: Order) -> None:
        """A conversation of its own is known, goes on under attack, and then takes another turn."""
        prefix, how = prefix_of(4, order.number), ALONE | {"cache_salt": f"attack {order.number}"}
        for server in (self.golden.server, self.server):
            assert ask(server, prefix, n_predict=0, id_slot=0, **how).status == 200
        under_attack, afterwards = (self.golden.question(prefix, (4, order.number, i), how) for i in range(2))
        assert self._act("save", 0, how["cache_salt"]).status == 200
        n_restarts = self._n_restarts()
        (self.directory / ORDER).write_bytes(msgspec.json.encode(order))
        try:
            reply = self._provoke(order, under_attack)
        finally:
            (self.directory / ORDER).unlink()
        outcome = self._outcome(order, self._n_restarts() - n_restarts)
        self.outcomes[outcome] += 1
        self._check_reply(order, reply, outcome, under_attack.golden)
        self.check([*self.next_19, afterwards], f"after {order}, {outcome}")

    def _provoke(self, order: Order, question: Question) -> Reply:
        if order.target != "sequence":
            return ask(self.server, question.prompt, **question.how)
        salt = f"restored {order.number}"  # a namespace of its own, in which only the file knows the conversation
        assert ask(self.server, prefix_of(4, order.number), n_predict=0, id_slot=1, cache_salt=salt).status == 200
        assert self._act("save", 1, salt).status == self._act("erase", 1, salt).status == 200
        reply = self._act("restore", 1, salt)
        assert reply.status == 200 or _is_clean_error(reply), (order, reply)
        return ask(self.server, question.prompt, cache_salt=salt)

    def _act(self, action: str, slot: int, salt: str) -> Reply:
        return self.server.post(f"/slots/{slot}?action={action}", {"filename": "attacked.bin", "cache_salt": salt})

    def _outcome(self, order: Order, n_deaths: int) -> str:
        message = [entry.message for entry in read_log(self.directory) if entry.number == order.number]
        assert "given" in message and "failed" not in message, f"{order} was not tried: {message}"
        self.outcomes["blobs"] += message.count("given")
        if n_deaths:
            return "died" if "accepted" not in message else "accepted, then died"
        return "accepted" if "accepted" in message else "refused"

    def _check_reply(self, order: Order, reply: Reply, outcome: str, golden: Answer) -> None:
        """Golden, or an error that says so. Only who believed a hostile blob may say anything else."""
        if reply.status != 200:
            assert _is_clean_error(reply), (order, reply)
            self.outcomes["errors"] += 1
        elif not Answer.of(reply).is_like(golden):
            assert "accepted" in outcome, (order, outcome, Answer.of(reply), golden)
            self.outcomes["wrong"] += 1

    def check(self, questions: list[Question], when: str) -> None:
        for i, question in enumerate(questions):
            found = answer(self.server, question.prompt, **question.how)
            assert found.is_like(question.golden), f"answer {i} {when}: {found}, not {question.golden}"
        assert self.server.process.poll() is None and self.server.get("/health").status == 200

    def _n_restarts(self) -> int:
        return int(metric(self.server.get("/metrics").data.decode(), "everwarm_engine_restarts_total"))


def _is_clean_error(reply: Reply) -> bool:
    return reply.status in (400, 500, 503) and bool(reply.json["error"]["message"])


def run(arch: str, orders: list[Order], directory: Path) -> collections.Counter[str]:
    """All attacks on one server, beside an honest one that says what is right; returns what came of them."""
    write_strangers(directory, arch)
    model = tiny_model(arch)
    with serving_model(model) as honest, serving_hostile(model, directory) as server:
        campaign = Campaign(server, directory, Golden(honest))
        campaign.check(campaign.next_19, "before anything hostile")
        for order in orders:
            campaign.attack(order)
        assert "EVERWARM_TEST_HOOK is set" in server.log and "EVERWARM_TEST_HOOK" not in honest.log
    print(f"\n{arch}: {len(orders)} attacks, {dict(campaign.outcomes)}")
    return campaign.outcomes


@pytest.mark.timeout(3600 if CAMPAIGN else 120)
@pytest.mark.parametrize("arch", TARGETS)
def test_a_hostile_blob_harms_nobody_else(arch: str, tmp_path: Path) -> None:
    orders = plan(arch, *(kind for kind in MUTATIONS if kind != UNCURED))
    counts = run(arch, orders, tmp_path)
    assert counts["blobs"] >= len(orders), "not every blob was tried"
    assert counts["refused"] + counts["died"] > 0, "this test could not fail: libllama believed everything"
    assert counts["wrong"] > 0, "this test could not fail: no wrong answer can be told from a right one"


@pytest.mark.xfail(
    reason="libllama never removes a cell at a negative position: whoever gets its sequence next sees it"
)
@pytest.mark.parametrize(("arch", "target"), [("llama", "segment"), ("mamba2", "sequence")])
def test_cells_at_negative_positions_harm_nobody_else(arch: str, target: str, tmp_path: Path) -> None:
    run(arch, [Order(i, UNCURED, target, i) for i in range(3)], tmp_path)
