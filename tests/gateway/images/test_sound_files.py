"""Sound files: what clients send becomes samples at 16 kHz in a child process; everything else is a 400 that says why."""

from __future__ import annotations

import base64
import random
import struct

import numpy as np
import pytest

from everwarm.errors import BadRequest
from everwarm.gateway.images.image_loader import DecodedSound, ImageLoader, part_of
from support.image_files import mutated
from support.image_files import samples as images
from support.image_harness import opened, running, until
from support.sounds import RATE, flac, mp3, samples, wav

SOUND = samples(1, 0.5)


def part(data: bytes) -> dict[str, object]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


async def heard(loader: ImageLoader, data: bytes) -> np.ndarray:
    found = await loader.from_part(part(data))
    assert isinstance(found, DecodedSound)
    return np.frombuffer(found.data, np.float32)


async def refusal(loader: ImageLoader, data: bytes) -> str:
    return await refusal_of_part(loader, base64.b64encode(data).decode())


async def refusal_of_part(loader: ImageLoader, coded: str) -> str:
    with pytest.raises(BadRequest) as refused:
        await loader.from_part({"type": "input_audio", "input_audio": {"data": coded}})
    return str(refused.value)


async def is_answered(loader: ImageLoader, data: bytes) -> bool:
    """With samples within the limit, or with a sentence about the sound."""
    try:
        return len(await heard(loader, data)) <= loader.limits.max_samples
    except BadRequest as error:
        return "sound" in str(error)


def riff(
    values: bytes, *, kind: int, bits: int, rate: int = RATE, n_channels: int = 1, says: int | None = None
) -> bytes:
    width = bits // 8 * n_channels
    head = struct.pack("<HHIIHH", kind, n_channels, rate, rate * width, width, bits)
    data = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", says or len(values)) + values
    return b"RIFF" + struct.pack("<I", 4 + len(data)) + b"WAVE" + data


@running
async def test_the_usual_files_become_the_same_samples() -> None:
    wide = (SOUND * (2**31 - 1)).astype("<i4")
    packed = wide.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes()
    files = {
        "float": (riff(SOUND.tobytes(), kind=3, bits=32), 1e-7),
        "double": (riff(SOUND.astype("<f8").tobytes(), kind=3, bits=64), 1e-7),
        "32": (riff(wide.tobytes(), kind=1, bits=32), 1e-6),
        "24": (riff(packed, kind=1, bits=24), 1e-6),
        "16": (wav(SOUND), 1e-4),
        "8": (riff((SOUND * 127 + 128).astype(np.uint8).tobytes(), kind=1, bits=8), 2e-2),
        "stereo": (wav(SOUND, n_channels=2), 1e-4),
        "flac": (flac(SOUND), 1e-4),
    }
    async with opened() as loader:
        for name, (data, off) in files.items():
            found = await heard(loader, data)
            assert found.shape == SOUND.shape and np.abs(found - SOUND).max() < off, name
        assert len(loader.child_pids) == 1 and loader.n_deaths == 0


@running
async def test_other_rates_are_brought_to_the_models() -> None:
    async with opened() as loader:
        for rate in (8_000, 22_050, 44_100, 48_000):
            found = await heard(loader, wav(samples(1, 0.5, rate), rate))
            spectra = [np.abs(np.fft.rfft(values[:7000])) for values in (found, SOUND)]  # a filter delays it a little
            assert abs(len(found) - len(SOUND)) <= 2 and np.corrcoef(*spectra)[0, 1] > 0.9, rate
        quiet = await heard(loader, mp3(20))
        assert abs(len(quiet) - 20 * 1152 * RATE / 44_100) < 1200 and not quiet.any()


@running
async def test_a_sound_is_decoded_once_and_known_by_its_samples() -> None:
    async with opened() as loader:
        (first,) = await loader.from_parts([part(wav(SOUND))], "me")
        (again,) = await loader.from_parts([part(wav(SOUND))], "me")
        assert isinstance(first, DecodedSound) and not first.data and first == again and loader.n_decoded == 1
        (other,) = await loader.from_parts([part(flac(SOUND))], "me")
        assert other.digest == first.digest, "another format, the same samples"
        (shorter,) = await loader.from_parts([part(wav(SOUND[:-1]))], "me")
        assert shorter.digest != first.digest
        async with loader.lent([first], "me") as lent:
            assert len(lent[0].data) == first.n_bytes == 4 * len(SOUND)


@running
async def test_what_is_no_sound_is_said_to_be_none() -> None:
    async with opened(max_samples=RATE, max_samples_per_request=RATE, max_bytes=1 << 20) as loader:
        for data in (images()["png"], b"hello, I am no sound", b"RIFF", b"OggS" + bytes(100)):
            assert "no sound of a known kind: send WAV, MP3 or FLAC" in await refusal(loader, data)
        assert "damaged" in await refusal(loader, b"ID3" + bytes(100))
        assert "damaged" in await refusal(loader, b"RIFF\0\0\0\0WAVE" + bytes(50))
        assert "longer than 1 s: send a shorter one" in await refusal(loader, wav(samples(1, 2)))
        assert "is not base64" in (wrong := await refusal_of_part(loader, "!" * 100)) and "image/png" not in wrong
        assert "larger than 1,048,576 bytes" in await refusal(loader, bytes(2 << 20))
        parts = [part(wav(samples(seed, 0.6))) for seed in (1, 2)]
        with pytest.raises(BadRequest, match="longer than 1 s together"):
            await loader.from_parts(parts)
        for wrong in (None, 5, {}, {"data": 5}, {"data": ""}, {"data": "!"}, {"url": "https://example.com/a.wav"}):
            with pytest.raises(BadRequest):
                await loader.from_part({"type": "input_audio", "input_audio": wrong})
        assert loader.n_deaths == 0


@running
async def test_lengths_that_lie_harm_nobody() -> None:
    async with opened() as loader:
        for says in (1, 1 << 20, (1 << 32) - 2):
            await loader.decode(images()["png"])
            assert await is_answered(loader, riff(bytes(3200), kind=1, bits=16, says=says))
        assert np.array_equal(await heard(loader, riff(SOUND.tobytes(), kind=3, bits=32)), SOUND)


@running
async def test_a_sound_that_does_not_fit_its_child_is_not_only_called_damaged() -> None:
    async with opened() as loader:
        assert "far too long" in await refusal(loader, riff(bytes(32_000), kind=1, bits=16, rate=1))
        assert loader.n_deaths == 1


@running
async def test_damaged_files_are_answered_and_at_most_their_child_dies() -> None:
    rng = random.Random(5)
    whole = (wav(SOUND), flac(SOUND), mp3(20), riff(SOUND.tobytes(), kind=3, bits=32))
    async with opened() as loader:
        for i in range(80):
            assert await is_answered(loader, mutated(whole[i % 4], rng))
        assert np.array_equal(await heard(loader, riff(SOUND.tobytes(), kind=3, bits=32)), SOUND)
        await until(lambda: len(loader.child_pids) <= 2)


def test_a_file_of_unknown_kind_is_told_by_its_beginning() -> None:
    for data in (wav(SOUND), flac(SOUND), mp3(3)):
        coded = base64.b64encode(data).decode()
        assert part_of(coded)["type"] == part_of(f"data:audio/wav;base64,{coded}")["type"] == "input_audio"
    for data in (*images().values(), b"", b"x"):
        assert part_of(base64.b64encode(data).decode())["type"] == "image_url"
    assert part_of("!")["type"] == part_of("data:,")["type"] == part_of("é" * 20)["type"] == "image_url"
