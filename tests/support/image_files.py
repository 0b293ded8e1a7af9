"""Images as files, made by hand where Pillow would not write them: depths, interlacing, sizes that lie, bombs."""

import base64
import io
import random
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
N_SAMPLES = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGB_ALPHA: 4}
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
SIGNATURE = b"\x89PNG\r\n\x1a\n"

Row = Sequence[int]  # samples


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    rows: Sequence[Row],
    *,
    depth: int = 8,
    color: int = RGB,
    interlaced: bool = False,
    extra: bytes = b"",
    size: tuple[int, int] | None = None,
    pixels: bytes | None = None,
) -> bytes:
    """Any PNG; ``size`` and ``pixels`` (compressed) may be something else than the rows say."""
    n = N_SAMPLES[color]
    width, height = size or (len(rows[0]) // n, len(rows))
    if pixels is None:
        raw = b"".join(_passes(rows, depth, n)) if interlaced else b"".join(_lines(rows, depth))
        pixels = zlib.compress(raw)
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, int(interlaced))
    return SIGNATURE + chunk(b"IHDR", head) + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def _lines(rows: Sequence[Row], depth: int) -> Iterator[bytes]:
    for row in rows:
        bits = "".join(f"{sample:0{depth}b}" for sample in row)
        bits += "0" * (-len(bits) % 8)
        yield b"\0" + int(bits, 2).to_bytes(len(bits) // 8, "big")


def _passes(rows: Sequence[Row], depth: int, n: int) -> Iterator[bytes]:
    for x0, y0, dx, dy in ADAM7:
        columns = range(x0, len(rows[0]) // n, dx)
        part = [[sample for x in columns for sample in row[x * n : x * n + n]] for row in rows[y0::dy]]
        if columns:
            yield from _lines(part, depth)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def scene(width: int = 96, height: int = 64, mode: str = "RGB") -> Image.Image:
    """Something with gradients, edges and a little noise, always the same."""
    noise = Image.frombytes("L", (width, height), random.Random(7).randbytes(width * height))
    image = Image.merge(
        "RGB",
        (Image.linear_gradient("L").resize((width, height)), Image.radial_gradient("L").resize((width, height)), noise),
    )
    ImageDraw.Draw(image).ellipse((width // 4, height // 4, width // 2, height // 2), (250, 20, 10))
    return image.convert(mode)


def with_alpha(image: Image.Image) -> Image.Image:
    seen = image.convert("RGBA")
    seen.putalpha(Image.linear_gradient("L").resize(image.size).rotate(90))
    return seen


def samples() -> dict[str, bytes]:
    """One of each kind that clients send."""
    image = scene()
    clear = with_alpha(image)
    frames = [scene(96, 64).rotate(angle) for angle in (90, 180)]
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a scene"
    grey16 = [[(x * 700 + y * 900) & 0xFFFF for x in range(40)] for y in range(30)]
    return {
        "png": saved(image, "PNG"),
        "png alpha": saved(clear, "PNG", exif=exif),
        "png palette": saved(image.quantize(64), "PNG", transparency=3),
        "png grey16": png(grey16, depth=16, color=GREY),
        "png interlaced": png([list(range(60))] * 20, interlaced=True, extra=chunk(b"gAMA", b"\0\0\xb1\x8f")),
        "apng": saved(image, "PNG", save_all=True, append_images=frames),
        "jpeg": saved(image, "JPEG", exif=exif, quality=80),
        "jpeg progressive": saved(image, "JPEG", progressive=True, subsampling=0),
        "jpeg grey": saved(image.convert("L"), "JPEG"),
        "jpeg cmyk": saved(image.convert("CMYK"), "JPEG", progressive=True),
        "mpo": saved(image, "MPO", save_all=True, append_images=frames),
        "webp": saved(image, "WEBP", quality=60, exif=exif),
        "webp lossless": saved(clear, "WEBP", lossless=True, method=0),
        "webp animated": saved(image, "WEBP", save_all=True, append_images=frames, method=0),
        "gif": saved(image.quantize(32), "GIF", transparency=1),
        "gif animated": saved(image.quantize(16), "GIF", save_all=True, append_images=frames),
    }


def giants(side: int) -> dict[str, bytes]:
    """Small files whose headers speak of that many rows and columns."""
    size16 = struct.pack(">HH", side, side)
    jpeg = bytearray(saved(scene(), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = size16
    gif = bytearray(saved(scene().quantize(8), "GIF"))
    gif[6:10] = struct.pack("<HH", side, side)
    lossy = bytearray(saved(scene(), "WEBP"))
    lossy[26:30] = struct.pack("<HH", min(side, 0x3FFF), min(side, 0x3FFF))
    more = max(1, side) - 1
    canvas = struct.pack("<I", 0x10) + more.to_bytes(3, "little") * 2
    webp = b"VP8X" + struct.pack("<I", len(canvas)) + canvas + saved(scene(), "WEBP")[12:]
    return {
        "png": png([[0]], color=GREY, size=(side, side)),
        "jpeg": bytes(jpeg),
        "gif": bytes(gif),
        "webp lossy": bytes(lossy),
        "webp": b"RIFF" + struct.pack("<I", 4 + len(webp)) + b"WEBP" + webp,
    }


def scan_bomb(side: int, n_scans: int) -> bytes:
    """A progressive JPEG that goes over all its blocks again and again."""
    data = saved(Image.new("L", (side, side)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * n_scans + data[-2:]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Damaged in one of many ways."""
    file = bytearray(data)
    match rng.randrange(8):
        case 0:
            del file[rng.randrange(len(file)) :]
        case 1:
            for _ in range(rng.choice((1, 2, 8, 64))):
                file[rng.randrange(len(file))] ^= 1 << rng.randrange(8)
        case 2:  # near the beginning, where sizes and kinds are
            for _ in range(rng.choice((1, 3))):
                file[rng.randrange(min(64, len(file)))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 3:
            at = rng.randrange(len(file))
            file[at : at + rng.choice((1, 4, 100))] = b""
        case 4:
            at, n = rng.randrange(len(file)), rng.choice((1, 4, 1000))
            file[at:at] = rng.choice((b"\0" * n, b"\xff" * n, rng.randbytes(n), bytes(file[:n])))
        case 5:
            at, n = rng.randrange(len(file)), rng.choice((4, 64, 400))
            file[at : at + n] = rng.choice((b"\0" * n, b"\xff" * n, rng.randbytes(n)))
        case 6:
            other = rng.randrange(len(file))
            file += file[other:] if rng.random() < 0.5 else rng.randbytes(50)
        case 7:
            file[:] = file[: rng.randrange(1, 40)] + file[rng.randrange(len(file)) :]
    return with_right_sums(bytes(file)) if rng.random() < 0.7 else bytes(file)


def with_right_sums(data: bytes) -> bytes:
    """A PNG whose checksums are right again: damage must reach the decoder."""
    if not data.startswith(SIGNATURE):
        return data
    out, at = bytearray(SIGNATURE), 8
    while at + 12 <= len(data):
        n = struct.unpack(">I", data[at : at + 4])[0]
        body = data[at + 8 : at + 8 + n]
        out += struct.pack(">I", n) + data[at + 4 : at + 8] + body
        out += struct.pack(">I", zlib.crc32(data[at + 4 : at + 8] + body))
        at += 12 + n
    return bytes(out + data[at:])


def data_url(seed: int, width: int = 160, height: int = 96, form: str = "PNG") -> str:
    """An image of noise, as chats carry it."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"
