"""The list of models in OpenAI's, Anthropic's and llama-server's shape, and orders to load, unload, download and delete
them.

Downloads and deletions are only for admins, and only where the server was told to allow them. Models come from the Hub that
huggingface_hub is set up for, into its cache. A download reports its progress in lines, as Ollama does; it stops when its
client disconnects, and the next one continues it.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.errors import BadRequest, NotFound, NotSupported, Overloaded
from everwarm.gateway.access.auth import admin_only, principal_of
from everwarm.gateway.http.sse import ClientGone, json_response
from everwarm.gateway.ollama.encode import line
from everwarm.gateway.openai.schema import ModelBody
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.router.catalog import hub
from everwarm.router.plan import Phase
from everwarm.router.pool import Pool, Served
from everwarm.types import Json

_SHOWN: dict[Phase, str] = {  # in llama-server's words
    "asleep": "unloaded",
    "loading": "loading",
    "ready": "loaded",
    "draining": "loaded",
    "stopping": "unloaded",
}


class Models:
    def __init__(self, pool: Pool, gate: RequestGate, pulls: Pulls) -> None:
        self._pool = pool
        self._pulls = pulls
        self._gate = gate

    def routes(self) -> builtins.list[Route]:
        return [
            Route("/v1/models", self.list, methods=["GET"]),
            Route("/v1/models/{id:path}", self.show, methods=["GET"]),
            Route("/v1/models/{id:path}", self.delete, methods=["DELETE"]),
            Route("/models", self.list, methods=["GET"]),
            Route("/models/load", self.load, methods=["POST"]),
            Route("/models/unload", self.unload, methods=["POST"]),
        ]

    async def list(self, request: Request) -> Response:
        """One body that satisfies OpenAI's, Anthropic's and llama-server's clients."""
        if request.query_params.get("reload") in ("1", "true"):
            if not principal_of(request).is_admin:
                raise admin_only("GET /models?reload=1")
            self._pool.refresh(now=True)
        models = self._models()
        first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
        answer = {"object": "list", "data": models, "has_more": False, "first_id": first, "last_id": last}
        answer["models"] = [_capable(served) for served in self._pool.all_served()]
        if self._pulls.allowed:  # the page then offers it
            answer["can_pull"] = principal_of(request).is_admin
        return json_response(answer)

    async def show(self, request: Request) -> Response:
        """One model of the list, by its id or an alias."""
        id = request.path_params["id"]
        models = self._models()
        found = next((model for model in models if id in (model["id"], *model.get("aliases", ()))), None)
        if found is None:
            names = ", ".join(str(model["id"]) for model in models) or "none"
            raise NotFound(f"there is no model {id[:100]!r}; there are: {names}", "model_not_found")
        return json_response(found)

    async def delete(self, request: Request) -> Response:
        """Deletes the files of a model of the Hub."""
        id = request.path_params["id"]
        self._pulls.require_allowed()
        await self._pulls.delete(id)
        return json_response({"id": id, "object": "model", "deleted": True})

    def _models(self) -> builtins.list[Json]:
        models = [_model(served) for served in self._pool.all_served()]
        return models + [
            {**_names(broken.id), "status": {"value": "unloaded", "failed": True, "reason": broken.reason}}
            for broken in self._pool.catalog.broken
        ]

    async def load(self, request: Request) -> Response:
        body, _ = await self._gate.read(request, ModelBody)
        self._pool.load(body.model)
        return json_response({"success": True})

    async def unload(self, request: Request) -> Response:
        body, _ = await self._gate.read(request, ModelBody)
        self._pool.unload(body.model)
        return json_response({"success": True})


def _capable(served: Served) -> Json:
    """What a model can do, as llama-server lists it beside OpenAI's list."""
    spec, info = served.spec, served.supervisor.info
    makes_vectors = spec.settings.embedding is not None or (info is not None and info.pooling is not None)
    capabilities = ["embedding"] if makes_vectors else ["completion"]
    if spec.mmproj is not None or (info is not None and (info.sees or info.sample_rate)):
        capabilities.append("multimodal")
    return {"name": spec.id, "model": spec.id, "type": "model", "capabilities": capabilities}


