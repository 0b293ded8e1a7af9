"""Anthropic's request bodies, typed and bounded with unknown fields ignored, and their translation to a chat body.

A block without a counterpart becomes text that the model can read, or is refused: content that the model never sees must
not be accepted silently. Pure: knows no HTTP and no engine.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from everwarm.errors import THREAD_UNSUPPORTED, BadRequest
from everwarm.gateway.openai.schema import MAX_MESSAGES, ChatBody, Count, Name, Probability, read
from everwarm.types import Json

REMINDER = "<system-reminder>"
HARMLESS_TOOLS = "tool_search_tool_"  # they find tools that were deferred; Everwarm defers none


class Block(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    cache_control: Any = None  # a breakpoint of the client; never seen by a template


class TextBlock(Block, frozen=True, tag="text"):
    text: str


class Source(msgspec.Struct, frozen=True):
    """Of an image: ``base64`` with ``data``, or ``url``. Of a document: ``text`` with ``data``, or ``content``."""

    type: Name
    data: str | None = None
    media_type: Annotated[str, Meta(max_length=100)] = "image/png"
    url: str | None = None
    content: str | list[TextBlock] | None = None


class ImageBlock(Block, frozen=True, tag="image"):
    source: Source


class DocumentBlock(Block, frozen=True, tag="document"):
    source: Source
    title: str | None = None
    context: str | None = None


class ToolUseBlock(Block, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block, frozen=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Block, frozen=True, tag="thinking"):
    thinking: str


class RedactedThinkingBlock(Block, frozen=True, tag="redacted_thinking"):
    """Encrypted thinking of another server; it is ignored."""


Shown = TextBlock | ImageBlock | DocumentBlock
AnyBlock = (
    TextBlock | ImageBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
)


class AnthropicMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


class AnthropicTool(msgspec.Struct, frozen=True):
    name: Name = ""
    type: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: Any = None


class ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 26)] | None = None


class Metadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a prompt depends on. The last two are Everwarm's own."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    cache_control: Any = None
    thread: Any = None  # a conversation that the server would keep; see ``THREAD_UNSUPPORTED``
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Name | None = None

    @property
    def marks_cache(self) -> bool:
        """Whether the client set ``cache_control`` anywhere."""
        blocks = [self, *(self.tools or ()), *blocks_of(self.system)]
        for turn in self.messages:
            for block in blocks_of(turn.content):
                blocks += [block, *(blocks_of(block.content) if isinstance(block, ToolResultBlock) else ())]
        return any(getattr(block, "cache_control", None) is not None for block in blocks)


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """``max_tokens`` may be 0: the prompt is read and nothing is generated."""

    max_tokens: Count
    output_config: dict[str, Any] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    metadata: Metadata | None = None
    seed: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] | None = None
    deterministic: bool | None = None


B = TypeVar("B", bound=CountBody)


def read_body(data: bytes | bytearray, kind: type[B]) -> B:
    try:
        return read(data, kind)
    except BadRequest as error:
        if "Invalid value '" in str(error) and str(error).endswith(".type`"):
            supported = "text, image, document (text), tool_use, tool_result and thinking"
            raise BadRequest(f"{error}: the supported blocks are {supported}") from None
        raise


def blocks_of(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [TextBlock(text=content)] if content else []
    return list(content or ())


# the chat


def chat_body(body: CountBody, session: str | None = None) -> ChatBody:
    """The same conversation as a chat body."""
    if body.thread is not None:
        message = "thread is not supported: send the whole conversation as messages, without thread"
        raise BadRequest(message, THREAD_UNSUPPORTED)
    tools = _tools(body.tools or ())
    options: Json = {}
    if isinstance(body, MessagesBody):
        options = {
            "max_tokens": body.max_tokens,
            "stream": body.stream,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "seed": body.seed,
            "deterministic": body.deterministic,
            "response_format": _response_format(body.output_config or {}),
        }
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    choice = body.tool_choice
    return ChatBody(
        model=body.model,
        messages=chat_messages(body),
        tools=tools or None,
        tool_choice=_tool_choice(choice, tools),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        chat_template_kwargs={"enable_thinking": thinks, **(body.chat_template_kwargs or {})},
        thinking_budget_tokens=body.thinking.budget_tokens if body.thinking is not None and thinks else None,
        cache_salt=body.cache_salt,
        prompt_cache_key=session[:512] if session else None,
        **options,
    )


def _response_format(config: Json) -> Json | None:
    """What a reply must look like, as OpenAI's ``response_format``."""
    format = config.get("format")
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        return None
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": format.get("schema"), "strict": True}}


# tools


