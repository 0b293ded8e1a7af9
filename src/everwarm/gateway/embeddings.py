"""Vectors and ranks instead of text, for every API that has them: OpenAI, llama-server, Ollama, Jina, TEI.

Bodies are parsed here, the engine of an embedding model is asked, and its vectors are scaled, cut and written as numbers or
base64.
"""

from __future__ import annotations

import base64
import math
import struct
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest, NotSupported
from everwarm.gateway.admin.metrics import Metrics
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.openai.schema import Name, TokenId
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.router.pool import Pool
from everwarm.types import Json

MAX_INPUTS = 2048
MAX_DIMENSIONS = 1 << 16

Input = str | list[int | str]


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's ``input``, llama-server's ``content``, Ollama's ``prompt``: a text, tokens, both mixed, or a list
    of these."""

    input: Any = None
    content: Any = None
    prompt: str | None = None
    model: Name | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None
    embd_normalize: Annotated[int, Meta(ge=-1, le=64)] | None = None
    user: str | None = None

    def inputs(self) -> list[Input]:
        given = next((each for each in (self.input, self.content, self.prompt) if each is not None), None)
        if given is None:
            raise BadRequest("there is nothing to embed: give input, a text or a list of texts")
        if isinstance(given, list) and not any(isinstance(each, int) for each in given):
            found = [_one(each) for each in given]
        else:
            found = [_one(given)]
        if not 1 <= len(found) <= MAX_INPUTS:
            raise BadRequest(f"input has {len(found)} entries; give 1 to {MAX_INPUTS}")
        return found


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """Jina's ``documents``, or TEI's ``texts``."""

    query: str
    documents: Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    texts: Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    model: Name | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_text: bool = False

    def ranked(self) -> list[str]:
        found = self.documents or self.texts
        if not found:
            raise BadRequest("there is nothing to rank: give documents, a list of texts")
        return found


class _TextPart(msgspec.Struct, frozen=True):
    text: str
    type: Literal["text"] = "text"


def _one(given: Any) -> Input:
    """A text, tokens, or llama-server's objects with a text in them."""
    try:
        if isinstance(given, dict):
            if "content" in given:
                return "".join(part.text for part in msgspec.convert(given["content"], list[_TextPart]))
            if given.get("multimodal_data"):
                raise NotSupported("there are no embeddings of images: leave multimodal_data out")
            return msgspec.convert(given.get("prompt_string"), str)
        return msgspec.convert(given, str | Annotated[list[TokenId | str], Meta(max_length=1 << 20)])
    except msgspec.ValidationError as error:
        raise BadRequest(f"an input cannot be used: {str(error)[:200]}; give a text or a list of tokens") from None


class Embeddings:
    def __init__(self, pool: Pool, gate: RequestGate, normalize: int, metrics: Metrics) -> None:
        """``normalize``: how vectors are scaled where a request does not say it."""
        self._metrics = metrics
        self._pool = pool
        self._gate = gate
        self._normalize = normalize

    def routes(self) -> list[Route]:
        ranks = ("/v1/rerank", "/rerank", "/reranking", "/v1/reranking")
        return [
            Route("/v1/embeddings", self.openai, methods=["POST"]),
            Route("/embeddings", self.llama_server, methods=["POST"]),
            Route("/embedding", self.llama_server, methods=["POST"]),
            Route("/api/embed", self.ollama, methods=["POST"]),
            Route("/api/embeddings", self.ollama_single, methods=["POST"]),
            *(Route(path, self.rerank, methods=["POST"]) for path in ranks),
        ]

    async def openai(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, EmbeddingBody)
        model, found = await self._ask(request, body.model, n_bytes, body.inputs())
        if body.input is None and body.content is not None:  # llama-server's name, and so its answer
            return json_response(llama_server_list(self._rows(body, found)))
        if any(len(rows) != 1 for rows in found.rows):
            raise BadRequest("this model has a vector for each token (pooling none); use /embedding")
        vectors = [rows[0] for rows in self._rows(body, found)]
        return json_response(openai_list(body, body.model or model, vectors, sum(found.n_tokens)))

    async def llama_server(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, EmbeddingBody)
        _, found = await self._ask(request, body.model, n_bytes, body.inputs())
        return json_response(llama_server_list(self._rows(body, found)))

    async def ollama(self, request: Request) -> Response:
        began = time.monotonic_ns()
        body, n_bytes = await self._gate.read(request, EmbeddingBody)
        model, found = await self._ask(request, body.model, n_bytes, body.inputs())
        vectors = [rows[0] for rows in self._rows(body, found)]
        took = {"total_duration": time.monotonic_ns() - began, "load_duration": 0}
        answer = {"model": body.model or model, "embeddings": vectors, "prompt_eval_count": sum(found.n_tokens)}
        return json_response(answer | took)

    async def ollama_single(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, EmbeddingBody)
        _, found = await self._ask(request, body.model, n_bytes, body.inputs())
        return json_response({"embedding": self._rows(body, found)[0][0]})

    async def rerank(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, RerankBody)
        inputs: list[Input] = [*body.ranked()]
        model, found = await self._ask(request, body.model, n_bytes, inputs, body.query)
        scores = [unpacked(rows[0])[0] for rows in found.rows]
        return json_response(ranked_list(body, body.model or model, scores, sum(found.n_tokens)))

    def _rows(self, body: EmbeddingBody, found: m.Embedded) -> list[list[Vector]]:
        """Only pooled vectors are scaled."""
        norm = self._normalize if body.embd_normalize is None else body.embd_normalize
        scaled = [norm if len(rows) == 1 else -1 for rows in found.rows]
        return [
            [finished(row, how, body.dimensions) for row in rows] for rows, how in zip(found.rows, scaled, strict=True)
        ]

    async def _ask(
        self, request: Request, name: str | None, n_bytes: int, inputs: list[Input], query: str | None = None
    ) -> tuple[str, m.Embedded]:
        """The model's own name, and what its engine answers; loads the model if need be."""

        async def answer() -> tuple[str, m.Embedded]:
            with self._pool.lease(name) as lease:
                served = await lease.ready()
                info = await served.supervisor.wait_ready()
                _require(info, ranks=query is not None)
                found = await served.supervisor.ask(m.Embed, inputs=inputs, query=query)
                embedded = msgspec.convert(found, m.Embedded)
                self._metrics.embedded(sum(embedded.n_tokens))
                return served.id, embedded

        with self._gate.admitted(request, n_bytes):
            return await self._gate.within_time(request, answer())


