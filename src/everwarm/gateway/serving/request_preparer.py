"""From a body to the ``Submit`` of the engine: the prompt, the sampling, the images and the constraint of its reply.

``prepare_chat`` makes the prompt; here are the effects around it: threads, image downloads, the caller's
namespace, metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from everwarm.config import Constraint, Sampling, ThinkingBudget
from everwarm.engine.process import messages as m
from everwarm.engine.process.messages import CutHints
from everwarm.errors import BadRequest, NotSupported
from everwarm.gateway.access.auth import namespace_of
from everwarm.gateway.access.limits import estimated_tokens
from everwarm.gateway.admin.metrics import Metrics
from everwarm.gateway.chat.chat_template import CHATML, ChatTemplate
from everwarm.gateway.chat.content import Message
from everwarm.gateway.chat.jinja_template import MAX_PROMPT_CHARS
from everwarm.gateway.chat.prepare import ImageMarker, PreparedChat, prepare_chat
from everwarm.gateway.chat.reply_memory import (
    Remembered,
    RememberedReply,
    keys_of,
    keys_of_reply,
    remembered_reply,
)
from everwarm.gateway.constraints.reply_constraint import chat_constraint, completion_constraint
from everwarm.gateway.http.request_body import BodyReader
from everwarm.gateway.images.image_loader import (
    SOUND_PART,
    DecodedMedia,
    DecodedSound,
    ImageLoader,
    part_of,
)
from everwarm.gateway.openai.schema import (
    MEDIA_MARKER,
    Body,
    ChatBody,
    CompletionBody,
    LoraScale,
    MarkedCompletion,
    MediaPrompt,
)
from everwarm.gateway.parsing.output_parser import TAIL, ModelSyntax, OutputParser
from everwarm.gateway.parsing.tool_parser import kinds_of
from everwarm.gateway.rewrite.volatile_lines import VolatileLine, VolatileLines
from everwarm.gateway.serving.background import background_kind
from everwarm.gateway.serving.prewarm import Parser, Recall, next_text_of, workspace_of
from everwarm.gateway.serving.request_gate import place_of
from everwarm.gateway.settings import ServerSettings
from everwarm.gateway.stores import ReplyStore
from everwarm.router.catalog.catalog import ModelSpec
from everwarm.router.pool import Served
from everwarm.router.supervise.supervisor import Lend
from everwarm.types import Json

log = logging.getLogger("everwarm.gateway")

# Headers by which real clients name the conversation of a request. It decides which slot is evicted last, never what may
# be reused.
SESSION_HEADERS = ("x-session-id", "x-session-affinity", "x-claude-code-session-id", "session-id", "thread-id")

LoraScales = tuple[float, ...]
NextTextOf = Callable[[str], m.Prewarm | None]  # from a reply to what the next turn begins with; None: it is not known
KeepReply = Callable[[Json, str], None]  # remembers a reply: the message that the client got, and what the model wrote


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """The messages to the engine, one per choice, and the parser of its replies."""

    submits: tuple[m.Submit, ...]  # the supervisor gives them their numbers
    parser: Parser = OutputParser
    next_text: NextTextOf | None = None
    keep_reply: KeepReply | None = None
    notes: m.PromptNotes = dataclasses.field(default_factory=m.PromptNotes)
    lend: Lend | None = None  # the pixels of its images; None: it has none
    charge: Callable[[int], None] | None = None  # gets the tokens that were read, where system text had changed

    def with_lora(self, scales: LoraScales) -> PreparedRequest:
        """With other scales of LoRA adapters than the model's; the next turn is not prewarmed, because
        prewarming ignores these scales."""
        submits = tuple(msgspec.structs.replace(submit, lora=scales) for submit in self.submits)
        return dataclasses.replace(self, submits=submits, next_text=None)

    def without_quotes(self) -> PreparedRequest:
        """Reports only the position where its prompt leaves the cached one, not the cached text, which may be a guess."""
        submits = tuple(msgspec.structs.replace(submit, wants_diagnostics=False) for submit in self.submits)
        return dataclasses.replace(self, submits=submits)


class RequestPreparer:
    def __init__(
        self,
        settings: ServerSettings,
        images: ImageLoader,
        bodies: BodyReader,
        metrics: Metrics,
        replies: ReplyStore,
        volatile: VolatileLines,
    ) -> None:
        self._settings = settings
        self._replies = replies
        self._images = images
        self._bodies = bodies
        self._metrics = metrics
        self._scales: dict[str, tuple[LoraScales, LoraScales]] = {}  # by model: those it was started with, those set
        self._volatile = volatile
        self._marker = f"<|image-{secrets.token_hex(12)}|>"  # no text has it by chance
        folder = settings.workspace
        self._workspace = None if folder is None else os.path.realpath(folder)
        self._templates: dict[str, ChatTemplate] = {}  # by model id

    async def prepare(self, request: Request, body: ChatBody | CompletionBody, served: Served) -> PreparedRequest:
        info = await served.supervisor.wait_ready()
        body = self._settings.defaults.applied(body)
        if info.pooling is not None:
            raise NotSupported(
                "this model makes embeddings and writes no text; name another one, or use /v1/embeddings"
            )
        lora = self._scales_of_request(served.spec, body.lora)
        if isinstance(body, ChatBody):
            prepared = await self._chat(request, body, self._template(served, info), info)
        else:
            prepared = await self._completion(request, body, info)
        if self._workspace_of(namespace_of(request, body.cache_salt)) is not None:
            prepared = prepared.without_quotes()
        return prepared if lora is None else prepared.with_lora(lora)

    async def prompt(self, request: Request, body: ChatBody, served: Served, marker: ImageMarker) -> PreparedChat:
        """Only the prompt of a chat, with another marker for its images."""
        info = await served.supervisor.wait_ready()
        template = self._template(served, info)
        namespace = namespace_of(request, body.cache_salt)
        body = self._settings.defaults.applied(body)
        work = partial(self._prepared, body, template, info, marker, namespace)
        prepared = await self._bodies.for_request(request, work)
        self._count_noise(prepared)
        return prepared

    def adapter_scales(self, spec: ModelSpec) -> LoraScales:
        """How much of each LoRA adapter is added where a request does not say it: what an admin has set, else as the
        model was started. The scales are sent with every request, so nothing is lost when the engine is started again."""
        started, scales = self._scales.get(spec.id, ((), ()))
        own = _started_with(spec)
        return scales if started == own else own  # its adapters were changed since: set it again

    def set_adapter_scales(self, spec: ModelSpec, given: Sequence[LoraScale]) -> None:
        self._scales[spec.id] = (_started_with(spec), _listed(given, len(spec.settings.model.lora)))

    def _scales_of_request(self, spec: ModelSpec, given: Sequence[LoraScale] | None) -> LoraScales | None:
        """None: as the model was started."""
        scales = self.adapter_scales(spec) if given is None else _listed(given, len(spec.settings.model.lora))
        return None if scales == _started_with(spec) else scales

    def _template(self, served: Served, info: m.ModelInfo) -> ChatTemplate:
        text = served.spec.template or info.chat_template or CHATML
        known = self._templates.get(served.id)
        if known is None or known.source != text:
            known = self._templates[served.id] = ChatTemplate(text, bos=info.bos, eos=info.eos)
            if text is CHATML:
                log.warning(
                    "%s has no chat template: ChatML is used; give --chat-template if it wants another", served.id
                )
        return known

    def _prepared(
        self, body: ChatBody, template: ChatTemplate, info: m.ModelInfo, marker: ImageMarker, namespace: str
    ) -> PreparedChat:
        return prepare_chat(
            body,
            template,
            marker,
            adds_bos=info.adds_bos,
            canonicalise=self._settings.canonicalise,
            remembered=self._remembered(body, template, namespace) if _has_memory(body) else {},
            rules=self._settings.rewrite,
        )

    def _remembered(self, body: ChatBody, template: ChatTemplate, namespace: str) -> Remembered:
        keys = keys_of(body.messages)
        wanted = [key for some in keys.values() for key in some]
        found = self._replies.find(namespace, template.source, wanted) if wanted else {}
        return {
            i: list({id(found[key]): found[key] for key in some if key in found}.values()) for i, some in keys.items()
        }

    async def _chat(
        self, request: Request, body: ChatBody, template: ChatTemplate, info: m.ModelInfo
    ) -> PreparedRequest:
        syntax = ModelSyntax(template.source, self._settings.tool_format, self._settings.thinking_tags)
        namespace = namespace_of(request, body.cache_salt)
        background = background_kind(request.headers, body)

        def work() -> tuple[PreparedChat, Constraint | None, Parser, tuple[VolatileLine, ...]]:
            prepared = self._prepared(body, template, info, lambda _: self._marker, namespace)
            begun = syntax.continued(prepared.continues)
            parser = _parser(body, begun, prepared.text)
            changed = self._volatile.note(namespace, prepared.messages) if _is_learned(body, background) else ()
            return prepared, chat_constraint(body, begun, prepared.text), parser, changed

        prepared, constraint, parser, changed = await self._bodies.for_request(request, work)
        self._count_noise(prepared)
        if body.verbose:
            request.state.prompt = prepared.text
        images = await self._images_of(prepared.images, info, namespace)
        submit = _submit(
            request,
            body,
            info,
            body.sampling(self._settings.defaults.sampling),
            text=prepared.text,
            add_special=prepared.add_special,
            hints=prepared.hints,
            n_probs=body.n_probs,
            constraint=constraint,
            thinking=_thinking_budget(body, syntax.continued(prepared.continues), template, prepared.text),
            marker=self._marker if images else "",
            images=tuple(map(_sent, images)),
            least_priority=0 if background is None else 1,
        )
        goes_on = not images and _has_memory(body) and submit.max_tokens and not submit.priority
        style = syntax.thinking(prepared.text)
        recall = partial(_remembered_reply, body, prepared, template, style.closing if style else None)
        about = prepared, template, parser, recall, self._workspace_of(namespace)
        next_text = partial(next_text_of, *about) if goes_on else None
        keep_reply = partial(self._keep_reply, template, namespace, body.messages[-1], recall)
        _recount(request, estimated_tokens(len(prepared.text)))
        return PreparedRequest(
            _choices(submit, body),
            parser,
            next_text,
            keep_reply if _has_memory(body) else None,
            m.PromptNotes(prepared.n_recalled, background, prepared.rewritten),
            partial(lent_images, self._images, images, namespace) if images else None,
            partial(self._volatile.charge, changed) if changed else None,
        )

    def _workspace_of(self, namespace: str) -> str | None:
        return workspace_of(self._workspace, self._settings.api_key, namespace)

    async def _images_of(self, parts: Sequence[Json], info: m.ModelInfo, namespace: str) -> list[DecodedMedia]:
        """The images and sounds of a prompt, if the model can see and hear them."""
        if parts and not info.sees and not info.sample_rate:
            raise BadRequest("this model reads text only: start it with --mmproj and its projector file")
        hears = [part.get("type") == SOUND_PART for part in parts]
        if any(hears) and not info.sample_rate:
            raise BadRequest("this model hears no sounds: its projector (--mmproj) has no audio encoder")
        if not all(hears) and not info.sees:
            raise BadRequest("this model sees no images: its projector (--mmproj) has no vision encoder")
        return await self._images.from_parts(parts, namespace) if parts else []

    def _keep_reply(
        self, template: ChatTemplate, namespace: str, asked: Json, recall: Recall, reply: Json, text: str
    ) -> None:
        """Remembers what the model wrote, if another spelling of it would be read again."""
        found = recall(reply, text)
        if found is not None:
            self._replies.keep(namespace, template.source, keys_of_reply(found, asked), found)

    async def _completion(self, request: Request, body: CompletionBody, info: m.ModelInfo) -> PreparedRequest:
        constraint = None
        sampling = body.sampling(self._settings.defaults.sampling)
        if body.has_form:
            constraint = await self._bodies.for_request(request, partial(completion_constraint, body))
        first = body.prompts()[0]
        if isinstance(first, MediaPrompt):
            return await self._media_completion(request, body, first, info, constraint)
        background = background_kind(request.headers, body)
        submits: list[m.Submit] = []
        n_tokens = 0
        for text, tokens in body.texts_or_tokens():
            if text is not None and len(text) > MAX_PROMPT_CHARS:
                raise BadRequest(f"the prompt has {len(text):,} characters; at most {MAX_PROMPT_CHARS:,} can be read")
            given: Any = {"text": text, "tokens": tokens, "n_probs": body.wanted_probs, "constraint": constraint}
            if isinstance(body, MarkedCompletion):
                given["hints"] = CutHints(breakpoints=body.breakpoints)
            given["least_priority"] = 0 if background is None else 1
            submits += _choices(_submit(request, body, info, sampling, **given), body)
            n_tokens += len(tokens) if tokens is not None else estimated_tokens(len(text or ""))
        _recount(request, n_tokens)
        return PreparedRequest(tuple(submits), notes=m.PromptNotes(background=background))

    async def _media_completion(
        self,
        request: Request,
        body: CompletionBody,
        prompt: MediaPrompt,
        info: m.ModelInfo,
        constraint: Constraint | None,
    ) -> PreparedRequest:
        """Of one prompt with images and sounds."""
        data, text = prompt.multimodal_data, prompt.prompt_string
        if len(body.prompts()) > 1:
            raise BadRequest("a prompt with multimodal_data is sent alone")
        if (n_places := text.count(MEDIA_MARKER)) != len(data) or len(text) > MAX_PROMPT_CHARS:
            raise BadRequest(
                f"the prompt has {n_places} places {MEDIA_MARKER} for {len(data)} images and sounds; give one for each"
            )
        namespace = namespace_of(request, body.cache_salt)
        background = background_kind(request.headers, body)
        images = await self._images_of([part_of(each) for each in data], info, namespace)
        submit = _submit(
            request,
            body,
            info,
            body.sampling(self._settings.defaults.sampling),
            text=text.replace(MEDIA_MARKER, self._marker),
            n_probs=body.wanted_probs,
            constraint=constraint,
            marker=self._marker,
            images=tuple(map(_sent, images)),
            least_priority=0 if background is None else 1,
        )
        _recount(request, estimated_tokens(len(text)))
        lend = partial(lent_images, self._images, images, namespace)
        notes = m.PromptNotes(background=background)
        return PreparedRequest(_choices(submit, body), notes=notes, lend=lend)

    async def count(self, request: Request, body: ChatBody, served: Served) -> int:
        """The tokens of a chat's prompt."""
        (submit, *_) = (await self.prepare(request, body, served)).submits
        prompt = m.Submit(
            0,
            text=submit.text,
            add_special=submit.add_special,
            marker=submit.marker,
            images=submit.images,  # without pixels
            namespace=submit.namespace,
        )
        n_tokens: int = await served.supervisor.ask(m.AskPrompt, what="count", submit=prompt)
        return n_tokens

    def _count_noise(self, prepared: PreparedChat) -> None:
        for rule, n_lines in Counter(prepared.removed).items():
            self._metrics.removed_noise(rule, n_lines)
            log.debug("%d lines of system text were removed: %s", n_lines, rule)


