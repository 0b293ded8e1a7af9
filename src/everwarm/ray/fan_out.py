"""Requests that no single replica can answer: the list of models, whether all are ready, the metrics of all."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from everwarm.gateway.admin.metrics import CONTENT_TYPE
from everwarm.gateway.http.sse import json_response
from everwarm.ray.replica_messages import ProxiedRequest
from everwarm.ray.router_registry import replicas_of

LISTS = {"/v1/models": "data", "/models": "data", "/api/tags": "models", "/api/ps": "models"}
_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+.*)$")


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    status: int
    body: bytes


class FanOut:
    def __init__(self, models: list[str], ask: Callable[[ProxiedRequest, str], Awaitable[ReplicaAnswer]]) -> None:
        self._models = models
        self._ask = ask

    async def answer(self, request: ProxiedRequest) -> Response | None:
        """None: a single replica can answer it."""
        if request.path == "/ready":
            return await self._ready(request)
        if request.path in LISTS:
            return await self._listed(request, LISTS[request.path])
        if request.path == "/metrics" and not request.replica:
            return await self._metrics(request)
        return None

    async def _ready(self, request: ProxiedRequest) -> Response:
        """Ready when every model has a replica that is ready."""
        missing = [model for model in self._models if not replicas_of(model)]
        for model in self._models:
            if model not in missing and (await self._ask(request, model)).status != 200:
                missing.append(model)
        about = {"status": "starting" if missing else "ready", "models": len(self._models), "missing": missing}
        return json_response(about, 503 if missing else 200, {"retry-after": "1"} if missing else {})

    async def _listed(self, request: ProxiedRequest, key: str) -> Response:
        whole: dict[str, Any] = {}
        for model in self._models:
            answer = await self._ask(request, model)
            if answer.status != 200:
                return Response(answer.body, answer.status, media_type="application/json")
            part = msgspec.json.decode(answer.body)
            whole = part if not whole else whole | {key: whole[key] + part[key]}
        if "last_id" in whole:
            whole["last_id"] = whole[key][-1]["id"]
        return json_response(whole)

    async def _metrics(self, request: ProxiedRequest) -> Response:
        """The metrics of every replica, with labels for model and replica."""
        texts = {}
        for model in self._models:
            for name in replicas_of(model):
                answer = await self._ask(dataclasses.replace(request, replica=name), model)
                texts[model, name] = answer.body.decode()
        return Response(labelled(texts), media_type=CONTENT_TYPE)


def labelled(texts: dict[tuple[str, str], str]) -> str:
    """One text of metrics, by (model, replica): each family once, every sample with both labels."""
    about: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for (model, replica), text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ")[2]
                if line not in about.setdefault(family, []):
                    about[family].append(line)
            elif found := _SAMPLE.match(line):
                labels = ",".join(filter(None, (f'model_id="{model}",replica="{replica}"', found[2])))
                samples.setdefault(family, []).append(f"{found[1]}{{{labels}}} {found[3]}")
    return "\n".join(line for name, head in about.items() for line in (*head, *samples.get(name, []))) + "\n"
