"""Many models behind one address, one in memory at a time: every conversation goes on where it was, whoever came between.

The golden answers are those of servers with one model each. Long forms with EVERWARM_CAMPAIGN=1.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.peer import Peer, PeerOptions, llama_server

from everwarm.demo import EMBEDDED_MODEL
from support.models import tiny_model
from support.server import GUARD, Server, serving, serving_models, until, words

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_TURNS = 100 if CAMPAIGN else 9
N_TALKS = 2
ARCHS = ("qwen35", "mamba2", "gemma3")


@dataclass(frozen=True)
class Turn:
    """Somebody says something in one of a model's conversations."""

    model: str
    talk: int
    new: tuple[int, ...]


@dataclass(frozen=True)
class Answered:
    tokens: tuple[int, ...]
    n_new: int
    n_read: int
    n_known: int


def a_script(seed: int) -> list[Turn]:
    """Turns in random order. Every model is told the same, so that only the model tells two conversations apart."""
    rng = random.Random(seed)
    counts: dict[tuple[str, int], Iterator[int]] = {}
    turns = []
    for _ in range(N_TURNS):
        model, talk = rng.choice(ARCHS), rng.randrange(N_TALKS)
        nth = next(counts.setdefault((model, talk), itertools.count()))
        turns.append(Turn(model, talk, _news(seed, talk, nth)))
    return turns


def _news(seed: int, talk: int, nth: int) -> tuple[int, ...]:
    rng = np.random.default_rng((seed, talk, nth))
    return tuple(rng.integers(0, 256, 120 if nth == 0 else int(rng.integers(5, 40))).tolist())


class Player:
    """Plays a script on a server, each conversation with the replies it got there."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._talks: dict[tuple[str, int], list[int]] = {}

    def play(self, turn: Turn) -> Answered:
        talk = self._talks.setdefault((turn.model, turn.talk), [])
        talk += turn.new
        answer = self.server.complete(turn.model, talk)
        talk += answer["tokens"]
        timings = answer["timings"]
        return Answered(tuple(answer["tokens"]), len(turn.new), timings["prompt_n"], timings["cache_n"])


def link(folder: Path, **models: Path) -> Path:
    """A folder of models under these names."""
    for name, path in models.items():
        (folder / f"{name}.gguf").symlink_to(path)
    return folder


def n_changes(turns: Sequence[Turn]) -> int:
    return sum(a.model != b.model for a, b in itertools.pairwise(turns))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return link(tmp_path_factory.mktemp("models"), **{arch: tiny_model(arch) for arch in ARCHS})


def golden_of(turns: Sequence[Turn]) -> list[Answered]:
    """The same turns, each on a server that has only their model."""
    replies: dict[int, Answered] = {}
    for arch in ARCHS:
        with serving(model=tiny_model(arch)) as server:
            player = Player(server)
            replies |= {i: player.play(turn) for i, turn in enumerate(turns) if turn.model == arch}
    return [replies[i] for i in range(len(turns))]


@pytest.fixture(scope="module")
def script() -> list[Turn]:
    return a_script(seed=11)


@pytest.fixture(scope="module")
def golden(script) -> list[Answered]:
    return golden_of(script)


def test_the_models_say_different_things(script, golden):
    """Otherwise an answer with another model's state could pass for a good one."""
    first: dict[int, list[tuple[int, ...]]] = {}
    for turn, replies in zip(script, golden, strict=True):
        if len(turn.new) == 120:
            first.setdefault(turn.talk, []).append(replies.tokens)
    assert max(map(len, first.values())) == len(ARCHS)
    assert all(len(set(answers)) == len(answers) for answers in first.values())


def check(script: Sequence[Turn], replies: Sequence[Answered], golden: Sequence[Answered]) -> None:
    """Only what is new was read, and the answers are those of a server that never swapped."""
    for i, (turn, ours, theirs) in enumerate(zip(script, replies, golden, strict=True)):
        assert ours.n_read <= ours.n_new + GUARD, (
            f"turn {i} of {turn.model} read {ours.n_read} for {ours.n_new} new ones"
        )
        assert ours.tokens == theirs.tokens, f"turn {i} of {turn.model} is answered otherwise"
    assert max(ours.n_known for ours in replies) > 120, "nothing was long enough to be worth it"


