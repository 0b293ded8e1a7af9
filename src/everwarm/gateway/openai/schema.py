"""Request bodies as clients send them: typed, bounded, unknown fields ignored. Pure parsing; knows no HTTP."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from everwarm.config import (
    MAX_BREAKERS,
    MAX_LOGIT_BIASES,
    MAX_SAMPLERS,
    MAX_SCALE,
    ContextShift,
    Sampling,
    parse_samplers,
)
from everwarm.errors import BadRequest

MAX_STOPS, MAX_STOP_CHARS = 32, 512
MAX_BIAS_CHARS = 1 << 15
MAX_CHOICES = 16
MAX_PROMPTS = 128  # of one request, times choices
MAX_MESSAGES = 20_000
MAX_TOKENIZED_CHARS = 1 << 20
MAX_ADAPTERS = 256
_MAX_REASON_CHARS = 400

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-100.0, le=100.0)]
Count = Annotated[int, Meta(ge=0, le=1 << 26)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Name = Annotated[str, Meta(max_length=512)]
PromptItem = TokenId | str | list[TokenId | str] | dict[str, Any]

LogitBias = (
    Annotated[dict[str, float | bool], Meta(max_length=MAX_LOGIT_BIASES)]
    | Annotated[list[tuple[int | str, float | bool]], Meta(max_length=MAX_LOGIT_BIASES)]
)
_NUMBER = re.compile(r"[+-]?[0-9]{1,20}")
ReasoningFormat = Literal["none", "auto", "deepseek"]

DEFAULT_SAMPLING = Sampling()
# Fields of a body that are fields of ``Sampling`` as they are.
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "dry_multiplier",
    "dry_allowed_length",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "adaptive_target",
    "adaptive_decay",
    "min_keep",
)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class CacheOptions(msgspec.Struct, frozen=True):
    """OpenAI's options. ``ttl`` is parsed and not used: eviction depends on the value of a checkpoint."""

    mode: Name | None = None
    ttl: Annotated[str, Meta(max_length=64)] | Annotated[float, Meta(ge=0.0, le=1e12)] | None = None


