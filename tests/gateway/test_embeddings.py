"""Embeddings and ranks over HTTP: the numbers are llama-server's, in the shape of every API."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from bench.peer import PeerOptions, llama_server

from everwarm.demo import EMBEDDED_MODEL
from everwarm.gateway.embeddings import normalized
from everwarm.llama.abi import POOLING
from support.bert import N_CTX, TOKENS, WIDTH, write_bert
from support.models import tiny_model
from support.server import Server, metric, run_cli, serving, serving_models

TEXTS = ["the river is a stone", "machine learning", "paris", "a lamp and the garden of the city"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_bert(folder / "embeds.gguf")
    write_bert(folder / "ranks.gguf", ranks=True)
    (folder / "writes.gguf").write_bytes(EMBEDDED_MODEL.read_bytes())
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Both kinds behind one address, each in its own process."""
    with serving_models(folder, "--models-max", "0") as server:
        yield server


def peer_of(path: Path, pooling: str) -> Any:
    return llama_server(PeerOptions(path, n_ctx=N_CTX, n_parallel=1, n_threads=1, pooling=POOLING[pooling]))


def embedded(server: Server, **body: Any) -> np.ndarray:
    rows = server.ask("/v1/embeddings", {"model": "embeds"} | body)["data"]
    return np.array([row["embedding"] for row in rows])


def test_the_vectors_are_llama_servers(server: Server, folder: Path) -> None:
    with peer_of(folder / "embeds.gguf", "auto") as peer:
        theirs = [row["embedding"] for row in peer.post("/v1/embeddings", {"input": TEXTS})["data"]]
    ours = embedded(server, input=TEXTS)
    assert ours.shape == (len(TEXTS), WIDTH)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert np.abs(ours[0] - ours[1]).max() > 1e-2, "all vectors are alike: this test could not fail"


def test_the_ranks_are_llama_servers(server: Server, folder: Path) -> None:
    body = {"query": "machine learning is", "documents": TEXTS}
    with peer_of(folder / "ranks.gguf", "rank") as peer:
        theirs = peer.post("/v1/rerank", body)
    ours = server.ask("/v1/rerank", body | {"model": "ranks"})
    assert [row["index"] for row in ours["results"]] == [row["index"] for row in theirs["results"]]
    for mine, other in zip(ours["results"], theirs["results"], strict=True):
        assert mine["relevance_score"] == pytest.approx(other["relevance_score"], abs=1e-5)
    assert ours["usage"] == theirs["usage"]


def test_a_model_that_writes_text_can_make_vectors_too() -> None:
    path = tiny_model("llama", n_layers=2, width=64)
    tokens = [list(range(20)), [7]]
    with serving("--embeddings", "--pooling", "last", model=path) as server:
        ours = [row["embedding"] for row in server.ask("/v1/embeddings", {"input": tokens})["data"]]
        assert server.post("/completion", {"prompt": "x"}).status == 501
    with llama_server(PeerOptions(path, n_ctx=512, n_parallel=1, n_threads=1, pooling=POOLING["last"])) as peer:
        theirs = [row["embedding"] for row in peer.post("/v1/embeddings", {"input": tokens})["data"]]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "same_as"),
    [
        ("paris", ["paris"]),
        ({"content": [{"type": "text", "text": "ma"}, {"type": "text", "text": "chine"}]}, ["machine"]),
        ({"prompt_string": "paris"}, ["paris"]),
        (["paris", {"prompt_string": "a lamp"}], ["paris", "a lamp"]),
        ([2, TOKENS.index("▁paris"), 3], ["paris"]),
        ([[2, TOKENS.index("▁paris"), 3], "paris"], ["paris", "paris"]),
        ("", [""]),
    ],
    ids=str,
)
def test_an_input_has_many_shapes(server: Server, given: Any, same_as: list[str]) -> None:
    np.testing.assert_array_equal(embedded(server, input=given), embedded(server, input=same_as))


def test_base64_holds_the_same_numbers(server: Server) -> None:
    (row,) = server.ask("/v1/embeddings", {"model": "embeds", "input": "paris", "encoding_format": "base64"})["data"]
    assert struct.unpack(f"<{WIDTH}f", base64.b64decode(row["embedding"])) == pytest.approx(
        embedded(server, input="paris")[0]
    )


def test_dimensions_cut_and_scale_again(server: Server) -> None:
    whole, short = embedded(server, input="paris")[0], embedded(server, input="paris", dimensions=8)[0]
    assert len(short) == 8 and math.isclose(float(np.linalg.norm(short)), 1.0, rel_tol=1e-6)
    np.testing.assert_allclose(short, whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-5)


def test_the_openai_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="embeds", input=["paris", "a lamp"])
    assert [len(row.embedding) for row in answer.data] == [WIDTH, WIDTH] and answer.usage.prompt_tokens == 7


def test_ollamas_and_llama_servers_shapes(server: Server) -> None:
    wanted = embedded(server, input=["paris", "a lamp"]).tolist()
    answer = server.ask("/api/embed", {"model": "embeds", "input": ["paris", "a lamp"]})
    assert answer["embeddings"] == wanted and answer["prompt_eval_count"] == 7
    assert server.ask("/api/embeddings", {"model": "embeds", "prompt": "paris"})["embedding"] == wanted[0]
    for body in ({"content": "paris"}, {"input": "paris"}):
        assert server.ask("/embedding", {"model": "embeds"} | body) == [{"index": 0, "embedding": [wanted[0]]}]


