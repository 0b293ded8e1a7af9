"""Parcels for the remote tier that no engine made, and how they are found and fetched again."""

from __future__ import annotations

import numpy as np

from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key
from everwarm.state.remote.pointer import MAC_BYTES, Need, Parcel, Pointer, grid_points, names_at
from everwarm.state.remote.remote_tier import RemoteTier
from everwarm.state.store.object import ObjectHeader, file_size, name_of

MODEL, KEY = "model|f16|f16|auto|unified", bytes(range(32))
ITEMS = Prompt.of_tokens(range(100, 400))
N = 200


def parcel(
    n: int = N, *, prompt: Prompt = ITEMS, model: str = MODEL, space: str = "", kv_bytes: int = 100_000
) -> Parcel:
    """A state after ``n`` items and the KV it needs."""
    root = root_key(model, space)
    named = keys(root, prompt, {0, n, *grid_points(n).values()})
    items = np.ascontiguousarray(prompt.codes[:n], "<i4").view(np.uint8)
    blobs = [np.random.default_rng(n + i).integers(0, 256, size, np.uint8) for i, size in enumerate((kv_bytes, 70_000))]
    common = {"fingerprint": model, "key": named[n], "n_items": n}
    kv = ObjectHeader(kind="kv", start=named[0], n_start=0, **common)
    state = ObjectHeader(kind="state", start=named[n], n_start=n, needs=(name_of(kv),), reaches=(n,), **common)
    objects = ((kv, {"items": items, "kv": blobs[0]}), (state, {"items": items, "state": blobs[1]}))
    sizes = [file_size(*thing) + MAC_BYTES for thing in objects]
    post = Pointer(named[n], n, sizes[1], (Need(name_of(kv), sizes[0], n),))
    names = names_at(named[n], {grid: named[at] for grid, at in grid_points(n).items()})
    return Parcel(objects, post, tuple(names))


def find(remote: RemoteTier, prompt: Prompt = ITEMS, ends: tuple[int, ...] = (N,), space: str = "", model: str = MODEL):
    return remote.find(root_key(model, space), prompt, ends, least=16, most=len(prompt) - 1)


def read(remote: RemoteTier, name: str, size: int, section: str, patience_s: float = 5.0) -> bytes:
    with remote.reading(name, remote.download(name, size, patience_s)) as reader:
        return reader.read(section).tobytes()


def fetch(remote: RemoteTier, post: Pointer) -> tuple[bytes, bytes]:
    (need,) = post.needs
    return read(remote, post.name, post.size, "state"), read(remote, need.name, need.size, "kv")


def stored(one: Parcel) -> tuple[bytes, bytes]:
    (_, kv), (_, state) = one.objects
    return state["state"].tobytes(), kv["kv"].tobytes()
