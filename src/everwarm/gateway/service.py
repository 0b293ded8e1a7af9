"""What the handlers share: the engine, the chat template, limits, and how a body becomes what the engine is asked."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from everwarm.engine.process import messages as m
from everwarm.engine.process.messages import ModelInfo
from everwarm.errors import BadRequest, EngineStopped, EverwarmError
from everwarm.gateway.access.auth import principal_of
from everwarm.gateway.access.limits import AdmissionLimits, Place, estimated_tokens
from everwarm.gateway.access.middleware import error_body
from everwarm.gateway.admin.metrics import Metrics
from everwarm.gateway.admin.request_log import Caller, RequestLog, RequestTracker
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.generate import Event, events
from everwarm.gateway.chat.jinja_template import MAX_PROMPT_CHARS
from everwarm.gateway.chat.next_turn import NextTurn, NextTurnPrewarmer
from everwarm.gateway.chat.prepare import Shown, prepare_chat, template_options
from everwarm.gateway.constraints.reply_constraint import completion_constraint
from everwarm.gateway.http.connection import network_of
from everwarm.gateway.http.loop_lag import LoopLag
from everwarm.gateway.http.request_body import BodyReader, ReceivedBody
from everwarm.gateway.http.sse import SSE_KEEP_ALIVE, EventStream, sse, unless_gone, within
from everwarm.gateway.images.image_loader import ImageLoader, ImageSupport
from everwarm.gateway.openai.schema import Body, ChatBody, CompletionBody, read
from everwarm.gateway.parsing.model_syntax import TAIL, ModelSyntax
from everwarm.gateway.parsing.output_parser import OutputParser
from everwarm.gateway.settings import ServerSettings
from everwarm.router.pool import Pool, Served
from everwarm.router.supervise.supervisor import Lend, Question
from everwarm.types import Json

log = logging.getLogger("everwarm.gateway")

T = TypeVar("T")

BODIES_AT_ONCE = 4  # of the largest size

# Who is talking, as real clients say it. It informs which slot to give up last, never what may be reused.
SESSION_HEADERS = ("x-session-id", "x-session-affinity", "x-claude-code-session-id", "session-id", "thread-id")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the engine is asked, once per choice, and how a reply is to be read."""

    submits: list[Json]
    follow: RequestTracker
    reader: Callable[[], OutputParser] = OutputParser
    next_turn: NextTurn | None = None
    lend: Lend | None = None  # its pictures' pixels; None: it has none
    place: Place | None = None  # what it counts among all requests

    @property
    def first(self) -> Asked:
        """One choice, for dialects that know no more."""
        return dataclasses.replace(self, submits=self.submits[:1])


