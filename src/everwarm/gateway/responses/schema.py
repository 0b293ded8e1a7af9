"""The body of ``/v1/responses``, and its translation to a chat body. Pure: knows no HTTP and no storage.

A conversation is a list of items here: messages, thoughts, calls and their outputs. Items that a model wrote in one
reply become one assistant message again, so that the template renders what the model wrote.

A custom tool takes free text: it becomes a function with one string, ``input``. The functions of a namespace get
its name as a prefix. Tools that run elsewhere (web search, files, computers …) are not offered, so no model will call
them.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from everwarm.errors import BadRequest
from everwarm.gateway.openai.schema import MAX_MESSAGES, Body, ChatBody, Count
from everwarm.types import Json

MAX_TOOLS = 1024
INPUT = "input"
MAX_METADATA = 16
ENCRYPTED = "reasoning.encrypted_content"
_SEAL = b"everwarm reasoning\n"
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class ResponsesTool(msgspec.Struct, frozen=True):
    """A tool of any type. ``tools``: those of a namespace; ``format``: the grammar of a custom tool's text."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: Json | None = None
    tools: list[Json] | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """How the client described a function that the model is offered."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Offered:
    """``functions`` are in the shape of the chat dialect; ``shown`` are the client's tools that are offered."""

    functions: list[Json] = field(default_factory=list)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    shown: list[Json] = field(default_factory=list)

    def origin(self, name: str) -> Origin:
        """The origin of a function. Models also call functions that were never offered."""
        return self.origins.get(name) or Origin(name)


def offered(tools: Sequence[Json] | None) -> Offered:
    functions: list[Json] = []
    origins: dict[str, Origin] = {}
    shown = []
    for given in tools or ():
        found = list(_functions(given))
        for origin, function in found:
            name = function["name"]
            if name in origins:
                raise BadRequest(f"two tools are called {name[:80]!r}; give each a name of its own")
            origins[name] = origin
            functions.append({"type": "function", "function": function})
        shown += [given] if found else []
    if len(functions) > MAX_TOOLS:
        raise BadRequest(f"there are {len(functions)} tools; offer at most {MAX_TOOLS}")
    return Offered(functions, origins, shown)


def _functions(given: Json, namespace: str | None = None) -> Iterator[tuple[Origin, Json]]:
    tool = _read(given)
    match tool.type:
        case "function" | "custom":
            if not tool.name:
                raise BadRequest(f"a tool of type {tool.type} needs a name")
            is_custom = tool.type == "custom"
            about: Json = {"name": function_name(tool.name, namespace), "description": tool.description}
            about["parameters"] = _free_text(tool.format) if is_custom else tool.parameters
            yield Origin(tool.name, namespace, is_custom), {k: v for k, v in about.items() if v is not None}
        case "namespace" if namespace is None and tool.name:
            for inner in tool.tools or ():
                yield from _functions(inner, tool.name)
        case _:
            return


def _read(given: Json) -> ResponsesTool:
    try:
        return msgspec.convert(given, ResponsesTool)
    except msgspec.ValidationError as error:
        raise BadRequest(f"a tool cannot be used: {error}") from None


def _free_text(format: Json | None) -> Json:
    about = "the whole input, as plain text"
    if format and format.get("type") == "grammar":
        about += f", in this {format.get('syntax')} grammar:\n{format.get('definition')}"
    return {"type": "object", "properties": {INPUT: {"type": "string", "description": about}}, "required": [INPUT]}


def function_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """A custom tool's text as the arguments of the function that it is offered as."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_text(arguments: str) -> str:
    """The inverse of ``custom_arguments``; other JSON, or text that is no JSON, is returned unchanged. A lone
    surrogate, which JSON can say and UTF-8 cannot, becomes U+FFFD."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    if not isinstance(text, str):
        return arguments
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


Choice = Literal["none", "auto", "required"]


def choice(given: str | Json | None, tools: Offered) -> Choice | Json | None:
    """``tool_choice`` in the chat dialect's shape. ``allowed_tools`` sets only the mode: all tools stay offered."""
    match given:
        case None | "none" | "auto":
            return given
        case "required":
            wanted: Choice | Json = "required"
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode}:
            return choice(mode, tools)
        case {"type": "function" | "custom", "name": str(own), "namespace": str(namespace)}:
            wanted = _named(function_name(own, namespace), tools)
        case {"type": "function" | "custom", "name": str(own)}:
            wanted = _named(own, tools)
        case _:
            kind = given.get("type") if isinstance(given, dict) else given
            words = "give none, auto, required, or a function that is offered"
            raise BadRequest(f"tool_choice is {str(kind)[:40]!r}; {words}")
    if not tools.functions:
        raise BadRequest(
            "tool_choice wants a call, but none of the tools can be offered: give a function or custom tool"
        )
    return wanted


