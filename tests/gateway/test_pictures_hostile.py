"""Pictures meant to do harm, decoders that die or hang, and many at once: the gateway answers, and leaves nothing behind."""

import asyncio
import base64
import contextlib
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from PIL import Image

from everwarm.errors import BadRequest, EngineStopped, Overloaded
from everwarm.gateway.picture_child import Child
from everwarm.gateway.pictures import Picture, PictureLimits, Pictures, read_base64
from gateway.picture_files import GREY, giants, mutated, png, samples, saved, scan_bomb, scene

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_MUTATED = 20_000 if CAMPAIGN else 400
MEMORY = 512 << 20
MIB = 1 << 20
QUICK = 0.4


@contextlib.asynccontextmanager
async def opened(**limits: float) -> AsyncIterator[Pictures]:
    """And afterwards no child is left."""
    pictures = Pictures(PictureLimits(**limits))  # type: ignore[arg-type]
    try:
        yield pictures
    finally:
        pids = pictures.child_pids
        await pictures.close()
        assert pictures.child_pids == [] and not [pid for pid in pids if is_there(pid)]


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


async def outcome(pictures: Pictures, data: bytes) -> Picture | str:
    try:
        return await pictures.decode(data)
    except BadRequest as error:
        return str(error)


# harmful pictures


@running
async def test_damaged_files_are_refused_or_read() -> None:
    """By the thousand; no child takes more memory than it may, and none dies."""
    rng = random.Random(20)
    originals = list(samples().values())
    peak, n_read = 0, 0
    async with opened(n_pictures_per_child=1 << 30, cache_bytes=0) as pictures:
        for done in range(0, N_MUTATED, 20):
            batch = [mutated(originals[(done + i) % len(originals)], rng) for i in range(20)]
            for found in await asyncio.gather(*(outcome(pictures, data) for data in batch)):
                check_outcome(found)
                n_read += isinstance(found, Picture)
            peak = max(peak, *map(peak_bytes, pictures.child_pids))
        assert pictures.n_deaths == 0 and len(pictures.child_pids) == 2
    print(f"{N_MUTATED} files, {n_read} read, peak {peak / MIB:.0f} MiB")
    assert peak <= MEMORY and n_read > N_MUTATED // 20


def check_outcome(found: Picture | str) -> None:
    if isinstance(found, Picture):
        assert found == Picture.of(found.width, found.height, found.rgb)
        return
    assert re.search("(send|give|save) ", found) and len(found) < 400, found
    assert not re.search("object at|Too many open|Errno|/", found.replace("image/png", "")), found


@running
async def test_the_largest_pictures_fit_and_larger_ones_are_refused() -> None:
    """Each kind at its limit: as many pixels as are allowed, in the way that takes most memory."""
    blank = Image.new("RGB", (6400, 6250))
    webp = blank.crop((0, 0, 5300, 5200))
    largest = [saved(blank, "JPEG", progressive=True, subsampling=0), saved(webp, "WEBP", method=0)]
    if CAMPAIGN:
        clear = webp.convert("RGBA")
        largest += [saved(blank, "PNG", compress_level=1), saved(clear, "WEBP", lossless=True, method=0)]
        largest += [saved(blank.quantize(4), "GIF"), saved(blank.crop((0, 0, 6000, 6000)).convert("CMYK"), "JPEG")]
    async with opened(n_children=1) as pictures:
        for data in largest:
            picture = await pictures.decode(data)
            assert picture.width * picture.height >= 27_000_000 and len(set(picture.rgb[::9973])) <= 2
        (pid,) = pictures.child_pids
        peak = peak_bytes(pid)
        assert "may have" in str(await outcome(pictures, giants(6200)["webp"]))
    print(f"peak {peak / MIB:.0f} MiB")
    assert peak <= MEMORY


@running
async def test_a_picture_that_takes_for_ever_is_given_up() -> None:
    async with opened(n_children=1, timeout_s=QUICK) as pictures:
        said = await outcome(pictures, scan_bomb(3000, 1000))
        assert "took longer than 0.4 s" in str(said) and pictures.n_deaths == 1
        assert isinstance(await outcome(pictures, small(1)), Picture)


@running
async def test_a_child_has_little_to_lose() -> None:
    """Limits hold, no file can be opened, and it was told no secrets."""
    os.environ["EVERWARM_SERVE_API_KEY"] = "not for children"
    try:
        async with opened(n_children=1) as pictures:
            await pictures.decode(small(1))
            (pid,) = pictures.child_pids
            limits = Path(f"/proc/{pid}/limits").read_text()
            for name, most in (("address space", MEMORY), ("data size", MEMORY), ("open files", 0), ("file size", 0)):
                assert re.search(rf"Max {name}\s+{most}\s+{most} ", limits), limits
            assert re.search(r"Max cpu time\s+1\d ", limits), limits
            assert b"API_KEY" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        del os.environ["EVERWARM_SERVE_API_KEY"]


# children that die, hang or lie