class LoraScale(msgspec.Struct, frozen=True):
    """How much of one adapter is added; the scale of an adapter that is not listed is 0."""

    id: Annotated[int, Meta(ge=0, lt=MAX_ADAPTERS)]
    scale: Annotated[float, Meta(ge=-MAX_SCALE, le=MAX_SCALE)]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What every kind of completion may carry. ``None`` means: not given."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=-1, le=1 << 26)] | None = None
    n_predict: Annotated[int, Meta(ge=-2, le=1 << 26)] | None = None
    max_completion_tokens: Count | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | Annotated[float, Meta(ge=-1.0, le=1 << 24)] | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=1 << 16)] | None = None
    logit_bias: LogitBias | None = None
    typical_p: Annotated[float, Meta(ge=0.0)] | None = None
    top_n_sigma: Annotated[float, Meta(ge=-100.0, le=100.0)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    dynatemp_range: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    dynatemp_exponent: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    dry_base: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=1 << 16)] | None = None
    dry_sequence_breakers: Annotated[list[str], Meta(min_length=1, max_length=MAX_BREAKERS)] | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    mirostat_tau: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    mirostat_eta: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    adaptive_target: Annotated[float, Meta(ge=-100.0, le=1.0)] | None = None
    adaptive_decay: Annotated[float, Meta(ge=0.0, le=0.99)] | None = None
    samplers: Annotated[list[Name], Meta(max_length=MAX_SAMPLERS)] | Name | None = None
    min_keep: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    lora: Annotated[list[LoraScale], Meta(max_length=MAX_ADAPTERS)] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_diagnostics: bool | None = None
    deterministic: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None  # the larger, the later; below 0 is 0
    id_slot: Annotated[int, Meta(ge=-1, le=1 << 16)] | None = None
    grammar: str | None = None  # GBNF or Lark
    json_schema: dict[str, Any] | bool | None = None
    response_format: dict[str, Any] | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    n_keep: Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)] | None = None  # of a full context; -1: the whole prompt
    n_discard: Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)] | None = None
    t_max_predict_ms: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    post_sampling_probs: bool | None = None
    verbose: bool | None = None
    max_draft: Annotated[int, Meta(ge=0, le=1 << 16)] | None = msgspec.field(name="speculative.n_max", default=None)

    def sampling(self, defaults: Sampling = DEFAULT_SAMPLING) -> Sampling:
        """``defaults``: what holds where the body says nothing."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | {
            "top_k": None if self.top_k is None else max(0, int(self.top_k)),
            "typical_p": None if self.typical_p is None else min(1.0, self.typical_p),
            "penalty_last_n": None if self.repeat_last_n is None else max(0, self.repeat_last_n),
            "dry_penalty_last_n": None if self.dry_penalty_last_n is None else max(0, self.dry_penalty_last_n),
            "dry_base": None if self.dry_base is None or self.dry_base < 1.0 else self.dry_base,
            "dry_sequence_breakers": None if self.dry_sequence_breakers is None else tuple(self.dry_sequence_breakers),
            "samplers": None if self.samplers is None else parse_samplers(self.samplers),
            "seed": None if self.seed is None or self.seed < 0 else self.seed % ((1 << 32) - 1),
            "logit_bias": _logit_bias(self.logit_bias),
        }
        changed = {name: value for name, value in given.items() if value is not None}
        if self.seed is not None and self.seed < 0:
            changed["seed"] = None  # asks for a random one
        return dataclasses.replace(defaults, **changed) if changed else defaults

    def text_bias(self) -> tuple[tuple[str, float], ...]:
        """The biases of ``logit_bias`` that name texts; ``sampling`` has those of tokens."""
        found = tuple((key, value) for key, value in _biases(self.logit_bias) if isinstance(key, str))
        if (n_chars := sum(len(text) for text, _ in found)) > MAX_BIAS_CHARS:
            raise BadRequest(f"the texts of logit_bias have {n_chars} characters; give at most {MAX_BIAS_CHARS}")
        return found

    @property
    def max_write_s(self) -> float | None:
        limit = self.t_max_predict_ms
        return None if limit is None or limit <= 0 else limit / 1e3

    @property
    def shift(self) -> ContextShift | None:
        """None: a full context ends the reply. What the server allows is in ``RequestDefaults``."""
        return None if self.n_keep is None else ContextShift(max(-1, self.n_keep), max(0, self.n_discard or 0))

    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
            raise BadRequest(f"give at most {MAX_STOPS} stop strings of at most {MAX_STOP_CHARS} characters")
        return tuple(stop for stop in stops if stop)

    def reply_tokens(self, default: int) -> int:
        """The most tokens to write; negative means until the context is full."""
        for limit in (self.max_completion_tokens, self.max_tokens, self.n_predict):
            if limit is not None:
                return limit if limit >= 0 else default
        return default

    @property
    def has_form(self) -> bool:
        """Whether the body constrains the reply."""
        return bool(self.grammar) or self.json_schema is not None or self.response_format is not None

    @property
    def uses_cache(self) -> bool:
        options = self.prompt_cache_options
        return self.cache_prompt is not False and not (options is not None and options.mode == "off")

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


StoredMetadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class ChatBody(Body, frozen=True, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: ReasoningFormat | None = None  # none: thinking stays in the content
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None  # none: no thinking
    reasoning_budget_tokens: Annotated[int, Meta(ge=-1, le=1 << 26)] | None = None  # -1: no bound
    thinking_budget_tokens: Annotated[int, Meta(ge=-1, le=1 << 26)] | None = None
    reasoning_budget_message: Annotated[str, Meta(max_length=4096)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None  # only what is stored has to be short texts

    def __post_init__(self) -> None:
        if self.store and self.metadata:
            msgspec.convert(self.metadata, StoredMetadata)

    @property
    def n_probs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def thinking_tokens(self) -> int | None:
        """The most tokens of thinking; None: any number."""
        given = self.thinking_budget_tokens if self.reasoning_budget_tokens is None else self.reasoning_budget_tokens
        return None if given is None or given < 0 else given


class MediaPrompt(msgspec.Struct, frozen=True):
    """llama-server's prompt with images and sounds: each ``<__media__>`` in the text stands for the next, in base64."""

    prompt_string: str
    multimodal_data: Annotated[list[str], Meta(min_length=1, max_length=256)]


