"""Tokenizing piecewise gives what tokenizing the whole text gives, and costs what is new."""

import random
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everwarm.llama.model import Model
from everwarm.prompt.tokenizer import Tokenizer
from support.models import EMBEDDED, tiny_model

LSTRIP, RSTRIP = 1 << 7, 1 << 8
WHITE = " \n\t\r\v\f"


# a vocabulary written down from the definition


@dataclass
class FakeVocabulary:
    """Cuts specials out longest first (in bytes), as libllama does; then every 3 characters of a fragment are a token."""

    special: dict[int, tuple[str, int]]
    splits_independently: bool = True
    bos: int | None = 900
    eos: int | None = 901
    adds_bos: bool = True
    adds_eos: bool = True
    asked: list[str] = field(default_factory=list)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> np.ndarray:
        assert parse_special
        self.asked.append(text)
        tokens = [t for part in partition(text, self.special) for t in self._tokens(part, text)]
        first = [self.bos] if add_special and self.adds_bos else []
        last = [self.eos] if add_special and self.adds_eos else []
        return np.array([*first, *tokens, *last], np.int32)

    def _tokens(self, part: str | int, whole: str) -> list[int]:
        if isinstance(part, int):
            return [part]
        salt = "" if self.splits_independently else whole  # neighbours matter where a vocabulary says so
        return [1000 + zlib.crc32((part[i : i + 3] + salt).encode()) % 10**6 for i in range(0, len(part), 3)]


def partition(text: str, special: dict[int, tuple[str, int]]) -> list[str | int]:
    parts: list[str | int] = [text] if text else []
    for token, (name, attributes) in sorted(special.items(), key=lambda item: -len(item[1][0].encode())):
        parts = [
            new for part in parts for new in ([part] if isinstance(part, int) else cut(part, token, name, attributes))
        ]
    return parts


def cut(text: str, token: int, name: str, attributes: int) -> Iterable[str | int]:
    while name in text:
        left, text = text.split(name, 1)
        left = left.rstrip(WHITE) if attributes & LSTRIP else left
        text = text.lstrip(WHITE) if attributes & RSTRIP else text
        yield from ([left] if left else [])
        yield token
    yield from ([text] if text else [])


def special(*texts: str, **striped: int) -> dict[int, tuple[str, int]]:
    return {i: (text, striped.get(text, 0)) for i, text in enumerate(texts)}


CHAT = special("<|im_start|>", "<|im_end|>", "<think>", "</think>")


def agrees(vocab: FakeVocabulary, text: str, tokenizer: Tokenizer | None = None) -> bool:
    tokenizer = tokenizer or Tokenizer(vocab)
    return all(
        tokenizer.tokenize(text, add_special=both).codes.tolist()
        == vocab.tokenize(text, add_special=both, parse_special=True).tolist()
        for both in (False, True)
    )


def splitting_at(vocab: FakeVocabulary, text: str, name: str) -> list[int]:
    """What a careless tokenizer would do: trust this special to split."""
    head, tail = text.split(name, 1)
    return [
        int(t)
        for part in (head + name, tail)
        if part
        for t in vocab.tokenize(part, add_special=False, parse_special=True)
    ]


UNSAFE = [
    pytest.param(special("abc", "cde"), "xabcdey", "cde", id="overlapping"),
    pytest.param(special("abcd", "cdx"), "yyabcdxzz", "cdx", id="a shorter one overlapped by a longer one"),
    pytest.param(special("aa"), "xaaaay", None, id="self-overlapping, even"),
    pytest.param(special("aXa"), "aXaXaXb", None, id="self-overlapping"),
    pytest.param(special("<a>", "[<a>]"), "x[<a>]yyyy", "<a>", id="contained in a longer one"),
    pytest.param({0: ("<l>", LSTRIP)}, "ab  <l> cd", None, id="strips left"),
    pytest.param({0: ("<r>", RSTRIP)}, "ab <r>   cd", "<r>", id="strips right"),
    pytest.param({0: ("<l>", LSTRIP), 1: ("<e>", 0)}, "a<e>b  <l>c<e> d", None, id="strips left beside a safe one"),
]


@pytest.mark.parametrize(("specials", "text", "careless"), UNSAFE)
def test_specials_that_cannot_be_trusted_never_change_the_tokens(specials, text, careless):
    vocab = FakeVocabulary(specials)
    assert agrees(vocab, text)
    if careless:  # the control: trusting it would have been wrong
        assert (
            splitting_at(vocab, text, careless) != vocab.tokenize(text, add_special=False, parse_special=True).tolist()
        )


