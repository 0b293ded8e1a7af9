"""An open projector: what it says of images, what it makes of them, and what it refuses before libmtmd sees it."""

from __future__ import annotations

import ctypes
import shutil
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everwarm.errors import BadRequest, ModelError, ModelFileError
from everwarm.llama import abi, lib
from everwarm.llama.lib import Mtmd, library_path
from everwarm.llama.media import mtmd_abi
from everwarm.llama.media.media_model import MAX_SIDE, Embedding, MediaModel, MediaShape
from everwarm.llama.model import Model
from everwarm.llama.system.model_files import file_digest, file_identity
from support.gguf_mutants import File, minicpm, take_apart, text
from support.models import tiny_model, tiny_vision
from support.vision import make_image

Sight = tuple[Model, MediaModel]

SIZES = ((2, 2), (3, 2), (96, 64), (64, 96), (224, 224), (31, 33), (400, 2), (2, 400), (352, 224), (500, 300))


def open_media(path: Path, model: Model) -> MediaModel:
    return MediaModel(path, model, n_threads=1, use_gpu=False)


def written(path: Path, file: File) -> Path:
    path.write_bytes(file.whole())
    return path


# facts


def test_a_qwen_projector_is_causal_and_uses_mrope(qwen: Sight) -> None:
    media = qwen[1]
    assert (media.around_image.begin, media.around_image.end) == ("<|vision_start|>", "<|vision_end|>")
    assert (media.is_causal, media.uses_mrope, media.n_embd) == (True, True, 64)


def test_a_gemma_projector_is_neither(gemma: Sight) -> None:
    media = gemma[1]
    assert (media.around_image.begin, media.around_image.end) == ("<start_of_image>", "<end_of_image>")
    assert (media.is_causal, media.uses_mrope, media.n_embd) == (False, False, 64)


def test_the_fingerprint_is_the_files_digest(both: Sight) -> None:
    media = both[1]
    assert media.fingerprint == file_digest(media.path) and media.files.identity(media.path) == file_identity(
        media.path
    )


def test_a_file_that_changed_while_open_has_no_fingerprint(qwen: Sight, tmp_path: Path) -> None:
    path = Path(shutil.copy(qwen[1].path, tmp_path / "mmproj.gguf"))
    with open_media(path, qwen[0]) as media:
        path.write_bytes(path.read_bytes() + b"more")
        with pytest.raises(ModelFileError, match=r"mmproj\.gguf was changed while it was open"):
            _ = media.fingerprint


def test_a_closed_projector_answers_nothing(qwen: Sight) -> None:
    with open_media(qwen[1].path, qwen[0]) as media:
        pass
    media.close()
    with pytest.raises(AssertionError, match="closed"):
        media.shape(64, 64)


# shapes and embeddings


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_shape_is_known_without_encoding(size: tuple[int, int], both: Sight) -> None:
    media = both[1]
    image = media.encode(make_image(*size), *size)
    assert image.shape == media.shape(*size)
    assert image.values.shape == (image.shape.n_tokens, media.n_embd)
    assert image.values.dtype == np.float32 and np.isfinite(image.values).all() and image.values.std() > 0.1


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ((96, 64), MediaShape(12, 4, 4, 3)),
        ((224, 224), MediaShape(49, 7, 7, 7)),
        ((1000, 700), MediaShape(682, 31, 31, 22)),
        ((8192, 8192), MediaShape(4096, 64, 64, 64)),
    ],
)
def test_known_sizes_have_known_shapes(size: tuple[int, int], shape: MediaShape, qwen: Sight) -> None:
    assert qwen[1].shape(*size) == shape


def test_every_gemma_image_has_the_same_shape(gemma: Sight) -> None:
    assert {gemma[1].shape(*size) for size in SIZES} == {MediaShape(36, 36, 36, 1)}