Prompt = str | list[int | str] | MediaPrompt
MEDIA_MARKER = "<__media__>"


class CompletionBody(Body, frozen=True, kw_only=True):
    """``prompt``: text, tokens, both mixed, llama-server's object with ``prompt_string``, or a list of these."""

    prompt: str | dict[str, Any] | Annotated[list[PromptItem], Meta(max_length=1 << 24)]
    response_fields: Annotated[list[Name], Meta(max_length=256)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | bool | None = None
    n_probs: Annotated[int, Meta(ge=0, le=100)] | None = None
    return_tokens: bool | None = None
    echo: bool | None = None

    def text_or_tokens(self) -> tuple[str | None, list[int] | None]:
        """The only prompt."""
        first, *others = self.texts_or_tokens()
        if others:
            raise BadRequest("prompt must be one text or one list of token ids here; /v1/completions takes several")
        return first

    def texts_or_tokens(self) -> list[tuple[str | None, list[int] | None]]:
        """Every prompt is a text or a list of tokens."""
        found: list[tuple[str | None, list[int] | None]] = []
        for prompt in self.prompts():
            if isinstance(prompt, str):
                found.append((prompt, None))
            elif isinstance(prompt, list) and set(map(type, prompt)) <= {int}:
                found.append((None, prompt))  # type: ignore[arg-type]
            else:
                raise BadRequest("prompt must be a text, a list of token ids, or a list of these")
        return found

    def prompts(self) -> list[Prompt]:
        """Every prompt, as text, as tokens, as tokens and texts in one list, or as text with images."""
        prompt: Any = self.prompt
        kinds = set(map(type, prompt)) if isinstance(prompt, list) else set()  # fast: a prompt may have 100,000 tokens
        are_many = bool(kinds & {list, dict}) or kinds == {str}
        given = prompt if are_many else [prompt]
        if len(given) * (self.n or 1) > MAX_PROMPTS:
            raise BadRequest(
                f"there are {len(given)} prompts with {self.n or 1} choices each; at most {MAX_PROMPTS} in all"
            )
        return [_one_prompt(item) for item in given]

    @property
    def wanted_probs(self) -> int | None:
        if self.n_probs:
            return self.n_probs
        if self.logprobs is None or self.logprobs is False:
            return None
        return int(self.logprobs)


class MarkedCompletion(CompletionBody, frozen=True, kw_only=True):
    """A completion of tokens that a dialect has made, with the places that the next request is likely to share."""

    breakpoints: tuple[int, ...] = ()


def _one_prompt(given: Any) -> Prompt:
    if isinstance(given, dict):
        text = given.get("prompt_string")
        media = given.get("multimodal_data")
        if media:
            try:
                return msgspec.convert(given, MediaPrompt)
            except msgspec.ValidationError as error:
                raise BadRequest(f"a prompt with multimodal_data cannot be used: {_shortened(str(error))}") from None
        if not isinstance(text, str):
            raise BadRequest("a prompt that is an object needs prompt_string")
        return text
    if not isinstance(given, str | list):
        raise BadRequest("a prompt is a text, a list of token ids, or an object with prompt_string")
    return given


class TokenizeBody(msgspec.Struct, frozen=True):
    content: Annotated[str, Meta(max_length=MAX_TOKENIZED_CHARS)]
    model: Name | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True):
    tokens: Annotated[list[TokenId], Meta(max_length=1 << 24)]
    model: Name | None = None


class SlotBody(msgspec.Struct, frozen=True):
    """The body of a slot action; erasing needs no file."""

    filename: Annotated[str, Meta(max_length=256)] = ""
    model: Name | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None


class ModelBody(msgspec.Struct, frozen=True):
    """The body of a request to load or unload a model."""

    model: Name


T = TypeVar("T")


