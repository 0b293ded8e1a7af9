"""GGUF files made of a header and a few bytes: enough to be listed, far too little to be loaded."""

import struct
from pathlib import Path
from typing import Any

_U32, _F32, _BOOL, _TEXT, _LIST = 4, 6, 7, 8, 9

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.embedding_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return _BOOL, struct.pack("<?", value)
        case int():
            return _U32, struct.pack("<I", value)
        case float():
            return _F32, struct.pack("<f", value)
        case str():
            return _TEXT, text(value)
        case bytes():  # already packed: a type and its bytes
            return struct.unpack("<I", value[:4])[0], value[4:]
    items = [_value(item) for item in value]
    kind = items[0][0] if items else _U32
    return _LIST, struct.pack("<IQ", kind, len(items)) + b"".join(raw for _, raw in items)


def header(
    values: dict[str, Any] | None = None, n_tensors: int = 1, n_values: int | None = None, version: int = 3
) -> bytes:
    values = LLAMA if values is None else values
    out = b"GGUF" + struct.pack("<IQQ", version, n_tensors, len(values) if n_values is None else n_values)
    for key, value in values.items():
        kind, raw = _value(value)
        out += text(key) + struct.pack("<I", kind) + raw
    for i in range(min(n_tensors, 100)):
        out += text(f"blk.{i}.weight") + struct.pack("<IQIQ", 1, 16, 0, 64 * i)
    return out


def write(path: Path, values: dict[str, Any] | None = None, *, n_bytes: int = 64, n_tensors: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = header(values, n_tensors)
    path.write_bytes(raw + bytes(-len(raw) % 32) + bytes(n_bytes))
    return path
