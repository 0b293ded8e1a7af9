"""Drafts by an MTP head beside llama-server's own MTP mode, with the same acceptance on both.

Random weights guess nothing, so what is accepted is imposed: here by a head that is computed as ever and then says the
right token as often as it is told; in llama-server by its synthetic rates. On a GPU with a model of ``bench.big_model
--mtp``: ``python -m bench.acceptance --model MODEL --llama-server PROGRAM``; ``python -m bench speculation`` runs the rest
on the CPU, with the embedded model as well, whose head really guesses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu_peer import llama_server as llama_server_program
from bench.imposed import Imposed, cpu_s
from bench.measure import EMBEDDED, hundred_megabytes, table
from bench.peer import Peer, PeerOptions, llama_server
from bench.server import post
from everwarm.config import GREEDY, ModelOptions
from everwarm.engine.engine import Engine
from everwarm.engine.lifecycle import starting
from everwarm.engine.settings import EngineSettings, StoreSettings
from everwarm.engine.speculation.draft_length import Pacing, Record, StepShape
from everwarm.engine.speculation.model_drafter import ComputingDrafter
from everwarm.llama.batch import DraftRequest
from everwarm.types import SeqId

RATES = (0.0, 0.5, 0.7, 0.9)  # 0: a text that cannot be predicted
N_DRAFT = 3  # llama-server's default for heads
N_REPLY = 192
N_ROUNDS = 2
N_PROMPT = 256
N_PROMPT_GPU = 4096
QUESTIONS = (
    "Tell me a story about a blue cup.",
    "Write a short story about a dragon.",
    "Tell me a story about a red key.",
)
ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class ImposedHead:
    """Computes what a head computes, and then says tokens that are right as often as they should be."""

    def __init__(self, head: ComputingDrafter, rate: float) -> None:
        self._head = head
        self._rate = rate
        self._rng = random.Random(0)
        self.source, self.confidence, self.n_most = head.source, rate, head.n_most
        self.n_prompt = 0

    def read(self, wanted: Sequence[DraftRequest]) -> None:
        self._head.read(wanted)

    def draft(self, wanted: Sequence[DraftRequest]) -> dict[SeqId, list[int]]:
        found = self._head.draft(wanted)
        return {each.seq: self._right(each) for each in wanted if each.seq in found}

    def _right(self, wanted: DraftRequest) -> list[int]:
        at = len(wanted.history) - self.n_prompt
        tokens = Imposed.reply[at : at + wanted.n]
        return [token if self._rng.random() < self._rate else (token + 1) % 200 for token in tokens]

    def forget(self) -> None:
        self._head.forget()

    def close(self) -> None:
        self._head.close()


class AlwaysThree(Pacing):
    """Drafts as llama-server does: always so many tokens."""

    def is_plain(self) -> bool:
        return False

    def computed_length(self, drafter: ComputingDrafter, n_most: int, record: Record, shape: StepShape) -> int:  # noqa: ARG002
        record.above = self.record
        return min(n_most, N_DRAFT)


def run() -> None:
    print("What a head brings where its guesses are right as often as imposed.\n")
    imposed_on_cpu()
    print()
    embedded()
    print()
    after_restart()


# an imposed acceptance


def random_tokens(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(12, 200) for _ in range(n)]


@contextmanager
def ours(path: Path, rate: float | None, **settings: Any) -> Iterator[Engine]:
    """``rate``: None: without drafts."""
    wanted = EngineSettings(n_slots=1, speculate="off" if rate is None else "mtp", **settings)
    with Engine(path, wanted) as engine:
        if rate is not None:
            engine.call(
                lambda core: setattr(core.speculator, "computing", ImposedHead(core.speculator.computing, rate))
            )
        yield engine


def _ours(engine: Engine, seed: int, n_prompt: int, *, is_wall: bool, n_reply: int = N_REPLY) -> tuple[float, float]:
    """Tokens per second, and tokens per decode."""
    prompt, Imposed.reply = random_tokens(seed, n_prompt), random_tokens(seed + 1000, n_reply)
    engine.submit(prompt, GREEDY, max_tokens=1, ignore_eos=True).result()

    def begin(core: Any) -> tuple[float, int]:
        if core.speculator.computing is not None:
            core.speculator.computing.n_prompt = n_prompt
        return time.monotonic() if is_wall else time.thread_time(), core.context.n_decodes

    began, before = engine.call(begin)
    result = engine.submit(prompt, GREEDY, max_tokens=n_reply, ignore_eos=True).result()
    ended, after = engine.call(begin)
    assert list(result.tokens) == Imposed.reply
    seconds = result.decode_s if is_wall else ended - began  # as llama-server counts: from the first token to the last
    return n_reply / seconds, n_reply / (after - before)


def rates_of(rate: float) -> tuple[float, ...]:
    """That a token of each place is accepted, whatever was before."""
    return tuple(rate ** (i + 1) for i in range(N_DRAFT))


def imposed_on_cpu() -> None:
    starting.Sampler = Imposed  # type: ignore[misc,assignment]
    model = hundred_megabytes(mtp=True)
    usual = PeerOptions(model, n_ctx=2048, n_parallel=1, n_threads=1)
    kinds: list[float | None] = [None, *RATES]
    speeds: dict[tuple[str, float | None], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        engines = {rate: stack.enter_context(ours(model, rate, n_ctx=2048, n_threads=1)) for rate in kinds}
        peers = {rate: stack.enter_context(llama_server(_with_head(usual, rate))) for rate in kinds}
        for seed in range(N_ROUNDS + 1):
            for rate in kinds:
                speeds.setdefault(("ours", rate), []).append(_ours(engines[rate], seed, N_PROMPT, is_wall=False))
                speeds.setdefault(("theirs", rate), []).append(_theirs(peers[rate], seed))
    show(
        speeds, f"100 MB q8_0 shape with a head, replies of {N_REPLY} tokens, per second of processor time, one thread"
    )


def _with_head(options: PeerOptions, rate: float | None) -> PeerOptions:
    if rate is None:
        return options
    return replace(options, speculative="DRAFT_MTP", n_draft=N_DRAFT, synth_rates=rates_of(rate))


def _theirs(peer: Peer, seed: int) -> tuple[float, float]:
    tokens = random_tokens(seed, N_PROMPT)
    peer.complete(tokens, 1)
    began = cpu_s(peer)
    answer = peer.complete(tokens, N_REPLY, ignore_eos=True)
    return N_REPLY / (cpu_s(peer) - began), per_decode(answer["timings"])


def per_decode(timings: dict[str, Any]) -> float:
    n = int(timings["predicted_n"])
    return n / max(1, n - int(timings.get("draft_n_accepted", 0)))


def show(speeds: dict[tuple[str, float | None], list[tuple[float, float]]], title: str) -> None:
    def median(who: str, rate: float | None, i: int) -> float:
        return statistics.median(row[i] for row in speeds[who, rate][1:])

    rows = []
    for rate in dict.fromkeys(rate for _, rate in speeds):
        mine, other = median("ours", rate, 0), median("theirs", rate, 0)
        rows.append(
            (
                "no drafts" if rate is None else f"{rate:.0%}",
                f"{mine:.1f}",
                f"{mine / median('ours', None, 0):.2f}×",
                f"{median('ours', rate, 1):.2f}",
                f"{other:.1f}",
                f"{other / median('theirs', None, 0):.2f}×",
                f"{median('theirs', rate, 1):.2f}",
                f"{mine / other:.2f}×",
                f"{mine / median('ours', rate, 1) / (other / median('theirs', rate, 1)):.2f}×",
            )
        )
    head = (
        "acceptance",
        "Everwarm",
        "gain",
        "per decode",
        "llama-server",
        "gain",
        "per decode",
        "Everwarm / llama-server",
        "decodes per second",
    )
    table(title, head, rows)


# the embedded model: a head that was trained


def embedded() -> None:
    """Both draft three tokens always, so that decodes can be compared; texts are the model's own."""
    rows = []
    usual = PeerOptions(EMBEDDED, n_ctx=2048, n_parallel=1, n_threads=1)
    with ExitStack() as stack:
        starting.Sampler = Sampler  # type: ignore[misc]
        engines = {
            mode: stack.enter_context(
                Engine(EMBEDDED, EngineSettings(n_slots=1, n_ctx=2048, n_threads=1, speculate=mode))
            )
            for mode in ("off", "mtp")
        }
        engines["mtp"].call(lambda core: setattr(core.speculator, "pacing", AlwaysThree()))
        peers = {
            kind: stack.enter_context(llama_server(replace(usual, speculative=kind, n_draft=N_DRAFT)))
            for kind in (None, "DRAFT_MTP")
        }
        for name, engine in engines.items():
            rows.append((f"Everwarm, {name}", *_story(engine)))
        for kind, peer in peers.items():
            rows.append((f"llama-server, {'plain' if kind is None else 'its MTP'}", *_their_story(peer)))
    head = ("", "tokens/s of processor time", "tokens per decode", "accepted")
    table(f"everwarm-tiny, {len(QUESTIONS)} stories, one thread", head, rows)


