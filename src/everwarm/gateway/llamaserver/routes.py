"""llama-server's dialect: completion, tokenize, templates, props, slots."""

from __future__ import annotations

import asyncio
import os
import re
import struct
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm import __version__
from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest, EngineStopped, Forbidden, NotSupported
from everwarm.gateway.access.auth import namespace_of, own_namespace, principal_of
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.llamaserver.encode import (
    LlamaEncoder,
    generation_settings,
    tokenized,
)
from everwarm.gateway.llamaserver.infill import InfillBody, infill_completion, texts_around
from everwarm.gateway.openai.encode import live_timings
from everwarm.gateway.openai.schema import (
    MEDIA_MARKER,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoraScale,
    MediaPrompt,
    Prompt,
    SlotBody,
    TokenizeBody,
    read,
)
from everwarm.gateway.serving.generate import Choice
from everwarm.gateway.serving.replies import Replies
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.gateway.serving.request_preparer import RequestPreparer
from everwarm.gateway.settings import ServerSettings
from everwarm.router.pool import Pool, Served
from everwarm.router.supervise.supervisor import Question
from everwarm.state.store.slot_names import COMPANION, checked_name, namespace_folder
from everwarm.types import Json

_TEXT_ONLY = {"vision": False, "audio": False, "video": False}
_NO_TOOLS = "Everwarm runs no tools and connects to no MCP servers: let the client run them"
NOT_OFFERED = {
    "/tools": _NO_TOOLS,
    "/mcp": _NO_TOOLS,
    "/cors-proxy": "Everwarm fetches no pages for others: let the client do it",
    "/predict": "Everwarm does not speak Vertex AI's dialect: use /v1/chat/completions",
    "/v1/systemone": "Everwarm answers no decision questions: use /v1/chat/completions with a JSON schema",
}
MAX_FILES_OF_A_USER = 64  # in each of its namespaces


