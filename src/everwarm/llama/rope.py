"""Which RoPE factors a context uses: a longrope model has two sets, and libllama chooses by the size of the context."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from everwarm.errors import ModelFileError
from everwarm.llama import abi
from everwarm.llama.lib import lib
from everwarm.llama.system.file_digest import file_identity, parts_of

FACTORS = (b"rope_factors_long.weight", b"rope_factors_short.weight")


def rope_limit_of(path: Path) -> int | None:
    """Contexts of more cells use the long factors, others the short ones. None: the model has only one set."""
    try:
        parts = parts_of(path)
        return _read(path, tuple(map(file_identity, parts)))
    except OSError as error:
        raise ModelFileError(f"a file of {path.name} cannot be read: {error.strerror or error}") from None


@functools.lru_cache(maxsize=64)
def _read(path: Path, _identities: tuple[str, ...]) -> int | None:
    limit = None
    has_factors = False
    for i, part in enumerate(parts_of(path)):
        header = lib().gguf_init_from_file(os.fsencode(part), abi.GgufInitParams(True, None))
        if not header:
            raise ModelFileError(f"{part.name} is not a GGUF file, or its header is damaged")
        try:
            has_factors = has_factors or any(lib().gguf_find_tensor(header, name) >= 0 for name in FACTORS)
            limit = _limit(header) if i == 0 else limit
        finally:
            lib().gguf_free(header)
    return limit if has_factors else None


def _limit(header: int) -> int:
    """What the model was first trained for; libllama takes its context where the file does not say."""
    arch = _text(header, "general.architecture")
    found = _number(header, f"{arch}.rope.scaling.original_context_length")
    return found if found is not None else _number(header, f"{arch}.context_length") or 0


def _number(header: int, key: str) -> int | None:
    at = int(lib().gguf_find_key(header, key.encode()))
    is_number = at >= 0 and int(lib().gguf_get_kv_type(header, at)) == abi.GGUF_UINT32
    return int(lib().gguf_get_val_u32(header, at)) if is_number else None


def _text(header: int, key: str) -> str:
    at = int(lib().gguf_find_key(header, key.encode()))
    is_text = at >= 0 and int(lib().gguf_get_kv_type(header, at)) == abi.GGUF_STRING
    return ctypes.string_at(lib().gguf_get_val_str(header, at)).decode("utf-8", "replace") if is_text else ""
