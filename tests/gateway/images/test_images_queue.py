"""Many images at once: in turn, bounded, decoded once, and without anybody else waiting."""

import asyncio
import base64
import contextlib
import os
import random
import signal
import time

import pytest
from PIL import Image

from everwarm.errors import BadRequest, EngineStopped, Overloaded
from everwarm.gateway.images.image_loader import DecodedImage, read_base64
from support.image_files import GREY, png, saved, scene
from support.image_harness import MIB, is_there, opened, running, small, until


@running
async def test_fifty_at_once_are_all_decoded_by_few() -> None:
    async with opened(max_waiting=50) as images:
        found = await asyncio.gather(*(images.decode(small(i)) for i in range(50)))
        assert [tuple(image.rgb) for image in found] == [(i, 0, 3) for i in range(50)]
        assert len(images.child_pids) <= 2 and images.n_decoded == 50


@running
async def test_the_queue_has_an_end() -> None:
    async with opened(n_children=1, max_waiting=3) as images:
        asked = [asyncio.create_task(images.decode(small(i))) for i in range(5)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in found] == [DecodedImage] * 4 + [Overloaded]
        assert "waiting" in str(found[-1])


@running
async def test_who_leaves_the_queue_frees_a_place() -> None:
    async with opened(n_children=1, max_waiting=1) as images:
        await images.decode(small(0))
        (pid,) = images.child_pids
        os.kill(pid, signal.SIGSTOP)
        asked = [asyncio.create_task(images.decode(small(i))) for i in (1, 2)]
        await until(lambda: images.decoding.n_waiting == 1)
        with pytest.raises(Overloaded):
            await images.decode(small(3))
        asked[1].cancel()
        again = asyncio.create_task(images.decode(small(2)))  # at once: it must not join what is being dropped
        await until(lambda: asked[1].cancelled() and images.decoding.n_waiting == 1)
        os.kill(pid, signal.SIGCONT)
        assert (await asked[0]).rgb == b"\1\0\3" and (await again).rgb == b"\2\0\3"


@running
async def test_an_image_nobody_waits_for_any_more_is_finished_and_remembered() -> None:
    async with opened(n_children=1) as images:
        asked = asyncio.create_task(images.decode(small(1)))
        await until(lambda: images.child_pids)
        asked.cancel()
        await until(lambda: images.n_decoded == 1)
        await images.decode(small(1))
        assert (images.n_decoded, images.n_remembered) == (1, 1)


@running
async def test_requests_take_turns() -> None:
    """One with many images does not hold up one with a single image."""
    async with opened(n_children=1) as images:
        done: list[str] = []

        async def request(name: str, numbers: range) -> None:
            urls = ["data:;base64," + base64.b64encode(small(i)).decode() for i in numbers]
            await images.from_parts([{"type": "image_url", "image_url": url} for url in urls])
            done.append(name)

        await asyncio.gather(request("many", range(30)), request("one", range(40, 41)))
        assert done == ["one", "many"]


@running
async def test_a_request_brings_only_so_many_images() -> None:
    async with opened(max_images_per_request=2, max_pixels_per_request=15) as images:
        url = "data:;base64," + base64.b64encode(png([[0] * 10], color=GREY)).decode()
        part = {"type": "image_url", "image_url": url}
        with pytest.raises(BadRequest, match="3 images and sounds; send at most 2"):
            await images.from_parts([part] * 3)
        with pytest.raises(BadRequest, match="more than 15 pixels together"):
            await images.from_parts([part] * 2)
        assert len(await images.from_parts([part])) == 1


@running
async def test_the_same_image_is_decoded_once() -> None:
    async with opened() as images:
        found = await asyncio.gather(*(images.decode(small(7)) for _ in range(20)))
        assert len({id(image) for image in found}) == 1
        await images.decode(small(7))
        assert (images.n_decoded, images.n_remembered) == (1, 1)


@running
async def test_memory_for_images_is_bounded_and_the_oldest_goes() -> None:
    async with opened(cache_bytes=9) as images:
        for i in (1, 2, 3, 1, 4, 1, 2):
            await images.decode(small(i))
            assert images.cache.n_bytes <= 9
        assert (images.n_decoded, images.n_remembered) == (5, 2)
        await images.decode(png([[0] * 30]))
        await images.decode(small(1))
        assert images.n_remembered == 3, "one too large to be kept sent another away"


@running
async def test_children_are_renewed_after_so_many_images() -> None:
    async with opened(n_children=1, n_images_per_child=3) as images:
        seen = []
        n_files = len(os.listdir("/proc/self/fd"))
        for i in range(9):
            await images.decode(small(i))
            seen += [pid for pid in images.child_pids if pid not in seen]
        assert len(seen) == 3 and images.n_deaths == 0
        await until(lambda: not any(map(is_there, seen)) and len(os.listdir("/proc/self/fd")) <= n_files)


@running
async def test_closing_ends_what_runs_and_what_waits() -> None:
    async with opened(n_children=1) as images:
        await images.decode(small(0))
        os.kill(images.child_pids[0], signal.SIGSTOP)
        asked = [asyncio.create_task(images.decode(small(i))) for i in (1, 2)]
        await until(lambda: images.decoding.n_waiting == 1)
        await images.close()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(error, EngineStopped) for error in found), found
        with pytest.raises(EngineStopped):
            await images.decode(small(3))


@running
async def test_closing_while_a_child_starts_leaves_none() -> None:
    for pause_s in (0.0, 0.01, 0.05, 0.1):
        async with opened() as images:
            asked = asyncio.create_task(images.decode(small(0)))
            await asyncio.sleep(pause_s)
            children = list(images._busy)
            await images.close()
            await asyncio.gather(asked, return_exceptions=True)
            assert not any(child.pid is not None and is_there(child.pid) for child in children)


@running
async def test_nobody_else_waits_while_a_large_image_is_read() -> None:
    data = saved(scene(400, 300).resize((4000, 3000), Image.Resampling.NEAREST), "PNG", compress_level=0)[: 20 << 20]
    text = "data:image/png;base64," + base64.b64encode(data).decode()
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            began = time.thread_time()  # what else the machine does is not counted
            await asyncio.sleep(0.002)
            longest_s = max(longest_s, time.thread_time() - began)

    async with opened(max_bytes=20 << 20) as images:
        watching = asyncio.create_task(watch())
        with contextlib.suppress(BadRequest):
            await images.from_part({"type": "image_url", "image_url": text})
        watching.cancel()
    print(f"{len(text) / MIB:.0f} MiB of text, longest pause {longest_s * 1000:.0f} ms")
    assert longest_s < 0.2


def test_base64_is_read_the_same_in_pieces() -> None:
    data = random.Random(3).randbytes(1_000_001)
    text = base64.b64encode(data).decode()
    wrapped = "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    for given in (text, wrapped, text.rstrip("="), text + " \n" * 5, wrapped + "\n"):
        assert read_base64("ab," + given, 3, 2_000_000) == data
    at = (256 << 10) - 4
    for wrong in (
        text[:at] + "AA==" + text[at:],
        text[:at] + "AAA=" + text[at:],
        "=" + text,
        text + "A===",
        text + "!",
    ):
        with pytest.raises(BadRequest, match="not base64"):
            read_base64(wrong, 0, 2_000_000)
    with pytest.raises(BadRequest, match="larger than 1,000,000 bytes"):
        read_base64(text, 0, 1_000_000)
