"""Sounds through libmtmd: their cells and embeddings, and their way into a sequence as libmtmd's own helper goes it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from everwarm.errors import BadRequest, ModelFileError
from everwarm.llama.media.media_model import MIN_SAMPLES, MediaModel, MediaShape
from everwarm.llama.model import Model
from support.models import tiny_audio, tiny_vision
from support.sounds import encoded, samples
from support.steps import same_bits, text
from support.vision import Eye, _helper, eye

Hearing = tuple[Model, MediaModel]
N_CELLS = 15  # of a window of 30 s


@pytest.fixture(scope="module", params=["qwen35", "gemma3"])
def hearing(request: pytest.FixtureRequest) -> Iterator[Hearing]:
    path, projector = tiny_audio(request.param)
    with Model(path) as model, MediaModel(projector, model, n_threads=1, use_gpu=False) as media:
        yield model, media


def test_a_projector_says_what_it_hears(hearing: Hearing) -> None:
    media = hearing[1]
    assert media.sample_rate == 16_000 and not media.sees
    assert media.sound_shape(MIN_SAMPLES) == media.sound_shape(16_000 * 29) == MediaShape.of_sound(N_CELLS)
    assert media.sound_shape(16_000 * 31) == MediaShape.of_sound(2 * N_CELLS), "a window more"
    with pytest.raises(BadRequest, match="refused"):
        media.shape(96, 64)
    model, projector = tiny_vision("qwen35")
    with Model(model) as seer, MediaModel(projector, seer, n_threads=1, use_gpu=False) as blind:
        assert blind.sees and not blind.sample_rate
        with pytest.raises(BadRequest, match="refused"):
            blind.sound_shape(16_000)


def test_the_same_sound_gives_the_same_numbers_and_another_one_others(hearing: Hearing) -> None:
    media = hearing[1]
    first, again, other = (encoded(media, samples(seed, 31).tobytes()) for seed in (1, 1, 2))
    assert first.shape == MediaShape.of_sound(2 * N_CELLS) and first.values.shape == (2 * N_CELLS, media.n_embd)
    assert np.array_equal(first.values, again.values) and not np.allclose(first.values, other.values, atol=1e-3)
    assert not np.array_equal(first.values[:N_CELLS], first.values[N_CELLS:])


def heard_by_helper(at: Eye, sound: bytes) -> None:
    """As libmtmd does it itself, window by window."""
    values = np.frombuffer(sound, np.float32)
    embedding = encoded(at.media, sound)
    end, row = ctypes.c_int32(-1), 0
    with at.media._sound_chunks(values) as chunks:
        for window in at.media._windows(chunks):
            part = np.ascontiguousarray(embedding.values[row : row + N_CELLS])
            given = (at.media._ptr, at.ptr, window, part.ctypes.data, at.ends[0], 0, at.options.n_batch)
            assert _helper()(*given, ctypes.byref(end), None, None) == 0
            at.ends[0], row = end.value, row + N_CELLS


def test_by_hand_is_as_libmtmd_does_it(hearing: Hearing) -> None:
    sound = samples(1).tobytes()
    rows = []
    for by_hand in (True, False):
        with eye(*hearing) as at:
            at.say(text(30))
            if by_hand:
                assert at.see(encoded(hearing[1], sound), causal=True) == 0
            else:
                heard_by_helper(at, sound)
            rows.append([at.say(text(20, seed=7)), at.say(text(3, seed=8))])
            assert at.ends[0] == 30 + N_CELLS + 23, "a position for each cell"
    assert same_bits(*rows)


def test_samples_that_cannot_be_heard_are_refused(hearing: Hearing) -> None:
    media = hearing[1]
    with pytest.raises(BadRequest, match="1600 to"):
        media.sound_shape(10)
    with pytest.raises(BadRequest, match="1600 to"):
        media.sound_shape(1 << 40)
    for wrong in (np.nan, np.inf, 1e30):
        values = samples(1)
        values[5] = wrong
        with pytest.raises(BadRequest, match="full scale is 1"):
            encoded(media, values.tobytes())
    with pytest.raises(BadRequest, match="32-bit"):
        encoded(media, b"123")


def test_a_projector_of_another_width_is_refused() -> None:
    _, projector = tiny_audio("qwen35", width=128)
    with Model(tiny_audio("qwen35")[0]) as model, pytest.raises(ModelFileError, match="is no projector"):
        MediaModel(projector, model, n_threads=1, use_gpu=False)
