"""Prompts: typed items, both counters, and how much two prompts share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everwarm.errors import BadRequest
from everwarm.prompt.prompt import MediaItem, Prompt
from everwarm.types import Mark, Position, TokenCount
from support.items import prompt_of

PEEK = 256  # where the comparison changes its stride


def image(name: str, n_tokens: int = 60, n_pos: int = 8) -> MediaItem:
    return MediaItem(name.encode().ljust(16, b"."), TokenCount(n_tokens), Position(n_pos))


CAT, DOG = image("cat"), image("dog")
TWIN_A, TWIN_B = image("same-code-a"), image("same-code-b")  # the code is made of the first four bytes only


def naive_common_prefix(a: list[int | MediaItem], b: list[int | MediaItem]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def test_an_image_counts_its_cells_but_advances_its_positions():
    prompt = prompt_of([1, 2, CAT, 3])
    assert len(prompt) == prompt.n_items == 4
    assert prompt.mark(2) == Mark(2, 2)
    assert prompt.mark(3) == Mark(62, 10)
    assert prompt.end == prompt.mark(4) == Mark(63, 11)


def test_two_images_add_up_and_text_alone_counts_one_to_one():
    assert prompt_of([CAT, 5, DOG]).end == Mark(121, 17)
    assert Prompt.of_tokens(range(9)).end == Mark(9, 9)


def test_marks_before_between_and_behind_images_follow_the_definition():
    items: list[int | MediaItem] = [7, CAT, 8, 9, DOG, CAT, 3]
    prompt = prompt_of(items)
    for n in range(len(items) + 1):
        n_tokens = sum(i.n_tokens if isinstance(i, MediaItem) else 1 for i in items[:n])
        n_pos = sum(i.n_pos if isinstance(i, MediaItem) else 1 for i in items[:n])
        assert prompt.mark(n) == Mark(n_tokens, n_pos)


def test_a_mark_outside_the_prompt_is_our_own_bug():
    prompt = Prompt.of_tokens([1, 2])
    for n in (-1, 3):
        with pytest.raises(AssertionError):
            prompt.mark(n)


def test_the_first_items_keep_their_counters_and_drop_later_media():
    prompt = prompt_of([1, CAT, 2, DOG, 3])
    first = prompt.first(3)
    assert first.end == prompt.mark(3)
    assert list(first.media) == [1]
    assert first.common_prefix(prompt) == 3


def test_a_prompt_can_be_empty():
    empty = Prompt.of_tokens([])
    assert len(empty) == 0 and empty.end == Mark(0, 0)
    assert empty.common_prefix(Prompt.of_tokens([1])) == 0


@pytest.mark.parametrize("bad", [[-1], [5, -3], [2**31], [2**40]])
def test_token_ids_out_of_range_are_the_callers_mistake(bad):
    with pytest.raises(BadRequest):
        Prompt.of_tokens(bad)


def test_an_absurdly_large_token_id_is_the_callers_mistake():
    with pytest.raises(BadRequest):
        Prompt.of_tokens([2**70])


def test_codes_are_copied_from_the_caller_and_cannot_be_written():
    array = np.array([1, 2, 3], np.int32)
    prompt = Prompt.of_tokens(array)
    array[0] = 9
    assert prompt.codes.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        prompt.codes[0] = 5


@pytest.mark.parametrize(("digest", "n_tokens", "n_pos"), [(b"short", 1, 1), (b"x" * 16, 0, 1), (b"x" * 16, 1, 0)])
def test_a_media_item_needs_a_digest_and_a_size(digest, n_tokens, n_pos):
    with pytest.raises(BadRequest):
        MediaItem(digest, n_tokens, n_pos)


def test_media_codes_are_negative_so_no_token_is_ever_taken_for_one():
    for item in (CAT, DOG, MediaItem(b"\0" * 16, 1, 1), MediaItem(b"\xff" * 16, 1, 1)):
        assert -(2**31) <= item.code < 0


def test_where_codes_collide_the_digests_decide():
    assert TWIN_A.code == TWIN_B.code  # the control: codes alone would call them equal
    a, b = prompt_of([1, TWIN_A, 2]), prompt_of([1, TWIN_B, 2])
    assert a.codes.tolist() == b.codes.tolist()
    assert a.common_prefix(b) == 1
    assert a.common_prefix(prompt_of([1, TWIN_A, 2])) == 3


def test_the_same_digest_with_another_size_is_another_item():
    a, b = prompt_of([1, image("cat", 60)]), prompt_of([1, image("cat", 61)])
    assert a.common_prefix(b) == 1


ITEM = st.one_of(st.integers(0, 3), st.sampled_from([CAT, DOG, TWIN_A, TWIN_B]))


@st.composite
def pairs(draw) -> tuple[list, list]:
    """Two prompts with a common beginning that is often longer than the first look."""
    base = draw(st.lists(ITEM, max_size=12)) * draw(st.sampled_from([1, 1, 30, 60]))
    a, b = draw(st.lists(ITEM, max_size=8)), draw(st.lists(ITEM, max_size=8))
    cut = draw(st.integers(0, len(base)))
    return base + a, draw(st.sampled_from([base + b, base[:cut] + b, base[:cut], [*base, *a, 1]]))


@settings(max_examples=200, deadline=None)
@given(pairs(), st.data())
def test_the_common_prefix_is_what_a_naive_loop_finds(pair, data):
    a, b = pair
    expected = naive_common_prefix(a, b)
    known = data.draw(st.integers(0, expected))
    first, second = prompt_of(a), prompt_of(b)
    assert first.common_prefix(second) == second.common_prefix(first) == expected
    assert first.common_prefix(second, known) == expected


@pytest.mark.parametrize("at", [0, 1, PEEK - 1, PEEK, PEEK + 1, 2 * PEEK, 999])
def test_a_single_difference_is_found_wherever_it_lies(at):
    tokens = list(range(1000))
    edited = [*tokens[:at], 5000, *tokens[at + 1 :]]
    assert Prompt.of_tokens(tokens).common_prefix(Prompt.of_tokens(edited)) == at