@dataclass(slots=True)
class Service:
    pool: Pool
    settings: ServerSettings
    limits: AdmissionLimits
    metrics: Metrics
    recent: RequestLog = field(default_factory=RequestLog)
    pictures: ImageLoader = field(default_factory=ImageLoader)
    marker: str = field(default_factory=lambda: f"<|picture-{secrets.token_hex(12)}|>")  # nobody can write it by chance
    _templates: dict[str, tuple[str, ChatTemplate]] = field(default_factory=dict)  # by model
    bodies: BodyReader = field(init=False)
    lag: LoopLag = field(init=False)
    _ahead: NextTurnPrewarmer = field(init=False)

    def __post_init__(self) -> None:
        self.lag = LoopLag(self.metrics.lagged)
        self.bodies = BodyReader(BODIES_AT_ONCE * self.settings.max_body_bytes)
        self._ahead = NextTurnPrewarmer(self.limits, is_on=self.settings.prewarm)

    async def template(self, served: Served) -> ChatTemplate:
        info = await served.supervisor.wait_ready()
        text = served.spec.template or info.chat_template
        if text is None:
            raise BadRequest("this model has no chat template; use /v1/completions")
        known = self._templates.get(served.id)
        if known is None or known[0] != text:
            known = self._templates[served.id] = (text, ChatTemplate(text, bos=info.bos, eos=info.eos))
        return known[1]

    # bodies

    async def read(self, request: Request, kind: type[T]) -> ReceivedBody[T]:
        """The request's body, if there is room to read it and it is what it should be."""
        return await self.bodies.read(request, lambda data: read(data, kind))

    # borrowing a model

    async def ask(self, request: Request, name: str | None, question: type[Question], **fields: Any) -> Any:
        """Ask a model's engine something, with the model loaded for it if need be."""

        async def asked() -> Any:
            with self.pool.lease(name) as lease:
                served = await lease.ready()
                return await served.supervisor.ask(question, **fields)

        return await self.within_time(request, asked())

    def awake(self, name: str | None) -> Served:
        """A model whose engine runs or starts, for whoever only looks: nobody's model is loaded or moved for that."""
        served = self.pool.look(name)
        if not served.supervisor.is_running:
            raise EngineStopped(f"{served.id} is not loaded; it is when somebody asks it for a reply")
        return served

    @contextlib.asynccontextmanager
    async def borrowed(self, name: str | None) -> AsyncIterator[Served]:
        with self.pool.lease(name) as lease:
            yield await lease.ready()

    # bodies to submits

    async def chat_submits(self, request: Request, body: ChatBody, served: Served) -> Asked:
        info, template = await served.supervisor.wait_ready(), await self.template(served)
        notation = ModelSyntax(template.source, self.settings.tool_format, self.settings.thinking_tags)
        canonicalise = self.settings.canonicalise
        prepare = partial(prepare_chat, body, template, notation, self.marker, canonicalise=canonicalise)
        ready = await self.bodies.for_request(request, prepare)
        self.count_noise(ready.shown)
        rendered, parts = ready.rendered, ready.shown.parts
        if parts and not info.sees:
            raise BadRequest("this model reads text only: start it with --mmproj and its projector file")
        sights = await self.pictures.from_parts(parts, self.namespace(request, body.cache_salt)) if parts else []
        adds_bos = info.adds_bos and not (info.bos and rendered.text.startswith(info.bos))
        common = {
            **self._common(request, body, info),
            "text": rendered.text,
            "add_special": adds_bos,
            "boundaries": rendered.boundaries,
            "stable": rendered.stable,
            "stables": rendered.stables,
            "breakpoints": rendered.breakpoints,
            "n_probs": body.n_probs,
            "form": ready.form,
        }
        if sights:
            shown = tuple(m.SentImage(sight.digest, sight.width, sight.height) for sight in sights)
            common |= {"marker": self.marker, "pictures": shown}
        thinks, kinds = body.reasoning_format != "none", None if body.tool_choice == "none" else ready.kinds
        told = {"with_thinking": thinks, "one_call": body.parallel_tool_calls is False}
        reader = partial(OutputParser.of, notation, rendered.text[-TAIL:], kinds, **told)
        after = partial(_text_after, template, ready.shown.messages, template_options(body))
        spot = common["add_special"], common["namespace"], common["session"]
        plain = not sights and not body.deterministic and body.uses_cache
        next_turn = NextTurn(reader, after, *spot) if plain and common["max_tokens"] else None
        lend = partial(self._lent, sights, common["namespace"]) if sights else None
        place = _recounted(request, estimated_tokens(len(rendered.text)))
        return Asked(_choices(common, body), self.follow(request, body, served), reader, next_turn, lend, place)

    @contextlib.asynccontextmanager
    async def _lent(self, sights: list[ImageSupport], namespace: str) -> AsyncIterator[tuple[m.SentImage, ...]]:
        """A picture for each place in the prompt. One that has several brings its pixels to the first."""
        async with self.pictures.lent(sights, namespace) as pictures:
            pixels = {picture.digest: picture.rgb for picture in pictures}
            del pictures[:]
            yield tuple(m.SentImage(s.digest, s.width, s.height, pixels.pop(s.digest, None)) for s in sights)

    def count_noise(self, shown: Shown) -> None:
        for rule, n_lines in Counter(shown.removed).items():
            self.metrics.removed_noise(rule, n_lines)
            log.debug("%d lines of system text were left out: %s", n_lines, rule)

    async def completion_submits(self, request: Request, body: CompletionBody, served: Served) -> Asked:
        text, tokens = body.text_or_tokens()
        if text is not None and len(text) > MAX_PROMPT_CHARS:
            raise BadRequest(f"the prompt has {len(text):,} characters; at most {MAX_PROMPT_CHARS:,} can be read")
        common = {
            **self._common(request, body, await served.supervisor.wait_ready()),
            "text": text,
            "tokens": tokens,
            "n_probs": body.wanted_probs,
            "form": await self.bodies.for_request(request, lambda: completion_constraint(body))
            if body.has_form
            else None,
        }
        place = _recounted(request, len(tokens) if tokens is not None else estimated_tokens(len(text or "")))
        return Asked(_choices(common, body), self.follow(request, body, served), place=place)

    def follow(self, request: Request, body: Body, served: Served) -> RequestTracker:
        """What becomes of the request is written down under the id that the answer bears."""
        about = (request.state.request_id, served.id, request.url.path, bool(body.stream))
        namespace = self.namespace(request, body.cache_salt)
        return self.recent.follow(Caller(*about, request.headers.get("traceparent"), namespace))

    def _common(self, request: Request, body: Body, info: ModelInfo) -> dict[str, Any]:
        slot = body.id_slot if body.id_slot is not None and body.id_slot >= 0 else None
        if slot is not None and slot >= info.n_slots:
            raise BadRequest(f"id_slot is {slot}; this server has slots 0 to {info.n_slots - 1}")
        return {
            "sampling": body.sampling(),
            "max_tokens": body.reply_tokens(info.n_ctx),
            "stop": body.stops(),
            "namespace": self.namespace(request, body.cache_salt),
            "use_cache": body.uses_cache,
            "deterministic": bool(body.deterministic),
            "ignore_eos": bool(body.ignore_eos),
            "slot": slot,
            "session": session_of(request.headers, body),
            "wants_progress": bool(body.return_progress),
            "wants_diagnostics": bool(body.prompt_cache_diagnostics),
        }

    @staticmethod
    def namespace(request: Request, salt: str | None) -> str:
        """What one key and salt has read is invisible to others."""
        return principal_of(request).namespace(salt)

    def forget_next_turns(self, namespace: str) -> None:
        """What namespaces that begin so are about to have read ahead is dropped."""
        self._ahead.forget(namespace)

    # answering

    @contextlib.contextmanager
    def admitted(self, request: Request, n_body_bytes: int) -> Iterator[Place]:
        """A place for a request: until its answer is over or, if that is sooner, the engine has done its part."""
        n_context = max((spec.settings.n_ctx for spec in self.pool.catalog.specs.values()), default=None)
        cut_off = getattr(request.state, "abort", None)
        client = client_of(request)
        with self.limits.admitted(n_body_bytes, client, n_context=n_context, cut_off=cut_off) as place:
            request.state.place = place
            yield place

    async def run(self, served: Served, asked: Asked) -> AsyncGenerator[Event, None]:
        """The engine's replies to all choices, as they come. After a lone one idle time may go to the next turn."""
        supervisor, said, place, n_done = served.supervisor, [], asked.place, 0
        try:
            async with contextlib.aclosing(events(supervisor, asked.submits, asked.follow, asked.lend)) as heard:
                async for event in heard:
                    if place is not None and isinstance(event.message, m.Begun):
                        place.recount(event.message.n_prompt)
                    if isinstance(event.message, m.TextPiece | m.Done):
                        said.append(event.message.text)
                    if isinstance(event.message, m.Done):
                        self.metrics.finished(event.message)
                        n_done += 1
                    if place is not None and n_done == len(asked.submits):
                        place.release()  # before its last words are taken
                    yield event
        finally:
            if place is not None:
                place.release()
        if len(asked.submits) == 1:
            self._ahead.offer(supervisor, asked.next_turn, "".join(said))

    def frame(self, kind: str, body: Body) -> dict[str, Any]:
        """What every chunk and answer of one request repeats."""
        served = self.pool.find(body.model)
        info = served.supervisor.info
        return {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model or served.id,
            "system_fingerprint": f"everwarm-{info.build if info else ''}",
        }

    async def within_time(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Drop the work when the client hangs up or its time is over."""
        async with within(self.settings.request_timeout_s or None):
            return await unless_gone(request.receive, work)

    def stream(
        self,
        request: Request,
        frames: AsyncGenerator[bytes, None],
        n_body_bytes: int,
        *,
        error_frame: Callable[[EverwarmError], bytes] | None = None,
        keep_alive_frame: bytes = SSE_KEEP_ALIVE,
    ) -> EventStream:
        """Errors and signs of life in OpenAI's words, unless a dialect has its own."""

        def openai_error(error: EverwarmError) -> bytes:
            return sse(error_body(error, request.state.request_id))

        limit_s, admitted = self.settings.request_timeout_s or None, self.admitted(request, n_body_bytes)
        return EventStream(frames, admitted, error_frame or openai_error, limit_s, keep_alive_frame=keep_alive_frame)


def client_of(request: Request) -> str:
    """Who asks, as far as that can be known: the address, and whose key it is."""
    address = network_of(request.client.host if request.client is not None else "")
    return f"{address} {principal_of(request).namespace(None)}"


def _recounted(request: Request, n_tokens: int) -> Place | None:
    """The request's place, now that its prompt is there."""
    place: Place | None = getattr(request.state, "place", None)
    if place is not None:
        place.recount(n_tokens)
    return place


def _text_after(template: ChatTemplate, messages: list[Json], options: Json, reply: Json) -> str | None:
    return template.after_reply(messages, reply, **options)


def session_of(headers: Mapping[str, str], body: Body) -> str | None:
    for value in (body.prompt_cache_key, *(headers.get(name) for name in SESSION_HEADERS)):
        if value:
            return value[:512]
    return None


def _choices(common: dict[str, Any], body: Body) -> list[dict[str, Any]]:
    """Several choices are several requests that share a prompt, each with a seed of its own."""
    n = body.n or 1
    if n == 1:
        return [common]
    sampling = common["sampling"]
    seed = secrets.randbelow(1 << 31) if sampling.seed is None else sampling.seed
    return [common | {"sampling": dataclasses.replace(sampling, seed=(seed + i) % ((1 << 32) - 1))} for i in range(n)]
