"""The embedded model: a trunk that never changes, and a head that guesses the tokens after the next one."""

import hashlib

from gguf import GGUFReader

from everwarm.demo import EMBEDDED_MODEL

TRUNK = "29293b0f87089eae09bb3cb008d7977a"  # of the file as it was before it had a head: 108 tensors
HEAD = "blk.8."


def digest(reader: GGUFReader, *, of_head: bool) -> str:
    """Of names, types, shapes and numbers."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.name):
        if tensor.name.startswith(HEAD) == of_head:
            shape = [int(n) for n in tensor.shape]
            found.update(f"{tensor.name} {tensor.tensor_type.name} {shape}\n".encode())
            found.update(tensor.data.tobytes())
    return found.hexdigest()


def test_the_trunk_is_the_one_that_was_measured() -> None:
    reader = GGUFReader(EMBEDDED_MODEL)
    assert digest(reader, of_head=False) == TRUNK != digest(reader, of_head=True)


def test_the_head_is_one_block_behind_the_trunk() -> None:
    fields = GGUFReader(EMBEDDED_MODEL).fields
    assert fields["qwen35.block_count"].contents() == 9 and fields["qwen35.nextn_predict_layers"].contents() == 1
