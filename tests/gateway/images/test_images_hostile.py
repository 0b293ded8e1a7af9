"""Images meant to do harm, and decoders that die, hang or lie: the gateway answers, and leaves nothing behind."""

import asyncio
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from everwarm.gateway.images.image_loader import DecodedImage
from support.image_files import giants, mutated, samples, saved, scan_bomb
from support.image_harness import CAMPAIGN, MIB, is_there, opened, outcome, peak_bytes, running, small, until

N_MUTATED = 20_000 if CAMPAIGN else 400
MEMORY = 512 * MIB
QUICK = 0.4


# harmful images


@running
async def test_damaged_files_are_refused_or_read() -> None:
    """By the thousand; no child takes more memory than it may, and none dies."""
    rng = random.Random(20)
    originals = list(samples().values())
    peak, n_read = 0, 0
    async with opened(n_images_per_child=1 << 30, cache_bytes=0) as images:
        for done in range(0, N_MUTATED, 20):
            batch = [mutated(originals[(done + i) % len(originals)], rng) for i in range(20)]
            for found in await asyncio.gather(*(outcome(images, data) for data in batch)):
                check_outcome(found)
                n_read += isinstance(found, DecodedImage)
            peak = max(peak, *map(peak_bytes, images.child_pids))
        assert images.n_deaths == 0 and len(images.child_pids) == 2
    print(f"{N_MUTATED} files, {n_read} read, peak {peak / MIB:.0f} MiB")
    assert peak <= MEMORY and n_read > N_MUTATED // 20


def check_outcome(found: DecodedImage | str) -> None:
    if isinstance(found, DecodedImage):
        assert found == DecodedImage.of(found.width, found.height, found.rgb)
        return
    assert re.search("(send|give|save) ", found) and len(found) < 400, found
    assert not re.search("object at|Too many open|Errno|/", found.replace("image/png", "")), found


@running
async def test_the_largest_images_fit_and_larger_ones_are_refused() -> None:
    """Each kind at its limit: as many pixels as are allowed, in the way that takes most memory."""
    blank = Image.new("RGB", (6400, 6250))
    webp = blank.crop((0, 0, 5300, 5200))
    largest = [saved(blank, "JPEG", progressive=True, subsampling=0), saved(webp, "WEBP", method=0)]
    if CAMPAIGN:
        clear = webp.convert("RGBA")
        largest += [saved(blank, "PNG", compress_level=1), saved(clear, "WEBP", lossless=True, method=0)]
        largest += [saved(blank.quantize(4), "GIF"), saved(blank.crop((0, 0, 6000, 6000)).convert("CMYK"), "JPEG")]
    async with opened(n_children=1) as images:
        for data in largest:
            image = await images.decode(data)
            assert image.width * image.height >= 27_000_000 and len(set(image.rgb[::9973])) <= 2
        (pid,) = images.child_pids
        peak = peak_bytes(pid)
        assert "may have" in str(await outcome(images, giants(6200)["webp"]))
    print(f"peak {peak / MIB:.0f} MiB")
    assert peak <= MEMORY


@running
async def test_an_image_that_takes_for_ever_is_given_up() -> None:
    async with opened(n_children=1, timeout_s=QUICK) as images:
        message = await outcome(images, scan_bomb(3000, 1000))
        assert "took longer than 0.4 s" in str(message) and images.n_deaths == 1
        assert isinstance(await outcome(images, small(1)), DecodedImage)


@running
async def test_a_child_has_little_to_lose() -> None:
    """Limits hold, no file can be opened, and it was told no secrets."""
    os.environ["EVERWARM_SERVE_API_KEY"] = "not for children"
    try:
        async with opened(n_children=1) as images:
            await images.decode(small(1))
            (pid,) = images.child_pids
            limits = Path(f"/proc/{pid}/limits").read_text()
            for name, most in (("address space", MEMORY), ("data size", MEMORY), ("open files", 0), ("file size", 0)):
                assert re.search(rf"Max {name}\s+{most}\s+{most} ", limits), limits
            assert re.search(r"Max cpu time\s+1\d ", limits), limits
            assert b"API_KEY" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        del os.environ["EVERWARM_SERVE_API_KEY"]


# children that die, hang or lie


@running
async def test_a_child_that_is_killed_costs_only_its_image() -> None:
    async with opened(n_children=1) as images:
        await images.decode(small(1))
        (pid,) = images.child_pids
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.create_task(outcome(images, small(2)))
        waiting = asyncio.create_task(outcome(images, small(3)))
        await until(lambda: images.decoding.n_waiting == 1)
        os.kill(pid, signal.SIGKILL)
        assert "its decoder died" in str(await asked)
        assert isinstance(await waiting, DecodedImage) and isinstance(await outcome(images, small(2)), DecodedImage)
        assert images.child_pids != [pid] and images.n_deaths == 1


@running
async def test_a_child_that_died_between_images_is_replaced_silently() -> None:
    async with opened(n_children=1) as images:
        await images.decode(small(1))
        (pid,) = images.child_pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_there(pid))
        assert isinstance(await outcome(images, small(2)), DecodedImage) and images.n_deaths == 0


@running
async def test_a_child_that_is_stopped_is_killed_in_time() -> None:
    async with opened(n_children=1, timeout_s=4 * QUICK) as images:
        await images.decode(small(1))
        (pid,) = images.child_pids
        os.kill(pid, signal.SIGSTOP)
        assert "took longer" in str(await outcome(images, small(2)))
        assert isinstance(await outcome(images, small(2)), DecodedImage)
        await until(lambda: not is_there(pid))


@pytest.mark.parametrize(
    "message",
    [
        b"\0\0\0\x02{}",
        b"\0\0\0\x19{'width': 9, 'height': 9}!",
        b'\0\0\0\x21{"width": 99999, "height": 99999}',
        b'\0\0\0\x1b{"width": -3, "height": -3}',
        b"\xff\xff\xff\xff",
        b'\0\0\0\x19{"width": 2, "height": 2}xx',
    ],
)
def test_a_child_that_lies_is_not_believed(message: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = b'\0\0\0\x0f{"ready": true}'
    liar = f"import os; os.write(0, {ready!r}); os.read(0, 4); os.write(0, {message!r}); os.read(0, 1 << 20)"
    spawn = subprocess.Popen

    def lying(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return spawn([sys.executable, "-c", liar], **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(subprocess, "Popen", lying)

    async def test() -> None:
        async with opened(n_children=1) as images:
            assert "its decoder died" in str(await outcome(images, small(1)))

    running(test)()


def test_a_decoder_that_does_not_start_is_the_servers_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("everwarm.gateway.images.image_loader.ImageProcess.worker", "everwarm.no_such_module")

    async def test() -> None:
        async with opened() as images:
            with pytest.raises(Exception, match="does not start") as caught:
                await images.decode(small(1))
            assert getattr(caught.value, "status", 0) == 500

    with caplog.at_level(logging.ERROR):
        running(test)()
    assert "exit code 1" in caplog.text and "did not start" in caplog.text


def test_children_end_with_the_gateway_however_it_ends() -> None:
    """Even one that is stopped."""
    program = (
        "import asyncio, time\n"
        "from everwarm.gateway.images.image_loader import *\n"
        f"images = [{small(1)!r}, {small(2)!r}]\n"
        "async def main():\n"
        "    p = ImageLoader()\n"
        "    await asyncio.gather(*map(p.decode, images))\n"
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
