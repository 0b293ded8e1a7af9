"""Conversations with a tool, held with the real clients of every dialect: a question, a call, its result, an answer.

Each keeps its own history as its client would and says what its prompts are, rendered by the server's template. They know
nothing of what is read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import msgspec
import ollama
import openai

from everwarm.gateway.anthropic.schema import CountBody, chat_body, read_body
from everwarm.gateway.responses import schema as responses
from everwarm.gateway.responses.schema import ResponsesBody, own_items
from support.server import Server

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = {"name": "get_weather", "description": "the weather in a city"}
FUNCTION: Any = {"type": "function", "function": {**ABOUT, "parameters": PARAMETERS}}
SYSTEM = "You are a helpful assistant."
N_MOST = 200


@dataclass(frozen=True)
class LoopReply:
    n_prompt: int
    n_cached: int | None  # None: the dialect does not say
    n_written: int
    text: str
    thought: str
    city: str | None  # what the tool is called for


def tokens(server: Server, messages: list[Any], **more: Any) -> list[int]:
    text = server.rendered(messages, **more)
    return [int(token) for token in server.ask("/tokenize", {"content": text})["tokens"]]


class Chat:
    """OpenAI's chat."""

    def __init__(self, server: Server, *, think: bool, stream: bool) -> None:
        self._server, self._stream = server, stream
        self._template = {"chat_template_kwargs": {"enable_thinking": think}}
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        self._call = ""

    def close(self) -> None:
        self._client.close()

    def prompt(self) -> list[int]:
        return tokens(self._server, self._messages, tools=[FUNCTION], **self._template)

    def ask(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def give(self, result: str) -> None:
        self._messages.append({"role": "tool", "tool_call_id": self._call, "content": result})

    def say(self) -> LoopReply:
        options: Any = {"model": "any", "temperature": 0, "max_tokens": N_MOST, "extra_body": self._template}
        options |= {"messages": self._messages, "tools": [FUNCTION]}
        if self._stream:
            with self._client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
                thought = "".join(_thought(event) for event in stream)
                answer = stream.get_final_completion()
        else:
            answer = self._client.chat.completions.create(**options)
            thought = getattr(answer.choices[0].message, "reasoning_content", None) or ""
        message = answer.choices[0].message
        calls = [_call(call) for call in message.tool_calls or ()]
        kept = {"role": "assistant", "content": message.content, "reasoning_content": thought, "tool_calls": calls}
        self._messages.append({name: value for name, value in kept.items() if value})
        self._call = calls[0]["id"] if calls else ""
        city = json.loads(calls[0]["function"]["arguments"])["city"] if calls else None
        usage = answer.usage
        counts = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens
        return LoopReply(*counts, message.content or "", thought, city)


def _call(call: Any) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _thought(event: Any) -> str:
    if event.type != "chunk" or not event.chunk.choices:
        return ""
    return getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""


class Responses:
    """OpenAI's responses. A client that goes on from the one before sends only what is new."""

    goes_on = False

    def __init__(self, server: Server, *, think: bool, stream: bool) -> None:
        self._server, self._stream = server, stream
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        self._options: Any = {
            "instructions": SYSTEM,
            "tools": [{"type": "function", **ABOUT, "parameters": PARAMETERS}],
        }
        self._options |= {} if think else {"reasoning": {"effort": "none"}}
        self._history: list[Any] = []
        self._new: list[Any] = []
        self._last: Any = None

    def close(self) -> None:
        self._client.close()

    def prompt(self) -> list[int]:
        typed = msgspec.convert({**self._options, "input": self._new}, ResponsesBody)
        items = [*self._history, *own_items(typed, "0", lambda _: None)]
        chat = responses.chat_body(typed, responses.offered(typed.tools), items)
        more = {"tools": chat.tools, "chat_template_kwargs": chat.chat_template_kwargs or {}}
        return tokens(self._server, chat.messages, **more)

    def ask(self, text: str) -> None:
        self._new = [{"role": "user", "content": text}]

    def give(self, result: str) -> None:
        call = self._last.output[-1].call_id
        self._new = [{"type": "function_call_output", "call_id": call, "output": result}]

    def say(self) -> LoopReply:
        whole: Any = {"model": "any", "temperature": 0, "max_output_tokens": N_MOST, **self._options}
        whole["input"] = self._new if self.goes_on else [*self._history, *self._new]
        if self.goes_on and self._last:
            whole["previous_response_id"] = self._last.id
        if self._stream:
            with self._client.responses.stream(**whole) as stream:
                self._last = stream.get_final_response()
        else:
            self._last = self._client.responses.create(**whole)
        output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in self._last.output]
        self._history += [*self._new, *output]
        usage, end = self._last.usage, output[-1]
        city = json.loads(end["arguments"])["city"] if end["type"] == "function_call" else None
        thought = "".join(part["text"] for item in output if item["type"] == "reasoning" for part in item["content"])
        counts = usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens
        return LoopReply(*counts, self._last.output_text, thought, city)