def test_a_vocabulary_whose_fragments_depend_on_each_other_is_always_asked_for_the_whole_text():
    vocab = FakeVocabulary(CHAT, splits_independently=False)
    text = "<|im_start|>user\nhello<|im_end|>more"
    assert agrees(vocab, text)
    assert set(vocab.asked) == {text}
    assert (
        splitting_at(vocab, text, "<|im_end|>") != vocab.tokenize(text, add_special=False, parse_special=True).tolist()
    )


def test_a_vocabulary_without_specials_is_asked_for_the_whole_text():
    assert agrees(FakeVocabulary({}), "plain text")
    assert Tokenizer(FakeVocabulary({0: ("", 0)}))._splitter is None  # an empty name would split everywhere


def test_a_special_with_fewer_characters_but_more_bytes_is_cut_out_first():
    """DeepSeek-style names hold characters of three bytes."""
    vocab = FakeVocabulary(special("xyz｜", "｜｜｜"))
    assert agrees(vocab, "xyz｜｜｜ab")


def test_a_special_of_white_space_beside_one_that_strips_is_not_trusted():
    vocab = FakeVocabulary({0: ("<long>", RSTRIP), 1: ("\n", 0)})
    assert agrees(vocab, "a<long>\n  bcd")


NAMES = st.lists(st.text("ab<>|", min_size=1, max_size=4), min_size=1, max_size=5, unique=True)


@st.composite
def vocabularies(draw) -> FakeVocabulary:
    names = draw(NAMES)
    attributes = [draw(st.sampled_from([0, 0, 0, LSTRIP, RSTRIP, LSTRIP | RSTRIP])) for _ in names]
    both = st.booleans()
    return FakeVocabulary(
        dict(enumerate(zip(names, attributes, strict=True))),
        adds_bos=draw(both),
        adds_eos=draw(both),
    )


@settings(max_examples=300, deadline=None)
@given(vocabularies(), st.data())
def test_any_vocabulary_of_overlapping_and_stripping_specials_gives_the_reference_partition(vocab, data):
    names = [name for name, _ in vocab.special.values()]
    piece = st.one_of(st.sampled_from(names), st.text("ab<>| \n", max_size=4))
    tokenizer = Tokenizer(vocab, memory_bytes=data.draw(st.sampled_from([0, 500, 1 << 20])), n_beginnings=2)
    texts = ["".join(data.draw(st.lists(piece, max_size=8))) for _ in range(2)]
    for text in (*texts, texts[0] + texts[1], texts[0]):
        assert agrees(vocab, text, tokenizer)


# the real vocabularies


@pytest.fixture(scope="module")
def models():
    with Model(EMBEDDED) as embedded, Model(tiny_model("llama", width=64, n_layers=1)) as byte_level:
        yield {"embedded": embedded, "byte-level": byte_level}


@pytest.fixture(scope="module")
def tokenizers(models):
    """One with room for everything and two that forget all the time, kept across all examples."""
    return {
        name: [Tokenizer(m.vocab), Tokenizer(m.vocab, memory_bytes=900, n_beginnings=2), Tokenizer(m.vocab, 0, 1)]
        for name, m in models.items()
    }


CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<|image_pad|>", "<|vision_start|>"]
PIECE = st.one_of(
    st.sampled_from(CONTROL),
    st.sampled_from([name[:cut] for name in CONTROL for cut in (1, 2, -1)] + ["|>", "im_start|>", "<|", "<<|im_end|>"]),
    st.sampled_from(
        ["user\n", "assistant\n", "The code is 48213.", "  ", "\n\n", "\t", "1234567890", "don't", "\u00a0"]
    ),
    st.text(max_size=6),
)
TEXT = st.lists(PIECE, max_size=12).map("".join)


@pytest.mark.parametrize("name", ["embedded", "byte-level"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXT, min_size=1, max_size=4), add_special=st.booleans(), order=st.randoms())
def test_piecewise_equals_whole(models, tokenizers, name, texts, add_special, order):
    vocab = models[name].vocab
    histories = [*texts, "".join(texts), "".join(texts[:2])]
    order.shuffle(histories)
    for text in histories:
        expected = vocab.tokenize(text, add_special=add_special, parse_special=True).tolist()
        for tokenizer in tokenizers[name]:
            assert tokenizer.tokenize(text, add_special=add_special).codes.tolist() == expected


def test_splitting_inside_a_control_token_would_be_noticed(models):
    """The control of the property above: tokens do depend on where a text is split."""
    vocab = models["embedded"].vocab
    text = "hello<|im_end|>"
    whole = vocab.tokenize(text, add_special=False, parse_special=True).tolist()
    halves = [vocab.tokenize(part, add_special=False, parse_special=True) for part in (text[:8], text[8:])]
    assert np.concatenate(halves).tolist() != whole