@running
async def test_a_child_that_is_killed_costs_only_its_picture() -> None:
    async with opened(n_children=1) as pictures:
        await pictures.decode(small(1))
        (pid,) = pictures.child_pids
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.create_task(outcome(pictures, small(2)))
        waiting = asyncio.create_task(outcome(pictures, small(3)))
        await until(lambda: pictures._busy)
        os.kill(pid, signal.SIGKILL)
        assert "its decoder died" in str(await asked)
        assert isinstance(await waiting, Picture) and isinstance(await outcome(pictures, small(2)), Picture)
        assert pictures.child_pids != [pid] and pictures.n_deaths == 1


@running
async def test_a_child_that_died_between_pictures_is_replaced_silently() -> None:
    async with opened(n_children=1) as pictures:
        await pictures.decode(small(1))
        (pid,) = pictures.child_pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_there(pid))
        assert isinstance(await outcome(pictures, small(2)), Picture) and pictures.n_deaths == 0


@running
async def test_a_child_that_is_stopped_is_killed_in_time() -> None:
    async with opened(n_children=1, timeout_s=QUICK) as pictures:
        await pictures.decode(small(1))
        (pid,) = pictures.child_pids
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        assert "took longer" in str(await outcome(pictures, small(2)))
        assert time.monotonic() - began < 10 * QUICK
        assert isinstance(await outcome(pictures, small(2)), Picture)
        await until(lambda: not is_there(pid))


