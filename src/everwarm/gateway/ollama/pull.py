"""Downloads of models on request, and their deletion: only where the server was told to allow it, and only for admins.

Models come from the Hub that huggingface_hub is set up for, into its cache. A download reports its progress in lines, as
Ollama does; it stops when its client disconnects, and the next one continues it.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from everwarm.errors import BadRequest, NotFound, NotSupported, Overloaded
from everwarm.gateway.http.sse import ClientGone
from everwarm.gateway.ollama.encode import line
from everwarm.router.catalog import hub
from everwarm.router.pool import Pool
from everwarm.types import Json

REPORT_S = 0.2  # between lines of progress
AT_ONCE = 2
MAX_PULLS = 8  # running and waiting
SUCCESS: Json = {"status": "success"}


class Pulls:
    def __init__(self, pool: Pool, *, allowed: bool) -> None:
        self._pool = pool
        self.allowed = allowed
        self._n_pulls = 0
        self._threads = ThreadPoolExecutor(AT_ONCE, "pull")

    def require_allowed(self) -> None:
        if not self.allowed:
            raise NotSupported("this server downloads and deletes no models; start it with --models hf: --allow-pull")

    async def pull(self, name: str) -> AsyncGenerator[bytes, None]:
        """Lines of progress; the model is in the list of models before the last one."""
        wanted = hub.parse_name(name)
        if self._n_pulls >= MAX_PULLS:
            raise Overloaded(f"{MAX_PULLS} models are being downloaded; try again when one is there", 30)
        self._n_pulls += 1
        is_over = threading.Event()
        done: tuple[int, int] | None = None  # bytes done, bytes in all

        def note(n_done: int, n_total: int) -> None:
            nonlocal done
            if is_over.is_set():
                raise ClientGone
            done = (n_done, n_total)

        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, hub.resolve, str(wanted), note)
            yield line({"status": "pulling manifest"})
            said = None
            while not (await asyncio.wait({work}, timeout=REPORT_S))[0]:
                if done is not None and done != said:
                    said = done
                    yield line(_progress(str(wanted), *said))
            model = work.result()
            yield line(_progress(str(wanted), *(done or (model.n_bytes, model.n_bytes))))
            self._pool.refresh(now=True)
            yield line(SUCCESS)
        finally:
            self._n_pulls -= 1
            is_over.set()

    async def delete(self, name: str) -> None:
        """Deletes the files of a model of the Hub; a loaded one is unloaded when it is idle."""
        spec = self._pool.catalog.named(name)
        if spec is None:
            names = ", ".join(sorted(self._pool.catalog.specs)) or "none"
            raise NotFound(f"there is no model {name[:100]!r}; there are: {names}", "model_not_found")
        if spec.source != "hub":
            raise BadRequest(f"{spec.id} was not downloaded from the Hub; delete its file where it lies")
        await asyncio.to_thread(hub.remove, spec.id)
        self._pool.refresh(now=True)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _progress(name: str, n_done: int, n_total: int) -> Json:
    """Ollama's clients show a bar for each digest; this one is of the name, so that all files share a bar. Pure."""
    digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    return {"status": f"pulling {name}", "digest": digest, "total": n_total, "completed": min(n_done, n_total)}
