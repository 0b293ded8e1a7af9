"""``ImageLoader`` opened for a test, what its children are doing, and that none is left."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from everwarm.errors import BadRequest
from everwarm.gateway.images.image_loader import DecodedImage, ImageLimits, ImageLoader
from support.image_files import png

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
MIB = 1 << 20


@contextlib.asynccontextmanager
async def opened(**limits: float) -> AsyncIterator[ImageLoader]:
    """And afterwards no child is left."""
    images = ImageLoader(ImageLimits(**limits))  # type: ignore[arg-type]
    try:
        yield images
    finally:
        pids = images.child_pids
        await images.close()
        assert images.child_pids == [] and not [pid for pid in pids if is_there(pid)]


def running(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 3000 if CAMPAIGN else 60))  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def is_there(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return " Z" not in Path(f"/proc/{pid}/stat").read_text()
    return False


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10 if found else 0


def small(i: int) -> bytes:
    """Ever another one."""
    return png([[i & 255, i >> 8 & 255, 3]])


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def outcome(images: ImageLoader, data: bytes) -> DecodedImage | str:
    try:
        return await images.decode(data)
    except BadRequest as error:
        return str(error)
