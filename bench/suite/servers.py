"""The servers under test. Each is a process: started, used over HTTP, killed with -9, measured."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from bench.measure import EMBEDDED, model_file
from bench.peer import PeerOptions, llama_server
from bench.server import Server, everwarm, post
from bench.suite.weight import NOTHING, Weight, weigh
from everwarm.demo.tiny import TinySpec

SETTLE_S = 1.0  # before a server is killed: a person would not have read the answer yet
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says it did. ``why``: Everwarm's own reason, where it has one."""

    n_prompt: int
    n_cached: int
    n_reached: int
    seconds: float
    restore_ms: float | None = None
    why: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all servers have in common."""

    n_ctx: int
    n_threads: int
    n_slots: int = 4
    ram_mib: int | None = None
    swaps: bool = False
    model: Path = EMBEDDED


class Runner(Protocol):
    name: str
    model: str

    @property
    def host(self) -> str: ...

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def swap(self) -> None: ...
    def tokens(self, body: Mapping[str, Any]) -> list[int]: ...
    def ask(self, body: Mapping[str, Any]) -> Answer: ...
    def hang_up(self, body: Mapping[str, Any], share: float) -> Answer: ...
    def weight(self) -> Weight: ...


class _Process:
    """What is the same for every server that speaks llama-server's dialect."""

    name: str
    model = ""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._server = Server("", "")
        self._before = NOTHING

    def _open(self) -> Server:
        raise NotImplementedError

    @property
    def host(self) -> str:
        return self._server.host

    def start(self) -> None:
        self._server = self._open()

    def stop(self) -> None:
        self._stack.close()

    def kill(self) -> None:
        """-9 and start again, with whatever it left on disk."""
        time.sleep(SETTLE_S)
        self._before = self.weight()
        assert self._server.pid is not None
        os.kill(self._server.pid, signal.SIGKILL)
        self._stack.close()
        self.start()

    def weight(self) -> Weight:
        assert self._server.pid is not None
        return weigh(self._server.pid).after(self._before)

    def tokens(self, body: Mapping[str, Any]) -> list[int]:
        text = post(self._server, "/apply-template", self._named(body))["prompt"]
        whole = self._named({"content": text, "add_special": True, "parse_special": True})
        return list(post(self._server, "/tokenize", whole)["tokens"])

    def ask(self, body: Mapping[str, Any]) -> Answer:
        began = time.perf_counter()
        answer = post(self._server, CHAT, self._named(body) | {"max_tokens": 1, "temperature": 0})
        seconds = time.perf_counter() - began
        timings = answer["timings"]
        n_prompt = timings["cache_n"] + timings["prompt_n"]
        why = {key: timings["cache"][key] for key in WHY} if "cache" in timings else {}
        return Answer(n_prompt, timings["cache_n"], n_prompt, seconds, timings.get("restore_ms"), why)

    def hang_up(self, body: Mapping[str, Any], share: float) -> Answer:
        """Listen until a share of what is new has been read, then close the connection."""
        more = {"max_tokens": 1, "temperature": 0, "stream": True, "return_progress": True}
        connection = http.client.HTTPConnection(self._server.host, timeout=600)
        began = time.perf_counter()
        connection.request("POST", CHAT, json.dumps(self._named(body) | more), {"Content-Type": "application/json"})
        n_prompt = n_cached = n_reached = 0
        for line in connection.getresponse():
            chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            progress = chunk.get("prompt_progress")
            if progress is not None:
                n_prompt, n_cached, n_reached = progress["total"], progress["cache"], progress["processed"]
                if n_reached - n_cached >= share * (n_prompt - n_cached):
                    break
            elif _has_said_something(chunk):
                n_reached = n_prompt  # it was quicker
                break
        connection.close()
        return Answer(n_prompt, n_cached, n_reached, time.perf_counter() - began)

    def _named(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {**body, "model": self.model} if self.model else dict(body)


def _has_said_something(chunk: Mapping[str, Any]) -> bool:
    choices = chunk.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return bool(choices[0].get("finish_reason") or delta.get("content") or delta.get("reasoning_content"))


WHY = ("reason", "again", "n_shared", "n_kv", "n_checkpoint", "checkpoint")


class Everwarm(_Process):
    """``everwarm serve`` with its defaults; states in a folder of its own."""

    def __init__(self, setup: Setup, name: str = "Everwarm", source: Path | None = None) -> None:
        super().__init__()
        self.name = name
        self._source = source
        self._setup = setup
        self._folder = contextlib.ExitStack()
        self._where = Path(self._folder.enter_context(tempfile.TemporaryDirectory(prefix="everwarm-suite-")))
        if setup.swaps:
            self.model = "main"
            (self._where / "main.gguf").symlink_to(setup.model)
            (self._where / "other.gguf").symlink_to(model_file(TinySpec(arch="qwen35", n_layers=8, dtype="q8_0")))

    def _open(self) -> Server:
        s = self._setup
        what = ("--models", str(self._where), "--models-max", "1") if s.swaps else (str(s.model),)
        flags = ["-c", str(s.n_ctx), "-np", str(s.n_slots), "-t", str(s.n_threads)]
        flags += ["--state-dir", str(self._where / "states")]
        flags += ["--cache-ram", f"{s.ram_mib or 8192}MiB"]
        return self._stack.enter_context(everwarm(*what, *flags, source=self._source))

    def stop(self) -> None:
        super().stop()
        self._folder.close()

    def swap(self) -> None:
        """Another model has the place for a while."""
        post(self._server, "/completion", {"model": "other", "prompt": [1, 2, 3], "n_predict": 1})


class LlamaServer(_Process):
    """llama-server out of the same wheel. A swap is another start: one process has one model."""

    def __init__(self, setup: Setup, name: str = "llama-server", **options: Any) -> None:
        super().__init__()
        self.name = name
        ram = {} if setup.ram_mib is None else {"cache_ram_mib": setup.ram_mib}
        common = PeerOptions(setup.model, setup.n_ctx, setup.n_slots, setup.n_threads)
        self._options = replace(common, **(options | ram))

    def _open(self) -> Server:
        peer = self._stack.enter_context(llama_server(self._options))
        return Server(self.name, peer.host, peer.pid)

    def swap(self) -> None:
        self._before = self.weight()
        self._stack.close()
        self.start()


# The best of what was tried (docs/benchmarks/README.md): no spacing, as many checkpoints as there are places for them.
TUNED: Mapping[str, Any] = {"n_ctx_checkpoints": 1024, "checkpoint_min_step": 0, "cache_ram_mib": -1}
TRIED: Mapping[str, Mapping[str, Any]] = {
    "tuned": TUNED,
    "tuned, similarity 0.5": {**TUNED, "slot_prompt_similarity": 0.5},
    "tuned, similarity 0.9": {**TUNED, "slot_prompt_similarity": 0.9},
    "tuned, ubatch 2048": {**TUNED, "n_ubatch": 2048},
    "tuned, reuse 64": {**TUNED, "n_cache_reuse": 64},
    "tuned, one slot": {**TUNED, "n_parallel": 1},
    "tuned, similarity 0": {**TUNED, "slot_prompt_similarity": 0.0},
    "tuned, idle slots stay": {**TUNED, "cache_idle_slots": False},
    "tuned, idle slots stay, similarity 0.5": {**TUNED, "cache_idle_slots": False, "slot_prompt_similarity": 0.5},
}


def runner(name: str, setup: Setup) -> Runner:
    if name == "Everwarm":
        return Everwarm(setup)
    if name == "llama-server":
        return LlamaServer(setup)
    return LlamaServer(setup, name, **TRIED[name.removeprefix("llama-server ")])


SERVERS = ("Everwarm", "llama-server", "llama-server tuned")
