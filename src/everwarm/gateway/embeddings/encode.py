"""Vectors as the APIs want them: scaled, cut, and as numbers or base64. Pure."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence

from everwarm.gateway.embeddings.schema import EmbeddingBody, RerankBody
from everwarm.types import Json

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


def openai(body: EmbeddingBody, model: str, vectors: Sequence[Vector], n_tokens: int) -> Json:
    data = [{"object": "embedding", "index": i, **_written(vector, body)} for i, vector in enumerate(vectors)]
    return {"object": "list", "model": model, "data": data, "usage": _usage(n_tokens)}


def _written(vector: Vector, body: EmbeddingBody) -> Json:
    if body.encoding_format == "float":
        return {"embedding": vector}
    packed = struct.pack(f"<{len(vector)}f", *vector)
    return {"embedding": base64.b64encode(packed).decode(), "encoding_format": "base64"}


def llama_server(rows: Sequence[Sequence[Vector]]) -> list[Json]:
    """A list of rows for each input: one, or without pooling one for each token."""
    return [{"index": i, "embedding": list(each)} for i, each in enumerate(rows)]


def ranks(body: RerankBody, model: str, scores: Sequence[float], n_tokens: int) -> Json | list[Json]:
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