Sampler = starting.Sampler


def _story(engine: Engine) -> tuple[str, str, str]:
    seconds = n_tokens = n_drafted = n_accepted = 0.0
    for _ in range(2):  # the first round warms up
        seconds = n_tokens = n_drafted = n_accepted = 0.0
        for question in QUESTIONS:
            prompt = ASK.format(question)
            engine.submit(prompt, GREEDY, max_tokens=1).result()
            began = engine.call(lambda _: time.thread_time())
            result = engine.submit(prompt, GREEDY, max_tokens=N_REPLY).result()
            seconds += engine.call(lambda _: time.thread_time()) - began
            n_tokens += len(result.tokens)
            n_drafted, n_accepted = n_drafted + result.n_drafted, n_accepted + result.n_draft_accepted
    return _line(seconds, n_tokens, n_drafted, n_accepted)


def _their_story(peer: Peer) -> tuple[str, str, str]:
    seconds = n_tokens = n_drafted = n_accepted = 0.0
    for _ in range(2):
        seconds = n_tokens = n_drafted = n_accepted = 0.0
        for question in QUESTIONS:
            tokens = peer.post("/tokenize", {"content": ASK.format(question), "parse_special": True})["tokens"]
            peer.complete(tokens, 1)
            began = cpu_s(peer)
            timings = peer.complete(tokens, N_REPLY)["timings"]
            seconds += cpu_s(peer) - began
            n_tokens += int(timings["predicted_n"])
            n_drafted += int(timings.get("draft_n", 0))
            n_accepted += int(timings.get("draft_n_accepted", 0))
    return _line(seconds, n_tokens, n_drafted, n_accepted)


