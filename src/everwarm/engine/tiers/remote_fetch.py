"""One point of the remote store while it is fetched: everything it needs is on its way at once, and what the disk has comes
from there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from everwarm.state.remote.pointer import Signpost
from everwarm.state.remote.remote_tier import Remote
from everwarm.state.store.disk import Disk
from everwarm.state.store.object import Reader

_FIRST_GUESS = 1 << 20  # of the size of what no signpost names


class Afar:
    def __init__(self, remote: Remote, post: Signpost, n_kv: int, patience_s: float, disk: Disk | None) -> None:
        self._remote = remote
        self._disk = disk
        self._patience_s = patience_s
        self._here = frozenset() if disk is None else disk.names()
        sizes = {post.name: post.size} | {need.name: need.size for need in post.needs if need.reach > n_kv}
        self._downloads = {
            name: remote.download(name, size, patience_s) for name, size in sizes.items() if name not in self._here
        }

    def __enter__(self) -> Afar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nobody waits for the rest."""
        for download in self._downloads.values():
            download.cancel()

    def reading(self, name: str) -> AbstractContextManager[Reader]:
        if self._disk is not None and name in self._here:
            return self._disk.reading(name)
        download = self._downloads.pop(name, None) or self._remote.download(name, _FIRST_GUESS, self._patience_s)
        return self._remote.reading(name, download)
