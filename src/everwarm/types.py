"""The counting types that cross every room.

A token count and a position are both integers and must never be mixed: under M-RoPE an image of 60 cells may advance
the position by 8. They are distinct types here, and only ``everwarm.prompt`` converts between them.
"""

from typing import NamedTuple, NewType

Token = NewType("Token", int)  # a vocabulary id
ItemCount = NewType("ItemCount", int)  # prompt elements: a text token is one, a whole image is one
TokenCount = NewType("TokenCount", int)  # KV cells
Position = NewType("Position", int)  # what RoPE sees
SeqId = NewType("SeqId", int)  # a libllama sequence


class Mark(NamedTuple):
    """A point of a prompt in both counters at once."""

    n_tokens: TokenCount
    pos: Position


START = Mark(TokenCount(0), Position(0))
