"""The file of ``--rewrite``, read and checked."""

from __future__ import annotations

from pathlib import Path

from everwarm.errors import BadRequest
from everwarm.gateway.rewrite.rules import Rules, parse_rules

MAX_FILE_BYTES = 1 << 20


def read_rules(path: Path) -> Rules:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"--rewrite: {path} cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise BadRequest(f"--rewrite: {path} has more than {MAX_FILE_BYTES >> 10} KiB")
    try:
        return parse_rules(data.decode())
    except (BadRequest, UnicodeDecodeError) as error:
        raise BadRequest(f"--rewrite: {path}: {error}") from None