def _names(id: str) -> Json:
    dates = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
    names = {"id": id, "object": "model", "type": "model", **dates, "owned_by": "everwarm", "display_name": id}
    return {**names, "lifecycle": "active"}


def _model(served: Served) -> Json:
    status, info = served.status, served.supervisor.info
    shown: Json = {"value": _SHOWN[status.phase]}
    if status.phase == "loading":
        shown["progress"] = served.supervisor.loaded
    if status.reason is not None:
        shown |= {"failed": True, "reason": status.reason}
        if served.retry_in_s is not None:
            shown |= {"attempts": served.supervisor.deaths.n_given_up, "retry_in_s": round(served.retry_in_s, 1)}
    model = {**_names(served.spec.id), "aliases": served.spec.aliases, "tags": served.spec.tags}
    model["status"] = shown
    if info is not None:
        n_usable = min(info.n_ctx, info.n_ctx_train or info.n_ctx)  # beyond what it was trained on a model is lost
        model |= {"max_input_tokens": n_usable, "max_tokens": n_usable}
        read = {"text": True, "image": info.sees, "audio": info.sample_rate > 0}
        modalities = [name for name, is_read in read.items() if is_read]
        model["architecture"] = {"input_modalities": modalities, "output_modalities": ["text"]}
        model["meta"] = {
            "n_ctx_train": info.n_ctx_train,
            "n_params": info.n_params,
            "size": info.size_bytes,
            "n_vocab": info.n_vocab,
        }
    return {**model, "n_running": status.n_leased, "n_waiting": status.n_waiting}


# downloads

REPORT_S = 0.2  # between lines of progress
AT_ONCE = 2
MAX_PULLS = 8  # running and waiting
SUCCESS: Json = {"status": "success"}


class Pulls:
    def __init__(self, pool: Pool, *, allowed: bool) -> None:
        self._pool = pool
        self.allowed = allowed
        self._n_pulls = 0
        self._threads = ThreadPoolExecutor(AT_ONCE, "pull")

    def require_allowed(self) -> None:
        if not self.allowed:
            raise NotSupported("this server downloads and deletes no models; start it with --models hf: --allow-pull")

    async def pull(self, name: str) -> AsyncGenerator[bytes, None]:
        """Lines of progress; the model is in the list of models before the last one."""
        wanted = hub.parse_name(name)
        if self._n_pulls >= MAX_PULLS:
            raise Overloaded(f"{MAX_PULLS} models are being downloaded; try again when one is there", 30)
        self._n_pulls += 1
        is_over = threading.Event()
        done: tuple[int, int] | None = None  # bytes done, bytes in all

        def note(n_done: int, n_total: int) -> None:
            nonlocal done
            if is_over.is_set():
                raise ClientGone
            done = (n_done, n_total)

        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, hub.resolve, str(wanted), note)
            yield line({"status": "pulling manifest"})
            reported = None
            while not (await asyncio.wait({work}, timeout=REPORT_S))[0]:
                if done is not None and done != reported:
                    reported = done
                    yield line(_progress(str(wanted), *reported))
            model = work.result()
            yield line(_progress(str(wanted), *(done or (model.n_bytes, model.n_bytes))))
            self._pool.refresh(now=True)
            yield line(SUCCESS)
        finally:
            self._n_pulls -= 1
            is_over.set()

    async def delete(self, name: str) -> None:
        """Deletes the files of a model of the Hub; a loaded one is unloaded when it is idle."""
        spec = self._pool.catalog.named(name)
        if spec is None:
            names = ", ".join(sorted(self._pool.catalog.specs)) or "none"
            raise NotFound(f"there is no model {name[:100]!r}; there are: {names}", "model_not_found")
        if spec.source != "hub":
            raise BadRequest(f"{spec.id} was not downloaded from the Hub; delete its file where it lies")
        await asyncio.to_thread(hub.remove, spec.id)
        self._pool.refresh(now=True)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _progress(name: str, n_done: int, n_total: int) -> Json:
    """Ollama's clients show a bar for each digest; this one is of the name, so that all files share a bar. Pure."""
    digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    return {"status": f"pulling {name}", "digest": digest, "total": n_total, "completed": min(n_done, n_total)}