def _line(seconds: float, n_tokens: float, n_drafted: float, n_accepted: float) -> tuple[str, str, str]:
    per_step = n_tokens / max(1.0, n_tokens - n_accepted)
    return f"{n_tokens / seconds:.0f}", f"{per_step:.2f}", f"{n_accepted:.0f} of {n_drafted:.0f}" if n_drafted else "–"


# after a restart


def after_restart(n_first: int = 64) -> None:
    """What is accepted of the first tokens of a reply, in a process that was running and in one that has just started."""
    with tempfile.TemporaryDirectory() as folder:
        store = StoreSettings(folder, restore_policy="always")
        settings = EngineSettings(n_slots=1, n_ctx=2048, n_threads=1, speculate="mtp", store=store)
        with _drafting(settings) as engine:
            tokens = _tokens(engine, QUESTIONS[0])
            tokens += engine.submit(tokens, GREEDY, max_tokens=96).result().tokens
            tokens += _tokens(engine, "My secret code is 48213. " + QUESTIONS[1])
        with _drafting(settings) as engine:
            restarted = engine.submit(tokens, GREEDY, max_tokens=n_first, ignore_eos=True).result()
    with _drafting(replace(settings, store=None)) as engine:
        engine.submit(tokens[:-32], GREEDY, max_tokens=1).result()
        running = engine.submit(tokens, GREEDY, max_tokens=n_first, ignore_eos=True).result()
    rows = [
        (f"Everwarm, {name}", f"{result.n_cached} of {result.n_prompt}", _share(result))
        for name, result in (("running", running), ("just started", restarted))
    ]
    rows.append(("llama-server, just started, slot restored", *_their_restart(tokens, n_first)))
    head = ("", "tokens not read again", "accepted")
    table(f"everwarm-tiny: the first {n_first} tokens of the second reply of a conversation", head, rows)