def _started_with(spec: ModelSpec) -> LoraScales:
    return tuple(scale for _, scale in spec.settings.model.lora)


def _listed(given: Sequence[LoraScale], n_adapters: int) -> LoraScales:
    """The scale of every adapter."""
    scales = [0.0] * n_adapters
    for adapter in given:
        if adapter.id >= n_adapters:
            there = f"this model has adapters 0 to {n_adapters - 1}" if n_adapters else "this model has no adapters"
            raise BadRequest(f"lora names adapter {adapter.id}; {there}")
        scales[adapter.id] = adapter.scale
    return tuple(scales)


@contextlib.asynccontextmanager
async def lent_images(
    loader: ImageLoader, images: list[DecodedMedia], namespace: str
) -> AsyncIterator[tuple[m.SentMedia, ...]]:
    """An image for each place in the prompt. A repeated image has its pixels only at the first place."""
    async with loader.lent(images, namespace) as decoded:
        pixels = {image.digest: image.data for image in decoded}
        del decoded[:]
        yield tuple(_sent(image, pixels.pop(image.digest, None)) for image in images)


def _sent(image: DecodedMedia, data: bytes | None = None) -> m.SentMedia:
    if isinstance(image, DecodedSound):
        return m.SentSound(image.digest, image.n_samples, data)
    return m.SentImage(image.digest, image.width, image.height, data)


