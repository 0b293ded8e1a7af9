"""Images in requests: right pixels from every kind of file, and clear sentences about everything else."""

import asyncio
import base64
import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import blake3
import pytest
from PIL import Image, ImageOps

from everwarm.errors import BadRequest
from everwarm.gateway.images.image_loader import DecodedImage, ImageLimits, ImageLoader
from support.image_files import (
    GREY,
    GREY_ALPHA,
    PALETTE,
    RGB,
    RGB_ALPHA,
    chunk,
    giants,
    png,
    samples,
    saved,
    scene,
    with_alpha,
)

Pixel = tuple[int, int, int]
PLAIN = png([[1, 2, 3, 4, 5, 6]])
URL = "data:image/png;base64," + base64.b64encode(PLAIN).decode()


class Decoder:
    """``ImageLoader`` in an event loop of its own."""

    def __init__(self, limits: ImageLimits) -> None:
        self.runner = asyncio.Runner()
        self.images = self.runner.run(self._made(limits))

    async def _made(self, limits: ImageLimits) -> ImageLoader:
        return ImageLoader(limits)

    def __call__(self, data: bytes) -> DecodedImage:
        return self.runner.run(self.images.decode(data))

    def part(self, part: Any) -> DecodedImage:
        return self.runner.run(self.images.from_part(part))

    def close(self) -> None:
        self.runner.run(self.images.close())
        self.runner.close()


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    decoder = Decoder(ImageLimits(n_children=1))
    yield decoder
    decoder.close()


def pixels(image: DecodedImage) -> list[list[Pixel]]:
    flat = [tuple(image.rgb[i : i + 3]) for i in range(0, len(image.rgb), 3)]
    return [flat[y * image.width : (y + 1) * image.width] for y in range(image.height)]  # type: ignore[misc]


def greys(*values: int) -> list[list[Pixel]]:
    return [[(value, value, value) for value in values]]


def on_white(samples: Sequence[int], alpha: int) -> tuple[int, ...]:
    return tuple(round((sample * alpha + 255 * (255 - alpha)) / 255) for sample in samples)


# golden pixels