def read(data: bytes | bytearray, kind: type[T]) -> T:
    """Parses a body; ``BadRequest`` has the place and the reason."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body cannot be used: {_shortened(str(error))}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


_Fields = dict[str, msgspec.Raw]


def unknown_fields(data: bytes | bytearray, kind: type[Any]) -> list[str]:
    """The fields of a body that ``kind`` was parsed from and does not have."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return [name for name in read(data, _Fields) if name not in known]


def _shortened(reason: str) -> str:
    """A reason may quote the body and ends with the place, so its middle is cut."""
    if len(reason) <= _MAX_REASON_CHARS:
        return reason
    return f"{reason[: _MAX_REASON_CHARS // 2]} … {reason[-_MAX_REASON_CHARS // 2 :]}"


def _logit_bias(given: LogitBias | None) -> dict[int, float] | None:
    return None if given is None else {key: value for key, value in _biases(given) if isinstance(key, int)}


def _biases(given: LogitBias | None) -> Iterator[tuple[int | str, float]]:
    """Tokens or texts, and their biases. OpenAI sends an object with token ids as keys, llama-server also a list of pairs;
    both may name a text instead, and ``false`` bans."""
    for key, value in given.items() if isinstance(given, dict) else given or ():
        bias = float("-inf") if value is False else float(value)
        if isinstance(key, str) and not _NUMBER.fullmatch(key):
            if not key or len(key) > MAX_STOP_CHARS:
                raise BadRequest(f"a text in logit_bias has {len(key)} characters; give 1 to {MAX_STOP_CHARS}")
            yield key, bias
        elif 0 <= (token := int(key)) < 1 << 31:
            yield token, bias
        else:
            raise BadRequest(f"logit_bias names {str(key)[:40]!r}; give a token id and a number")


# what holds where a body does not say it

B = TypeVar("B", bound=Body)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestDefaults:
    """The server's own defaults of requests. ``None`` or empty: it sets none."""

    sampling: Sampling = DEFAULT_SAMPLING
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True
    grammar: str | None = None
    json_schema: Mapping[str, Any] | None = None
    reasoning_format: ReasoningFormat | None = None
    reasoning_budget: int | None = None  # tokens of thinking
    reasoning_budget_message: str | None = None
    verbose: bool = False  # answers to chats show the prompt that was made of them
    context_shift: bool = False  # replies go on where their context is full, with less behind them
    n_keep: int = 0  # tokens that such a reply keeps from its beginning; -1: its whole prompt
    spm_infill: bool = False  # /infill: the text after the cursor comes first
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def applied(self, body: B) -> B:
        """The body with everything but its sampling filled in."""
        changes = self._for_any(body)
        if isinstance(body, ChatBody):
            changes |= self._for_chat(body)
        return msgspec.structs.replace(body, **changes) if changes else body

    def _for_any(self, body: Body) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.max_tokens is not None and body.max_tokens is body.n_predict is body.max_completion_tokens is None:
            changes["n_predict"] = self.max_tokens
        if self.stop and not body.stops():
            changes["stop"] = list(self.stop)
        if self.ignore_eos and body.ignore_eos is None:
            changes["ignore_eos"] = True
        if not self.cache_prompt and body.cache_prompt is None:
            changes["cache_prompt"] = False
        if not self.context_shift:
            changes |= {} if body.n_keep is None else {"n_keep": None}
        elif body.n_keep is None:
            changes["n_keep"] = self.n_keep
        if not body.has_form:
            changes |= {} if self.grammar is None else {"grammar": self.grammar}
            changes |= {} if self.json_schema is None else {"json_schema": dict(self.json_schema)}
        return changes

    def _for_chat(self, body: ChatBody) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.reasoning_format is not None and body.reasoning_format is None:
            changes["reasoning_format"] = self.reasoning_format
        if self.reasoning_budget is not None and body.reasoning_budget_tokens is body.thinking_budget_tokens is None:
            changes["reasoning_budget_tokens"] = self.reasoning_budget
        if self.reasoning_budget_message is not None and body.reasoning_budget_message is None:
            changes["reasoning_budget_message"] = self.reasoning_budget_message
        if self.verbose and body.verbose is None:
            changes["verbose"] = True
        if self.template_kwargs:
            changes["chat_template_kwargs"] = {**self.template_kwargs, **(body.chat_template_kwargs or {})}
        return changes
