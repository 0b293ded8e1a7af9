"""A running server's vocabulary and template, for callers without a model file: asked over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from everwarm.errors import EverwarmError
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.prepare import ChatModel
from everwarm.gateway.client import Client
from everwarm.gateway.explain.explain import PromptSource
from everwarm.gateway.explain.prompt_diff import ModelFacts
from everwarm.prompt.tokenizer import Tokenizer, Tokens
from everwarm.state.params import CheckpointParams
from everwarm.types import Json

TIMEOUT_S = 60.0


class ServerVocab:
    """Whole texts only: nothing is known of the control tokens."""

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
        every, most = int(props["checkpoint_every"]), int(props["max_checkpoints"])
        kind, adds_bos = str(props["memory_kind"]), bool(props["adds_bos"])
    except (KeyError, TypeError, ValueError):
        raise EverwarmError(f"{url} does not say how it keeps prompts; is it an Everwarm of this version?") from None
    params = CheckpointParams(most, every_n_tokens=every)
    spacing = params.fitted(state_bytes=0, kv_bytes_per_token=1, window="window" in kind)
    chat = ChatModel(ChatTemplate(text, bos=bos, eos=eos), bos, adds_bos) if text else None
    plan = ModelFacts(spacing, needs_checkpoints=kind != "attention")
    return PromptSource(url, Tokenizer(vocab), vocab.detokenize, chat, plan)