def tokens_wholly_before(vocab, text: str, offset: int) -> int:
    """The definition: tokens whose last byte lies before the offset."""
    end, n = len(text[:offset].encode()), 0
    for token in vocab.tokenize(text, add_special=False, parse_special=True).tolist():
        end -= len(vocab.piece(token))
        if end < 0:
            return n
        n += 1
    return n


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, data=st.data())
def test_counts_at_offsets_match_the_definition_where_a_byte_is_a_token(models, tokenizers, text, data):
    vocab = models["byte-level"].vocab
    offsets = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    expected = [tokens_wholly_before(vocab, text, offset) for offset in offsets]
    for tokenizer in tokenizers["byte-level"]:
        assert tokenizer.count_at(text, offsets) == expected


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, data=st.data())
def test_counts_at_offsets_are_never_behind_the_offset(models, tokenizers, text, data):
    vocab = models["embedded"].vocab
    offsets = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    counts = tokenizers["embedded"][0].count_at(text, offsets)
    assert all(n <= tokens_wholly_before(vocab, text, at) for n, at in zip(counts, offsets, strict=True))


def test_inside_a_word_a_count_may_be_one_low_but_never_high(models, tokenizers):
    text = "<|im_start|>user\nremembering the conversation"
    expected = [tokens_wholly_before(models["embedded"].vocab, text, at) for at in range(len(text))]
    found = tokenizers["embedded"][0].count_at(text, range(len(text)))
    assert all(0 <= right - count <= 1 for count, right in zip(found, expected, strict=True))


def test_counts_behind_control_tokens_are_exact_and_count_the_bos(models, tokenizers):
    text = "<|im_start|>user\nMy code is 48213.<|im_end|>\n<|im_start|>assistant\n"
    vocab = models["embedded"].vocab
    ends = [12, text.index("<|im_end|>") + 10, text.rindex("<|im_start|>") + 12, len(text), 0]
    expected = [tokens_wholly_before(vocab, text, end) for end in ends]
    assert tokenizers["embedded"][0].count_at(text, ends) == expected
    fake = FakeVocabulary(CHAT)
    assert Tokenizer(fake).count_at("<think>abc", [0, 7, 10], add_special=True) == [1, 2, 3]


def test_an_offset_outside_the_text_is_clamped(models, tokenizers):
    text = "one<|im_end|>two"
    whole = len(tokenizers["embedded"][0].tokenize(text))
    assert tokenizers["embedded"][0].count_at(text, [-5, 10_000]) == [0, whole]


WORDS = st.lists(
    st.sampled_from(["a", "remember", "the", "river's", "48213", "naïve", "x,", "(y)", "😀"]), min_size=1, max_size=30
)
JOINTS = st.sampled_from(["", " ", "  ", "\n", "\n\n", ".", "s", "9", "<|im_end|>"])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=WORDS, ends=st.tuples(JOINTS, JOINTS), more=st.tuples(WORDS, WORDS))
def test_what_is_sure_before_a_place_is_there_whatever_follows_it(tokenizers, words, ends, more):
    tokenizer = tokenizers["embedded"][0]
    before = "<|im_start|>user\n" + " ".join(words)
    one, other = (before + end + " ".join(after) for end, after in zip(ends, more, strict=True))
    count = tokenizer.sure_count_at(one, len(before))
    assert count <= int(tokenizer.tokenize(one).common_prefix(tokenizer.tokenize(other)))
    assert tokenizer.count_at(one, [len(before)])[0] - count <= 16


def test_what_is_sure_is_sure_without_words_and_outside_the_text(tokenizers):
    tokenizer = tokenizers["embedded"][0]
    text = "<|im_start|>" + "漢字" * 100
    assert tokenizer.sure_count_at(text, -5) == 0
    assert (
        0 < tokenizer.sure_count_at(text, 150) < tokenizer.sure_count_at(text, 10_000) < len(tokenizer.tokenize(text))
    )
    assert tokenizer.sure_count_at(text, len("<|im_start|>")) == 1


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=WORDS, more=WORDS, data=st.data())
def test_many_sure_places_are_what_each_of_them_is(models, words, more, data):
    text = "<|im_start|>user\n" + " ".join(words) + "<|im_end|>\n" + "\n".join(more)
    offsets = data.draw(st.lists(st.integers(-2, len(text) + 2), max_size=8))
    together = Tokenizer(models["embedded"].vocab).sure_counts_at(text, offsets)
    assert together == [Tokenizer(models["embedded"].vocab).sure_count_at(text, offset) for offset in offsets]