def session_of(headers: Mapping[str, str], body: Body) -> str | None:
    for value in (body.prompt_cache_key, *(headers.get(name) for name in SESSION_HEADERS)):
        if value:
            return value[:512]
    return None


def _is_learned(body: ChatBody, background: str | None) -> bool:
    """Whether volatile lines are learned from a request."""
    return background is None and body.uses_cache and not body.deterministic


def _has_memory(body: ChatBody) -> bool:
    """Whether replies are recognised. A deterministic prompt depends on its request alone."""
    return body.uses_cache and not body.deterministic


def _remembered_reply(
    body: ChatBody, chat: PreparedChat, template: ChatTemplate, closing_tag: str | None, reply: Json, text: str
) -> RememberedReply | None:
    if chat.continues is not None:
        return None  # the model wrote only the end of the message that comes back
    options = {name: value for name, value in chat.options.items() if name != "continues"}

    def render(messages: list[Message]) -> str | None:
        try:
            return template.render(messages, **options)
        except BadRequest:
            return None

    got_all = body.parallel_tool_calls is not False  # else the model may have written more than the client got
    return remembered_reply(reply, text, closing_tag, render if got_all else lambda _: None)


def _parser(body: ChatBody, syntax: ModelSyntax, text: str) -> Parser:
    """The parser of replies to a prompt with this text."""
    return partial(
        OutputParser.of,
        syntax,
        text[-TAIL:],
        None if body.tool_choice == "none" else kinds_of(body.tools or ()),
        with_thinking=body.reasoning_format != "none",
        one_call=body.parallel_tool_calls is False,
    )


