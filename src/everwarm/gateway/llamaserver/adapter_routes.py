"""llama-server's ``/lora-adapters``: which adapters a model has, and how much of each is used."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.gateway.access.auth import principal_of
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.openai.schema import LoraScale, read
from everwarm.gateway.serving.adapter_scales import AdapterScales
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.router.pool import Pool


class AdapterRoutes:
    def __init__(self, pool: Pool, gate: RequestGate, scales: AdapterScales) -> None:
        self._pool = pool
        self._gate = gate
        self._scales = scales

    def routes(self) -> list[Route]:
        return [
            Route("/lora-adapters", self.show, methods=["GET"]),
            Route("/lora-adapters", self.change, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        """Only admins see where the files are."""
        spec = self._pool.look(request.query_params.get("model")).spec
        shows_path = principal_of(request).is_admin
        rows = zip(spec.settings.model.lora, self._scales.now(spec), strict=True)
        shown = [(path if shows_path else Path(path).name, scale) for (path, _), scale in rows]
        return json_response([{"id": i, "path": path, "scale": scale} for i, (path, scale) in enumerate(shown)])

    async def change(self, request: Request) -> Response:
        """The scales of all later requests that do not have their own. An adapter that is not listed gets 0."""
        given, _ = await self._gate.bodies.read(request, lambda data: read(data or b"[]", list[LoraScale]))
        self._scales.set(self._pool.look(request.query_params.get("model")).spec, given)
        return json_response({"success": True})
