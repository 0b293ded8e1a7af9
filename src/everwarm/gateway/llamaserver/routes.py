"""llama-server's dialect: completion, tokenize, templates, props, slots."""

from __future__ import annotations

import itertools
import os
import re
import struct
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest, Forbidden
from everwarm.gateway.access.auth import own_namespace, principal_of
from everwarm.gateway.chat.generate import collect
from everwarm.gateway.chat.prepare import show, template_options
from everwarm.gateway.http.sse import LOADING_S, json_response, sse, sse_loading
from everwarm.gateway.openai import encode
from everwarm.gateway.openai.schema import ChatBody, CompletionBody, DetokenizeBody, SlotBody, TokenizeBody, read
from everwarm.gateway.service import Service
from everwarm.gateway.settings import ServerSettings
from everwarm.router.pool import Served
from everwarm.state.store.slot_names import COMPANION, checked_name, namespace_folder
from everwarm.types import Json

_TEXT_ONLY = {"vision": False, "audio": False, "video": False}


def llama_routes(service: Service) -> list[Route]:
    llama = LlamaServer(service)
    return [
        Route("/completion", llama.completion, methods=["POST"]),
        Route("/completions", llama.completion, methods=["POST"]),
        Route("/tokenize", llama.tokenize, methods=["POST"]),
        Route("/detokenize", llama.detokenize, methods=["POST"]),
        Route("/apply-template", llama.apply_template, methods=["POST"]),
        Route("/props", llama.props, methods=["GET"]),
        Route("/slots", llama.slots, methods=["GET"]),
        Route("/slots/{id}", llama.slot_action, methods=["POST"]),
    ]


class LlamaServer:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def completion(self, request: Request) -> Response:
        body, n_bytes = await self._service.read(request, CompletionBody)
        if body.stream:
            return self._service.stream(request, self._frames(request, body), n_bytes)
        with self._service.admitted(request, n_bytes):
            return await self._service.within_time(request, self._whole(request, body))

    async def _whole(self, request: Request, body: CompletionBody) -> Response:
        async with self._service.borrowed(body.model) as served:
            asked = await self._service.completion_submits(request, body, served)
            (choice,) = await collect(self._service.run(served, asked.first), 1)
        name = body.model or served.id
        with_probs = body.wanted_probs is not None
        answer = encode.llama_completion(name, choice, with_tokens=bool(body.return_tokens), with_probs=with_probs)
        return json_response(answer)

    async def _frames(self, request: Request, body: CompletionBody) -> AsyncGenerator[bytes, None]:
        with self._service.pool.lease(body.model) as lease:
            async for loaded in lease.waiting(LOADING_S):
                yield sse_loading(lease.served.id, loaded)
            async for frame in self._completion_frames(request, body, lease.served):
                yield frame

    async def _completion_frames(
        self, request: Request, body: CompletionBody, served: Served
    ) -> AsyncGenerator[bytes, None]:
        asked = await self._service.completion_submits(request, body, served)
        name = body.model or served.id
        n_prompt = n_reply = slot = 0
        async for event in self._service.run(served, asked.first):
            match event.message:
                case m.Begun() as begun:
                    n_prompt, slot = begun.n_prompt, begun.slot
                case m.PromptRead() as so_far:
                    progress = {"prompt_progress": encode.progress(so_far)}
                    yield sse({"index": 0, "content": "", "stop": False, "id_slot": slot, **progress})
                case m.TextPiece() as piece:
                    n_reply += len(piece.tokens)
                    chunk: Json = {"index": 0, "content": piece.text, "tokens": piece.tokens, "stop": False}
                    chunk |= {"id_slot": slot, "tokens_predicted": n_reply, "tokens_evaluated": n_prompt}
                    if piece.probs:
                        chunk["completion_probabilities"] = encode.logprobs(piece.probs)["content"]
                    yield sse(chunk)
                case m.Done() as done:
                    yield sse({"index": 0, "content": done.text, "tokens": [], **encode.llama_end(name, done)})

    async def tokenize(self, request: Request) -> Response:
        body, n_bytes = await self._service.read(request, TokenizeBody)
        fields = {"text": body.content, "add_special": body.add_special, "parse_special": body.parse_special}
        with self._service.admitted(request, n_bytes):
            found = await self._service.ask(request, body.model, m.Tokenize, with_pieces=body.with_pieces, **fields)
            tokens = msgspec.convert(found, m.Tokenized)
            answer = partial(_tokenized, tokens, with_pieces=body.with_pieces)
            return await self._service.bodies.for_request(request, answer)

    async def detokenize(self, request: Request) -> Response:
        body, n_bytes = await self._service.read(request, DetokenizeBody)
        with self._service.admitted(request, n_bytes):
            text: bytes = await self._service.ask(request, body.model, m.Detokenize, tokens=body.tokens)
        return json_response({"content": text.decode("utf-8", "replace")})

    async def apply_template(self, request: Request) -> Response:
        body, n_bytes = await self._service.read(request, ChatBody)
        with self._service.admitted(request, n_bytes):
            return await self._service.within_time(request, self._applied(request, body))

    async def _applied(self, request: Request, body: ChatBody) -> Response:
        async with self._service.borrowed(body.model) as served:
            template = await self._service.template(served)
        canonicalise = self._service.settings.canonicalise
        aside = self._service.bodies.for_request
        shown = await aside(request, lambda: show(body, template, "<__media__>", canonicalise=canonicalise))
        self._service.count_noise(shown)
        text = await aside(request, lambda: template.render(shown.messages, **template_options(body)))
        return json_response({"prompt": text})

    async def props(self, request: Request) -> Response:
        name = request.query_params.get("model")
        if name is None and self._service.pool.catalog.find(None) is None:
            models = [standing.spec.id for standing in self._service.pool.standings()]
            return json_response({"role": "router", "models": models, "modalities": _TEXT_ONLY})
        served = self._service.pool.look(name)
        if not served.supervisor.is_running:
            return json_response(_asleep(served))
        return await self._service.within_time(request, self._props(served))

    async def _props(self, served: Served) -> Response:
        info = await served.supervisor.wait_ready()
        return json_response(
            {
                "default_generation_settings": {"n_ctx": info.n_ctx, "params": {}},
                "total_slots": info.n_slots,
                "model_alias": served.id,
                "model_description": info.description,
                "memory_kind": info.memory_kind,
                "modalities": _TEXT_ONLY | {"vision": info.sees},
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": True,
                "chat_template": served.spec.template or info.chat_template or "",
                "checkpoint_every": info.every_n_tokens,
                "max_checkpoints": info.max_checkpoints,
                "adds_bos": info.adds_bos,
                "bos_token": info.bos,
                "eos_token": info.eos,
                "build_info": f"everwarm, libllama {info.build}",
                "is_sleeping": False,
            }
        )

    async def slots(self, request: Request) -> Response:
        principal, query = principal_of(request), request.query_params
        namespace = "" if principal.is_admin else principal.namespace(query.get("cache_salt"))
        asked = self._service.awake(query.get("model")).supervisor.ask(m.AskSlots, namespace=namespace)
        return json_response(await self._service.within_time(request, asked))

    async def slot_action(self, request: Request) -> Response:
        """llama-server's ``POST /slots/N?action=save|restore|erase``."""
        body, n_bytes = await self._service.bodies.read(request, lambda data: read(data or b"{}", SlotBody))
        action, number = request.query_params.get("action", ""), request.path_params["id"]
        if action not in ("save", "restore", "erase"):
            raise BadRequest(f"action is {action[:32]!r}; give save, restore or erase")
        if not re.fullmatch(r"[0-9]{1,4}", number):
            raise BadRequest("the slot in the path is not a number")
        service = self._service
        namespace = service.namespace(request, body.cache_salt)
        fields: dict[str, Any] = {"slot": int(number), "action": action, "namespace": namespace}
        shown = {}
        if action != "erase":
            shown["filename"] = body.filename
            fields |= slot_file_fields(request, service.settings, body.filename, namespace)
        with service.admitted(request, n_bytes):
            name = body.model or request.query_params.get("model")
            answer = await service.ask(request, name, m.SlotAction, **fields)
        return json_response({"id_slot": answer["id_slot"], **shown, **answer})


