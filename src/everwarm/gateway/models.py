"""The list of models in OpenAI's, Anthropic's and llama-server's shape, and orders to load and unload."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from everwarm.gateway.body import ModelBody, read
from everwarm.gateway.replies import json_response
from everwarm.gateway.service import Service
from everwarm.router.plan import Phase
from everwarm.router.pool import Standing

Json = dict[str, Any]

_SHOWN = {  # llama-server's words
    Phase.ASLEEP: "unloaded",
    Phase.LOADING: "loading",
    Phase.READY: "loaded",
    Phase.DRAINING: "loaded",
    Phase.STOPPING: "unloaded",
}


class Models:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, request: Request) -> Response:
        """One body that satisfies OpenAI's, Anthropic's and llama-server's clients."""
        pool = self._service.pool
        if request.query_params.get("reload") in ("1", "true"):
            pool.refresh(now=True)
        models = [_model(standing) for standing in pool.standings()]
        models += [
            {**_names(broken.id), "status": {"value": "unloaded", "failed": True, "reason": broken.reason}}
            for broken in pool.catalog.broken
        ]
        first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
        return json_response({"object": "list", "data": models, "has_more": False, "first_id": first, "last_id": last})

    async def load(self, request: Request) -> Response:
        self._service.pool.load(read(await request.body(), ModelBody).model)
        return json_response({"success": True})

    async def unload(self, request: Request) -> Response:
        self._service.pool.unload(read(await request.body(), ModelBody).model)
        return json_response({"success": True})


def _names(id: str) -> Json:
    dates = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": id, "object": "model", "type": "model", **dates, "owned_by": "everwarm", "display_name": id}


def _model(standing: Standing) -> Json:
    status, info = standing.status, standing.supervisor.info
    shown: Json = {"value": _SHOWN[status.phase]}
    if status.phase is Phase.LOADING:
        shown["progress"] = standing.supervisor.loaded
    if status.reason is not None:
        shown |= {"failed": True, "reason": status.reason}
    model = {**_names(standing.spec.id), "aliases": standing.spec.aliases, "status": shown}
    if info is not None:
        model["meta"] = {
            "n_ctx_train": info.n_ctx_train,
            "n_params": info.n_params,
            "size": info.size_bytes,
            "n_vocab": info.n_vocab,
        }
    return {**model, "n_running": status.n_leased, "n_waiting": status.n_waiting}
