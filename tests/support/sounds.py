"""Sounds: samples for the engine, and files as clients send them."""

from __future__ import annotations

import base64
import io
import wave

import blake3
import numpy as np

from everwarm.engine.process.messages import SentSound
from everwarm.llama.media.media_model import Embedding, MediaModel

RATE = 16_000


def samples(seed: int, seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    """A chord that fades, in a little noise."""
    rng = np.random.default_rng(seed)
    at = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * hz * at) for hz in rng.uniform(100, 2000, 3))
    return (0.2 * tones * np.exp(-at) + 0.01 * rng.standard_normal(len(at))).astype(np.float32)


def make_sound(seed: int, seconds: float = 1.0) -> SentSound:
    pcm = samples(seed, seconds).tobytes()
    return SentSound(blake3.blake3(pcm).digest(), len(pcm) // 4, pcm)


def encoded(media: MediaModel, pcm: bytes) -> Embedding:
    """All windows of a sound."""
    with media.hear(pcm) as sound:
        while (found := sound.step()) is None:
            pass
        return found


def wav(values: np.ndarray, rate: int = RATE, n_channels: int = 1) -> bytes:
    """16-bit PCM; every channel gets the same samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(n_channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.repeat((values * 32767).astype("<i2"), n_channels).tobytes())
    return file.getvalue()


def audio_part(seed: int, seconds: float = 1.0) -> dict[str, object]:
    """A content part as OpenAI's client sends it."""
    data = base64.b64encode(wav(samples(seed, seconds))).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def flac(values: np.ndarray, rate: int = RATE) -> bytes:
    """16 bits, one channel, nothing compressed. ``rate``: 16,000, whose code it writes."""
    assert rate == RATE
    whole = (values * 32767).astype(">i2")
    info = (4096).to_bytes(2, "big") * 2 + bytes(6)
    info += ((rate << 44) | (0 << 41) | (15 << 36) | len(whole)).to_bytes(8, "big") + bytes(16)
    out = b"fLaC\x80" + len(info).to_bytes(3, "big") + info
    for i, at in enumerate(range(0, len(whole), 4096)):
        block = whole[at : at + 4096]
        head = b"\xff\xf8\x75\x08" + chr(i).encode() + (len(block) - 1).to_bytes(2, "big")
        frame = head + bytes([_crc(head, 8, 0x07)]) + b"\x02" + block.tobytes()
        out += frame + _crc(frame, 16, 0x8005).to_bytes(2, "big")
    return out


def _crc(data: bytes, n_bits: int, polynomial: int) -> int:
    most, found = (1 << n_bits) - 1, 0
    for byte in data:
        found ^= byte << (n_bits - 8)
        for _ in range(8):
            found = ((found << 1) ^ (polynomial if found >> (n_bits - 1) else 0)) & most
    return found


def mp3(n_frames: int) -> bytes:
    """Silence: frames of 1,152 samples at 44.1 kHz in 128 kbit/s."""
    return (b"\xff\xfb\x90\xc0" + bytes(413)) * n_frames