def _submit(
    request: Request,
    body: Body,
    info: m.ModelInfo,
    sampling: Sampling,
    *,
    text: str | None = None,
    tokens: list[int] | None = None,
    add_special: bool = True,
    hints: CutHints = CutHints(),  # noqa: B008 - frozen
    n_probs: int | None = None,
    constraint: Constraint | None = None,
    thinking: ThinkingBudget | None = None,
    marker: str = "",
    images: tuple[m.SentMedia, ...] = (),
    least_priority: int = 0,
) -> m.Submit:
    slot = body.id_slot if body.id_slot is not None and body.id_slot >= 0 else None
    if slot is not None and slot >= info.n_slots:
        raise BadRequest(f"id_slot is {slot}; this server has slots 0 to {info.n_slots - 1}")
    return m.Submit(
        0,
        text=text,
        tokens=tokens,
        add_special=add_special,
        hints=hints,
        sampling=sampling,
        max_tokens=body.reply_tokens(info.n_ctx),
        stop=body.stops(),
        namespace=namespace_of(request, body.cache_salt),
        use_cache=body.uses_cache,
        deterministic=bool(body.deterministic),
        text_bias=body.text_bias(),
        post_sampling=bool(body.post_sampling_probs),
        max_write_s=body.max_write_s,
        thinking=thinking,
        ignore_eos=bool(body.ignore_eos),
        n_probs=n_probs,
        slot=slot,
        session=session_of(request.headers, body),
        wants_progress=bool(body.return_progress),
        wants_diagnostics=bool(body.prompt_cache_diagnostics),
        marker=marker,
        images=images,
        constraint=constraint,
        priority=max(least_priority, body.priority or 0),  # none comes before those without one
        max_draft=body.max_draft,
        shift=body.shift,
    )