def test_many_sure_places_cost_the_text_once_and_then_nothing(models, monkeypatch):
    vocab, n_chars = models["embedded"].vocab, []
    tokenizer, text = Tokenizer(vocab), "<|im_start|>" + "some words of a long line\n" * 400
    plain = vocab.tokenize
    monkeypatch.setattr(
        vocab, "tokenize", lambda output, **more: (n_chars.append(len(output)), plain(output, **more))[1]
    )
    offsets = range(12, len(text), 150)
    counts = tokenizer.sure_counts_at(text, offsets)
    assert counts == sorted(counts)
    assert sum(n_chars) <= 2 * len(text) + 100
    n_before = len(n_chars)
    assert tokenizer.sure_counts_at(text, offsets) == counts
    assert sum(n_chars[n_before:]) <= len(text), "only the end behind the last control token"


# work


def message(i: int) -> str:
    return f"<|im_start|>user\nmessage number {i} " + "words and more words " * 6 + "<|im_end|>\n"


def test_one_new_message_costs_itself_however_long_the_history_is():
    vocab = FakeVocabulary(CHAT)
    tokenizer = Tokenizer(vocab)
    history = "".join(message(i) for i in range(2000))
    assert len(tokenizer.tokenize(history)) > 100_000
    vocab.asked.clear()
    longer = history + message(9999)
    tokens = tokenizer.tokenize(longer)
    assert sum(map(len, vocab.asked)) <= len(message(9999)) + 16 and len(vocab.asked) <= 4
    assert tokens.codes.tolist() == vocab.tokenize(longer, add_special=False, parse_special=True).tolist()


def test_counting_boundaries_of_a_long_history_asks_for_little():
    vocab = FakeVocabulary(CHAT)
    tokenizer = Tokenizer(vocab)
    history = "".join(message(i) for i in range(2000))
    tokenizer.tokenize(history)
    vocab.asked.clear()
    tokenizer.count_at(history, [m * len(message(0)) for m in range(5)])
    assert sum(map(len, vocab.asked)) <= 6 * len(message(0))


def test_without_memory_the_whole_history_is_paid_again():
    """The control: the proportional cost above comes from the memory."""
    vocab = FakeVocabulary(CHAT)
    tokenizer = Tokenizer(vocab, memory_bytes=0)
    history = "".join(message(i) for i in range(50))
    tokenizer.tokenize(history)
    vocab.asked.clear()
    tokenizer.tokenize(history + message(9999))
    assert sum(map(len, vocab.asked)) >= len(history)


def test_a_conversation_that_branches_pays_for_the_branch_only():
    vocab = FakeVocabulary(CHAT)
    tokenizer = Tokenizer(vocab)
    history = "".join(message(i) for i in range(300))
    tokenizer.tokenize(history)
    tokenizer.tokenize(history + message(1))
    vocab.asked.clear()
    tokenizer.tokenize(history + message(777))
    assert sum(map(len, vocab.asked)) <= 2 * len(message(777))


def test_what_is_remembered_stays_within_its_bounds():
    vocab = FakeVocabulary(CHAT)
    tokenizer = Tokenizer(vocab, memory_bytes=20_000, n_beginnings=4)
    for i in range(200):
        tokenizer.tokenize(message(i) + message(i + 1))
        assert tokenizer._fragments.n_bytes <= 20_000 and tokenizer._beginnings.n_bytes <= 20_000
        assert len(tokenizer._beginnings) <= 4


def test_a_namespace_pays_for_what_another_has_sent_and_only_once_for_its_own():
    vocab = FakeVocabulary(CHAT)
    tokenizer = Tokenizer(vocab)
    history = "".join(message(i) for i in range(50))

    def n_asked(namespace: str) -> int:
        vocab.asked.clear()
        tokenizer.within(namespace).tokenize(history)
        return sum(map(len, vocab.asked))

    whole = n_asked("a")
    assert whole > len(history) // 2
    assert n_asked("b") == whole, "what another sent must not be told from what nobody sent"
    assert n_asked("a") < len(message(0)) and n_asked("b") < len(message(0)), "the control: one's own is remembered"


def test_many_threads_share_one_memory(models):
    vocab = models["embedded"].vocab
    tokenizer = Tokenizer(vocab, memory_bytes=30_000, n_beginnings=3)
    wrong: list[str] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        history = ""
        for _ in range(60):
            history = (history if dice.random() < 0.8 else "") + message(dice.randrange(8))
            if (
                tokenizer.tokenize(history).codes.tolist()
                != vocab.tokenize(history, add_special=False, parse_special=True).tolist()
            ):
                wrong.append(history)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