def _require(info: m.ModelInfo, *, ranks: bool) -> None:
    if info.pooling is None:
        raise NotSupported("this model writes text; start an embedding model with --embeddings, or name one")
    if ranks != (info.pooling == "rank"):
        wanted = (
            "ranks texts; use /v1/rerank" if not ranks else "does not rank texts; start one that does with --reranking"
        )
        raise NotSupported(f"this model {wanted}")


Vector = Sequence[float]


def unpacked(row: bytes) -> Vector:
    return struct.unpack(f"<{len(row) // 4}f", row)


def normalized(vector: Vector, norm: int) -> Vector:
    """llama-server's numbers: -1 none, 0 the largest becomes 32,760, 2 euclidean, others by that power."""
    if norm == -1:
        return vector
    if norm == 0:
        size = max(map(abs, vector)) / 32760.0
    elif norm == 2:
        size = math.sqrt(math.fsum(value * value for value in vector))
    else:
        size = math.fsum(abs(value) ** norm for value in vector) ** (1.0 / norm)
    return [value / size for value in vector] if size > 0.0 else [0.0] * len(vector)


def finished(row: bytes, norm: int, dimensions: int | None) -> Vector:
    vector = unpacked(row)
    return normalized(vector if dimensions is None else vector[:dimensions], norm)


def openai_list(body: EmbeddingBody, model: str, vectors: Sequence[Vector], n_tokens: int) -> Json:
    data = [{"object": "embedding", "index": i, **_written(vector, body)} for i, vector in enumerate(vectors)]
    return {"object": "list", "model": model, "data": data, "usage": _usage(n_tokens)}


def _written(vector: Vector, body: EmbeddingBody) -> Json:
    if body.encoding_format == "float":
        return {"embedding": vector}
    packed = struct.pack(f"<{len(vector)}f", *vector)
    return {"embedding": base64.b64encode(packed).decode(), "encoding_format": "base64"}


def llama_server_list(rows: Sequence[Sequence[Vector]]) -> list[Json]:
    """A list of rows for each input: one, or without pooling one for each token."""
    return [{"index": i, "embedding": list(each)} for i, each in enumerate(rows)]


def ranked_list(body: RerankBody, model: str, scores: Sequence[float], n_tokens: int) -> Json | list[Json]:
    """The best first; in TEI's form if the body was in it."""
    is_tei, texts = body.documents is None, body.ranked()
    label = "score" if is_tei else "relevance_score"
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    shown: list[Json] = [{"index": i, label: scores[i]} for i in order]
    if is_tei:
        return [row | {"text": texts[row["index"]]} for row in shown] if body.return_text else shown
    return {"object": "list", "model": model, "usage": _usage(n_tokens), "results": shown}


def _usage(n_tokens: int) -> Json:
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
