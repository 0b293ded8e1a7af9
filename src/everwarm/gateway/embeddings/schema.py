"""Bodies of requests for embeddings and ranks. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from everwarm.errors import BadRequest, NotSupported
from everwarm.gateway.openai.schema import Name, TokenId

MAX_INPUTS = 2048
MAX_DIMENSIONS = 1 << 16

Input = str | list[int | str]


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's ``input``, llama-server's ``content``, Ollama's ``prompt``: a text, tokens, both mixed, or a list
    of these."""

    input: Any = None
    content: Any = None
    prompt: str | None = None
    model: Name | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None
    embd_normalize: Annotated[int, Meta(ge=-1, le=64)] | None = None
    user: str | None = None

    def inputs(self) -> list[Input]:
        given = next((each for each in (self.input, self.content, self.prompt) if each is not None), None)
        if given is None:
            raise BadRequest("there is nothing to embed: give input, a text or a list of texts")
        if isinstance(given, list) and not any(isinstance(each, int) for each in given):
            found = [_one(each) for each in given]
        else:
            found = [_one(given)]
        if not 1 <= len(found) <= MAX_INPUTS:
            raise BadRequest(f"input has {len(found)} entries; give 1 to {MAX_INPUTS}")
        return found


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """Jina's ``documents``, or TEI's ``texts``."""

    query: str
    documents: Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    texts: Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    model: Name | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_text: bool = False

    def ranked(self) -> list[str]:
        found = self.documents or self.texts
        if not found:
            raise BadRequest("there is nothing to rank: give documents, a list of texts")
        return found


class _TextPart(msgspec.Struct, frozen=True):
    text: str
    type: Literal["text"] = "text"


def _one(given: Any) -> Input:
    """A text, tokens, or llama-server's objects with a text in them."""
    try:
        if isinstance(given, dict):
            if "content" in given:
                return "".join(part.text for part in msgspec.convert(given["content"], list[_TextPart]))
            if given.get("multimodal_data"):
                raise NotSupported("there are no embeddings of images: leave multimodal_data out")
            return msgspec.convert(given.get("prompt_string"), str)
        return msgspec.convert(given, str | Annotated[list[TokenId | str], Meta(max_length=1 << 20)])
    except msgspec.ValidationError as error:
        raise BadRequest(f"an input cannot be used: {str(error)[:200]}; give a text or a list of tokens") from None
