"""A vocabulary of exactly one token per byte, plus the control tokens of a ChatML conversation.

Knows token texts, types and ids. Does not know models or files. One exception to "one token per byte" is real behaviour
of libllama: user-defined tokens (`<think>`, `</think>`) are recognised in any text, control tokens only on request.
"""

from dataclasses import dataclass
from enum import IntEnum


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type` used here."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


@dataclass(frozen=True, slots=True)
class TinyVocabulary:
    """Token texts and types by id, and the one merge that libllama insists on."""

    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[str, ...]


_SPECIAL: tuple[tuple[str, TokenType], ...] = (
    ("<|endoftext|>", TokenType.CONTROL),
    ("<|im_start|>", TokenType.CONTROL),
    ("<|im_end|>", TokenType.CONTROL),
    ("<think>", TokenType.USER_DEFINED),
    ("</think>", TokenType.USER_DEFINED),
    ("<|vision_start|>", TokenType.CONTROL),
    ("<|vision_end|>", TokenType.CONTROL),
    ("<|image_pad|>", TokenType.CONTROL),
)

N_BYTES = 256
N_BASE_TOKENS = N_BYTES + len(_SPECIAL)
# What stands around an image and is not among the base tokens, of the architectures that can have a projector.
IMAGE_MARKERS: dict[str, tuple[str, ...]] = {"qwen35": (), "gemma3": ("<start_of_image>", "<end_of_image>")}
END_OF_TEXT = 256
IM_END = 258

# libllama refuses a missing merges list. Neither side of this pair can be built by a merge, so it never applies.
_DEAD_MERGE = "<|vision_start|> <|vision_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each byte in byte-level tokenizers, by byte value."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return tuple(chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(N_BYTES))


def vocabulary(n_tokens: int, markers: tuple[str, ...] = ()) -> TinyVocabulary:
    """The base tokens, these markers, and as many unused ones as it takes to reach `n_tokens`."""
    special = (*_SPECIAL, *((text, TokenType.CONTROL) for text in markers))
    n_filler = n_tokens - N_BYTES - len(special)
    filler = tuple(f"<|unused_{i}|>" for i in range(n_filler))
    return TinyVocabulary(
        tokens=byte_alphabet() + tuple(text for text, _ in special) + filler,
        types=(TokenType.NORMAL,) * N_BYTES + tuple(kind for _, kind in special) + (TokenType.UNUSED,) * n_filler,
        merges=(_DEAD_MERGE,),
    )
