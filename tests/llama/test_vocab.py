"""Text to tokens and back, for the byte vocabulary and the embedded model's."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everwarm.errors import BadRequest
from everwarm.llama import abi, vocab
from everwarm.llama.model import Model
from everwarm.llama.vocab import Vocab

IM_START, IM_END, END_OF_TEXT, THINK, END_THINK = 257, 258, 256, 259, 260
TRICKY = "0123456789 \t\r\n\v\f\x00\x1b\u00a0\u2028\u3000\ufeff<|>_/'sthinkimendrt"
TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(TRICKY)), max_size=120)


@pytest.fixture(scope="module")
def bytes_vocab(open_tiny: Callable) -> Vocab:
    return open_tiny("llama", n_layers=2, width=64).vocab


@pytest.fixture(scope="module", params=["bytes", "embedded"])
def either(request: pytest.FixtureRequest, bytes_vocab: Vocab, embedded_model: Model) -> Vocab:
    return bytes_vocab if request.param == "bytes" else embedded_model.vocab


def plain(vocabulary: Vocab, text: str) -> list[int]:
    return vocabulary.tokenize(text, add_special=False, parse_special=False).tolist()


# there and back


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TEXTS)
@example("")
@example(" " * 500)
@example("e\u0301\u0928\u093f\U0001f468\u200d\U0001f469\x00\n")
@example("<|im_start|>user<|im_end|><think></think>")
def test_every_text_comes_back(either: Vocab, text: str) -> None:
    for parse_special in (False, True):
        tokens = either.tokenize(text, add_special=False, parse_special=parse_special)
        assert tokens.dtype == np.int32
        assert either.detokenize(tokens) == text.encode()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TEXTS.filter(lambda text: "think>" not in text))
def test_a_byte_model_has_one_token_per_byte(bytes_vocab: Vocab, text: str) -> None:
    assert plain(bytes_vocab, text) == list(text.encode())


def test_the_embedded_model_merges(embedded_model: Model) -> None:
    text = "What is the capital of France?"
    assert len(plain(embedded_model.vocab, text)) < len(text) / 2


def test_a_lone_surrogate_becomes_a_question_mark(either: Vocab) -> None:
    assert either.detokenize(plain(either, "a\ud800b")) == b"a?b"


def test_a_long_text_is_tokenized_whole(either: Vocab) -> None:
    text = "Nothing is read twice. " * 5000
    assert either.detokenize(plain(either, text)) == text.encode()


def test_a_text_longer_than_can_be_counted_is_refused(bytes_vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab, "MAX_TEXT_BYTES", 10)
    with pytest.raises(BadRequest, match="the text has 11 bytes; give at most 10"):
        plain(bytes_vocab, "ééééé!")


# pieces


def test_a_piece_may_be_part_of_a_character(bytes_vocab: Vocab) -> None:
    assert [bytes_vocab.piece(byte) for byte in "é".encode()] == [b"\xc3", b"\xa9"]


def test_the_pieces_of_the_byte_vocabulary_are_all_bytes_and_the_specials(bytes_vocab: Vocab) -> None:
    assert b"".join(bytes_vocab.piece(token) for token in range(256)) == bytes(range(256))
    assert bytes_vocab.piece(IM_START) == b"<|im_start|>"
    assert bytes_vocab.piece(THINK) == b"<think>"


def test_a_piece_longer_than_the_first_buffer_is_read_whole(bytes_vocab: Vocab) -> None:
    class Long:
        """A library whose tokens are long; asked with too little room it says how much it needs, negative."""

        def token_to_piece(self, _ptr: int, token: int, buffer: object, room: int, _strip: int, _special: bool) -> int:
            piece = bytes([token]) * 1000
            if room < len(piece):
                return -len(piece)
            buffer.raw = piece
            return len(piece)

    short = object.__new__(Vocab)
    short._lib, short._ptr, short.n_tokens, short._pieces = Long(), 0, 264, {}
    assert short.piece(65) == b"A" * 1000


def test_a_piece_is_the_same_when_asked_again(either: Vocab) -> None:
    assert either.piece(100) is either.piece(100)


@pytest.mark.parametrize("token", [-1, 264, 1 << 31])
def test_a_token_outside_the_vocabulary_is_refused(token: int, bytes_vocab: Vocab) -> None:
    with pytest.raises(BadRequest, match=f"token {token} is not in the vocabulary; give 0 to 263"):
        bytes_vocab.piece(token)
    with pytest.raises(BadRequest):
        bytes_vocab.detokenize([65, token])


# special tokens


def test_control_tokens_are_parsed_when_asked_for_and_think_always(bytes_vocab: Vocab) -> None:
    text = "<|im_start|><think>a</think><|im_end|>"
    parsed = bytes_vocab.tokenize(text, add_special=False, parse_special=True)
    assert parsed.tolist() == [IM_START, THINK, 97, END_THINK, IM_END]
    assert plain(bytes_vocab, text) == [*b"<|im_start|>", THINK, 97, END_THINK, *b"<|im_end|>"]


def test_the_special_tokens_are_told_with_their_attributes(bytes_vocab: Vocab) -> None:
    assert set(bytes_vocab.special) == set(range(256, 264))
    text, attributes = bytes_vocab.special[IM_START]
    assert text == "<|im_start|>" and attributes & abi.ATTR_CONTROL
    text, attributes = bytes_vocab.special[THINK]
    assert text == "<think>" and attributes & abi.ATTR_USER_DEFINED and not attributes & abi.ATTR_CONTROL


def test_the_end_of_generation_is_told(bytes_vocab: Vocab, embedded_model: Model) -> None:
    assert bytes_vocab.eog == {END_OF_TEXT, IM_END}
    assert bytes_vocab.eos == IM_END
    ends = {embedded_model.vocab.piece(token) for token in embedded_model.vocab.eog}
    assert ends == {b"<|im_end|>", b"<|endoftext|>"}


def test_no_model_here_adds_a_beginning_or_an_end(either: Vocab) -> None:
    assert not either.adds_bos and not either.adds_eos
    with_special = either.tokenize("abc", add_special=True, parse_special=False)
    assert with_special.tolist() == plain(either, "abc")


def test_a_token_that_does_not_exist_is_none() -> None:
    assert vocab.token_or_none(-1) is None
    assert vocab.token_or_none(0) == 0


def test_both_vocabularies_split_independently_of_their_neighbours(either: Vocab) -> None:
    assert either.splits_independently
