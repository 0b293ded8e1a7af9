"""The same request with the same seed has the same text here and on llama-server, with every kind of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bench.peer import Peer, PeerOptions, llama_server

from everwarm.demo import EMBEDDED_MODEL
from support.server import Server, serving

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "greedy": {"temperature": 0},
    "dry": {"dry_multiplier": 1.5, "dry_allowed_length": 1, "temperature": 1.2},
    "xtc and typical": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "typical_p": 0.8},
    "mirostat": {"mirostat": 2, "mirostat_tau": 4.0},
    "dynatemp": {"dynatemp_range": 0.5, "top_n_sigma": 1.5},
    "an order": {"samplers": ["temperature", "top_k"], "temperature": 1.5, "top_k": 20},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.3, "repeat_last_n": 20, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with llama_server(PeerOptions(EMBEDDED_MODEL, n_ctx=4096, n_parallel=1, n_threads=1)) as peer:
        yield peer


@pytest.mark.parametrize("case", CASES)
def test_the_same_text(case: str, server: Server, peer: Peer) -> None:
    body = {"prompt": "Once", "n_predict": 40, "seed": 11, "cache_prompt": False} | CASES[case]
    ours, theirs = server.ask("/completion", body), peer.post("/completion", body)
    assert ours["content"] == theirs["content"]
