"""Images in a sequence: by hand as libmtmd does it, bit for bit; and every wrong way shows in the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from everwarm.errors import BadRequest
from everwarm.llama.media.media_model import LOST, Embedding, MediaModel, MediaShape
from everwarm.llama.model import Model
from support.steps import N_UBATCH, same_bits, text
from support.vision import Eye, Logits, eye, make_image

ARCHS = ("qwen35", "gemma3")
SIZE = (352, 224)  # 11 × 7 cells on qwen35: more than one ubatch, and not square
SMALL = (160, 96)
CHUNKS = (1, N_UBATCH + 1, 2, 1)
OFF = 1e-2  # other chunks move the logits by less than a tenth of this

Sight = tuple[Model, MediaModel]


def seen(media: MediaModel, size: tuple[int, int] = SIZE, seed: int = 1) -> Embedding:
    return media.encode(make_image(*size, seed), *size)


def go_on(at: Eye, seq: int = 0, seed: int = 7) -> list[Logits]:
    tokens, rows, start = text(sum(CHUNKS), seed), [], 0
    for n in CHUNKS:
        rows.append(at.say(tokens[start : start + n], seq))
        start += n
    return rows


def story(sight: Sight, look: Callable[[Eye], Any], **options: Any) -> list[Logits]:
    """Text, whatever ``look`` does, and text: the logits of the latter."""
    with eye(*sight, **options) as at:
        at.say(text(30))
        look(at)
        return go_on(at)


def by_hand(image: Embedding, **how: Any) -> Callable[[Eye], None]:
    def look(at: Eye) -> None:
        assert at.see(image, **how) == 0, at.lib.last_words()

    return look


# the right way


def test_by_hand_is_as_libmtmd_does_it(both: Sight) -> None:
    image = seen(both[1])
    assert same_bits(story(both, by_hand(image)), story(both, lambda at: at.see_with_helper(image, *SIZE)))


@pytest.mark.parametrize("n_batch", [32, 64, 76, 77])
def test_a_causal_image_may_be_read_in_parts_as_libmtmd_does(n_batch: int, qwen: Sight) -> None:
    image = seen(qwen[1])
    assert image.shape == MediaShape(77, 11, 11, 7)
    parts = story(qwen, by_hand(image, n_batch=n_batch))
    assert same_bits(parts, story(qwen, lambda at: at.see_with_helper(image, *SIZE, n_batch=n_batch)))
    assert np.abs(parts[-1] - story(qwen, by_hand(image))[-1]).max() < 1e-3, "only the last bits may differ"


def test_the_first_thing_in_a_sequence_may_be_an_image(both: Sight) -> None:
    image = seen(both[1])
    rows = []
    for look in (lambda at: at.see(image), lambda at: at.see_with_helper(image, *SIZE)):
        with eye(*both) as at:
            look(at)
            rows.append(go_on(at))
    assert same_bits(*rows)


def test_two_images_and_text_between_them_are_as_libmtmd_does_it(both: Sight) -> None:
    first, second = seen(both[1]), seen(both[1], SMALL, seed=2)

    def hand(at: Eye) -> None:
        assert at.see(first) == 0
        at.say(text(5, seed=3))
        assert at.see(second) == 0

    def helper(at: Eye) -> None:
        at.see_with_helper(first, *SIZE)
        at.say(text(5, seed=3))
        at.see_with_helper(second, *SMALL)

    assert same_bits(story(both, hand), story(both, helper))


def test_the_logits_of_the_last_cell_are_row_minus_one(both: Sight) -> None:
    image = seen(both[1])
    rows = []
    for n_batch in (N_UBATCH, 2 * N_UBATCH):
        with eye(*both) as at:
            at.say(text(30))
            assert at.see(image, wants_logits=True, n_batch=n_batch) == 0
            rows.append(at.logits())
            assert np.isfinite(rows[-1]).all()
    assert np.abs(rows[0] - rows[1]).max() < 1e-3


def test_the_image_matters(both: Sight) -> None:
    one, other = (story(both, by_hand(seen(both[1], seed=seed))) for seed in (1, 2))
    assert np.abs(one[0] - other[0]).max() > 1e-2


def test_another_sequence_beside_it_is_not_touched(both: Sight) -> None:
    image = seen(both[1])
    rows = []
    for look in (True, False):
        with eye(*both) as at:
            at.say(text(30))
            if look:
                at.say(text(20, seed=5), seq=1)
                assert at.see(image, seq=1) == 0
                assert at.lib.memory_seq_rm(at.mem, 1, -1, -1)
            rows.append(go_on(at)[-1])
    assert np.abs(rows[0] - rows[1]).max() < 2e-2


# the position planes


def test_the_planes_are_t_y_x_z() -> None:
    planes = MediaShape(6, 3, 3, 2).positions(10, uses_mrope=True)
    assert planes.tolist() == [[10] * 6, [10, 10, 10, 11, 11, 11], [10, 11, 12, 10, 11, 12], [0] * 6]
    assert planes.dtype == np.int32


def test_without_mrope_positions_go_on_by_one() -> None:
    assert MediaShape(3, 3, 3, 1).positions(10, uses_mrope=False).tolist() == [[10, 11, 12]]


# wrong ways, which must show


@pytest.fixture
def planes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[np.ndarray], np.ndarray]], None]:
    """Change the planes on their way to libllama."""
    real = MediaShape.positions

    def change(how: Callable[[np.ndarray], np.ndarray]) -> None:
        monkeypatch.setattr(
            MediaShape, "positions", lambda self, start, uses_mrope: how(real(self, start, uses_mrope=uses_mrope))
        )

    return change


def distance(a: list[Logits], b: list[Logits]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


WRONG_PLANES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "x and y swapped": lambda p: p[[0, 2, 1, 3]],
    "x and y of an image that began elsewhere": lambda p: p - np.array([[0], [20], [20], [0]], np.int32),
    "t runs on": lambda p: p + np.array([[1], [0], [0], [0]], np.int32) * np.arange(p.shape[1], dtype=np.int32),
    "one plane for all": lambda p: p[[0, 0, 0, 0]],
}


@pytest.mark.parametrize("wrong", WRONG_PLANES)
def test_wrong_planes_show(wrong: str, qwen: Sight, planes: Callable) -> None:
    image = seen(qwen[1])
    right = story(qwen, by_hand(image))

    def look(at: Eye) -> None:
        assert at.see(image) == 0

    def continued(at: Eye) -> None:
        look(at)
        at.ends[0] = max(at.ends[0], int(at.lib.memory_seq_pos_max(at.mem, 0)) + 1)

    planes(WRONG_PLANES[wrong])
    assert distance(story(qwen, continued), right) > OFF


def test_going_on_behind_all_cells_instead_of_positions_shows(qwen: Sight) -> None:
    image = seen(qwen[1])

    def look(at: Eye) -> None:
        assert at.see(image) == 0
        at.ends[0] += image.shape.n_tokens - image.shape.n_pos

    assert distance(story(qwen, look), story(qwen, by_hand(image))) > OFF


def test_going_on_right_behind_libllamas_last_position_shows(qwen: Sight) -> None:
    image = seen(qwen[1])

    def look(at: Eye) -> None:
        assert at.see(image) == 0
        at.ends[0] = int(at.lib.memory_seq_pos_max(at.mem, 0)) + 1

    assert distance(story(qwen, look), story(qwen, by_hand(image))) > OFF


def test_a_second_image_at_the_place_of_the_first_shows(qwen: Sight) -> None:
    first, second = seen(qwen[1]), seen(qwen[1], SMALL, seed=2)

    def right(at: Eye) -> None:
        assert at.see(first) == 0 and at.see(second) == 0

    def wrong(at: Eye) -> None:
        assert at.see(first) == 0
        at.ends[0] -= first.shape.n_pos
        assert at.see(second) == 0
        at.ends[0] += first.shape.n_pos

    assert distance(story(qwen, wrong), story(qwen, right)) > OFF


def test_a_position_before_the_end_is_refused(both: Sight) -> None:
    image = seen(both[1])
    with eye(*both) as at:
        at.say(text(30))
        at.ends[0] = 10
        assert at.see(image) == -1


def test_a_causal_image_where_cells_must_see_each_other_shows(gemma: Sight) -> None:
    image = seen(gemma[1])
    right = story(gemma, by_hand(image))
    assert distance(story(gemma, by_hand(image, causal=True)), right) > OFF
    assert distance(story(gemma, by_hand(image, causal=True, n_batch=16)), right) > OFF


def test_attention_is_causal_again_after_an_image(gemma: Sight) -> None:
    """Also after one that failed: two runs that differ only in what came before a clean start must agree."""
    image = seen(gemma[1])
    rows = []
    for look in (False, True):
        with eye(*gemma) as at:
            if look:
                at.see(image)
                at.ends[0] = 3
                assert at.see(image) == -1
                at.lib.memory_clear(at.mem, True)
                at.ends[0] = 0
            rows.append(go_on(at))
    assert same_bits(*rows)


# refusals


def test_an_image_that_must_be_seen_at_once_and_is_larger_than_a_ubatch_is_refused(gemma: Sight) -> None:
    image = seen(gemma[1])
    assert image.shape.n_tokens == 36
    for small in ({"n_ubatch": 35}, {"n_batch": 35}):
        with eye(*gemma) as at:
            at.say(text(30))
            message = (
                "the image takes 36 tokens at once but a step has 35; start with a batch and ubatch size of at least 36"
            )
            with pytest.raises(BadRequest, match=message):
                at.see(image, **small)
            go_on(at)
    with eye(*gemma, n_batch=36, n_ubatch=36) as at:
        assert at.see(image) == 0


def test_no_room_changes_nothing(both: Sight) -> None:
    image = seen(both[1])
    rows = []
    for full in (False, True):
        with eye(*both, n_ctx=256) as at:
            at.say(text(30))
            if full:
                at.say(text(226 - 20, seed=4), seq=1)
                assert at.see(image) == 1
                at.lib.memory_seq_rm(at.mem, 1, -1, -1)
            rows.append(go_on(at)[-1])
    assert np.abs(rows[0] - rows[1]).max() < 2e-2


def test_no_room_for_the_second_part_is_told_apart(qwen: Sight) -> None:
    image = seen(qwen[1])
    with eye(*qwen, n_ctx=256) as at:
        at.say(text(256 - 70))
        assert at.see(image, n_batch=64) == LOST


def test_the_numbers_must_fit_the_model(qwen: Sight) -> None:
    image = seen(qwen[1])
    wrong = (
        replace(image, values=image.values[:-1]),
        replace(image, values=image.values[:, :-1]),
        replace(image, values=image.values.astype(np.float64)),
        replace(image, values=np.asfortranarray(image.values)),
        replace(image, shape=replace(image.shape, nx=7)),
    )
    with eye(*qwen) as at:
        for embedding in wrong:
            with pytest.raises(AssertionError):
                at.see(embedding)


# coming back


STEPS = ("before", "behind", "later")


def walk(at: Eye, image: Embedding, start: str, stop: str) -> dict[str, tuple[np.ndarray, int]]:
    """Text, the image, text: the state and the end after each."""
    cuts = {}
    for step in STEPS[STEPS.index(start) : STEPS.index(stop) + 1]:
        if step == "before":
            at.say(text(30))
        elif step == "behind":
            assert at.see(image) == 0
        else:
            at.say(text(9, seed=3))
        cuts[step] = (at.capture(), at.ends[0])
    return cuts


@pytest.mark.parametrize("cut", STEPS)
def test_a_state_taken_around_an_image_goes_on_bit_for_bit(cut: str, both: Sight) -> None:
    """Read on, and come back: the logits are those of a run that never left."""
    image, rows = seen(both[1]), []
    for leaves in (False, True):
        with eye(*both) as at:
            cuts = walk(at, image, "before", "later" if leaves else cut)
            if leaves:
                at.say(text(11, seed=9))
                at.restore(*cuts[cut])
            if cut != "later":
                walk(at, image, STEPS[STEPS.index(cut) + 1], "later")
            rows.append(go_on(at))
    assert same_bits(*rows)


def test_the_state_before_an_image_without_the_trim_shows(qwen: Sight) -> None:
    image = seen(qwen[1])
    with eye(*qwen) as at:
        at.say(text(30))
        state, end = at.capture(), at.ends[0]
        assert at.see(image) == 0
        at.put(state)
        at.ends[0] = end
        assert at.see(image) == 0
        wrong = go_on(at)
    assert distance(wrong, story(qwen, by_hand(image))) > OFF


def test_the_harmless_warning_is_not_kept(qwen: Sight) -> None:
    image = seen(qwen[1])
    qwen[0].lib.forget_log()
    story(qwen, by_hand(image))
    assert not [line for line in qwen[0].lib.all_words() if "non-consecutive" in line]