def _thinking_budget(body: ChatBody, syntax: ModelSyntax, template: ChatTemplate, prompt: str) -> ThinkingBudget | None:
    """How long the reply may think, and what ends it then: the template's own end of a thought."""
    n_tokens = body.thinking_tokens
    style = syntax.thinking(prompt)
    if n_tokens is None or style is None or style.begins == "after":
        return None
    closing = template.thinking_end if style.closing in template.thinking_end else style.closing
    opening = style.opening if style.begins == "before" else ""
    return ThinkingBudget(n_tokens, closing, opening, body.reasoning_budget_message or "")


def _choices(submit: m.Submit, body: Body) -> tuple[m.Submit, ...]:
    """Several choices are several requests that share a prompt, each with a seed of its own."""
    n = body.n or 1
    if n == 1:
        return (submit,)
    seed = secrets.randbelow(1 << 31) if submit.sampling.seed is None else submit.sampling.seed
    samplings = (dataclasses.replace(submit.sampling, seed=(seed + i) % ((1 << 32) - 1)) for i in range(n))
    return tuple(msgspec.structs.replace(submit, sampling=sampling) for sampling in samplings)


def _recount(request: Request, n_tokens: int) -> None:
    """Counts the prompt in the request's place, now that its size is known."""
    place = place_of(request)
    if place is not None:
        place.recount(n_tokens)
