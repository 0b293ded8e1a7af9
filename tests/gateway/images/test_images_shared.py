"""Images of many namespaces and of many choices: nobody finds another's, each is decoded once, and pixels are bounded."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from everwarm.config import GREEDY
from everwarm.engine.process import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.errors import Overloaded
from everwarm.gateway.admin.request_log import Caller, RequestLog
from everwarm.gateway.images.image_loader import DecodedImage, ImageLoader, Lending
from everwarm.gateway.parsing.output_parser import OutputParser
from everwarm.gateway.serving.generate import collect, generate
from everwarm.gateway.serving.request_preparer import lent_images
from everwarm.router.supervise.supervisor import Lend, Supervisor
from support.image_files import png
from support.image_harness import opened, running, small, until
from support.models import tiny_vision

MARKER = "<|an image|>"


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(data).decode()}}


# what is remembered


@running
async def test_a_namespace_decodes_what_another_has_sent() -> None:
    async with opened() as images:
        for namespace in ("a", "b"):
            await images.from_parts([part(small(1))], namespace)
        assert (images.n_decoded, images.n_remembered) == (2, 0)
        both = await asyncio.gather(*(images.decode(small(2), namespace) for namespace in "ab"))
        assert images.n_decoded == 4 and both[0] is not both[1], "they do not even wait for each other's"
        await images.decode(small(1), "a")
        assert (images.n_decoded, images.n_remembered) == (4, 1), "the control: one's own is known"


@running
async def test_one_namespace_does_not_push_out_all_of_another() -> None:
    async with opened(cache_bytes=12) as images:
        for i in (1, 2):
            await images.decode(small(i), "a")
        for i in range(8):
            await images.decode(small(i), "b")
        n_decoded = images.n_decoded
        for i in (1, 2):
            await images.decode(small(i), "a")
        assert images.n_decoded == n_decoded


@running
async def test_an_image_is_known_by_sight_when_its_pixels_have_gone() -> None:
    async with opened(cache_bytes=3) as images:
        first = await images.from_parts([part(small(1)), part(small(2)), part(small(1))])
        assert images.n_decoded == 2 and first[0].digest == first[2].digest != first[1].digest
        assert await images.from_parts([part(small(1)), part(small(2)), part(small(1))]) == first
        assert images.n_decoded == 2
        async with images.lent(first) as lent:
            assert [image.rgb for image in lent] == [b"\1\0\3", b"\2\0\3"], "each once"
            assert images.lending.n_bytes == 6
        assert images.lending.n_bytes == 0


# what is lent


@running
async def test_pixels_are_lent_within_a_bound_in_order_and_half_to_one_namespace() -> None:
    lending, got = Lending(100, max_waiting=10), list[str]()

    async def borrow(name: str, namespace: str, n_bytes: int, end: asyncio.Event) -> None:
        async with lending.of(namespace, n_bytes):
            got.append(name)
            assert lending.n_bytes <= 100
            await end.wait()

    ends = [asyncio.Event() for _ in range(7)]
    asked = (("a1", "a", 80), ("a2", "a", 10), ("b1", "b", 20), ("b2", "b", 40), ("c1", "c", 1), ("big", "d", 999))
    tasks = [asyncio.create_task(borrow(*each, end)) for each, end in zip(asked, ends, strict=False)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert got == ["a1", "b1"] and lending.n_waiting == 4, (
        "a has more than its half; b2 waits for room, and c behind it"
    )
    ends[0].set()
    await until(lambda: lending.n_waiting == 2)
    assert got == ["a1", "b1", "a2", "c1"], "b2 would have more than b's half, and holds up nobody"
    ends[2].set()
    await until(lambda: lending.n_waiting == 1)
    assert got[4:] == ["b2"] and lending.n_bytes == 51, "who needs everything waits for all"
    tasks[5].cancel()
    for end in ends:
        end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert lending.n_bytes == lending.n_waiting == 0 and not lending._lent


@running
async def test_more_than_everything_is_lent_alone_and_a_queue_has_an_end() -> None:
    lending = Lending(100, max_waiting=1)
    async with lending.of("a", 101):
        assert lending.n_bytes == 100
        waiting = asyncio.create_task(lending.of("b", 1).__aenter__())
        await until(lambda: lending.n_waiting)
        with pytest.raises(Overloaded, match="1 requests with images"):
            async with lending.of("c", 1):
                pass
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert lending.n_waiting == 0
    async with lending.of("c", 1):
        pass


# with a real engine


class Lender:
    """Lends as the server does, and counts."""

    def __init__(self, images: ImageLoader, sights: list[DecodedImage], namespace: str) -> None:
        self._lent = lambda: lent_images(images, sights, namespace)
        self.n_lent = 0

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[tuple[m.SentImage, ...]]:
        async with self._lent() as shown:
            self.n_lent += 1
            yield shown


async def choices(
    supervisor: Supervisor, sights: list[DecodedImage], namespace: str, lend: Lend, n: int, text: str
) -> int:
    """How many of the choices ended as they should."""
    shown = tuple(m.SentImage(sight.digest, sight.width, sight.height) for sight in sights)
    prompt = {"text": text + MARKER * len(sights), "marker": MARKER, "images": shown, "namespace": namespace}
    submit = m.Submit(0, **prompt, sampling=GREEDY, max_tokens=3, ignore_eos=True)
    follow = partial(RequestLog().follow, Caller("r", "model", "/", False))
    choices = await collect(generate(supervisor, [submit] * n, OutputParser, follow, lend), n)
    return sum(choice.finish != "" for choice in choices)


@running
async def test_many_choices_bring_an_image_once_and_another_namespace_brings_its_own() -> None:
    model, mmproj = tiny_vision("qwen35")
    supervisor = Supervisor(str(model), EngineSettings(n_slots=2, n_ctx=2048, n_threads=1, mmproj=str(mmproj)))
    supervisor.start()
    try:
        async with opened() as images:

            async def ask(namespace: str, n: int, text: str) -> int:
                """How often pixels were lent for it."""
                sights = await images.from_parts([part(png([[1, 2, 3] * 40] * 40))] * 2, namespace)
                lender = Lender(images, sights, namespace)
                assert await choices(supervisor, sights, namespace, lender.lend, n, text) == n
                return lender.n_lent

            async def n_encoded() -> int:
                return int((await supervisor.ask(m.Inspect, what="counts"))["n_images_encoded"])

            await supervisor.wait_ready()
            assert await ask("a", 6, "what?") == 1 and images.n_decoded == 1 and await n_encoded() == 1
            assert await ask("b", 1, "what?") == 1 and images.n_decoded == 2 and await n_encoded() == 2
            assert await ask("a", 3, "and now?") == 0 and images.n_decoded == 2, "the control: its own is known"
            assert await n_encoded() == 2 and images.lending.n_bytes == 0
            assert len(supervisor.pending) == 0
    finally:
        await supervisor.stop(0.0)
        supervisor.forget()
