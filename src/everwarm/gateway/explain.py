"""Why a prompt was read again: two request bodies, rendered, tokenized and compared as a server would have read them one
after the other.

The prompts come from ``prepare_chat``, as the server's do; the reasons are the engine's own codes. Knows a model
through its vocabulary and template only: the caller provides both, or a running server gives the template and tokenizes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from everwarm.engine.process.messages import N_SHOWN, CutHints, Reason
from everwarm.errors import BadRequest, EverwarmError
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.prepare import prepare_chat
from everwarm.gateway.client import Client
from everwarm.gateway.openai.schema import ChatBody, CompletionBody, read
from everwarm.gateway.rewrite.rules import Rules
from everwarm.prompt.prompt import Prompt
from everwarm.prompt.tokenizer import Tokenizer, Tokens
from everwarm.state import policy
from everwarm.state.policy import GUARD, CheckpointParams, Cut, Spacing, is_new_conversation
from everwarm.types import Json

MAX_FILE_BYTES = 32 << 20
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What turns a body into tokens."""

    name: str
    tokenizer: Tokenizer
    detokenize: Callable[[list[int]], bytes]
    template: ChatTemplate | None
    adds_bos: bool
    spacing: Spacing | None  # of its checkpoints; None: it needs none
    rules: Rules = ()  # of ``serve --rewrite``


RequestFile = tuple[ChatBody | CompletionBody, Json]  # a request body, and the same as it was written


def read_file(path: Path) -> RequestFile:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror or error}; give a file with a request body") from None
    if len(data) > MAX_FILE_BYTES:
        raise BadRequest(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB; a request body has less")
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict) or not {"messages", "prompt"} & raw.keys():
        raise BadRequest(f"{path} is not a request body: it has neither messages (chat) nor prompt (completion)")
    try:
        return (read(data, ChatBody) if "messages" in raw else read(data, CompletionBody)), raw
    except BadRequest as error:
        raise BadRequest(f"{path}: {error}") from None


def explained(first: RequestFile, second: RequestFile, source: PromptSource) -> Difference:
    """What a server that has read the first prompt reuses and reads of the second."""
    body, raw = first
    next_body, next_raw = second
    sides = prompt_side(body, source), prompt_side(next_body, source)
    same = (body.cache_salt or "") == (next_body.cache_salt or "")
    found = compare(*sides, source.spacing, same_namespace=same, use_cache=next_body.uses_cache)
    n_common = int(sides[0].prompt.common_prefix(sides[1].prompt))
    one, other = sides[0].prompt, sides[1].prompt
    start = max(0, n_common - N_SHOWN)
    stop = n_common + N_SHOWN
    around = (other.part(start, n_common), one.part(n_common, stop), other.part(n_common, stop))
    before, known, given = (source.detokenize(part.codes.tolist()).decode("utf-8", "replace") for part in around)
    causes = likely_causes(raw, next_raw, before=before, known=known, given=given)
    return dataclasses.replace(found, before=before, known=known, given=given, hints=tuple(causes))


def prompt_side(body: ChatBody | CompletionBody, source: PromptSource) -> Side:
    """A body's prompt and cut hints in tokens, as a server's engine has them."""
    side = _chat_side(body, source) if isinstance(body, ChatBody) else _completion_side(body, source)
    if not len(side.prompt):
        raise BadRequest("a prompt is empty: there is nothing to compare")
    return side


def _completion_side(body: CompletionBody, source: PromptSource) -> Side:
    text, tokens = body.text_or_tokens()
    if text is None:
        return Side(Prompt.of_tokens(tokens or []))
    return Side(source.tokenizer.tokenize(text, add_special=True))


def _chat_side(body: ChatBody, source: PromptSource) -> Side:
    if source.template is None:
        raise BadRequest(f"{source.name} has no chat template; compare completions, or give another model")
    prepared = prepare_chat(body, source.template, _image_name, adds_bos=source.adds_bos, rules=source.rules)
    count = partial(source.tokenizer.count_at, prepared.text, add_special=prepared.add_special)
    sure = partial(source.tokenizer.sure_counts_at, prepared.text, add_special=prepared.add_special)
    prompt = source.tokenizer.tokenize(prepared.text, add_special=prepared.add_special)
    return Side(prompt, prepared.hints.counted(count, sure))


def _image_name(part: Json) -> str:
    """A placeholder for an image: the same image has the same name."""
    digest = hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:12]
    return f"[image {digest}]"


# a running server