def report(what: str, server: Server, replies: Sequence[Answered]) -> None:
    most = max(one.n_read - one.n_new for one in replies)
    print(f"{what}: {len(replies)} requests, {server.n_loads} loads, at most {most} more read than new")


def test_three_models_in_turns_read_only_what_is_new(folder, script, golden):
    with serving_models(folder) as server:
        player = Player(server)
        replies = [player.play(turn) for turn in script]
        check(script, replies, golden)
        assert server.n_loads == n_changes(script) + 1 > N_TURNS / 3, "one load for every change of model"
        report("swapped", server, replies)


def test_engines_that_are_killed_in_between_cost_nothing_either(folder, script, golden):
    """Once an engine is settled its conversations are in the gateway's memory, and its death is only a pause."""
    rng, replies, n_killed = random.Random(2), [], 0
    with serving_models(folder) as server:
        player = Player(server)
        for i, turn in enumerate(script):
            if i and rng.random() < 0.4:
                before = script[i - 1].model
                until(lambda name=before: server.is_settled(name), "everything is in RAM")
                server.kill_engine()
                n_killed += 1
            replies.append(player.play(turn))
        check(script, replies, golden)
        report(f"with {n_killed} kills", server, replies)
    assert n_killed > N_TURNS / 5


def test_two_models_of_one_shape_never_see_each_others_states(tmp_path):
    """Their states are of the same size and would be accepted: only the weights differ. On disk they share a folder."""
    (tmp_path / "models").mkdir()
    models = link(tmp_path / "models", one=tiny_model("qwen35"), two=tiny_model("qwen35", seed=1))
    flags = ("--disk-cache", "1GiB", "--state-dir", str(tmp_path / "states"), "--restore-policy", "always")
    prompt, more = list(_news(1, 0, 0)), list(_news(1, 0, 1))
    with serving_models(models, *flags) as server:
        whole = [*prompt, *server.complete("one", prompt)["tokens"], *more]
        theirs, ours = (server.complete(name, whole) for name in ("two", "one"))
        assert theirs["timings"]["cache_n"] == 0, "what the one has read is nothing to the other"
        assert ours["timings"]["prompt_n"] <= len(more) + GUARD
        assert ours["tokens"] != theirs["tokens"], "this test could not fail"
    with serving_models(models, *flags) as server:
        for name, replies in (("one", ours), ("two", theirs)):
            longer = [*whole, *replies["tokens"], *more]
            warm = server.complete(name, longer)
            assert warm["timings"]["prompt_n"] <= len(more) + GUARD
            assert warm["tokens"] == server.complete(name, longer, cache_prompt=False)["tokens"]


# meaning


def test_a_secret_told_before_a_swap_is_known_after_it(tmp_path):
    link(tmp_path, tiny=EMBEDDED_MODEL, other=tiny_model("mamba2"))
    told = {"role": "user", "content": f"My secret code is 48213. {words(200)}"}
    asked = {"role": "user", "content": "What is my secret code?"}

    def say(server: Server, talk: list[dict[str, Any]]) -> Any:
        options = {"temperature": 0, "max_tokens": 24, "chat_template_kwargs": {"enable_thinking": False}}
        return server.ask("/v1/chat/completions", {"model": "tiny", "messages": talk} | options)

    with serving_models(tmp_path) as server:
        reply = say(server, [told])["choices"][0]["message"]
        server.complete("other", list(range(100)))
        assert server.status_of("tiny") == "unloaded"
        answer = say(server, [told, reply, asked])
        never_told = say(server, [{"role": "user", "content": words(200)}, reply, asked])
    usage = answer["usage"]
    assert "48213" in answer["choices"][0]["message"]["content"]
    assert "48213" not in never_told["choices"][0]["message"]["content"], "this test could not fail"
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= 60 < usage["prompt_tokens"] / 4


