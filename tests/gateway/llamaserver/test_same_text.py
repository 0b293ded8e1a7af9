"""The same request with the same seed has the same text here and on llama-server, with every kind of sampling."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from bench.peer import Peer, PeerOptions, llama_server

from everwarm.demo import EMBEDDED_MODEL
from support.models import tiny_audio
from support.server import Server, serving
from support.sounds import samples, wav

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


def test_a_sound_gives_the_same_probabilities() -> None:
    """At another sample rate, in two channels, and longer than one window."""
    model, mmproj = tiny_audio("qwen35")
    data = base64.b64encode(wav(samples(1, 31, 22_050), 22_050, n_channels=2)).decode()
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Listen:"}, sound]}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    with llama_server(PeerOptions(model, n_ctx=4096, n_parallel=1, n_threads=1, mmproj=mmproj)) as peer:
        theirs = peer.post("/v1/chat/completions", body)
    with serving("--mmproj", str(mmproj), model=model) as server:
        ours = server.ask("/v1/chat/completions", body)
        other = server.ask("/v1/chat/completions", body | {"messages": [{"role": "user", "content": "Listen:"}]})
    assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"] > 40
    found, expected, control = (
        np.array([top["logprob"] for top in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]])
        for answer in (ours, theirs, other)
    )
    assert np.abs(found - expected).max() < 1e-4 < np.abs(control - expected).max()
