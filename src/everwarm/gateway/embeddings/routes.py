"""Routes that answer with vectors or ranks; they need an embedding model."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest, NotSupported
from everwarm.gateway.admin.metrics import Metrics
from everwarm.gateway.embeddings import encode
from everwarm.gateway.embeddings.encode import Vector
from everwarm.gateway.embeddings.schema import EmbeddingBody, Input, RerankBody
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.router.pool import Pool


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
            return json_response(encode.llama_server(self._rows(body, found)))
        if any(len(rows) != 1 for rows in found.rows):
            raise BadRequest("this model has a vector for each token (pooling none); use /embedding")
        vectors = [rows[0] for rows in self._rows(body, found)]
        return json_response(encode.openai(body, body.model or model, vectors, sum(found.n_tokens)))

    async def llama_server(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, EmbeddingBody)
        _, found = await self._ask(request, body.model, n_bytes, body.inputs())
        return json_response(encode.llama_server(self._rows(body, found)))

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
        scores = [encode.unpacked(rows[0])[0] for rows in found.rows]
        return json_response(encode.ranks(body, body.model or model, scores, sum(found.n_tokens)))

    def _rows(self, body: EmbeddingBody, found: m.Embedded) -> list[list[Vector]]:
        """Only pooled vectors are scaled."""
        norm = self._normalize if body.embd_normalize is None else body.embd_normalize
        scaled = [norm if len(rows) == 1 else -1 for rows in found.rows]
        return [
            [encode.finished(row, how, body.dimensions) for row in rows]
            for rows, how in zip(found.rows, scaled, strict=True)
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