# slots


def test_a_slot_saved_before_a_swap_is_warm_after_it(folder, tmp_path):
    """It is erased in between, so that nothing but the file can know it."""
    prompt, more = list(_news(2, 0, 0)), list(_news(2, 0, 1))
    with serving_models(folder, "--slot-save-path", str(tmp_path)) as server:
        whole = [*prompt, *server.complete("qwen35", prompt, id_slot=0)["tokens"], *more]
        saved = server.ask("/slots/0?action=save", {"filename": "a.bin", "model": "qwen35"})
        golden = server.complete("qwen35", whole, id_slot=1, cache_prompt=False)["tokens"]
        assert server.ask("/slots/0?action=erase&model=qwen35", {})["n_erased"] == len(prompt) + 7
        server.ask("/slots/1?action=erase&model=qwen35", {})
        server.complete("mamba2", prompt)
        assert server.post("/slots/0?action=restore&model=mamba2", {"filename": "a.bin"}).status == 400
        assert server.post("/slots/0?action=save", {"filename": "b.bin"}).status == 404, "whose slot?"
        assert server.get("/slots?model=qwen35").status == 503, "looking loads nothing"
        assert server.status_of("qwen35") == "unloaded" and server.status_of("mamba2") == "loaded"
        cold = server.complete("qwen35", whole, id_slot=1)
        assert cold["timings"]["cache_n"] == 0 and cold["tokens"] == golden
        server.ask("/slots/1?action=erase", {"model": "qwen35"})
        restored = server.ask("/slots/0?action=restore&model=qwen35", {"filename": "a.bin"})
        assert restored["n_restored"] == saved["n_saved"] == len(prompt) + 7
        warm = server.complete("qwen35", whole, deterministic=False)  # else what is only in a file is read again
        assert warm["timings"]["prompt_n"] <= len(more) + GUARD and warm["tokens"] == golden


def test_a_slot_that_was_not_erased_needs_no_restoring(folder):
    """The conversation of a slot outlives its model's absence without anybody saving it."""
    prompt, more = list(_news(4, 0, 0)), list(_news(4, 0, 1))
    with serving_models(folder) as server:
        whole = [*prompt, *server.complete("gemma3", prompt, id_slot=1)["tokens"], *more]
        server.ask("/models/unload", {"model": "gemma3"})
        until(lambda: not server.engine_pids, "it is unloaded")
        warm = server.complete("gemma3", whole, id_slot=0)
        assert warm["timings"]["prompt_n"] <= len(more) + GUARD
        assert warm["tokens"] == server.complete("gemma3", whole, cache_prompt=False)["tokens"]


# the peer


def test_we_read_no_more_than_llama_server_does(folder):
    """llama-server has one model and forgets with its process, so a swap is a restart."""
    models = ("qwen35", "mamba2", "qwen35", "qwen35", "mamba2", "qwen35")
    ours, theirs, prompts = [], [], []
    with serving_models(folder) as server:
        talks: dict[str, list[int]] = {}
        for i, model in enumerate(models):
            prompt = [*talks.get(model, []), *_news(3, i, 0)]
            answer = server.complete(model, prompt)
            talks[model] = [*prompt, *answer["tokens"]]
            prompts.append(prompt)
            ours.append(answer["timings"]["prompt_n"])
    for model, turns in itertools.groupby(zip(models, prompts, strict=True), key=lambda turn: turn[0]):
        with llama_server(PeerOptions(tiny_model(model), 4096, 1, 1, cache_ram_mib=64)) as peer:
            theirs += [_n_read_by(peer, prompt) for _, prompt in turns]
    print(f"read by us {ours}, by llama-server {theirs}, of {list(map(len, prompts))}")
    assert all(a <= b for a, b in zip(ours, theirs, strict=True))
    assert 2 * sum(ours) < sum(theirs) + sum(map(len, prompts[:2]))


def _n_read_by(peer: Peer, prompt: list[int]) -> int:
    return int(peer.complete(prompt, 8, ignore_eos=True)["timings"]["prompt_n"])
