"""Anthropic's request bodies: typed, bounded, unknown fields ignored. Pure parsing; knows no HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from everwarm.errors import BadRequest
from everwarm.gateway.openai.schema import MAX_MESSAGES, Count, Name, Probability, read


class Block(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    cache_control: Any = None  # a breakpoint of the client; never seen by a template


class TextBlock(Block, frozen=True, tag="text"):
    text: str


class Base64Source(msgspec.Struct, frozen=True, tag_field="type", tag="base64"):
    data: str
    media_type: Annotated[str, Meta(max_length=100)] = "image/png"


class UrlSource(msgspec.Struct, frozen=True, tag_field="type", tag="url"):
    url: str


class ImageBlock(Block, frozen=True, tag="image"):
    source: Base64Source | UrlSource


class TextSource(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    data: str


class BlocksSource(msgspec.Struct, frozen=True, tag_field="type", tag="content"):
    content: str | list[TextBlock]


class DocumentBlock(Block, frozen=True, tag="document"):
    source: TextSource | BlocksSource
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
