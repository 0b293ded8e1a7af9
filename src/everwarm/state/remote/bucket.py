"""Where shared objects are stored: an S3-compatible store, a folder, or this process's memory, by URL. Only this knows
obstore.

Raises ``FileNotFoundError`` for what is not there, ``StoreFault`` for everything else a store may do, and ``TimeoutError``
when that takes too long. Knows no objects and no keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from everwarm.errors import BadRequest, EverwarmError

SCHEMES = ("s3", "file", "memory")
CONNECT_S, REQUEST_S = 2, 600  # callers have shorter limits of their own

_MEMORIES: dict[str, Any] = {}  # memory://NAME is one store in this process


class StoreFault(EverwarmError):
    """A store refused, or did not answer as it should."""


@dataclass(frozen=True, slots=True)
class BucketPiece:
    data: memoryview
    size: int  # of the whole


def require_bucket(url: str) -> None:
    """Refuse what can never be opened."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise BadRequest(f"the remote store {url!r} cannot be understood; give s3://bucket/prefix or file:///folder")
    if parts.scheme == "s3" and not parts.netloc:
        raise BadRequest(f"the remote store {url!r} names no bucket; give s3://bucket/prefix")
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise BadRequest(f"the remote store {url!r} is no folder; give file:///folder with a path from the root on")
    if importlib.util.find_spec("obstore") is None:
        raise BadRequest("a remote store needs the package obstore; install everwarm[remote]")


class Bucket:
    def __init__(self, url: str, endpoint: str | None = None) -> None:
        require_bucket(url)
        parts = urlsplit(url)
        path = parts.path.strip("/")
        self._prefix = f"{path}/" if parts.scheme == "s3" and path else ""
        try:
            with _translated():
                self._store = _open(parts.scheme, parts.netloc, unquote(parts.path), endpoint)
        except (StoreFault, FileNotFoundError) as error:
            raise BadRequest(f"the remote store {url!r} cannot be opened: {error}") from None

    async def get(self, path: str, start: int, stop: int, wait_s: float, more_s: float = 0.0) -> BucketPiece:
        """Bytes from ``start`` on, at most up to ``stop``. The answer must begin within ``wait_s``, and be whole ``more_s``
        later."""
        import obstore

        with _translated():
            async with asyncio.timeout(wait_s):
                answer = await obstore.get_async(self._store, self._prefix + path, options={"range": (start, stop)})
            async with asyncio.timeout(more_s or wait_s):
                return BucketPiece(memoryview(await answer.bytes_async()), answer.meta["size"])

    async def age_s(self, path: str, now: float, wait_s: float) -> float:
        """How long ago it was written."""
        import obstore

        with _translated():
            async with asyncio.timeout(wait_s):
                meta = await obstore.head_async(self._store, self._prefix + path)
        return now - meta["last_modified"].timestamp()

    async def put(self, path: str, pieces: Sequence[bytes | memoryview], wait_s: float, *, over: bool) -> bool:
        """Whole or not at all. False: it was there already and is left alone, unless ``over`` writes over it."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        mode: Literal["overwrite", "create"] = "overwrite" if over else "create"
        with _translated():
            try:
                async with asyncio.timeout(wait_s):
                    await obstore.put_async(
                        self._store, self._prefix + path, iter(pieces), mode=mode, use_multipart=False
                    )
            except AlreadyExistsError:
                return False
            except FileNotFoundError as error:
                raise OSError(f"there is no such bucket or folder: {error}") from None
        return True

    async def drop(self, path: str, wait_s: float) -> None:
        import obstore

        with _translated():
            async with asyncio.timeout(wait_s):
                await obstore.delete_async(self._store, self._prefix + path)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except (FileNotFoundError, TimeoutError):
        raise
    except (BaseError, OSError, ValueError, RuntimeError) as error:
        raise StoreFault(str(error).partition("\n")[0][:300]) from None


def _open(scheme: str, place: str, path: str, endpoint: str | None) -> Any:
    from obstore.store import LocalStore, MemoryStore, S3Store

    if scheme == "memory":
        return _MEMORIES.setdefault(place + path, MemoryStore())
    if scheme == "file":
        Path(path).mkdir(parents=True, exist_ok=True, mode=0o700)
        return LocalStore(path)
    brief = timedelta(milliseconds=10)
    long = timedelta(milliseconds=100)
    return S3Store(
        place,
        config={} if endpoint is None else {"endpoint": endpoint},
        client_options={"allow_http": True, "connect_timeout": f"{CONNECT_S}s", "timeout": f"{REQUEST_S}s"},
        retry_config={"max_retries": 2, "backoff": {"init_backoff": brief, "max_backoff": long, "base": 2}},
    )