class LlamaServer:
    def __init__(
        self,
        pool: Pool,
        gate: RequestGate,
        replies: Replies,
        preparer: RequestPreparer,
        settings: ServerSettings,
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._replies = replies
        self._preparer = preparer
        self._settings = settings

    def routes(self) -> list[Route]:
        return [
            Route("/completion", self.completion, methods=["POST"]),
            Route("/completions", self.completion, methods=["POST"]),
            Route("/v1/chat/completions/input_tokens", self.input_tokens, methods=["POST"]),
            Route("/chat/completions/input_tokens", self.input_tokens, methods=["POST"]),
            Route("/infill", self.infill, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/apply-template", self.apply_template, methods=["POST"]),
            Route("/props", self.props, methods=["GET"]),
            Route("/props", self.change_props, methods=["POST"]),
            Route("/slots", self.slots, methods=["GET"]),
            Route("/slots/{id}", self.slot_action, methods=["POST"]),
            Route("/lora-adapters", self.adapters, methods=["GET"]),
            Route("/lora-adapters", self.change_adapters, methods=["POST"]),
            *(Route(path, self.not_offered, methods=["GET", "POST"]) for path in NOT_OFFERED),
        ]

    async def completion(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, CompletionBody)
        prompts = body.prompts()
        encoders = [self._encoder(body, prompt if isinstance(prompt, str) else None) for prompt in prompts]
        if body.stream:
            if len(prompts) > 1 or (body.n or 1) > 1:
                raise BadRequest("only one reply can be streamed: send several prompts as several requests")
            source = partial(self._with_prompt, request, body, prompts[0])
            return self._replies.stream(request, n_bytes, source, encoders[0])
        with self._gate.admitted(request, n_bytes):
            found = await self._gate.within_time(request, self._all_completed(request, body, prompts))
        n = len(found) // len(prompts)
        answers = [encoders[i // n].whole(choice, index=i) for i, choice in enumerate(found)]
        return json_response(answers[0] if len(answers) == 1 else answers)

    def _encoder(self, body: CompletionBody | InfillBody, prompt: str | None = None) -> LlamaEncoder:
        served = self._pool.find(body.model)
        live = live_timings(body, time.monotonic)
        info = lambda: served.supervisor.info  # noqa: E731
        return LlamaEncoder(body.model or served.id, body, prompt, self._settings.defaults, info, live)

    async def infill(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, InfillBody)
        if (body.n or 1) > 1:
            raise BadRequest("one text is filled in: n must be 1")
        encoder = self._encoder(body)
        source = partial(self._filled, request, body)
        if body.stream:
            return self._replies.stream(request, n_bytes, source, encoder)
        with self._gate.admitted(request, n_bytes):
            found = await self._gate.within_time(request, self._collected(request, source))
        return json_response(encoder.whole(found[0]))

    async def _collected(self, request: Request, source: Callable[[], Awaitable[CompletionBody]]) -> list[Choice]:
        return await self._replies.collect(request, await source())

    async def _filled(self, request: Request, body: InfillBody) -> CompletionBody:
        """The completion that fills in what is missing at the cursor."""
        return await self._infilled(request, body, body.texts(), body.fields())

    async def fill_in(self, request: Request, body: CompletionBody, below: str) -> CompletionBody:
        """For other dialects: the completion of a text that another text follows."""
        texts = texts_around(str(body.prompt), below)
        return await self._infilled(request, body, texts, msgspec.structs.asdict(body))

    async def _infilled(self, request: Request, body: Body, given: list[str], fields: Json) -> CompletionBody:
        with self._pool.lease(body.model) as lease:
            info = await (await lease.ready()).supervisor.wait_ready()
        if info.fill_in is None:
            raise NotSupported("this model has no tokens for fill-in-the-middle; send a prompt to /completion")
        ask = partial(self._tokens, request, body.model, add_special=False, parse_special=False)
        texts = await asyncio.gather(*map(ask, given))
        defaults = self._settings.defaults
        return infill_completion(
            texts,
            info.fill_in,
            fields,
            n_batch=info.n_batch,
            n_ctx=info.n_ctx,
            n_predict=body.reply_tokens(-1 if defaults.max_tokens is None else defaults.max_tokens),
            suffix_first=defaults.spm_infill,
        )

    async def adapters(self, request: Request) -> Response:
        """Which adapters a model has, and how much of each is used. Only admins see where the files are."""
        spec = self._pool.look(request.query_params.get("model")).spec
        shows_path = principal_of(request).is_admin
        rows = zip(spec.settings.model.lora, self._preparer.adapter_scales(spec), strict=True)
        shown = [(path if shows_path else Path(path).name, scale) for (path, _), scale in rows]
        return json_response([{"id": i, "path": path, "scale": scale} for i, (path, scale) in enumerate(shown)])

    async def change_adapters(self, request: Request) -> Response:
        """The scales of all later requests that do not have their own. An adapter that is not listed gets 0."""
        given, _ = await self._gate.bodies.read(request, lambda data: read(data or b"[]", list[LoraScale]))
        self._preparer.set_adapter_scales(self._pool.look(request.query_params.get("model")).spec, given)
        return json_response({"success": True})

    async def _all_completed(self, request: Request, body: CompletionBody, prompts: list[Prompt]) -> list[Choice]:
        """The replies to all prompts, which run at once; the error of one ends them all."""
        tasks = [asyncio.create_task(self._completed(request, body, prompt)) for prompt in prompts]
        try:
            return [choice for choices in await asyncio.gather(*tasks) for choice in choices]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _completed(self, request: Request, body: CompletionBody, prompt: Prompt) -> list[Choice]:
        return await self._replies.collect(request, await self._with_prompt(request, body, prompt))

    async def _with_prompt(self, request: Request, body: CompletionBody, prompt: Prompt) -> CompletionBody:
        """The body with this prompt alone; texts among tokens are tokenized."""
        if isinstance(prompt, list) and str in set(map(type, prompt)):
            tokens: list[int] = []
            for item in prompt:
                is_first = not tokens
                tokens += [item] if isinstance(item, int) else await self._tokens(request, body.model, item, is_first)
            prompt = list(tokens)
        given = msgspec.to_builtins(prompt) if isinstance(prompt, MediaPrompt) else prompt
        return msgspec.structs.replace(body, prompt=given)

    async def _tokens(
        self, request: Request, model: str | None, text: str, add_special: bool, parse_special: bool = True
    ) -> list[int]:
        fields = {"text": text, "add_special": add_special, "parse_special": parse_special, "with_pieces": False}
        answer = await self._ask(request, model, m.Tokenize, **fields)
        ids = msgspec.convert(answer, m.Tokenized).ids
        return list(struct.unpack(f"<{len(ids) // 4}i", ids))

    async def input_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a chat has."""
        body, n_bytes = await self._gate.read(request, ChatBody)
        with self._gate.admitted(request, n_bytes):
            return await self._gate.within_time(request, self._counted(request, body))

    async def _counted(self, request: Request, body: ChatBody) -> Response:
        with self._pool.lease(body.model) as lease:
            n_tokens = await self._preparer.count(request, body, await lease.ready())
        return json_response({"input_tokens": n_tokens})

    async def tokenize(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, TokenizeBody)
        fields = {"text": body.content, "add_special": body.add_special, "parse_special": body.parse_special}
        with self._gate.admitted(request, n_bytes):
            answer = await self._ask(request, body.model, m.Tokenize, with_pieces=body.with_pieces, **fields)
            work = partial(tokenized, msgspec.convert(answer, m.Tokenized), with_pieces=body.with_pieces)
            return Response(await self._gate.bodies.for_request(request, work), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, DetokenizeBody)
        with self._gate.admitted(request, n_bytes):
            text: bytes = await self._ask(request, body.model, m.Detokenize, tokens=body.tokens)
        return json_response({"content": text.decode("utf-8", "replace")})

    async def apply_template(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, ChatBody)
        with self._gate.admitted(request, n_bytes):
            return await self._gate.within_time(request, self._applied(request, body))

    async def _applied(self, request: Request, body: ChatBody) -> Response:
        with self._pool.lease(body.model) as lease:
            prepared = await self._preparer.prompt(request, body, await lease.ready(), lambda _: MEDIA_MARKER)
        return json_response({"prompt": prepared.text.removeprefix(prepared.bos)})

    async def props(self, request: Request) -> Response:
        name = request.query_params.get("model")
        if name is None and self._pool.catalog.find(None) is None:
            models = [served.spec.id for served in self._pool.all_served()]
            shown: Json = {"role": "router", "max_instances": self._pool.limits.models_max, "models": models}
            shown |= {"models_autoload": self._pool.autoload, "model_alias": "everwarm", "model_path": "none"}
            shown["default_generation_settings"] = {"params": self._default_params(), "n_ctx": 0}
            return json_response({**shown, "modalities": _TEXT_ONLY, "build_info": f"everwarm-{__version__}"})
        served = self._pool.look(name)
        if not served.supervisor.is_running:
            return json_response(_asleep(served, self._default_params(), self._endpoints))
        shows_path = principal_of(request).is_admin
        return await self._gate.within_time(request, self._props(served, shows_path=shows_path))

    def _default_params(self) -> Json:
        return generation_settings(Body(), self._settings.defaults)

    @property
    def _endpoints(self) -> Json:
        return {
            "endpoint_slots": self._settings.shows_slots,
            "endpoint_props": True,
            "endpoint_metrics": self._settings.shows_metrics,
        }

    async def _props(self, served: Served, *, shows_path: bool) -> Response:
        info = await served.supervisor.wait_ready()
        return json_response(
            {
                "default_generation_settings": {"id": 0, "n_ctx": info.n_ctx, "params": self._default_params()},
                "model_path": str(served.spec.path) if shows_path else served.spec.path.name,
                "total_slots": info.n_slots,
                "model_alias": served.id,
                "model_description": info.description,
                "memory_kind": info.memory_kind,
                "modalities": _TEXT_ONLY | {"vision": info.sees, "audio": info.sample_rate > 0},
                "media_marker": MEDIA_MARKER,
                **self._endpoints,
                "chat_template": served.spec.template or info.chat_template or "",
                "placement": info.placement,
                "checkpoint_every": info.every_n_tokens,
                "max_checkpoints": info.max_checkpoints,
                "adds_bos": info.adds_bos,
                "bos_token": info.bos,
                "eos_token": info.eos,
                "build_info": f"{info.build}-everwarm-{__version__}",
                "is_sleeping": False,
            }
        )

    async def change_props(self, request: Request) -> Response:
        """llama-server changes nothing here, either."""
        await self._gate.bodies.read(request, bytes)
        return json_response({"success": True})

    async def not_offered(self, request: Request) -> Response:
        raise NotSupported(NOT_OFFERED[request.url.path])

    async def slots(self, request: Request) -> Response:
        if not self._settings.shows_slots:
            raise NotSupported("this server does not show its slots; start it without --no-slots")
        principal = principal_of(request)
        query = request.query_params
        namespace = "" if principal.is_admin else principal.namespace(query.get("cache_salt"))
        served = self._pool.look(query.get("model"))
        if not served.supervisor.is_running:  # this route loads no model
            raise EngineStopped(f"{served.id} is not loaded; a request for a reply loads it")
        answer = served.supervisor.ask(m.Inspect, what="slots", namespace=namespace)
        return json_response(await self._gate.within_time(request, answer))

    async def slot_action(self, request: Request) -> Response:
        """llama-server's ``POST /slots/N?action=save|restore|erase``."""
        body, n_bytes = await self._gate.bodies.read(request, lambda data: read(data or b"{}", SlotBody))
        action = request.query_params.get("action", "")
        number = request.path_params["id"]
        if action not in ("save", "restore", "erase"):
            raise BadRequest(f"action is {action[:32]!r}; give save, restore or erase")
        if not re.fullmatch(r"[0-9]{1,4}", number):
            raise BadRequest("the slot in the path is not a number")
        namespace = namespace_of(request, body.cache_salt)
        fields: dict[str, Any] = {"slot": int(number), "action": action, "namespace": namespace}
        shown = {}
        if action != "erase":
            shown["filename"] = body.filename
            fields |= slot_file_fields(request, self._settings, body.filename, namespace)
        with self._gate.admitted(request, n_bytes):
            name = body.model or request.query_params.get("model")
            answer = await self._ask(request, name, m.SlotAction, **fields)
        return json_response({"id_slot": answer["id_slot"], **shown, **answer})

    async def _ask(self, request: Request, name: str | None, question: type[Question], **fields: Any) -> Any:
        """Asks a model's engine; loads the model if need be."""

        async def answer() -> Any:
            with self._pool.lease(name) as lease:
                served = await lease.ready()
                return await served.supervisor.ask(question, **fields)

        return await self._gate.within_time(request, answer())


def _asleep(served: Served, params: Json, endpoints: Json) -> Json:
    """What the catalog knows of a model that is not loaded. As in llama-server, this does not load it."""
    settings = served.spec.settings
    return {
        "default_generation_settings": {"id": 0, "n_ctx": settings.n_ctx_of_request(settings.n_ctx), "params": params},
        "total_slots": settings.n_slots,
        "model_alias": served.id,
        "modalities": _TEXT_ONLY | {"vision": served.spec.mmproj is not None},
        **endpoints,
        "chat_template": served.spec.template or "",
        "is_sleeping": True,
    }


def slot_file_fields(request: Request, settings: ServerSettings, filename: str, namespace: str) -> dict[str, Any]:
    """The engine's fields of a slot file. The directory itself belongs to callers without a ``cache_salt`` that have the
    server's single key, or no key if the server has none. Every other namespace has a folder in it."""
    name = checked_name(filename)
    directory = _directory(settings)
    is_default = namespace == own_namespace(settings.api_key)
    where = directory if is_default else directory / namespace_folder(namespace)
    if not principal_of(request).is_admin:
        _require_quota(where, name)
    return {
        "path": str(where / name),
        "owns_unbound": is_default,
        "trusts_origin": may_trust_slot_files(request, settings),
    }


def may_trust_slot_files(request: Request, settings: ServerSettings) -> bool:
    """Whether the caller may restore a file without a companion: only an admin, and only with the start flag."""
    return settings.trust_slot_files and principal_of(request).is_admin


def _require_quota(folder: Path, name: str) -> None:
    """The server never removes slot files, so each user may have a limited number of them."""
    if not (folder / name).exists() and folder.is_dir():
        n_files = sum(not entry.name.endswith(COMPANION) for entry in os.scandir(folder) if entry.is_file())
        if n_files >= MAX_FILES_OF_A_USER:
            message = f"there are {n_files} slot files of yours; save over one of them, or ask an admin to remove some"
            raise Forbidden(message, "quota_exceeded")


def _directory(settings: ServerSettings) -> Path:
    if settings.slot_save_path is None:
        message = "this server does not save slots to files; start it with --slot-save-path"
        raise NotSupported(message)
    return Path(settings.slot_save_path)