def test_teis_shape_of_ranks_and_the_best_alone(server: Server) -> None:
    body = {"model": "ranks", "query": "paris", "texts": TEXTS, "return_text": True}
    rows = server.ask("/rerank", body)
    assert [row["text"] for row in rows] == [TEXTS[row["index"]] for row in rows]
    assert rows == sorted(rows, key=lambda row: -row["score"]) and len(rows) == len(TEXTS)
    assert server.ask("/rerank", body | {"top_n": 2}) == rows[:2]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/embeddings", {"model": "embeds"}, 400),
        ("/v1/embeddings", {"model": "embeds", "input": []}, 400),
        ("/v1/embeddings", {"model": "embeds", "input": [1.5]}, 400),
        ("/v1/embeddings", {"model": "embeds", "input": [len(TOKENS)]}, 400),
        ("/v1/embeddings", {"model": "embeds", "input": [-1]}, 400),
        ("/v1/embeddings", {"model": "embeds", "input": "river " * 1000}, 400),
        ("/v1/embeddings", {"model": "embeds", "input": "x", "encoding_format": "hex"}, 400),
        ("/v1/embeddings", {"model": "embeds", "input": [{"content": [{"type": "image_url"}]}]}, 400),
        ("/v1/rerank", {"model": "ranks", "query": "x", "documents": []}, 400),
        ("/v1/rerank", {"model": "ranks", "documents": ["x"]}, 400),
        ("/v1/rerank", {"model": "embeds", "query": "x", "documents": ["x"]}, 501),
        ("/v1/embeddings", {"model": "ranks", "input": "x"}, 501),
        ("/v1/embeddings", {"model": "writes", "input": "x"}, 501),
        ("/v1/chat/completions", {"model": "embeds", "messages": [{"role": "user", "content": "x"}]}, 501),
        ("/completion", {"model": "embeds", "prompt": "x"}, 501),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_answered_says_so_and_harms_nothing(server: Server, path: str, body: Any, status: int) -> None:
    before = server.engine_pids
    reply = server.post(path, body)
    assert reply.status == status, reply.data
    assert reply.json["error"]["message"]
    if body["model"] == "embeds":
        assert embedded(server, input="paris").shape == (1, WIDTH) and set(before) <= set(server.engine_pids)


def test_the_rest_of_the_server_knows_such_a_model(server: Server) -> None:
    assert server.ask("/tokenize", {"model": "embeds", "content": "paris"})["tokens"] == [TOKENS.index("▁paris")]
    for path in ("/metrics?model=embeds", "/cache?model=embeds", "/props?model=embeds", "/slots?model=embeds"):
        assert server.get(path).status == 200, path
    assert server.ask("/completion", {"model": "writes", "prompt": "Once", "n_predict": 1})["stop"] is True


def test_such_a_file_is_refused_for_text(folder: Path) -> None:
    done = run_cli("serve", str(folder / "embeds.gguf"), "--port", "0", "--disk-cache", "0")
    assert (
        done.returncode == 1 and "makes embeddings and writes no text (bert); start it with --embeddings" in done.stderr
    )


def test_a_model_without_a_head_does_not_rank(folder: Path) -> None:
    done = run_cli("serve", str(folder / "embeds.gguf"), "--reranking", "--port", "0", "--disk-cache", "0")
    assert done.returncode == 1 and "has no head that ranks" in done.stderr


def test_norms() -> None:
    vector = [3.0, -4.0]
    assert normalized(vector, -1) == vector and normalized([0.0, 0.0], 2) == [0.0, 0.0]
    assert normalized(vector, 2) == [0.6, -0.8]
    assert normalized(vector, 1) == pytest.approx([3 / 7, -4 / 7])
    assert normalized(vector, 0) == pytest.approx([24570.0, -32760.0])


def test_pictures_are_not_embedded_as_if_they_were_not_there(server):
    refused = server.post("/embeddings", {"content": [{"prompt_string": "a", "multimodal_data": ["AAAA"]}]})
    assert refused.status == 501 and "images" in refused.json["error"]["message"]


def test_texts_among_tokens_are_one_input(server):
    tokens = server.ask("/tokenize", {"content": "river", "model": "embeds"})["tokens"]
    body = {"model": "embeds", "input": [["the", *tokens], [*tokens, *tokens]]}
    assert len(server.ask("/v1/embeddings", body)["data"]) == 2
    assert len(server.ask("/v1/embeddings", {"model": "embeds", "input": [*tokens, "river"]})["data"]) == 1


def test_texts_that_become_vectors_are_counted(server):
    name = "llamacpp:prompt_tokens_total"
    before = metric(server.get("/metrics?model=embeds").data.decode(), name)
    used = server.ask("/v1/embeddings", {"model": "embeds", "input": "the river"})["usage"]["prompt_tokens"]
    text = server.get("/metrics?model=embeds").data.decode()
    assert metric(text, name) == before + used and metric(text, "llamacpp:n_decode_total") > 0