class Previous(Responses):
    goes_on = True


class Anthropic:
    """Anthropic's messages."""

    def __init__(self, server: Server, *, think: bool, stream: bool) -> None:
        self._server, self._stream = server, stream
        self._client = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)
        self._options: Any = {"system": SYSTEM, "tools": [{**ABOUT, "input_schema": PARAMETERS}]}
        self._options |= {"thinking": {"type": "adaptive"}} if think else {}
        self._messages: list[Any] = []
        self._call = ""

    def close(self) -> None:
        self._client.close()

    def prompt(self) -> list[int]:
        body = {"messages": self._messages, **self._options}
        chat = chat_body(read_body(json.dumps(body).encode(), CountBody))
        more = {"tools": chat.tools, "chat_template_kwargs": chat.chat_template_kwargs}
        return tokens(self._server, chat.messages, **more)

    def ask(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def give(self, result: str) -> None:
        block = {"type": "tool_result", "tool_use_id": self._call, "content": result}
        self._messages.append({"role": "user", "content": [block]})

    def say(self) -> LoopReply:
        whole: Any = {"model": "any", "max_tokens": N_MOST, "extra_body": {"temperature": 0}, **self._options}
        whole["messages"] = self._messages
        if self._stream:
            with self._client.messages.stream(**whole) as stream:
                answer = stream.get_final_message()
        else:
            answer = self._client.messages.create(**whole)
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        self._messages.append({"role": "assistant", "content": blocks})
        call = next((block for block in blocks if block["type"] == "tool_use"), None)
        self._call = call["id"] if call else ""
        usage = answer.usage
        n_prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        text, thought = ("".join(block.get(name, "") for block in blocks) for name in ("text", "thinking"))
        counts = n_prompt, usage.cache_read_input_tokens, usage.output_tokens
        return LoopReply(*counts, text, thought, call and call["input"]["city"])


class Ollama:
    """Ollama's chat, whose replies do not say what was reused."""

    def __init__(self, server: Server, *, think: bool, stream: bool) -> None:
        self._server, self._stream, self._think = server, stream, think
        self._client = ollama.Client(server.url)
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def close(self) -> None:
        self._client.close()

    def prompt(self) -> list[int]:
        shown = [_as_openai(message) for message in self._messages]
        return tokens(self._server, shown, tools=[FUNCTION], chat_template_kwargs={"enable_thinking": self._think})

    def ask(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def give(self, result: str) -> None:
        self._messages.append({"role": "tool", "tool_name": "get_weather", "content": result})

    def say(self) -> LoopReply:
        whole: Any = {"model": "everwarm-tiny", "options": {"temperature": 0, "num_predict": N_MOST}}
        whole |= {"messages": self._messages, "tools": [FUNCTION], "think": self._think}
        parts = list(self._client.chat(**whole, stream=True)) if self._stream else [self._client.chat(**whole)]
        reported = [part.message for part in parts]
        thought, text = ("".join(getattr(part, name) or "" for part in reported) for name in ("thinking", "content"))
        calls = [call.model_dump() for part in reported for call in part.tool_calls or ()]
        kept = {"role": "assistant", "content": text, "thinking": thought, "tool_calls": calls}
        self._messages.append({name: value for name, value in kept.items() if value})
        city = calls[0]["function"]["arguments"]["city"] if calls else None
        end = parts[-1]
        return LoopReply(end.prompt_eval_count or 0, None, end.eval_count or 0, text, thought, city)


def _as_openai(message: dict[str, Any]) -> dict[str, Any]:
    reported = {**message, "reasoning_content": message.get("thinking")}
    return {key: value for key, value in reported.items() if value is not None and key not in ("thinking", "tool_name")}


Talk = Chat | Responses | Anthropic | Ollama


@contextlib.contextmanager
def talking(dialect: type[Talk], server: Server, *, think: bool, stream: bool) -> Iterator[Talk]:
    with contextlib.closing(dialect(server, think=think, stream=stream)) as talk:
        yield talk
