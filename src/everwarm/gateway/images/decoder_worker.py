"""The process that decodes images: ``python -m everwarm.gateway.images.decoder_worker BOUNDS LIFELINE``.

Encoded images come in, and RGB rows go out; the head before them gives the size, or says what is wrong. An exploited
decoder is confined to this process. Knows Pillow; imports nothing else of Everwarm, so that little is in its memory.
"""

from __future__ import annotations

import importlib
import io
import socket
import warnings
from collections.abc import Iterator

from PIL import Image, ImageChops, PngImagePlugin, UnidentifiedImageError

from everwarm.confined_process import Bounds, Unusable, say, serve

WHITE = (255, 255, 255)
WANTED = "send a PNG, JPEG, WebP or GIF"
_BAND_PIXELS = 1 << 20
_OWN_BYTES = 64 << 20  # this process, and one band in its steps
_ORIENTATION = 0x0112
# Everything that an image can make Pillow import. It is imported first, because files cannot be opened later.
_PILLOW = ("ImagePalette", "ExifTags", "TiffImagePlugin", "MpoImagePlugin", "WebPImagePlugin")

_KINDS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF"}
_OTHERS = {b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF", b"<svg": "SVG", b"<?xml": "XML or SVG"}
_OTHERS |= {b"<!DOCTYPE": "HTML", b"<html": "HTML", b"\0\0\1\0": "an icon", b"\xff\x0a": "JPEG XL", b"PK\3\4": "a ZIP"}
_BRANDS = {b"avif": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"crx ": "a raw photo"}

# How an image with this EXIF orientation is turned upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def main() -> None:
    bounds = Bounds.of_this_process()
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # sizes are checked here, with better messages
    PngImagePlugin.MAX_TEXT_CHUNK = (
        8 << 20
    )  # large enough for colour profiles of printers and metadata of image generators
    Image.preinit()
    for name in _PILLOW:
        importlib.import_module(f"PIL.{name}")
    serve(answer, bounds)


def answer(wire: socket.socket, data: bytes, bounds: Bounds) -> None:
    try:
        image = read(data, bounds)
        turn = _TURNS.get(_orientation(image))
        width, height = image.size if turn is None or turn in _UPRIGHT else image.size[::-1]
    except Unusable as wrong:
        return say(wire, {"wrong": str(wrong)})
    except MemoryError:
        return say(wire, {"wrong": f"it needs more memory than an image may take: {WANTED} of fewer pixels"})
    except Exception as error:  # noqa: BLE001 - every exception of a decoder means a bad image
        return say(wire, {"wrong": f"it is damaged ({_description(error)}): save it again, or {WANTED}"})
    say(wire, {"width": width, "height": height})
    for rows in bands(image, turn):
        wire.sendall(rows)


def _description(error: Exception) -> str:
    text = str(error) if isinstance(error, OSError | ValueError | SyntaxError) else ""
    return "".join(c for c in text[:120] if c.isprintable() and c not in "<>") or type(error).__name__


# images


def read(data: bytes, bounds: Bounds) -> Image.Image:
    """The decoded image, not yet upright. Nothing is decoded before the size in its header has been checked."""
    kind = kind_of(data)
    if kind == "WEBP":  # opening one takes memory for all its pixels
        _check(_webp_size(data), kind, 4, len(data), bounds)
    try:
        image = Image.open(io.BytesIO(data), formats=[kind])
    except UnidentifiedImageError:
        raise Unusable(f"it begins like a {kind} but its header is damaged: save it again, or {WANTED}") from None
    size = image.size
    _check(size, kind, len(image.getbands()), len(data), bounds)
    image.load()
    assert image.size == size, "the size changed"
    if kind == "PNG":
        _set_transparency(image, depth=data[24])
    return image


def kind_of(data: bytes) -> str:
    """The format by content; a declared type does not matter."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    for beginning, kind in _KINDS.items():
        if data.startswith(beginning):
            return kind
    other = next((name for beginning, name in _OTHERS.items() if data.startswith(beginning)), None)
    if data[4:8] == b"ftyp":
        other = _BRANDS.get(data[8:12], "a film")
    raise Unusable(f"it is {other}: {WANTED}" if other else f"it is no image of a known kind: {WANTED}")


def _webp_size(data: bytes) -> tuple[int, int]:
    chunk, body = data[12:16], data[20:30]
    if len(body) == 10:
        if chunk == b"VP8X":
            return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
        if chunk == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
            return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
        if chunk == b"VP8L" and body[0] == 0x2F:
            bits = int.from_bytes(body[1:5], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    raise Unusable(f"it begins like a WEBP but its header is damaged: save it again, or {WANTED}")


def _check(size: tuple[int, int], kind: str, n_bands: int, n_bytes: int, bounds: Bounds) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise Unusable(f"it has {width} × {height} pixels: send one with at least 1 × 1")
    if max(size) > bounds.max_side:
        raise Unusable(f"it has {width} × {height} pixels: send one of at most {bounds.max_side} on each side")
    if width * height > bounds.max_pixels:
        raise Unusable(f"it has {width} × {height} pixels: send one of at most {bounds.max_pixels:,} in all")
    most = (bounds.memory_bytes - _OWN_BYTES - 3 * n_bytes) // _bytes_per_pixel(kind, n_bands)
    if width * height > most:
        raise Unusable(
            f"it has {width} × {height} pixels, but a {kind} of this kind may have {max(0, most):,}: "
            "send it smaller, or as another kind"
        )


def _bytes_per_pixel(kind: str, n_bands: int) -> int:
    """The most memory that a decoder needs besides the file: Pillow 4; libjpeg 2 per band more, for the coefficients of a
    progressive image; libwebp 12 more, for three buffers."""
    return {"WEBP": 16, "JPEG": 4 + 2 * n_bands}.get(kind, 4)


def _set_transparency(image: Image.Image, depth: int) -> None:
    """A PNG names its transparent colour in samples of the file; converts it to the decoded samples."""
    value = image.info.get("transparency")
    if image.mode == "L" and isinstance(value, int):
        most = (1 << depth) - 1
        image.info["transparency"] = (value & most) * 255 // most
    elif image.mode == "RGB" and isinstance(value, tuple):
        image.info["transparency"] = tuple(sample >> 8 if depth == 16 else sample & 255 for sample in value)


_UPRIGHT = frozenset({_TURNS[2], _TURNS[3], _TURNS[4]})  # width stays width
_FROM_END = frozenset({_TURNS[3], _TURNS[4], _TURNS[7], _TURNS[8]})  # the first row was the last row or column


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1 (upright) if the tag cannot be read."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a damaged tag can raise almost anything
        return 1
    return found if isinstance(found, int) else 1


def bands(image: Image.Image, turn: Image.Transpose | None) -> Iterator[bytes]:
    """RGB rows from the top of the upright image, a band at a time: a second copy of the whole would not fit."""
    by_rows = turn is None or turn in _UPRIGHT
    width, height = image.size if by_rows else image.size[::-1]
    n_rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, n_rows):
        bottom = min(height, top + n_rows)
        start, stop = (height - bottom, height - top) if turn in _FROM_END else (top, bottom)
        band = flat(image.crop((0, start, width, stop) if by_rows else (start, 0, stop, width)))
        yield (band if turn is None else band.transpose(turn)).tobytes()


def flat(band: Image.Image) -> Image.Image:
    """RGB with eight bits, on a white background."""
    if band.mode == "I;16":
        return _flat_grey16(band)
    if not band.has_transparency_data:
        return band.convert("RGB")
    seen = band.convert("RGBA")
    paper = Image.new("RGB", band.size, WHITE)
    paper.paste(seen, mask=seen.getchannel("A"))
    return paper


def _flat_grey16(band: Image.Image) -> Image.Image:
    """The upper eight bits, as for colours. The transparent value is compared with all sixteen bits."""
    samples = band.tobytes()
    low, high = (Image.frombytes("L", band.size, samples[i::2]) for i in (0, 1))
    clear = band.info.get("transparency")
    if isinstance(clear, int):
        is_low, is_high = (
            half.point([255 * (value == part) for value in range(256)])
            for half, part in ((low, clear & 255), (high, clear >> 8))
        )
        high.paste(255, mask=ImageChops.darker(is_low, is_high))
    return high.convert("RGB")


if __name__ == "__main__":
    main()
