"""Contents of slot files that no model wrote, and pairs in the layout of earlier versions."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import blake3
import numpy as np

from everwarm.engine.slotfile import slot_io
from everwarm.prompt.prompt import Codes, Prompt
from everwarm.state.store.object import END, MAGIC, ObjectHeader, ObjectReader, Section, encode
from everwarm.state.store.slot_file import Claim, encode_main, open_plain, owner_digest, read_open_main
from everwarm.state.store.slot_names import COMPANION
from everwarm.types import Blob

MINE = Claim("model", "mine")


def conversation(n: int = 40, seed: int = 3) -> slot_io.Saved:
    """What a slot file holds, without a model that it could be of."""
    rng = np.random.default_rng(seed)
    return slot_io.Saved(Prompt.of_tokens(rng.integers(0, 250, n)), rng.integers(0, 256, 5000).astype(np.uint8))


def write_old_pair(path: Path, saved: slot_io.Saved, claim: Claim) -> None:
    """As version 1.1 wrote it: all states in the companion, four of them in the main file as well, no word about the
    head, and a digest of the whole main file."""
    state = np.frombuffer(saved.state.tobytes(), np.uint8)
    main = b"".join(bytes(piece) for piece in encode_main(saved.prompt.cells, state, saved.appended))
    digest = blake3.blake3(main[12:]).hexdigest()
    parts = {"items": np.ascontiguousarray(saved.prompt.codes, "<i4").view(np.uint8)}
    for each in saved.points:
        parts |= {each.point.section: each.state} | ({} if each.logits is None else {each.point.logits: each.logits})
    header = ObjectHeader(
        kind="slot",
        fingerprint=claim.fingerprint,
        key="",
        start="",
        n_start=0,
        n_items=len(saved.prompt),
        points=tuple(each.point for each in saved.points),
        main=digest,
        owner=owner_digest(claim.fingerprint, digest, claim.namespace),
    )
    head, *others, _ = (bytes(piece) for piece in encode(header, parts))
    head = _as_before(head)
    path.write_bytes(main)
    end = blake3.blake3(head).digest() + END
    path.with_name(path.name + COMPANION).write_bytes(b"".join([head, *others, end]))


def _as_before(head: bytes) -> bytes:
    """The header without the fields that 1.1 did not have; spaces in their place keep its length."""
    (length,) = struct.unpack_from("<I", head, 12)
    body = json.loads(head[16 : 16 + length])
    del body["state_bytes"]
    for point in body["points"]:
        for name in ("at", "n_bytes", "tail", "digest"):
            del point[name]
    text = json.dumps(body, separators=(",", ":"), sort_keys=True).encode().ljust(length)
    return struct.pack("<8sHHI", MAGIC, 1, 1, length) + text + head[16 + length :]


def header_of(path: Path) -> ObjectHeader:
    """Of a main file's companion."""
    with path.with_name(path.name + COMPANION).open("rb") as file:
        return ObjectReader(file.fileno()).header


def section_of(path: Path, name: str) -> Section:
    return next(section for section in header_of(path).sections if section.name == name)


def damage_state(path: Path, n_items: int) -> None:
    """Changes a byte of a checkpoint's state, in whichever of the two files it lies."""
    point = next(point for point in header_of(path).points if point.n_items == n_items)
    assert point.at or point.section, "it is the main file's own state"
    file = path if point.at else path.with_name(path.name + COMPANION)
    data = bytearray(file.read_bytes())
    data[(point.at or section_of(path, point.section).offset) + 1000] ^= 1
    file.write_bytes(data)


def read_main(path: Path, max_tokens: int) -> tuple[Codes, Blob]:
    """Tokens and state of a main file, with what follows the state."""
    fd = open_plain(path)
    try:
        main = read_open_main(fd, max_tokens)
        return main.cells, main.state
    finally:
        os.close(fd)