@contextmanager
def _drafting(settings: EngineSettings) -> Iterator[Engine]:
    with Engine(EMBEDDED, settings) as engine:
        engine.call(lambda core: core.cache.tiers.wait_open(60.0))
        engine.call(lambda core: setattr(core.speculator, "pacing", AlwaysThree()))
        yield engine
        engine.call(lambda core: core.put_away())


def _tokens(engine: Engine, question: str) -> list[int]:
    found = engine.model.vocab.tokenize(ASK.format(question), add_special=False, parse_special=True)
    return [int(token) for token in found]


def _their_restart(tokens: list[int], n_first: int) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        usual = PeerOptions(EMBEDDED, n_ctx=2048, n_parallel=1, n_threads=1, slot_save_path=folder + "/")
        options = replace(usual, speculative="DRAFT_MTP", n_draft=N_DRAFT)
        with llama_server(options) as peer:
            peer.complete(tokens[:-1], 0)
            peer.post("/slots/0?action=save", {"filename": "slot"})
        with llama_server(options) as peer:
            peer.post("/slots/0?action=restore", {"filename": "slot"})
            timings = peer.complete(tokens, n_first, ignore_eos=True)["timings"]
    n_drafted, n_accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    return f"{len(tokens) - timings['prompt_n']} of {len(tokens)}", f"{n_accepted} of {n_drafted}"


def _share(result: Any) -> str:
    return f"{result.n_draft_accepted} of {result.n_drafted}"


# a GPU


def on_gpu(model: Path, program: Path, rates: Sequence[float], n_rounds: int, n_reply: int) -> None:
    """Servers take turns, because both have the model on the device; per second of the clock. How much is accepted is
    drawn at random: at 50 % the speed of one reply of 192 tokens differs by 6 % from that of the next."""
    starting.Sampler = Imposed  # type: ignore[misc,assignment]
    speeds: dict[tuple[str, float | None], list[tuple[float, float]]] = {}
    for rate in (None, *rates):
        gpu = {"model": ModelOptions(n_gpu_layers=99), "n_ctx": 16_384, "n_ubatch": 512}
        with ours(model, rate, **gpu) as engine:
            for seed in range(n_rounds + 1):
                row = _ours(engine, seed, N_PROMPT_GPU, is_wall=True, n_reply=n_reply)
                print(f"{rate} Everwarm {row[0]:.1f} tokens/s, {row[1]:.2f} per decode", flush=True)
                speeds.setdefault(("ours", rate), []).append(row)
        flags = ["-c", "16384", "-np", "1"]
        if rate is not None:
            given = ",".join(f"{p:.4f}" for p in rates_of(rate))
            flags += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(N_DRAFT), "--spec-synth-rates", given]
        with llama_server_program(program, model, *flags) as server:
            for seed in range(n_rounds + 1):
                body = {"prompt": random_tokens(seed, N_PROMPT_GPU), "temperature": 0, "ignore_eos": True}
                post(server, "/completion", body | {"n_predict": 1})
                timings = post(server, "/completion", body | {"n_predict": n_reply})["timings"]
                row = float(timings["predicted_per_second"]), per_decode(timings)
                print(f"{rate} llama-server {row[0]:.1f} tokens/s, {row[1]:.2f} per decode", flush=True)
                speeds.setdefault(("theirs", rate), []).append(row)
    show(speeds, f"{model.name}, {N_PROMPT_GPU} tokens of prompt, replies of {n_reply}, tokens per second")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance")
    parser.add_argument("--model", type=Path, required=True, help="of bench.big_model PATH --mtp")
    parser.add_argument("--llama-server", type=Path, required=True, help="of the same build as EVERWARM_LIBLLAMA")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--rounds", type=int, default=N_ROUNDS, help="after one that warms up")
    parser.add_argument("--reply", type=int, default=N_REPLY, help="tokens")
    given = parser.parse_args()
    on_gpu(given.model, given.llama_server, given.rates, given.rounds, given.reply)
