"""What sounds are in every process: samples of one channel at one rate, and files that are told by how they begin."""

from __future__ import annotations

SAMPLE_RATE = 16_000  # the only one that sounds are decoded at


def is_sound(data: bytes) -> bool:
    """WAV, MP3 (with a tag, or from a frame on) or FLAC, as libmtmd tells them."""
    if len(data) < 12:
        return False
    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    is_mp3 = data[:3] == b"ID3" or (data[0] == 0xFF and data[1] & 0xE0 == 0xE0)
    return is_wav or is_mp3 or data[:4] == b"fLaC"
