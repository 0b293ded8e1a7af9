"""Replies with and without drafts, beside llama-server with its own n-gram drafters: the same wheel, threads and model.

The weights are random, so the reply is imposed: on llama-server by a grammar that allows exactly one text, here by a
sampler that says it (a grammar would also correct the drafts). Whether a draft is accepted then depends on the text alone,
as with a large model that writes that text. Tokens are bytes. All servers take turns, and what is compared is processor
time with one thread, so that what else the machine does matters little. ``acceptance`` does the same for MTP heads.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import acceptance
from bench.imposed import Imposed, cpu_s
from bench.measure import hundred_megabytes, table
from bench.peer import Peer, PeerOptions, llama_server
from everwarm.config import GREEDY
from everwarm.engine.engine import Engine
from everwarm.engine.lifecycle import starting
from everwarm.engine.settings import EngineSettings
from everwarm.llama.system.process import collect_rarely

N_ROUNDS = 5
N_REPLY = 320
PEERS = (None, "NGRAM_SIMPLE", "NGRAM_MAP_K", "NGRAM_CACHE")


@dataclass(frozen=True)
class Text:
    name: str
    prompt: str
    reply: str


def run() -> None:
    model = hundred_megabytes()
    starting.Sampler = Imposed  # type: ignore[misc,assignment]
    speeds: dict[tuple[str, str], list[float]] = {}
    shares: dict[str, tuple[int, int]] = {}
    with ExitStack() as stack:
        engines = {
            mode: stack.enter_context(Engine(model, EngineSettings(n_slots=1, n_ctx=8192, n_threads=1, speculate=mode)))
            for mode in ("off", "auto")
        }
        peers = {
            kind: stack.enter_context(
                llama_server(PeerOptions(model, n_ctx=8192, n_parallel=1, n_threads=1, speculative=kind))
            )
            for kind in PEERS
        }
        collect_rarely()  # as the engine process does
        for i in range(N_ROUNDS + 1):  # the first round warms all up
            for text in texts(i):
                for mode, engine in engines.items():
                    speed, drafted = _ours(engine, text)
                    speeds.setdefault((text.name, mode), []).append(speed)
                    if mode == "auto":
                        shares[text.name] = drafted
                for kind, peer in peers.items():
                    speeds.setdefault((text.name, str(kind)), []).append(_theirs(peer, text))
    _show(speeds, shares)
    print()
    acceptance.run()


def _show(speeds: dict[tuple[str, str], list[float]], shares: dict[str, tuple[int, int]]) -> None:
    rows = []
    for name, (n_drafted, n_accepted) in shares.items():
        plain, drafted = speeds[name, "off"][1:], speeds[name, "auto"][1:]
        theirs = [f"{statistics.median(speeds[name, str(kind)][1:]):.1f}" for kind in PEERS]
        ratio = statistics.median(a / b for a, b in zip(drafted, plain, strict=True))
        ours = f"{statistics.median(plain):.1f}", f"{statistics.median(drafted):.1f}", f"{ratio:.2f}×"
        rows.append((name, *ours, f"{n_accepted} of {n_drafted}", *theirs))
    head = ("reply", "plain", "drafts", "ratio", "accepted", *(f"llama-server {kind or 'plain'}" for kind in PEERS))
    table(f"replies of {N_REPLY} tokens per second of processor time, one thread, medians of {N_ROUNDS}", head, rows)


def _ours(engine: Engine, text: Text) -> tuple[float, tuple[int, int]]:
    Imposed.reply = engine.model.vocab.tokenize(text.reply, add_special=False, parse_special=False).tolist()
    engine.submit(text.prompt, GREEDY, max_tokens=1).result()
    began = engine.call(lambda _: time.thread_time())
    result = engine.submit(text.prompt, GREEDY, max_tokens=len(Imposed.reply), ignore_eos=True).result()
    seconds = engine.call(lambda _: time.thread_time()) - began
    assert list(result.tokens) == Imposed.reply
    return len(result.tokens) / seconds, (result.n_drafted, result.n_draft_accepted)


def _theirs(peer: Peer, text: Text) -> float:
    tokens = peer.post("/tokenize", {"content": text.prompt})["tokens"]
    peer.complete(tokens, 1)
    began = cpu_s(peer)
    answer = peer.complete(tokens, N_REPLY, grammar=_grammar(text.reply))
    assert answer["content"] == text.reply
    return len(text.reply) / (cpu_s(peer) - began)


def _grammar(reply: str) -> str:
    return f"root ::= {json.dumps(reply)}"


# what is written


def texts(seed: int) -> list[Text]:
    rng = random.Random(seed)
    made = (_story, _code_edit, _extraction, _tool_loop, _noise, _library_edit)
    return [Text(name, prompt, reply[:N_REPLY]) for name, prompt, reply in (make(rng) for make in made)]


_WORDS = (  # noqa: SIM905
    "the a one this old young small great river house road king child bird ship stone light night winter morning went "
    "saw took gave found lost carried asked told wanted and then but so because under over beside into slowly never again"
).split()


def _sentences(rng: random.Random, n: int) -> str:
    return " ".join(" ".join(rng.choice(_WORDS) for _ in range(rng.randint(6, 12))) + "." for _ in range(n))


def _story(rng: random.Random) -> tuple[str, str, str]:
    return "story", f"Tell me a story about {rng.choice(_WORDS)}.\n", _sentences(rng, 20)


def _code(rng: random.Random) -> list[str]:
    names = [rng.choice(_WORDS) + str(i) for i in range(12)]
    return [f"def {name}(x, y):\n    total = x * {rng.randint(2, 99)} + y\n    return total" for name in names]


def _code_edit(rng: random.Random) -> tuple[str, str, str]:
    parts = _code(rng)
    edited = [part.replace("total", "result") if i % 4 == 1 else part for i, part in enumerate(parts)]
    file = "\n\n".join(parts)
    return "code edit", f"Rename some variables in this file:\n{file}\n\nThe new file:\n", "\n\n".join(edited)


def _extraction(rng: random.Random) -> tuple[str, str, str]:
    people = [(rng.choice(_WORDS).title() + str(i), rng.randint(1000, 9999), _sentences(rng, 1)) for i in range(12)]
    document = "\n".join(f"{name} has the number {number}. {text}" for name, number, text in people)
    found = [{"name": name, "number": number, "note": text} for name, number, text in people]
    return "JSON extraction", f"{document}\n\nAll of that as JSON:\n", json.dumps(found)


def _tool_loop(rng: random.Random) -> tuple[str, str, str]:
    def call(path: str) -> str:
        wanted = {"name": "read_file", "arguments": {"path": f"/src/{path}.py", "limit": 200}}
        return f"<tool_call>\n{json.dumps(wanted)}\n</tool_call>\n"

    before = "".join(call(rng.choice(_WORDS)) + _sentences(rng, 2) + "\n" for _ in range(6))
    return "tool calls", before, "".join(call(rng.choice(_WORDS)) for _ in range(6))


def _noise(rng: random.Random) -> tuple[str, str, str]:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    return "noise", "Random letters:\n", "".join(rng.choice(letters) for _ in range(N_REPLY))


def _library_edit(rng: random.Random) -> tuple[str, str, str]:
    """Real code: a passage of Python's own library; every ninth line is left out, one is added, and every sixth says
    ``this`` where it said ``self``."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    lines: list[str] = []
    while len(lines) < 300:
        lines = rng.choice(files).read_text(errors="replace").splitlines()
    at = rng.randrange(100, len(lines) - 60)
    passage = [line for line in lines[at : at + 40] if line.isascii() and line.isprintable()]
    edited = [line.replace("self", "this") if i % 6 == 3 else line for i, line in enumerate(passage) if i % 9 != 4]
    edited.insert(6, "    # checked before it is used")
    return "library code", "Edit:\n" + "\n".join(passage) + "\n\nEdited:\n", "\n".join(edited)