def _tools(tools: Sequence[AnthropicTool]) -> list[Json]:
    return [_tool(tool) for tool in tools if not (tool.type or "").startswith(HARMLESS_TOOLS)]


def _tool(tool: AnthropicTool) -> Json:
    known = client_function(tool.type, tool.name) if tool.input_schema is None else None
    if known is not None:
        return {"type": "function", "function": known}
    if tool.input_schema is None or not tool.name:
        what = f"type {tool.type[:60]!r}" if tool.type and tool.type != "custom" else f"name {tool.name[:60]!r}"
        raise BadRequest(f"the tool of {what} is not supported: give tools a name and an input_schema")
    function: Json = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoice | None, tools: Sequence[Json]) -> Any:
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise BadRequest(f"tool_choice is {choice.type!r} but there are no tools: send some, or leave it out")
    if choice.type == "any":
        return "required"
    if choice.name not in names:
        raise BadRequest(f"tool_choice names {str(choice.name)[:60]!r}; the tools are: {', '.join(names)[:500]}")
    return {"type": "function", "function": {"name": choice.name}}


# messages


@dataclass(slots=True)
class _ChatMessage:
    """A chat message under construction; consecutive messages of one role are merged."""

    role: str
    blocks: list[Shown] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    answers: str | None = None

    def message(self) -> Json:
        content = _content(self.blocks, separated=self.role != "assistant")
        message: Json = {"role": self.role, "content": content}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message |= {"content": content or None, "tool_calls": self.calls}
        return message if self.answers is None else {**message, "tool_call_id": self.answers}


def chat_messages(body: CountBody) -> list[Json]:
    first = list(itertools.takewhile(lambda turn: turn.role == "system", body.messages))
    system = [*blocks_of(body.system), *(block for turn in first for block in _text_only(turn))]
    chat = [_ChatMessage("system", system)] if system else []
    for turn in body.messages[len(first) :]:
        match turn.role:
            case "assistant":
                _assistant(chat, turn)
            case "user":
                _user(chat, turn)
            case "system":
                _remind(chat, [TextBlock(text=_wrapped(block.text)) for block in _text_only(turn)])
    if not chat or chat[-1].role == "system":
        raise BadRequest("the conversation has no message of the user; send one")
    return [each.message() for each in chat]


def _assistant(chat: list[_ChatMessage], turn: AnthropicMessage) -> None:
    now = _last(chat, "assistant")
    for block in blocks_of(turn.content):
        match block:
            case TextBlock():
                now.blocks.append(block)
            case ThinkingBlock(thinking=thought):
                now.thoughts.append(thought)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                function = {"name": block.name, "arguments": arguments}
                now.calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(block, "the assistant")


def _user(chat: list[_ChatMessage], turn: AnthropicMessage) -> None:
    """Tool results first, then the user's content. A reminder beside results stays with them: as a message of its own it
    would open a new turn, and many templates drop the thinking of the turns before."""
    blocks = blocks_of(turn.content)
    shown: list[Shown] = []
    for block in blocks:
        match block:
            case ToolResultBlock():
                chat.append(_ChatMessage("tool", _result(block), answers=block.tool_use_id))
            case TextBlock() | ImageBlock() | DocumentBlock():
                shown.append(block)
            case _:
                raise _misplaced(block, "the user")
    if len(shown) < len(blocks):
        beside = list(itertools.takewhile(_reminds, shown))
        _remind(chat, beside)
        shown = shown[len(beside) :]
    if shown or not blocks:
        _last(chat, "user").blocks.extend(shown)


def _remind(chat: list[_ChatMessage], blocks: Sequence[Shown]) -> None:
    """Appends reminders of the client to the last user or tool message."""
    if blocks:
        now = chat[-1] if chat and chat[-1].role in ("user", "tool") else _last(chat, "user")
        now.blocks.extend(blocks)


def _last(chat: list[_ChatMessage], role: str) -> _ChatMessage:
    if not chat or chat[-1].role != role:
        chat.append(_ChatMessage(role))
    return chat[-1]


def _result(block: ToolResultBlock) -> list[Shown]:
    """The blocks of a tool result. Its ``cache_control`` moves to its last block; an error is marked by a text block."""
    blocks: list[Shown] = [*blocks_of(block.content)]
    if block.is_error:
        blocks = [TextBlock(text="Error:"), *blocks]
    if block.cache_control is not None and blocks:
        blocks[-1] = msgspec.structs.replace(blocks[-1], cache_control=block.cache_control)
    return blocks


def _text_only(turn: AnthropicMessage) -> list[TextBlock]:
    blocks = blocks_of(turn.content)
    for block in blocks:
        if not isinstance(block, TextBlock):
            raise _misplaced(block, "the system")
    return blocks


