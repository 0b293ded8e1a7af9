"""A running server's vocabulary and template, for whoever has no model file: asked over HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from everwarm.errors import BadRequest, EverwarmError
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.explain.explain import PromptSource
from everwarm.gateway.explain.prompt_diff import ModelFacts
from everwarm.prompt.tokenizer import Tokenizer, Tokens
from everwarm.state.params import CheckpointParams

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
        self._url, self._key, self._model = url, api_key, model
        self._tokens = lru_cache(64)(self._ask_tokens)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        return np.array(self._tokens(text, add_special, parse_special), np.int32)

    def _ask_tokens(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        said = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return list(self.ask("POST", "/tokenize", said)["tokens"])

    def detokenize(self, tokens: list[int]) -> bytes:
        return str(self.ask("POST", "/detokenize", {"tokens": tokens})["content"]).encode()

    def props(self) -> dict[str, Any]:
        return self.ask("GET", "/props" + (f"?model={quote(self._model)}" if self._model else ""), None)

    def ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        where = urlsplit(self._url)
        if where.scheme not in ("http", "https") or not where.netloc:
            raise BadRequest(f"{self._url[:200]!r} is not the URL of a server; give one like http://127.0.0.1:8080")
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if body is not None and self._model:
            body = {**body, "model": self._model}
        connection = kind(where.netloc, timeout=TIMEOUT_S)
        try:
            prefix = where.path.rstrip("/").removesuffix("/v1")
            connection.request(method, prefix + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data, status = response.read(), response.status
        except (OSError, http.client.HTTPException) as error:
            raise EverwarmError(f"{self._url} does not answer: {error}") from None
        finally:
            connection.close()
        return _answer(self._url, status, data)


def _answer(url: str, status: int, data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if status == 200 and isinstance(answer, dict):
        return answer
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else data.decode("utf-8", "replace")[:200]
    raise EverwarmError(f"{url} answered {status}: {message}")


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
    template = ChatTemplate(text, bos=bos, eos=eos) if text else None
    plan = ModelFacts(spacing, needs_checkpoints=kind != "attention")
    return PromptSource(url, Tokenizer(vocab), vocab.detokenize, template, bos, adds_bos, plan)