class ServerVocab:
    """Whole texts only: the control tokens are not known."""

    bos: int | None = None
    eos: int | None = None
    adds_bos = False
    adds_eos = False
    splits_independently = False
    special: Mapping[int, tuple[str, int]] = {}

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        self._client = Client(url, api_key, timeout_s=TIMEOUT_S)
        self._model = model
        self._tokens = lru_cache(64)(self._ask_tokens)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        return np.array(self._tokens(text, add_special, parse_special), np.int32)

    def _ask_tokens(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return list(self._ask("/tokenize", body)["tokens"])

    def detokenize(self, tokens: list[int]) -> bytes:
        return str(self._ask("/detokenize", {"tokens": tokens})["content"]).encode()

    def props(self) -> dict[str, Any]:
        props: dict[str, Any] = self._client.get("/props", model=self._model)
        return props

    def _ask(self, path: str, body: Json) -> Any:
        return self._client.post(path, body | ({"model": self._model} if self._model else {}))


def source_of(url: str, api_key: str | None, model: str | None) -> PromptSource:
    vocab = ServerVocab(url, api_key, model)
    props = vocab.props()
    try:
        text, bos, eos = (str(props.get(name) or "") for name in ("chat_template", "bos_token", "eos_token"))
        every = int(props["checkpoint_every"])
        most = int(props["max_checkpoints"])
        kind = str(props["memory_kind"])
        adds_bos = bool(props["adds_bos"])
    except (KeyError, TypeError, ValueError):
        raise EverwarmError(
            f"{url} does not report its checkpoint settings; is it an Everwarm of this version?"
        ) from None
    params = CheckpointParams(most, every_n_tokens=every)
    spacing = params.fitted(state_bytes=0, kv_bytes_per_token=1, window="window" in kind)
    template = ChatTemplate(text, bos=bos, eos=eos) if text else None
    kept = None if kind == "attention" else spacing
    return PromptSource(url, Tokenizer(vocab), vocab.detokenize, template, adds_bos, kept)


# what two prompts share

N_UBATCH = 512


@dataclass(frozen=True, slots=True)
class Side:
    """One prompt with its cut hints, in tokens."""

    prompt: Prompt
    hints: CutHints = field(default_factory=CutHints)


@dataclass(frozen=True, slots=True)
class Difference:
    """What the second prompt shares with the first, and what is read of it. ``resume``: the cut at which it resumes; None:
    it is read from the start. ``known`` and ``given`` are the texts of both where they part, behind ``before``."""

    n_first: int
    n_second: int
    n_common: int
    kept: tuple[Cut, ...]
    resume: Cut | None
    n_resume: int
    reason: Reason
    again: Reason | None
    before: str = ""
    known: str = ""
    given: str = ""
    hints: tuple[str, ...] = ()

    @property
    def n_read(self) -> int:
        return self.n_second - self.n_resume

    @property
    def n_known_read(self) -> int:
        return self.n_common - self.n_resume


def compare(
    first: Side, second: Side, spacing: Spacing | None, *, same_namespace: bool = True, use_cache: bool = True
) -> Difference:
    """What a server that has read only the first prompt reuses and reads of the second. ``spacing``: that of its
    checkpoints; None: its model needs none and resumes anywhere."""
    n_common = int(first.prompt.common_prefix(second.prompt)) if same_namespace else 0
    kept = () if spacing is None else _kept(first, spacing)
    most = min(n_common, len(second.prompt) - 1) if use_cache else 0
    resume = max((cut for cut in kept if cut.at <= most), key=lambda cut: cut.at, default=None)
    n_resume = most
    if spacing is not None:
        n_resume = 0 if resume is None else resume.at
    if kept and use_cache and n_common == len(first.prompt) == len(second.prompt):
        resume, n_resume = None, n_common  # the end is kept, too, with its logits
    again = None
    if n_common - n_resume > GUARD:
        off = spacing is not None and spacing.max_checkpoints == 0
        again = Reason.CHECKPOINTS_OFF if off else Reason.NO_CHECKPOINT
    sizes = len(first.prompt), len(second.prompt), n_common
    first_message = policy.first_message(second.hints.opening, second.hints.boundaries)
    reason = _reason(sizes, n_resume, again, first_message) if use_cache else Reason.CACHE_OFF
    return Difference(*sizes, kept, resume, n_resume, reason, again if use_cache else Reason.CACHE_OFF)


def _kept(side: Side, spacing: Spacing) -> tuple[Cut, ...]:
    hints = side.hints
    return policy.cuts(
        len(side.prompt),
        spacing,
        n_ubatch=N_UBATCH,
        boundaries=hints.boundaries,
        stable=hints.stable,
        stables=hints.stables,
        breakpoints=hints.breakpoints,
        volatile=hints.volatile,
        joints=hints.joints,
    )


def _reason(sizes: tuple[int, int, int], n_resume: int, again: Reason | None, first: range | None) -> Reason:
    n_first, n_second, n_common = sizes
    if again is not None and n_common - n_resume >= n_second - n_common:
        return again
    if n_common == n_second:
        return Reason.HIT
    if is_new_conversation(n_common, n_second, first, parts=n_common < n_first):
        return Reason.NEW
    return Reason.EXTENDED if n_common == n_first else Reason.EDITED


# usual causes of a changed prompt; an unknown one is not reported

_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec"
_TIME = re.compile(
    r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    rf"|\b(?:{_MONTHS.replace(' ', '|')})[a-z]*\.? \d{{1,2}}|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b",
    re.IGNORECASE,
)
_RANDOM = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|\b(?=[a-z]*\d)(?=\d*[a-z])[0-9a-z]{16,}", re.IGNORECASE)
_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_NEAR = 24  # characters around a difference that are searched for its cause
_SYSTEM = ("system", "developer")


def likely_causes(first: Json, second: Json, *, before: str, known: str, given: str) -> list[str]:
    """``before``, ``known`` and ``given`` are the text around the first difference."""
    found = [*_of_settings(first, second), *_of_tools(first, second), *_of_messages(first, second)]
    if known and given:
        found += _of_text(before, known, given)
    return list(dict.fromkeys(found))


def _of_settings(first: Json, second: Json) -> Iterator[str]:
    if (first.get("cache_salt") or "") != (second.get("cache_salt") or ""):
        yield "another cache_salt: nothing is shared between the two, whatever their content"
    if second.get("cache_prompt") is False or _mode(second) == "off":
        yield "the second switches the cache off (cache_prompt or prompt_cache_options)"
    if (first.get("model") or "") != (second.get("model") or ""):
        yield "another model is named; where that is another file nothing can be shared"
    if (first.get("chat_template_kwargs") or {}) != (second.get("chat_template_kwargs") or {}):
        yield "other chat_template_kwargs: templates often write them near the beginning"


def _mode(body: Json) -> Any:
    options = body.get("prompt_cache_options")
    return options.get("mode") if isinstance(options, dict) else None


def _of_tools(first: Json, second: Json) -> Iterator[str]:
    old = first.get("tools") or []
    new = second.get("tools") or []
    if old == new or not isinstance(old, list) or not isinstance(new, list):
        return
    if sorted(map(_canonical, old)) == sorted(map(_canonical, new)):
        yield "the same tools in another order: templates write them first, so keep their order"
        return
    names = [_tool_name(tool) for tool in old], [_tool_name(tool) for tool in new]
    gone = [n for n in names[0] if n not in names[1]]
    come = [n for n in names[1] if n not in names[0]]
    what = "; ".join(f"{word}: {', '.join(some[:5])}" for word, some in (("gone", gone), ("new", come)) if some)
    yield f"another list of tools ({what or 'the same names, other descriptions or parameters'}); templates write it first"


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name", "?"))[:60] if isinstance(function, dict) else "?"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _of_messages(first: Json, second: Json) -> Iterator[str]:
    old, new = first.get("messages"), second.get("messages")
    if not isinstance(old, list) or not isinstance(new, list):
        return
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if at is None:
        if len(new) < len(old):
            yield "the second has fewer messages"
        return
    a, b = old[at], new[at]
    yield f"message {at} ({b.get('role', '?')}) is the first that differs"
    if a.get("role") != b.get("role"):
        yield f"another order of roles: message {at} was {a.get('role', '?')} and is {b.get('role', '?')} now"
        if b in old[at + 1 :]:
            yield f"message {at} of the second is a later one of the first: messages in between were cut out"
        return
    yield from _of_message(a, b)


def _of_message(a: Json, b: Json) -> Iterator[str]:
    if b.get("role") in _SYSTEM:
        yield "another system prompt: everything after it is read again"
    old = _text(a.get("content"))
    new = _text(b.get("content"))
    if old != new:
        if "".join(old.split()) == "".join(new.split()):
            yield "only white space differs"
        elif _THINKING.sub("", old) == _THINKING.sub("", new):
            yield "thinking was stripped from an earlier reply, or added to it"
    elif a.get("reasoning_content") != b.get("reasoning_content"):
        yield "reasoning_content of an earlier reply differs: send it back as it came, or never"
    elif a.get("tool_calls") != b.get("tool_calls"):
        yield "tool_calls of an earlier reply differ: send arguments and ids back as they came"


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def _of_text(before: str, known: str, given: str) -> Iterator[str]:
    near = [before[-_NEAR:] + side[:_NEAR] for side in (known, given)]
    if all(_reaches(_TIME, text, len(before[-_NEAR:])) for text in near):
        yield "a date or time: put it into the last message, or round it, so that what comes after it can be reused"
    elif all(_reaches(_RANDOM, text, len(before[-_NEAR:])) for text in near):
        yield "an id or another random text: leave it out, or put it at the end"


def _reaches(pattern: re.Pattern[str], text: str, at: int) -> bool:
    """Whether the pattern matches at the difference itself."""
    return any(match.start() <= at + 2 and match.end() > at for match in pattern.finditer(text))