def _reminds(block: Shown) -> bool:
    return isinstance(block, TextBlock) and block.text.lstrip().startswith(REMINDER)


def _wrapped(text: str) -> str:
    return text if text.lstrip().startswith(REMINDER) else f"{REMINDER}\n{text}\n</system-reminder>"


def _misplaced(block: AnyBlock, who: str) -> BadRequest:
    kind = type(block).__struct_config__.tag
    return BadRequest(f"a block of type {kind!r} cannot be in a message of {who}")


# content


def _content(blocks: Sequence[Shown], *, separated: bool) -> str | list[Json]:
    """One text if all blocks are plain text, else parts. Text blocks are separated by a line end where they have none."""
    parts = [_part(block) for block in blocks]
    if separated:
        for part, following in itertools.pairwise(parts):
            text, after = part.get("text"), following.get("text")
            if text and after and not text.endswith("\n") and not after.startswith("\n"):
                part["text"] = f"{text}\n"
    if all(part.keys() == {"type", "text"} for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(block: Shown) -> Json:
    match block:
        case TextBlock(text=text):
            part: Json = {"type": "text", "text": text}
        case ImageBlock(source=Source(type="base64", data=str(data), media_type=kind)):
            part = {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case ImageBlock(source=Source(type="url", url=str(url))):
            part = {"type": "image_url", "image_url": {"url": url}}
        case ImageBlock(source=source):
            raise BadRequest(
                f"the source of an image is {source.type[:40]!r}; give base64 with data, or url with a url"
            )
        case DocumentBlock():
            part = {"type": "text", "text": "\n".join(_document(block))}
    return part if block.cache_control is None else {**part, "cache_control": block.cache_control}


def _document(block: DocumentBlock) -> Iterable[str]:
    yield from (line for line in (block.title, block.context) if line)
    match block.source:
        case Source(type="text", data=str(text)):
            yield text
        case Source(type="content", content=str() | list() as content):
            yield from (text.text for text in blocks_of(content))
        case source:
            raise BadRequest(
                f"the source of a document is {source.type[:40]!r}; give text with data, or content with text blocks"
            )


# tools that the client runs: a shell, a text editor, a memory folder. They come as a type without a schema, and the model
# is offered a function of that name with the fields that the client reads.

_PATH = {"type": "string", "description": "The file or folder."}
_EDITS: Json = {
    "file_text": {"type": "string", "description": "create: the content of the new file."},
    "old_str": {"type": "string", "description": "str_replace: the text to replace; it must occur exactly once."},
    "new_str": {"type": "string", "description": "str_replace: the text to put there."},
    "insert_line": {
        "type": "integer",
        "description": "insert: the line after which the text goes; 0: at the beginning.",
    },
    "insert_text": {"type": "string", "description": "insert: the text."},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "view: the first and the last line; -1 as the last: to the end.",
    },
}
_BASH: Json = {
    "command": {"type": "string", "description": "The command line to run."},
    "restart": {"type": "boolean", "description": "Starts the shell anew, without a command."},
}
_MEMORY: Json = {
    **_EDITS,
    "old_path": {"type": "string", "description": "rename: the file or folder as it is called now."},
    "new_path": {"type": "string", "description": "rename: its new name."},
}

# the beginning of a type → the tool's name if the client gives none, what it does, its commands, the other fields
_CLIENT_TOOLS: dict[str, tuple[str, str, tuple[str, ...], Json]] = {
    "bash_": ("bash", "Runs a command in a shell that keeps its state between calls.", (), _BASH),
    "text_editor_": (
        "str_replace_based_edit_tool",
        "Shows and changes text files.",
        ("view", "create", "str_replace", "insert"),
        {"path": _PATH, **_EDITS},
    ),
    "memory_": (
        "memory",
        "Keeps notes in files below /memories that last beyond this conversation.",
        ("view", "create", "str_replace", "insert", "delete", "rename"),
        {"path": _PATH, **_MEMORY},
    ),
}


def client_function(type: str | None, name: str) -> Json | None:
    """The function that stands for a typed tool; None: the type is not known."""
    found = next((tool for beginning, tool in _CLIENT_TOOLS.items() if (type or "").startswith(beginning)), None)
    if found is None:
        return None
    usual_name, description, commands, fields = found
    command: Json = {"command": {"type": "string", "enum": list(commands)}} if commands else {}
    schema: Json = {"type": "object", "properties": {**command, **fields}}
    if commands:
        schema["required"] = ["command"]
    return {"name": name or usual_name, "description": description, "parameters": schema}
