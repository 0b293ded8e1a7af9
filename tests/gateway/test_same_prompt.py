"""What ``everwarm explain`` compares is what the server's engine reads, in every dialect."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.support.gateway import FakeGateway

from everwarm.cli.explain import source_for
from everwarm.demo import EMBEDDED_MODEL
from everwarm.engine.process.request_handler import _prompt_of_text
from everwarm.gateway.anthropic.schema import CountBody, MessagesBody, chat_body, read_body
from everwarm.gateway.explain import prompt_side
from everwarm.gateway.ollama.schema import OllamaChat, OllamaGenerate
from everwarm.gateway.openai.schema import ChatBody, CompletionBody, read
from everwarm.gateway.responses import schema as responses
from everwarm.gateway.responses.schema import ResponsesBody, own_items
from everwarm.state.policy import CheckpointParams

NOISE = "x-anthropic-billing-header: cc_version=1; cch=abc;\n"
TOOL = {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object"}}}
MARK = {"cache_control": {"type": "ephemeral"}}
TALK = [
    {
        "role": "system",
        "content": [{"type": "text", "text": f"{NOISE}Be brief."}, {"type": "text", "text": "Rules.", **MARK}],
    },
    {"role": "developer", "content": "More rules."},
    {"role": "user", "content": "What is 7 + 7?"},
    {"role": "assistant", "content": "14", "reasoning_content": "Seven and seven."},
    {"role": "user", "content": "And 8 + 8?"},
]


def responses_chat(body: dict[str, Any]) -> ChatBody:
    typed = msgspec.convert(body, ResponsesBody)
    return responses.chat_body(typed, responses.offered(typed.tools), own_items(typed, "0", lambda _: None))


def anthropic_chat(kind: type[CountBody]) -> Callable[[dict[str, Any]], ChatBody]:
    return lambda body: chat_body(read_body(json.dumps(body).encode(), kind))


def ollama_chat(kind: type[OllamaChat | OllamaGenerate]) -> Callable[[dict[str, Any]], ChatBody]:
    return lambda body: read(json.dumps(body).encode(), kind).as_chat()


def of_kind(kind: type[ChatBody | CompletionBody]) -> Callable[[dict[str, Any]], ChatBody | CompletionBody]:
    return lambda body: read(json.dumps(body).encode(), kind)


SYSTEM = [{"type": "text", "text": NOISE}, {"type": "text", "text": "Be brief.", **MARK}]
ANTHROPIC = {"system": SYSTEM, "messages": TALK[2:], "max_tokens": 5}
DIALECTS = {
    "openai": ("/v1/chat/completions", {"messages": TALK, "tools": [TOOL]}, of_kind(ChatBody)),
    "openai, streamed": ("/v1/chat/completions", {"messages": TALK, "stream": True}, of_kind(ChatBody)),
    "completions": ("/v1/completions", {"prompt": "Once upon a time"}, of_kind(CompletionBody)),
    "responses": ("/v1/responses", {"instructions": f"{NOISE}Be brief.", "input": "What is 7 + 7?"}, responses_chat),
    "anthropic": ("/v1/messages", ANTHROPIC, anthropic_chat(MessagesBody)),
    "ollama chat": ("/api/chat", {"messages": TALK[2:], "stream": False}, ollama_chat(OllamaChat)),
    "ollama generate": ("/api/generate", {"system": f"{NOISE}Be brief.", "prompt": "Hi"}, ollama_chat(OllamaGenerate)),
    "llama-server": ("/completion", {"prompt": "Once upon a time"}, of_kind(CompletionBody)),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_explain_compares_the_prompt_that_the_engine_reads(name: str) -> None:
    path, body, to_chat = DIALECTS[name]
    gateway = FakeGateway()
    answer = asyncio.run(gateway.post(path, body))
    assert answer.status_code == 200, answer.text
    (submit,) = gateway.supervisor.submits
    with source_for(EMBEDDED_MODEL, None, None, None, CheckpointParams()) as source:
        side = prompt_side(to_chat(body), source)
        assert submit.text is not None
        prompt, hints = _prompt_of_text(source.tokenizer, submit, submit.text)
    assert prompt.codes.tolist() == side.prompt.codes.tolist()
    assert hints == side.hints
    assert "billing" not in submit.text


def test_the_template_route_and_token_counts_have_the_same_prompt_too() -> None:
    gateway = FakeGateway()

    async def ask() -> str:
        await gateway.post("/v1/messages", ANTHROPIC)
        counted = {name: value for name, value in ANTHROPIC.items() if name != "max_tokens"}
        assert (await gateway.post("/v1/messages/count_tokens", counted)).json() == {"input_tokens": 42}
        chat = anthropic_chat(MessagesBody)(ANTHROPIC)
        body = {"messages": chat.messages, "chat_template_kwargs": chat.chat_template_kwargs}
        return str((await gateway.post("/apply-template", body)).json()["prompt"])

    applied = asyncio.run(ask())
    (submit,) = gateway.supervisor.submits
    (question,) = gateway.supervisor.questions
    counted = question["submit"]
    assert applied == submit.text == counted.text and submit.add_special == counted.add_special


def test_a_server_that_keeps_noise_has_another_prompt() -> None:
    """Else the first test could not fail."""
    gateway = FakeGateway(canonicalise=False)
    asyncio.run(gateway.post("/v1/chat/completions", {"messages": TALK}))
    assert "billing" in (gateway.supervisor.submits[0].text or "")