def _named(name: str, tools: Offered) -> Json:
    if name not in tools.origins:
        raise BadRequest(f"tool_choice names {name[:80]!r}, which is none of the tools")
    return {"type": "function", "function": {"name": name}}


Id = Annotated[str, Meta(min_length=1, max_length=256)]


class ReasoningOptions(msgspec.Struct, frozen=True):
    """``effort``: none and minimal mean no thinking; ``summary``: any other than none sends thinking as a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Annotated[str, Meta(max_length=32)] | None = None


class TextOptions(msgspec.Struct, frozen=True):
    format: Json | None = None


class ResponsesBody(Body, frozen=True, kw_only=True):
    """``None`` means: not given."""

    input: str | Annotated[list[Json], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | list[Json] | None = None
    previous_response_id: Id | None = None
    tools: Annotated[list[Json], Meta(max_length=1024)] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    chat_template_kwargs: Json | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def seals_reasoning(self) -> bool:
        return ENCRYPTED in (self.include or ())

    @property
    def wants_summary(self) -> bool:
        return self.reasoning is not None and self.reasoning.summary not in (None, "none")

    def check(self) -> None:
        """Refuses features that are not supported and would change the answer if they were ignored."""
        if self.background and (self.stream or not self.is_stored):
            raise BadRequest(
                "a background response is stored and asked for by its id: leave stream and store: false out"
            )
        if self.conversation is not None:
            raise BadRequest("conversations are not supported; use previous_response_id")
        if self.prompt is not None:
            raise BadRequest("stored prompts are not supported; send instructions and input")


# items


class MessageItem(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Json]


class CallItem(msgspec.Struct, frozen=True):
    """A call of a function has ``arguments``, that of a custom tool ``input``."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: Id
    name: Annotated[str, Meta(min_length=1, max_length=512)]
    arguments: str | None = None
    input: str | None = None
    namespace: str | None = None

    def function_arguments(self) -> str:
        """Of the function that the model was offered."""
        given = self.arguments if self.type == "function_call" else self.input
        if given is None:
            raise BadRequest(f"an input item of type {self.type} cannot be used: its arguments or input are missing")
        return given if self.type == "function_call" else custom_arguments(given)


class OutputItem(msgspec.Struct, frozen=True):
    call_id: Id
    output: str | list[Json]


class ReasoningItem(msgspec.Struct, frozen=True):
    summary: list[Json] | None = None
    content: list[Json] | None = None
    encrypted_content: str | None = None

    def thought(self) -> str:
        """From ``encrypted_content`` if this server wrote it, else from the readable text."""
        sealed = unsealed(self.encrypted_content) if self.encrypted_content else None
        return sealed if sealed is not None else _plain(self.content or ()) or _plain(self.summary or ())


class CompactionItem(msgspec.Struct, frozen=True):
    """A summary of what came before, as ``/v1/responses/compact`` wrote it."""

    encrypted_content: str

    def summary(self) -> str:
        text = unsealed(self.encrypted_content)
        if text is None:
            raise BadRequest("a compaction item was written by another server; send the conversation itself")
        return text


Item = MessageItem | CallItem | OutputItem | ReasoningItem | CompactionItem
_KINDS: dict[str, type[Any]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "custom_tool_call": CallItem,
    "function_call_output": OutputItem,
    "custom_tool_call_output": OutputItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
}


def typed(item: Json) -> Item:
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadRequest(f"an input item is of type {str(kind)[:40]!r}; send one of {', '.join(_KINDS)}")
    try:
        found: Item = msgspec.convert(item, _KINDS[kind])
    except msgspec.ValidationError as error:
        raise BadRequest(f"an input item of type {kind} cannot be used: {error}") from None
    return found


def own_items(body: ResponsesBody, tail: str, find: Callable[[str], Json | None]) -> list[Json]:
    """The items of this request's input, each with an id that ends in ``tail`` and its number; references are
    resolved by ``find``."""
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input or []
    items = []
    for i, item in enumerate(given):
        if item.get("type") == "item_reference" or (item.keys() == {"id"}):
            id = item.get("id")
            found = find(id) if isinstance(id, str) else None
            if found is None:
                raise BadRequest(f"the item {str(id)[:80]!r} is not stored here; send it whole")
            items.append(found)
        else:
            typed(item)
            items.append(_normal(item, f"{tail}{i:04x}"))
    return items


def _normal(item: Json, tail: str) -> Json:
    """An item as the API shows it: with a type, an id, and content in parts."""
    kind, content = item.get("type") or "message", item.get("content")
    if isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": part, "text": content}]}
    id = item.get("id")
    return {**item, "type": kind, "id": id if isinstance(id, str) and id else f"{kind[:3]}_{tail}"}


# the chat