@pytest.mark.parametrize(
    "said",
    [
        b"\0\0\0\x02{}",
        b"\0\0\0\x19{'width': 9, 'height': 9}!",
        b'\0\0\0\x21{"width": 99999, "height": 99999}',
        b'\0\0\0\x1b{"width": -3, "height": -3}',
        b"\xff\xff\xff\xff",
        b'\0\0\0\x19{"width": 2, "height": 2}xx',
    ],
)
def test_a_child_that_lies_is_not_believed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    liar = f"import os; os.write(0, b'\\0\\0\\0\\x0f{{\"ready\": true}}'); os.read(0, 4); os.write(0, {said!r}); os.read(0, 10**6)"
    spawn = subprocess.Popen

    def lying(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return spawn([sys.executable, "-c", liar], **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(subprocess, "Popen", lying)

    async def test() -> None:
        async with opened(n_children=1) as pictures:
            assert "its decoder died" in str(await outcome(pictures, small(1)))

    running(test)()


def test_a_decoder_that_does_not_start_is_the_servers_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("everwarm.gateway.picture_child.WORKER", "everwarm.no_such_module")

    async def test() -> None:
        async with opened() as pictures:
            with pytest.raises(Exception, match="does not start") as caught:
                await pictures.decode(small(1))
            assert getattr(caught.value, "status", 0) == 500

    with caplog.at_level(logging.ERROR):
        running(test)()
    assert "exit code 1" in caplog.text


def test_children_end_with_the_gateway_however_it_ends() -> None:
    """Even one that is stopped."""
    program = (
        "import asyncio, time\n"
        "from everwarm.gateway.pictures import *\n"
        f"pictures = [{small(1)!r}, {small(2)!r}]\n"
        "async def main():\n"
        "    p = Pictures()\n"
        "    await asyncio.gather(*map(p.decode, pictures))\n"
        "    print(*p.child_pids, flush=True)\n"
        "    time.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        pids = [int(pid) for pid in gateway.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_there, pids))
        os.kill(pids[0], signal.SIGSTOP)
        gateway.kill()
    deadline = time.monotonic() + 5
    while any(map(is_there, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_there, pids))


# many at once


@running
async def test_fifty_at_once_are_all_decoded_by_few() -> None:
    async with opened(max_waiting=50) as pictures:
        found = await asyncio.gather(*(pictures.decode(small(i)) for i in range(50)))
        assert [tuple(picture.rgb) for picture in found] == [(i, 0, 3) for i in range(50)]
        assert len(pictures.child_pids) <= 2 and pictures.n_decoded == 50


@running
async def test_the_queue_has_an_end() -> None:
    async with opened(n_children=1, max_waiting=3) as pictures:
        asked = [asyncio.create_task(pictures.decode(small(i))) for i in range(5)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in found] == [Picture] * 4 + [Overloaded]
        assert "waiting" in str(found[-1])


@running
async def test_who_leaves_the_queue_frees_a_place() -> None:
    async with opened(n_children=1, max_waiting=1) as pictures:
        await pictures.decode(small(0))
        (pid,) = pictures.child_pids
        os.kill(pid, signal.SIGSTOP)
        asked = [asyncio.create_task(pictures.decode(small(i))) for i in (1, 2)]
        await until(lambda: pictures._decoding.n_waiting == 1)
        with pytest.raises(Overloaded):
            await pictures.decode(small(3))
        asked[1].cancel()
        again = asyncio.create_task(pictures.decode(small(2)))  # at once: it must not join what is being dropped
        await until(lambda: asked[1].cancelled() and pictures._decoding.n_waiting == 1)
        os.kill(pid, signal.SIGCONT)
        assert (await asked[0]).rgb == b"\1\0\3" and (await again).rgb == b"\2\0\3"


@running
async def test_a_picture_nobody_waits_for_any_more_is_finished_and_remembered() -> None:
    async with opened(n_children=1) as pictures:
        asked = asyncio.create_task(pictures.decode(small(1)))
        await until(lambda: pictures._busy)
        asked.cancel()
        await until(lambda: pictures.n_decoded == 1 and pictures._idle)
        await pictures.decode(small(1))
        assert (pictures.n_decoded, pictures.n_remembered) == (1, 1)


@running
async def test_requests_take_turns() -> None:
    """One with many pictures does not hold up one with a single picture."""
    async with opened(n_children=1) as pictures:
        done: list[str] = []

        async def request(name: str, numbers: range) -> None:
            urls = ["data:;base64," + base64.b64encode(small(i)).decode() for i in numbers]
            await pictures.from_parts([{"type": "image_url", "image_url": url} for url in urls])
            done.append(name)

        await asyncio.gather(request("many", range(30)), request("one", range(40, 41)))
        assert done == ["one", "many"]


@running
async def test_a_request_brings_only_so_many_pictures() -> None:
    async with opened(max_pictures_per_request=2, max_pixels_per_request=15) as pictures:
        url = "data:;base64," + base64.b64encode(png([[0] * 10], color=GREY)).decode()
        part = {"type": "image_url", "image_url": url}
        with pytest.raises(BadRequest, match="3 pictures; send at most 2"):
            await pictures.from_parts([part] * 3)
        with pytest.raises(BadRequest, match="more than 15 pixels together"):
            await pictures.from_parts([part] * 2)
        assert len(await pictures.from_parts([part])) == 1


@running
async def test_the_same_picture_is_decoded_once() -> None:
    async with opened() as pictures:
        found = await asyncio.gather(*(pictures.decode(small(7)) for _ in range(20)))
        assert len({id(picture) for picture in found}) == 1
        await pictures.decode(small(7))
        assert (pictures.n_decoded, pictures.n_remembered) == (1, 1)


@running
async def test_memory_for_pictures_is_bounded_and_the_oldest_goes() -> None:
    async with opened(cache_bytes=9) as pictures:
        for i in (1, 2, 3, 1, 4, 1, 2):
            await pictures.decode(small(i))
            assert pictures._cache.n_bytes <= 9
        assert (pictures.n_decoded, pictures.n_remembered) == (5, 2)
        await pictures.decode(png([[0] * 30]))
        await pictures.decode(small(1))
        assert pictures.n_remembered == 3, "one too large to be kept sent another away"


@running
async def test_children_are_renewed_after_so_many_pictures() -> None:
    async with opened(n_children=1, n_pictures_per_child=3) as pictures:
        seen = []
        for i in range(9):
            await pictures.decode(small(i))
            seen += [pid for pid in pictures.child_pids if pid not in seen]
        assert len(seen) == 3 and pictures.n_deaths == 0
        await until(lambda: not any(map(is_there, seen)))


@running
async def test_closing_ends_what_runs_and_what_waits() -> None:
    async with opened(n_children=1) as pictures:
        await pictures.decode(small(0))
        os.kill(pictures.child_pids[0], signal.SIGSTOP)
        asked = [asyncio.create_task(pictures.decode(small(i))) for i in (1, 2)]
        await until(lambda: pictures._decoding.n_waiting == 1)
        await pictures.close()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(error, EngineStopped) for error in found), found
        with pytest.raises(EngineStopped):
            await pictures.decode(small(3))


@running
async def test_closing_while_a_child_starts_leaves_none() -> None:
    for pause_s in (0.0, 0.01, 0.05, 0.1):
        async with opened() as pictures:
            asked = asyncio.create_task(pictures.decode(small(0)))
            await asyncio.sleep(pause_s)
            (child,) = (*pictures._busy, None)[:1]
            await pictures.close()
            await asyncio.gather(asked, return_exceptions=True)
            assert not isinstance(child, Child) or child.pid is None or not is_there(child.pid)


@running
async def test_nobody_else_waits_while_a_large_picture_is_read() -> None:
    data = saved(scene(400, 300).resize((4000, 3000), Image.Resampling.NEAREST), "PNG", compress_level=0)[: 20 << 20]
    text = "data:image/png;base64," + base64.b64encode(data).decode()
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.002)
            longest_s = max(longest_s, time.perf_counter() - began)

    async with opened(max_bytes=20 << 20) as pictures:
        watching = asyncio.create_task(watch())
        with contextlib.suppress(BadRequest):
            await pictures.from_part({"type": "image_url", "image_url": text})
        watching.cancel()
    print(f"{len(text) / MIB:.0f} MiB of text, longest pause {longest_s * 1000:.0f} ms")
    assert longest_s < 0.5


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
