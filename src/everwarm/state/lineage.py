"""Names for lineages: a digest of everything from the root to a point, the same in every process. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import blake3
import numpy as np

from everwarm.prompt.prompt import Prompt


def root_key(fingerprint: str, namespace: str) -> str:
    """Different models, settings and namespaces never share a name."""
    return blake3.blake3(f"everwarm\0{len(fingerprint)}\0{fingerprint}\0{namespace}".encode()).hexdigest()


def keys(root: str, prompt: Prompt, ends: Iterable[int]) -> dict[int, str]:
    """The names of the lineages that end after so many items, all in one pass. A media item counts with its whole digest:
    its code is too short to tell pictures apart."""
    hasher = blake3.blake3(bytes.fromhex(root))
    found, done, wanted = {}, 0, set(ends)
    data = np.ascontiguousarray(prompt.codes, dtype="<i4")
    for end in sorted(wanted | {index + 1 for index in prompt.media}):
        if end > done:
            hasher.update(data[done:end].data.cast("B"))
        done = end
        if (item := prompt.media.get(end - 1)) is not None:
            hasher.update(item.digest)
        if end in wanted:
            found[end] = hasher.hexdigest()
    return found