A, B, C, D, E, F = ((10 * i, 250 - 10 * i, 99) for i in range(6))
UPRIGHT = {
    1: [[A, B, C], [D, E, F]],
    2: [[C, B, A], [F, E, D]],
    3: [[F, E, D], [C, B, A]],
    4: [[D, E, F], [A, B, C]],
    5: [[A, D], [B, E], [C, F]],
    6: [[D, A], [E, B], [F, C]],
    7: [[F, C], [E, B], [D, A]],
    8: [[C, F], [B, E], [A, D]],
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_exif_orientation_is_applied(decoder: Decoder, kind: str, orientation: int) -> None:
    image = Image.new("RGB", (3, 2))
    image.putdata([A, B, C, D, E, F])
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    assert pixels(decoder(saved(image, kind, exif=exif, **options))) == UPRIGHT[orientation]


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_orientation_is_applied_to_images_of_several_bands(decoder: Decoder, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(scene(1700, 1300), "JPEG", exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    image = decoder(data)
    assert (image.width, image.height) == upright.size and image.rgb == upright.tobytes()


def test_an_orientation_that_is_none_turns_nothing(decoder: Decoder) -> None:
    for exif in (b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x09\0\0\0\0\0\0", b"MM\0*\xff\xff\xff\xff", b"junk"):
        assert pixels(decoder(png([[1, 2, 3, 4, 5, 6]], extra=chunk(b"eXIf", exif)))) == [[(1, 2, 3), (4, 5, 6)]]


@pytest.mark.parametrize("alpha", [0, 1, 64, 128, 200, 254, 255])
def test_what_shines_through_is_white(decoder: Decoder, alpha: int) -> None:
    colors = ((10, 20, 30), (255, 0, 128))
    expected = [[on_white(color, alpha) for color in colors]]
    rgba = png([[*colors[0], alpha, *colors[1], alpha]], color=RGB_ALPHA)
    rgba16 = png([[s * 257 for s in (*colors[0], alpha, *colors[1], alpha)]], color=RGB_ALPHA, depth=16)
    palette = chunk(b"PLTE", bytes(colors[0] + colors[1])) + chunk(b"tRNS", bytes([alpha, alpha]))
    webp = Image.frombytes("RGBA", (2, 1), bytes([*colors[0], alpha, *colors[1], alpha]))
    for data in (rgba, rgba16, png([[0, 1]], color=PALETTE, extra=palette)):
        assert pixels(decoder(data)) == expected
    assert pixels(decoder(saved(webp, "WEBP", lossless=True, exact=True))) == expected
    assert pixels(decoder(png([[100, alpha]], color=GREY_ALPHA))) == [[on_white((100, 100, 100), alpha)]]


def test_a_transparent_colour_is_white_at_every_depth(decoder: Decoder) -> None:
    def clear(*values: int) -> bytes:
        return chunk(b"tRNS", struct.pack(f">{len(values)}H", *values))

    assert pixels(decoder(png([[0, 1]], color=GREY, depth=1, extra=clear(0)))) == greys(255, 255)
    assert pixels(decoder(png([[0, 1, 2]], color=GREY, depth=2, extra=clear(1)))) == greys(0, 255, 170)
    assert pixels(decoder(png([[0, 1, 15]], color=GREY, depth=4, extra=clear(0)))) == greys(255, 17, 255)
    assert pixels(decoder(png([[7, 8, 9]], color=GREY, extra=clear(8)))) == greys(7, 255, 9)
    grey16 = png([[0x1234, 0x1235, 0x1334]], color=GREY, depth=16, extra=clear(0x1234))
    assert pixels(decoder(grey16)) == greys(255, 0x12, 0x13)
    assert pixels(decoder(png([[1, 2, 3, 1, 2, 4]], extra=clear(1, 2, 3)))) == [[(255, 255, 255), (1, 2, 4)]]
    rgb16 = png([[0x0101, 0x0202, 0x0303, 0x4444, 0, 0]], depth=16, extra=clear(0x0101, 0x0202, 0x0303))
    assert pixels(decoder(rgb16)) == [[(255, 255, 255), (0x44, 0, 0)]]


def test_sixteen_bits_keep_their_upper_eight(decoder: Decoder) -> None:
    assert pixels(decoder(png([[0, 0x00FF, 0x1234, 0xFFFF]], color=GREY, depth=16))) == greys(0, 0, 0x12, 255)
    assert pixels(decoder(png([[0x1122, 0x3344, 0x5566]], color=RGB, depth=16))) == [[(0x11, 0x33, 0x55)]]


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_palettes_and_greys_of_every_depth(decoder: Decoder, depth: int) -> None:
    n = 1 << depth
    colors = [(i, 255 - i, i // 2) for i in range(n)]
    palette = chunk(b"PLTE", b"".join(map(bytes, colors)))
    assert pixels(decoder(png([range(n)], depth=depth, color=PALETTE, extra=palette))) == [colors]
    assert pixels(decoder(png([range(n)], depth=depth, color=GREY))) == greys(*(i * 255 // (n - 1) for i in range(n)))


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (8, 8), (13, 9)])
def test_interlaced_images(decoder: Decoder, size: tuple[int, int]) -> None:
    width, height = size
    rows = [[(7 * x + 3 * y + c) & 255 for x in range(width) for c in range(3)] for y in range(height)]
    assert decoder(png(rows, interlaced=True)).rgb == decoder(png(rows)).rgb == b"".join(map(bytes, rows))


def test_jpegs_of_every_colour_space(decoder: Decoder) -> None:
    def is_near(image: DecodedImage, color: Pixel) -> bool:
        return all(abs(found - wanted) <= 3 for found, wanted in zip(pixels(image)[5][5], color, strict=True))

    for progressive in (False, True):
        red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
        assert is_near(decoder(saved(red, "JPEG", progressive=progressive)), (255, 0, 0))
        assert is_near(decoder(saved(Image.new("RGB", (16, 16), (9, 200, 30)), "JPEG")), (9, 200, 30))
        assert is_near(decoder(saved(Image.new("L", (16, 16), 77), "JPEG", progressive=progressive)), (77, 77, 77))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "MPO"])
def test_the_first_frame_of_an_animation(decoder: Decoder, kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    image = decoder(saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options))
    assert (image.width, image.height) == (16, 16)
    assert image.rgb[0] > 250 and max(image.rgb[1:3]) < 5


def test_a_gif_whose_frame_is_smaller_than_its_canvas(decoder: Decoder) -> None:
    data = bytearray(saved(Image.new("P", (2, 2), 0), "GIF", transparency=255))
    data[6:10] = struct.pack("<HH", 4, 3)
    image = decoder(bytes(data))
    assert (image.width, image.height) == (4, 3)


def test_every_kind_gives_the_pixels_that_pillow_gives(decoder: Decoder) -> None:
    image = scene(300, 200)
    for data, seen in (
        (saved(image, "PNG"), image),
        (saved(image, "WEBP", lossless=True), image),
        (saved(image.quantize(50), "GIF"), image.quantize(50).convert("RGB")),
        (saved(image.convert("L"), "PNG"), image.convert("L").convert("RGB")),
    ):
        assert decoder(data).rgb == seen.tobytes()
    clear = with_alpha(image)
    paper = Image.new("RGBA", image.size, "white")
    paper.alpha_composite(clear)
    image = decoder(saved(clear, "PNG"))
    assert max(abs(a - b) for a, b in zip(image.rgb, paper.convert("RGB").tobytes(), strict=True)) <= 1


# digests


def test_the_digest_knows_size_and_pixels_and_nothing_of_the_file(decoder: Decoder) -> None:
    image = Image.frombytes("RGB", (6, 2), bytes(range(36)))
    png_file, webp_file = decoder(saved(image, "PNG")), decoder(saved(image, "WEBP", lossless=True))
    assert png_file.digest == webp_file.digest and len(png_file.digest) == 32
    about = struct.pack("<8sII8s", b"image", 6, 2, b"RGB")
    assert png_file.digest == blake3.blake3(about + bytes(range(36))).digest()
    wide = decoder(saved(Image.frombytes("RGB", (4, 3), bytes(range(36))), "PNG"))
    assert wide.rgb == png_file.rgb and wide.digest != png_file.digest


# what is refused


def refused(decoder: Decoder, data: bytes) -> str:
    with pytest.raises(BadRequest) as caught:
        decoder(data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "empty"),
        (b"hello", "no image of a known kind"),
        (b"BM" + bytes(60), "BMP"),
        (b"II*\0" + bytes(60), "TIFF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"\0\0\0\x20ftypavif" + bytes(60), "AVIF"),
        (b"\0\0\0\x20ftypheic" + bytes(60), "HEIC"),
        (b"<!DOCTYPE html><title>404</title>", "HTML"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "no image"),
        (b"RIFF\x24\0\0\0WEBPVP8 ", "header is damaged"),
        (b"\x89PNG\r\n\x1a\n", "damaged"),
        (b"\xff\xd8\xff\xe0", "damaged"),
        (b"GIF89a", "damaged"),
    ],
)
def test_other_kinds_are_refused_by_name(decoder: Decoder, data: bytes, named: str) -> None:
    message = refused(decoder, data)
    assert named in message and ("send" in message or "give" in message)


@pytest.mark.parametrize("side", [30_000, 16_000, 65_500])
def test_giants_are_refused_by_their_headers(decoder: Decoder, side: int) -> None:
    for kind, data in giants(side).items():
        message = refused(decoder, data)
        assert "pixels" in message and "at most" in message, (kind, message)


def test_images_without_pixels_are_refused(decoder: Decoder) -> None:
    for kind, data in giants(0).items():
        if kind not in ("webp", "gif"):  # there 0 is written as 1; here the frame makes its canvas larger
            assert "damaged" in refused(decoder, data) or "at least 1 × 1" in refused(decoder, data), kind


def test_a_header_that_does_not_match_its_pixels_is_damage(decoder: Decoder) -> None:
    for kind, data in giants(3000).items():
        if kind not in (
            "jpeg",
            "gif",
        ):  # these end where they say so, and the rest stays grey or clear, as in a browser
            assert "damaged" in refused(decoder, data), kind


def test_bombs_of_zeros_do_nothing(decoder: Decoder) -> None:
    zeros = zlib.compress(bytes(200 << 20), 9)  # 200 kB that become 200 MiB
    assert decoder(png([], color=GREY, size=(10, 10), pixels=zeros)).rgb == bytes(300)
    assert "damaged" in refused(decoder, png([[1, 2, 3]], extra=chunk(b"zTXt", b"name\0\0" + zeros)))
    assert "damaged" in refused(decoder, png([[1, 2, 3]], extra=chunk(b"iCCP", b"name\0\0" + zeros)))
    profile = zlib.compress(bytes(5 << 20))
    assert pixels(decoder(png([[1, 2, 3]], extra=chunk(b"iCCP", b"name\0\0" + profile)))) == [[(1, 2, 3)]]


def test_truncated_files_are_refused(decoder: Decoder) -> None:
    for kind, data in samples().items():
        if kind not in ("mpo", "apng", "gif animated", "webp animated"):  # the first frame may be whole
            assert "damaged" in refused(decoder, data[: len(data) // 2]), kind


def test_limits_are_said(decoder: Decoder) -> None:
    small = Decoder(ImageLimits(max_bytes=2000, max_pixels=5000, max_side=100, n_children=1))
    try:
        assert "larger than 2,000 bytes" in refused(small, PLAIN + bytes(2000))
        assert "at most 100 on each side" in refused(small, saved(Image.new("L", (101, 1)), "PNG"))
        assert "at most 5,000 in all" in refused(small, saved(Image.new("L", (100, 51)), "PNG"))
        assert small(saved(Image.new("L", (100, 50)), "PNG")).width == 100
    finally:
        small.close()


@pytest.mark.parametrize(
    "wrong", [{"max_bytes": 1}, {"max_side": 0}, {"timeout_s": 0.0}, {"child_memory": 1 << 20}, {"n_children": 0}]
)
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        ImageLimits(**wrong)


# content parts


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_image", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": URL.replace("data:image/png;base64", "DATA:Image/PNG;charset=utf-8;BASE64")},
        {"type": "image_url", "image_url": URL.replace("image/png", "image/jpeg")},
        {"type": "image_url", "image_url": URL.replace("image/png", "")},
        {"type": "image_url", "image_url": URL.replace(",", ",\r\n  ") + "\n"},
        {"type": "image_url", "image_url": URL.rstrip("=")},
    ],
)
def test_parts_as_clients_send_them(decoder: Decoder, part: dict[str, Any]) -> None:
    assert pixels(decoder.part(part)) == [[(1, 2, 3), (4, 5, 6)]]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({}, "is no image"),
        ({"type": "text", "text": "a"}, "is no image"),
        ({"type": "image_url"}, "needs an image"),
        ({"type": "image_url", "image_url": {}}, "needs an image"),
        ({"type": "image_url", "image_url": 7}, "needs an image"),
        ({"type": "input_image", "file_id": "file-1"}, "needs an image"),
        ({"type": "image_url", "image_url": "data:image/png,abc"}, "not a data: URL in base64"),
        ({"type": "image_url", "image_url": "data:;base64"}, "not a data: URL in base64"),
        ({"type": "image_url", "image_url": "data:" + "x" * 5000 + ";base64,AAAA"}, "not a data: URL in base64"),
        ({"type": "image_url", "image_url": "data:;base64,"}, "empty"),
        ({"type": "image_url", "image_url": "data:;base64,AAA-_AAA"}, "not base64"),
        ({"type": "image_url", "image_url": "data:;base64,AAAé"}, "not base64"),
        ({"type": "image_url", "image_url": "data:;base64,AAAAA"}, "not base64"),
        ({"type": "image_url", "image_url": "data:;base64,AA==AAAA"}, "not base64"),
        ({"type": "image_url", "image_url": "data:;base64," + "A" * (31 << 20)}, "larger than"),
        ({"type": "image_url", "image_url": "https://example.com/a.png"}, "does not fetch"),
        ({"type": "image_url", "image_url": "HTTP://169.254.169.254/"}, "does not fetch"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "send the image itself"),
        ({"type": "image_url", "image_url": "ftp://example.com/a"}, "send the image itself"),
        ({"type": "image_url", "image_url": "iVBORw0KGgo="}, "send the image itself"),
    ],
)
def test_parts_that_are_none_are_refused_with_a_sentence(decoder: Decoder, part: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        decoder.part(part)
    assert len(str(caught.value)) < 300
