"""llama-server's dialect: completion, tokenize, templates, props, slots."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from everwarm.engine import messages as m
from everwarm.errors import BadRequest, Forbidden
from everwarm.gateway import shapes
from everwarm.gateway.body import ChatBody, CompletionBody, DetokenizeBody, SlotBody, TokenizeBody, read
from everwarm.gateway.generate import collect, events
from everwarm.gateway.replies import json_response, sse
from everwarm.gateway.service import Service, template_options
from everwarm.state.slotfile import checked_name

Json = dict[str, Any]


class LlamaServer:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def completion(self, request: Request) -> Response:
        data = await request.body()
        body = read(data, CompletionBody)
        if body.stream:
            return self._service.stream(request, self._frames(request, body), len(data))
        with self._service.limits.admitted(len(data)):
            return await self._service.within_time(request, self._whole(request, body))

    async def _whole(self, request: Request, body: CompletionBody) -> Response:
        submits = await self._service.completion_submits(request, body)
        (choice,) = await collect(events(self._service.supervisor, submits[:1]), 1)
        self._service.metrics.finished(choice.done)
        name = body.model or self._service.settings.model_name
        with_probs = body.wanted_probs is not None
        answer = shapes.llama_completion(name, choice, with_tokens=bool(body.return_tokens), with_probs=with_probs)
        return json_response(answer)

    async def _frames(self, request: Request, body: CompletionBody) -> AsyncGenerator[bytes, None]:
        submits = await self._service.completion_submits(request, body)
        name = body.model or self._service.settings.model_name
        n_prompt = n_reply = slot = 0
        async for event in events(self._service.supervisor, submits[:1]):
            match event.message:
                case m.Begun() as begun:
                    n_prompt, slot = begun.n_prompt, begun.slot
                case m.PromptRead() as so_far:
                    progress = {"prompt_progress": shapes.progress(so_far)}
                    yield sse({"index": 0, "content": "", "stop": False, "id_slot": slot, **progress})
                case m.Piece() as piece:
                    n_reply += len(piece.tokens)
                    chunk: Json = {"index": 0, "content": piece.text, "tokens": piece.tokens, "stop": False}
                    chunk |= {"id_slot": slot, "tokens_predicted": n_reply, "tokens_evaluated": n_prompt}
                    if piece.probs:
                        chunk["completion_probabilities"] = shapes.logprobs(piece.probs)["content"]
                    yield sse(chunk)
                case m.Done() as done:
                    self._service.metrics.finished(done)
                    yield sse({"index": 0, "content": done.text, "tokens": [], **shapes.llama_end(name, done)})

    async def tokenize(self, request: Request) -> Response:
        data = await request.body()
        body = read(data, TokenizeBody)
        fields = {"text": body.content, "add_special": body.add_special, "parse_special": body.parse_special}
        with self._service.limits.admitted(len(data)):
            asked = self._service.supervisor.ask(m.Tokenize, **fields)
            tokens = await self._service.within_time(request, asked)
        if body.with_pieces:
            return json_response({"tokens": [{"id": token, "piece": _piece(piece)} for token, piece in tokens]})
        return json_response({"tokens": [token for token, _ in tokens]})

    async def detokenize(self, request: Request) -> Response:
        data = await request.body()
        body = read(data, DetokenizeBody)
        with self._service.limits.admitted(len(data)):
            asked = self._service.supervisor.ask(m.Detokenize, tokens=body.tokens)
            text: bytes = await self._service.within_time(request, asked)
        return json_response({"content": text.decode("utf-8", "replace")})

    async def apply_template(self, request: Request) -> Response:
        body = read(await request.body(), ChatBody)
        template = await self._service.template()
        text = await asyncio.to_thread(template.render, body.messages, **template_options(body))
        return json_response({"prompt": text})

    async def props(self, _request: Request) -> Response:
        info = await self._service.info()
        return json_response(
            {
                "default_generation_settings": {"n_ctx": info.n_ctx, "params": {}},
                "total_slots": info.n_slots,
                "model_alias": self._service.settings.model_name,
                "model_description": info.description,
                "memory_kind": info.memory_kind,
                "modalities": {"vision": False, "audio": False, "video": False},
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": True,
                "chat_template": info.chat_template or "",
                "bos_token": info.bos,
                "eos_token": info.eos,
                "build_info": f"everwarm, libllama {info.build}",
                "is_sleeping": False,
            }
        )

    async def slots(self, _request: Request) -> Response:
        return json_response(await self._service.supervisor.ask(m.AskSlots))

    async def slot_action(self, request: Request) -> Response:
        """llama-server's ``POST /slots/N?action=save|restore|erase``."""
        data = await request.body()
        action, number = request.query_params.get("action", ""), request.path_params["id"]
        if action not in ("save", "restore", "erase"):
            raise BadRequest(f"action is {action[:32]!r}; give save, restore or erase")
        if not re.fullmatch(r"[0-9]{1,4}", number):
            raise BadRequest("the slot in the path is not a number")
        body = read(data or b"{}", SlotBody)
        namespace = self._service.namespace(body.cache_salt)
        fields: dict[str, Any] = {"slot": int(number), "action": action, "namespace": namespace}
        shown = {}
        if action != "erase":
            shown["filename"] = checked_name(body.filename)
            fields["path"] = str(self._slot_directory() / shown["filename"])
        with self._service.limits.admitted(len(data)):
            answer = await self._service.within_time(request, self._service.supervisor.ask(m.SlotAction, **fields))
        return json_response({"id_slot": answer["id_slot"], **shown, **answer})

    def _slot_directory(self) -> Path:
        where = self._service.settings.slot_save_path
        if where is None:
            message = "this server does not save slots to files; start it with --slot-save-path"
            raise Forbidden(501, "not_supported_error", message)
        return Path(where)


def _piece(piece: bytes) -> str | list[int]:
    """Text, or bytes where a token is only part of a character."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