def chat_body(body: ResponsesBody, tools: Offered, items: Sequence[Json]) -> ChatBody:
    """A body as a chat. ``tools``: those of the body; ``items``: the whole conversation, oldest first."""
    instructions = body.instructions
    before = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else instructions or []
    messages = chat_messages(map(typed, [*before, *items]))
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise BadRequest(f"there are {len(messages)} messages; send at least one and at most {MAX_MESSAGES}")
    shared = {name: getattr(body, name) for name in Body.__struct_fields__}
    own: Json = {
        "n": None,
        "messages": messages,
        "tools": tools.functions or None,
        "tool_choice": choice(body.tool_choice, tools),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format if body.text else None),
        "chat_template_kwargs": {**_thinking(body.reasoning), **(body.chat_template_kwargs or {})} or None,
    }
    if body.max_output_tokens is not None:
        own["max_completion_tokens"] = body.max_output_tokens
    return ChatBody(**(shared | own))


def _thinking(options: ReasoningOptions | None) -> Json:
    """Template variables for the requested reasoning."""
    effort = options.effort if options else None
    if effort in ("none", "minimal"):
        return {"enable_thinking": False}
    return {"reasoning_effort": _EFFORTS[effort]} if effort else {}


def _response_format(format: Json | None) -> Json | None:
    match format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema", "schema": dict(schema)}:
            about = {key: format[key] for key in ("name", "description", "strict") if format.get(key) is not None}
            return {"type": "json_schema", "json_schema": {**about, "schema": schema}}
    raise BadRequest("text.format must be text, json_object, or json_schema with a schema")


SUMMARY_OF = "This is a summary of our conversation so far:\n\n"
_SUMMARIZE = (
    "Summarize our conversation so far, for yourself: you will see the summary instead of it. Keep what is needed to go "
    "on: what I want, what was decided and why, names of files and their state, open tasks. Write the summary only."
)


def compacting(chat: ChatBody, max_tokens: int) -> ChatBody:
    """The chat that asks for a summary. It begins like the conversation itself, so that little is read for it."""
    messages = [*chat.messages, {"role": "user", "content": _SUMMARIZE}]
    options = {"tool_choice": "none", "response_format": None, "stream": False}
    limit = chat.max_tokens if chat.max_tokens is not None else max_tokens
    return msgspec.structs.replace(chat, messages=messages, max_tokens=limit, **options)


def chat_messages(items: Iterable[Item]) -> list[Json]:
    """Messages as a chat client would have sent them."""
    messages: list[Json] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                last = _assistant(messages, lambda m: "content" in m and "tool_calls" not in m)
                content = _content(item.content)
                last["content"] = content
            case MessageItem():
                messages.append({"role": item.role, "content": _content(item.content)})
            case CompactionItem():
                messages.append({"role": "user", "content": f"{SUMMARY_OF}{item.summary()}"})
            case ReasoningItem():
                if thought := item.thought():
                    last = _assistant(messages, lambda m: "content" in m or "tool_calls" in m)
                    last.setdefault("reasoning_content", []).append(thought)
            case CallItem():
                function = {
                    "name": function_name(item.name, item.namespace),
                    "arguments": item.function_arguments(),
                }
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistant(messages, lambda _: False).setdefault("tool_calls", []).append(call)
            case OutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
    return [{"content": None, **message, **_thoughts(message)} for message in messages]


def _thoughts(message: Json) -> Json:
    return {"reasoning_content": "".join(message["reasoning_content"])} if "reasoning_content" in message else {}


def _assistant(messages: list[Json], is_over: Callable[[Json], bool]) -> Json:
    """The assistant message under construction: the last one unless it is over."""
    if not messages or messages[-1]["role"] != "assistant" or is_over(messages[-1]):
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: str | list[Json]) -> str | list[Json]:
    """One text if all parts are text."""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    return "".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts


def _part(part: Json) -> Json:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "input_audio", "input_audio": dict(sound)}:
            return {"type": "input_audio", "input_audio": sound}
    raise BadRequest(
        f"content of type {str(part.get('type'))[:40]!r} cannot be used: send input_text with a text, input_image with the "
        "image itself as image_url, or input_audio with the sound itself as data"
    )


def _plain(parts: Iterable[Json]) -> str:
    texts = [part.get("text") for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


# thinking that clients send back


def sealed(thought: str) -> str:
    """Thinking in a form that clients send back unchanged. It is encoded, not encrypted: clients may read it."""
    return base64.b64encode(_SEAL + thought.encode()).decode()


def unsealed(text: str) -> str | None:
    """None for a text that ``sealed`` did not write."""
    try:
        data = base64.b64decode(text, validate=True)
        return data.removeprefix(_SEAL).decode() if data.startswith(_SEAL) else None
    except (binascii.Error, ValueError):
        return None
