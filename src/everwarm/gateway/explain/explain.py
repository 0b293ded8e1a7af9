"""Two request bodies, explained: rendered, tokenized and compared as a server would have read them one after the other.

The prompts come from ``prepare_chat``, as the server's do. Knows a model through its vocabulary and template only; the
caller provides both.

Without a model file, a running server gives the template and tokenizes, over HTTP.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from everwarm.engine.process.messages import N_SHOWN
from everwarm.errors import BadRequest, EverwarmError
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.prepare import prepare_chat
from everwarm.gateway.client import Client
from everwarm.gateway.explain.causes import hints
from everwarm.gateway.explain.prompt_diff import Difference, Side, compare
from everwarm.gateway.openai.schema import ChatBody, CompletionBody, read
from everwarm.gateway.rewrite.rules import Rules
from everwarm.prompt.prompt import Prompt
from everwarm.prompt.tokenizer import Tokenizer, Tokens
from everwarm.state.policy import CheckpointParams, Spacing
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


@dataclass(frozen=True, slots=True)
class Explained:
    difference: Difference
    before: str
    known: str
    given: str
    hints: list[str]


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


def explained(first: RequestFile, second: RequestFile, source: PromptSource) -> Explained:
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
    causes = hints(raw, next_raw, before=before, known=known, given=given)
    return Explained(found, before, known, given, causes)


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