def test_the_same_image_gives_the_same_bits_whatever_came_before(both: Sight) -> None:
    model, media = both
    first = media.encode(make_image(96, 64), 96, 64)
    media.encode(make_image(500, 300, seed=2), 500, 300)
    assert media.encode(make_image(96, 64), 96, 64).values.tobytes() == first.values.tobytes()
    with open_media(media.path, model) as another:
        assert another.encode(make_image(96, 64), 96, 64).values.tobytes() == first.values.tobytes()


def test_another_image_gives_another_embedding_and_the_first_stays(both: Sight) -> None:
    media = both[1]
    first = media.encode(make_image(96, 64), 96, 64)
    kept = first.values.copy()
    second = media.encode(make_image(96, 64, seed=2), 96, 64)
    assert np.array_equal(first.values, kept) and np.abs(first.values - second.values).max() > 1e-2


def test_rows_are_rows_and_red_is_red(qwen: Sight) -> None:
    """An image lying on its side, or with its colours in another order, is another image."""
    media, pixels = qwen[1], np.frombuffer(make_image(96, 64), np.uint8).reshape(64, 96, 3)
    upright = media.encode(pixels.tobytes(), 96, 64)
    assert media.encode(pixels.swapaxes(0, 1).tobytes(), 64, 96).shape == MediaShape(12, 4, 3, 4)
    assert not np.array_equal(upright.values, media.encode(pixels[:, :, ::-1].tobytes(), 96, 64).values)


@pytest.mark.parametrize(
    "as_buffer", [memoryview, lambda data: memoryview(bytearray(data)), bytes], ids=["ro", "rw", "b"]
)
def test_pixels_may_come_in_any_buffer(as_buffer: Callable[[bytes], Any], qwen: Sight) -> None:
    data = make_image(96, 64)
    image = qwen[1].encode(as_buffer(data), 96, 64)
    assert image.values.tobytes() == qwen[1].encode(data, 96, 64).values.tobytes()


def test_many_threads_get_what_one_gets(both: Sight) -> None:
    media = both[1]
    jobs = [(make_image(*size, seed), *size) for seed, size in enumerate(SIZES * 3)]
    alone = [media.encode(*job) for job in jobs]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda job: (media.shape(*job[1:]), media.encode(*job)), jobs))
    for one, (shape, other) in zip(alone, together, strict=True):
        assert one.shape == shape == other.shape and one.values.tobytes() == other.values.tobytes()


def test_a_shape_is_told_while_an_image_is_encoded(qwen: Sight) -> None:
    media = qwen[1]
    with media._encoding:  # as if somebody encoded for a long time
        thread = threading.Thread(target=media.shape, args=(96, 64))
        thread.start()
        thread.join(5)
        assert not thread.is_alive()


def test_closing_waits_for_an_encoding(qwen: Sight) -> None:
    media = open_media(qwen[1].path, qwen[0])
    with media._encoding:
        thread = threading.Thread(target=media.close)
        thread.start()
        time.sleep(0.05)
        assert thread.is_alive() and media._ptr is not None
    thread.join(5)
    assert media._ptr is None


# images that are refused


@pytest.fixture
def untouched(both: Sight, monkeypatch: pytest.MonkeyPatch) -> MediaModel:
    """A projector whose libmtmd must not see any pixels."""

    def seen(*_: object) -> None:
        raise AssertionError("libmtmd saw it")

    monkeypatch.setattr(both[1]._mtmd, "bitmap_init", seen)
    return both[1]


@pytest.mark.parametrize(
    "size",
    [
        (0, 0),
        (0, 64),
        (64, 0),
        (1, 1),
        (1, 64),
        (-1, 64),
        (MAX_SIDE + 1, 64),
        (1 << 31, 2),
        (1 << 32, 1 << 32),
        (9000, 9000),
    ],
    ids=str,
)
def test_sizes_that_no_image_has_are_refused(size: tuple[int, int], untouched: MediaModel) -> None:
    message = f"an image of {size[0]}×{size[1]} pixels cannot be read; give sides of 2 to 16384 pixels"
    for ask in (lambda: untouched.shape(*size), lambda: untouched.encode(b"", *size)):
        with pytest.raises(BadRequest, match=message):
            ask()


