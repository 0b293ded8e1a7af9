"""Planning with the cache: what prompts would cost now, and reading some ahead of time.

``POST /cache/plan`` compares candidates, so that an agent can choose how to shorten its context. ``POST /cache/prefetch``
reads prompts before they are asked: in idle time, or now. Both see the caller's namespace only.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest
from everwarm.gateway.access.auth import principal_of
from everwarm.gateway.http.sse import json_response
from everwarm.gateway.openai.encode import usage
from everwarm.gateway.openai.schema import ChatBody, CompletionBody, Name
from everwarm.gateway.serving.replies import GenerationBody, Replies
from everwarm.gateway.serving.request_gate import RequestGate
from everwarm.gateway.serving.request_preparer import RequestPreparer
from everwarm.router.pool import Pool, Served
from everwarm.types import Json

MAX_CANDIDATES = 16
MAX_PREFETCHED = 8  # as many as wait for idle time
MAX_TTL_S = 7 * 86_400  # of a pin that ends by itself


class PlanBody(msgspec.Struct, frozen=True):
    """``candidates``: bodies of chat completions or completions."""

    candidates: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_CANDIDATES)]
    model: Name | None = None


class PrefetchBody(msgspec.Struct, frozen=True):
    """``requests``: bodies of chat completions or completions. ``when``: in idle time, or before the answer."""

    requests: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_PREFETCHED)]
    when: Literal["idle", "now"] = "idle"
    ttl_s: Annotated[int, Meta(ge=1, le=MAX_TTL_S)] | None = None  # how long what was read now is evicted last
    model: Name | None = None


class CachePlanner:
    def __init__(
        self, pool: Pool, gate: RequestGate, preparer: RequestPreparer, replies: Replies, pin_quota: float
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._preparer = preparer
        self._replies = replies
        self._pin_quota = pin_quota

    def routes(self) -> list[Route]:
        return [
            Route("/cache/plan", self.plan, methods=["POST"]),
            Route("/cache/prefetch", self.prefetch, methods=["POST"]),
        ]

    async def plan(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, PlanBody)
        bodies = [_typed(one, body.model) for one in body.candidates]

        async def costs() -> list[m.PromptCost]:
            return [await self._cost(request, one) for one in bodies]

        with self._gate.admitted(request, n_bytes):
            found = await self._gate.within_time(request, costs())
        rows = [_cost_row(i, cost) for i, cost in enumerate(found)]
        cheapest = min(range(len(rows)), key=lambda i: (not rows[i]["fits"], rows[i]["read_tokens"]))
        return json_response({"object": "cache.plan", "candidates": rows, "cheapest": cheapest})

    async def prefetch(self, request: Request) -> Response:
        body, n_bytes = await self._gate.read(request, PrefetchBody)
        bodies = [_typed(one, body.model) for one in body.requests]

        if body.ttl_s is not None and body.when != "now":
            raise BadRequest("ttl_s holds what was read: give it with when: now")

        async def read() -> list[Json]:
            work = partial(self._read_now, ttl_s=body.ttl_s) if body.when == "now" else self._offer
            return [await work(request, one) for one in bodies]

        with self._gate.admitted(request, n_bytes):
            rows = await self._gate.within_time(request, read())
        return json_response({"object": "cache.prefetch", "when": body.when, "requests": rows})

    async def _cost(self, request: Request, body: GenerationBody) -> m.PromptCost:
        with self._pool.lease(body.model) as lease:
            served = await lease.ready()
            return await self._cost_of(served, await self._submit(request, body, served))

    async def _cost_of(self, served: Served, submit: m.Submit) -> m.PromptCost:
        question = served.supervisor.ask(m.AskPrompt, what="cost", submit=submit)
        return msgspec.convert(await question, m.PromptCost)

    async def _submit(self, request: Request, body: GenerationBody, served: Served) -> m.Submit:
        submit, *others = (await self._preparer.prepare(request, body, served)).submits
        if others or submit.images:
            raise BadRequest("planning takes one prompt of text for each request, without n and images")
        return submit

    async def _offer(self, request: Request, body: GenerationBody) -> Json:
        """To be read in idle time, and the first to be evicted until it is used."""
        with self._pool.lease(body.model) as lease:
            served = await lease.ready()
            submit = await self._submit(request, body, served)
            if submit.text is None:
                raise BadRequest("tokens can only be read now: give when: now, or the prompt as text")
            cost = await self._cost_of(served, submit)
            served.supervisor.tell(m.Prewarm(submit.text, submit.add_special, submit.namespace, submit.session))
        return _cost_row(None, cost)

    async def _read_now(self, request: Request, body: GenerationBody, *, ttl_s: int | None) -> Json:
        whole = msgspec.structs.replace(
            body, max_tokens=0, max_completion_tokens=None, n_predict=None, n=None, stream=False
        )
        (choice,) = await self._replies.collect(request, whole)
        held = {} if ttl_s is None else {"held": await self._hold(request, whole, ttl_s)}
        return {"usage": usage([choice.done]), **held}

    async def _hold(self, request: Request, body: GenerationBody, ttl_s: int) -> bool:
        """Pins what was read for a while. False: nothing of it was kept."""
        quota = None if principal_of(request).is_admin else self._pin_quota
        with self._pool.lease(body.model) as lease:
            served = await lease.ready()
            submit = await self._submit(request, body, served)
            held = {"what": "hold", "ttl_s": float(ttl_s), "pin_quota": quota}
            answer = await served.supervisor.ask(m.AskPrompt, submit=submit, **held)
        return bool(answer["pinned"])


def _typed(body: dict[str, Any], model: str | None) -> GenerationBody:
    try:
        if "messages" in body:
            return msgspec.convert({"model": model, **body}, ChatBody)
        return msgspec.convert({"model": model, **body}, CompletionBody)
    except msgspec.ValidationError as error:
        raise BadRequest(f"a request to plan cannot be used: {error}") from None


def _cost_row(index: int | None, cost: m.PromptCost) -> Json:
    n_read = cost.n_prompt - cost.n_cached
    row = {"prompt_tokens": cost.n_prompt, "cached_tokens": cost.n_cached, "read_tokens": n_read}
    return ({} if index is None else {"index": index}) | row | {"seconds": round(cost.read_s, 3), "fits": cost.fits}
