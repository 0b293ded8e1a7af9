"""Requests that no single replica can answer: the list of models, whether all are ready, the metrics of all."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from everwarm.gateway.admin.metrics import CONTENT_TYPE
from everwarm.gateway.http.sse import json_response
from everwarm.ray.replica_messages import ProxiedRequest, replicas_of

LISTS = {"/v1/models": "data", "/models": "data", "/api/tags": "models", "/api/ps": "models"}
_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+.*)$")


Ask = Callable[[ProxiedRequest, str], Awaitable[Response]]  # gets the whole answer of a model's replica


async def merged(request: ProxiedRequest, models: Sequence[str], ask: Ask) -> Response | None:
    """The answer of all of these models; None: a single replica can answer it."""
    if request.path == "/ready":
        return await _ready(request, models, ask)
    if request.path in LISTS:
        return await _listed(request, models, ask)
    if request.path == "/metrics" and not request.replica:
        return await _metrics(request, models, ask)
    return None


async def _ready(request: ProxiedRequest, models: Sequence[str], ask: Ask) -> Response:
    """Ready when every model has a replica that is ready."""
    missing = [model for model in models if not replicas_of(model)]
    for model in models:
        if model not in missing and (await ask(request, model)).status_code != 200:
            missing.append(model)
    about = {"status": "starting" if missing else "ready", "models": len(models), "missing": missing}
    return json_response(about, 503 if missing else 200, {"retry-after": "1"} if missing else {})


async def _listed(request: ProxiedRequest, models: Sequence[str], ask: Ask) -> Response:
    key = LISTS[request.path]
    whole: dict[str, Any] = {}
    for model in models:
        answer = await ask(request, model)
        if answer.status_code != 200:
            return Response(answer.body, answer.status_code, media_type="application/json")
        part = msgspec.json.decode(answer.body)
        whole = part if not whole else whole | {key: whole[key] + part[key]}
    if "last_id" in whole:
        whole["last_id"] = whole[key][-1]["id"]
    return json_response(whole)


async def _metrics(request: ProxiedRequest, models: Sequence[str], ask: Ask) -> Response:
    """The metrics of every replica, with labels for model and replica."""
    texts = {}
    for model in models:
        for name in replicas_of(model):
            answer = await ask(dataclasses.replace(request, replica=name), model)
            texts[model, name] = bytes(answer.body).decode()
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