@pytest.mark.parametrize("size", [(2, 401), (16384, 81)], ids=str)
def test_threads_are_no_images(size: tuple[int, int], untouched: MediaModel) -> None:
    with pytest.raises(BadRequest, match="is too thin; give sides of at most 1 to 200"):
        untouched.shape(*size)


@pytest.mark.parametrize("n_bytes", [0, 1, 96 * 64 * 3 - 1, 96 * 64 * 3 + 1, 96 * 64 * 4])
def test_the_number_of_bytes_must_fit_the_size(n_bytes: int, untouched: MediaModel) -> None:
    with pytest.raises(BadRequest, match=f"an image of 96×64 pixels has 18432 bytes, not {n_bytes}"):
        untouched.encode(bytes(n_bytes), 96, 64)


def test_bytes_with_gaps_are_refused(untouched: MediaModel) -> None:
    with pytest.raises(BadRequest, match="must lie one behind the other"):
        untouched.encode(memoryview(bytes(96 * 64 * 6))[::2], 96, 64)


def test_numbers_that_are_none_never_leave(qwen: Sight, tmp_path: Path) -> None:
    file = take_apart(qwen[1].path)
    nan = replace(file.tensors[-1], data=struct.pack("<f", float("nan")) * (len(file.tensors[-1].data) // 4))
    path = written(tmp_path / "nan.gguf", replace(file, tensors=(*file.tensors[:-1], nan)))
    with open_media(path, qwen[0]) as media, pytest.raises(ModelError, match=r"nan\.gguf gave no numbers .* \(NaN\)"):
        media.encode(make_image(96, 64), 96, 64)


# a projector that cuts large images into slices (MiniCPM-V's)


@pytest.fixture(scope="module")
def slicing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("slicing")
    model_path, path = tiny_vision("gemma3", width=128)
    renamed = model_path.read_bytes().replace(b"</think>", b"</image>").replace(b"<think>", b"<image>")
    (folder / "model.gguf").write_bytes(renamed)
    projector = written(folder / "mmproj.gguf", minicpm(take_apart(path)))
    with Model(folder / "model.gguf") as model, open_media(projector, model) as media:
        yield media


def test_an_image_that_would_be_cut_up_is_refused(slicing: MediaModel) -> None:
    for ask in (lambda: slicing.shape(800, 600), lambda: slicing.encode(make_image(800, 600), 800, 600)):
        with pytest.raises(BadRequest, match=r"cuts the image into .* pieces, and one is needed; give a smaller one"):
            ask()


def test_an_image_that_is_left_whole_is_not(slicing: MediaModel) -> None:
    assert (slicing.around_image.begin, slicing.around_image.end) == ("<image>", "</image>")
    image = slicing.encode(make_image(96, 64), 96, 64)
    assert image.shape == slicing.shape(96, 64) == MediaShape(8, 8, 8, 1)
    assert isinstance(image, Embedding) and slicing.is_causal


def test_a_token_that_the_model_lacks_is_not_put_around_images(slicing: MediaModel) -> None:
    """This style looks its tokens up one by one, and libmtmd takes -1 for one that is not there."""
    without, _ = tiny_vision("gemma3", width=128)
    with Model(without) as model, pytest.raises(ModelFileError, match=r"puts a token around images that .* has not"):
        open_media(slicing.path, model)


# files that are refused


def test_a_missing_projector_is_named(qwen: Sight, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot open projector .*none\.gguf: No such file or directory"):
        open_media(tmp_path / "none.gguf", qwen[0])


def test_a_directory_is_no_projector(qwen: Sight, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot open projector .*: Is a directory"):
        open_media(tmp_path, qwen[0])


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_a_model_is_no_projector(arch: str, qwen: Sight) -> None:
    with pytest.raises(ModelFileError, match=rf"is not a projector but a model of its own \({arch}\)"):
        open_media(tiny_model(arch), qwen[0])


def test_another_width_is_refused_with_both_numbers(qwen: Sight) -> None:
    _, path = tiny_vision("qwen35", width=128)
    wanted = rf"{path.name} is no projector for .*n_embd = 64.*n_embd = 128"
    with pytest.raises(ModelFileError, match=wanted):
        open_media(path, qwen[0])


def test_the_projector_of_another_model_puts_unknown_words_around_images(qwen: Sight, gemma: Sight) -> None:
    with pytest.raises(ModelFileError, match="puts <start_of_image> around images, which is no token of"):
        open_media(gemma[1].path, qwen[0])


def test_a_model_without_mrope_does_not_fit_a_qwen_projector(qwen: Sight) -> None:
    with Model(tiny_model("llama")) as model, pytest.raises(ModelFileError, match="was made for a model with M-RoPE"):
        open_media(qwen[1].path, model)


def test_a_projector_for_nothing_is_refused(qwen: Sight, tmp_path: Path) -> None:
    file = take_apart(qwen[1].path)
    pairs = tuple(replace(p, value=b"\0") if p.key == b"clip.has_vision_encoder" else p for p in file.pairs)
    with pytest.raises(ModelFileError, match="has neither a vision encoder"):
        open_media(written(tmp_path / "deaf.gguf", replace(file, pairs=pairs)), qwen[0])


def test_a_style_nobody_knows_is_refused_by_name(qwen: Sight, tmp_path: Path) -> None:
    file = take_apart(qwen[1].path)
    pairs = tuple(replace(p, value=text(b"new")) if p.key == b"clip.projector_type" else p for p in file.pairs)
    with pytest.raises(ModelFileError, match=r"is no projector for .*unknown projector type: new"):
        open_media(written(tmp_path / "new.gguf", replace(file, pairs=pairs)), qwen[0])


def test_a_file_name_need_not_be_utf8(qwen: Sight, tmp_path: Path) -> None:
    path = tmp_path / "mm\udcffproj 🧊.gguf"
    shutil.copy(qwen[1].path, path)
    with open_media(path, qwen[0]) as media:
        assert media.shape(96, 64).n_tokens == 12


# the library


def bind() -> Mtmd:
    """As ``lib().mtmd`` does at its first use, with functions of its own."""
    return Mtmd(ctypes.CDLL(str(library_path())), library_path())


@pytest.mark.parametrize("field", mtmd_abi.EXPECTED_DEFAULTS)
def test_a_default_that_differs_shows_another_build(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mtmd_abi.EXPECTED_DEFAULTS, field, 7)
    with pytest.raises(ModelError, match=rf"is not libllama {abi.BUILD} \(its default {field} is .*, expected 7\)"):
        bind()


@pytest.mark.parametrize("gone", ["use_gpu", "device", "image_marker", "media_marker", "cb_eval", "batch_max_tokens"])
def test_a_layout_that_moved_by_one_field_shows(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [field for field in mtmd_abi.MediaParams._fields_ if field[0] != gone]
    room = ("room", ctypes.c_byte * 64)  # C writes as many bytes as before
    moved = type("Moved", (ctypes.Structure,), {"_fields_": [*fields, room]})
    monkeypatch.setitem(mtmd_abi.FUNCTIONS, "mtmd_context_params_default", (moved, ()))
    monkeypatch.delitem(mtmd_abi.EXPECTED_DEFAULTS, gone, raising=False)
    with pytest.raises((ModelError, AttributeError)):
        bind()


def test_the_library_as_it_is_passes() -> None:
    for name in mtmd_abi.FUNCTIONS:
        assert callable(getattr(bind(), name.removeprefix("mtmd_")))


def test_libmtmd_may_lie_beside_libllama(tmp_path: Path) -> None:
    for name in ("libllama.so", "libmtmd.so"):
        (tmp_path / name).symlink_to(library_path())
    cdll, path = lib.media_library(object(), tmp_path / "libllama.so")  # a library without media in it
    assert path == tmp_path / "libmtmd.so" and cdll.mtmd_init_from_file


def test_a_build_without_libmtmd_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"media need libmtmd\.so, which cannot be loaded"):
        lib.media_library(object(), tmp_path / "libllama.so")