def _asleep(served: Served) -> Json:
    """What the catalog knows of a model that is not loaded. As in llama-server, looking does not wake it."""
    settings = served.spec.settings
    return {
        "default_generation_settings": {"n_ctx": settings.n_ctx, "params": {}},
        "total_slots": settings.n_slots,
        "model_alias": served.id,
        "modalities": _TEXT_ONLY | {"vision": served.spec.mmproj is not None},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": served.spec.template or "",
        "is_sleeping": True,
    }


def _tokenized(tokens: m.Tokenized, *, with_pieces: bool) -> Response:
    """As JSON text by text, so that a thread that makes it never keeps others waiting for long."""
    ids = struct.unpack(f"<{len(tokens.ids) // 4}i", tokens.ids)
    shown: Iterator[Any] = iter(ids)
    if with_pieces:
        ends = itertools.accumulate(struct.unpack(f"<{len(ids)}I", tokens.sizes), initial=0)
        pieces = (tokens.pieces[start:end] for start, end in itertools.pairwise(ends))
        shown = ({"id": id, "piece": _piece(piece)} for id, piece in zip(ids, pieces, strict=True))
    texts = []
    while part := list(itertools.islice(shown, 4096)):
        texts.append(msgspec.json.encode(part)[1:-1])
    return Response(b'{"tokens":[' + b",".join(texts) + b"]}", media_type="application/json")


def _piece(piece: bytes) -> str | list[int]:
    """Text, or bytes where a token is only part of a character."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


MAX_FILES_OF_A_USER = 64  # in each of its namespaces


def slot_file_fields(request: Request, settings: ServerSettings, filename: str, namespace: str) -> dict[str, Any]:
    """What an engine is told of a file. The directory itself belongs to callers with the server's one key, or with none
    where it has none, who give no ``cache_salt``; every other namespace has a folder in it."""
    name, directory = checked_name(filename), _directory(settings)
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
    """Whether the caller's word is enough for a file without a companion. It takes the start flag, and an admin."""
    return settings.trust_slot_files and principal_of(request).is_admin


def _require_quota(folder: Path, name: str) -> None:
    """Nothing removes slot files but whoever owns the disk, so a user has a number of them and no more."""
    if not (folder / name).exists() and folder.is_dir():
        n_files = sum(not entry.name.endswith(COMPANION) for entry in os.scandir(folder) if entry.is_file())
        if n_files >= MAX_FILES_OF_A_USER:
            message = f"there are {n_files} slot files of yours; save over one of them, or ask an admin to remove some"
            raise Forbidden(403, "quota_exceeded", message)


def _directory(settings: ServerSettings) -> Path:
    if settings.slot_save_path is None:
        message = "this server does not save slots to files; start it with --slot-save-path"
        raise Forbidden(501, "not_supported_error", message)
    return Path(settings.slot_save_path)
