"""Replies as text: whole characters, and nothing that a stop string may begin."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.engine.process.reply_text import LEAST_LOG, ReplyText, left_probabilities
from everwarm.engine.request import Probs

OWL = "🦉".encode()


def say(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[str, str | None]:
    """All that is sent, up to the stop string or to the end."""
    reply, sent = ReplyText(stops), ""
    for piece in pieces:
        sent += reply.feed(piece)
        if reply.stop is not None:
            return sent, reply.stop
    return sent + reply.finish(), None


def naive(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text up to the earliest stop string to be complete; of several that are, up to the one that begins first."""
    for end in range(len(text) + 1):
        met = [(text[:end].find(stop), stop) for stop in stops if stop and stop in text[:end]]
        if met:
            at, stop = min(met)
            return text[:at], stop
    return text, None


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def test_a_character_is_sent_when_it_is_whole():
    reply = ReplyText()
    assert [reply.feed(bytes([byte])) for byte in OWL] == ["", "", "", "🦉"]
    assert reply.finish() == ""


def test_half_a_character_at_the_end_is_marked_as_broken():
    assert say([OWL[:2]]) == ("�", None)


def test_bytes_that_are_no_text_do_not_stop_the_rest():
    assert say([b"a\xff", b"b"]) == ("a�b", None)


def test_a_stop_string_is_found_across_pieces_and_not_sent():
    reply = ReplyText(("END",))
    assert [reply.feed(piece) for piece in (b"one E", b"N")] == ["one ", ""]
    assert (reply.feed(b"D and more"), reply.stop) == ("", "END")


def test_what_only_looked_like_a_stop_string_is_sent_after_all():
    reply = ReplyText(("END",))
    assert reply.feed(b"EN") == ""
    assert reply.feed(b"EN") == "EN"
    assert reply.feed(b"TRY") == "ENTRY"


def test_what_was_held_back_is_sent_at_the_end():
    assert say([b"the EN"], ("END",)) == ("the EN", None)


def test_the_first_of_several_stop_strings_counts():
    assert say([b"a stop here and there"], ("there", "stop")) == ("a ", "stop")


def test_empty_stop_strings_mean_nothing():
    assert say([b"text"], ("",)) == ("text", None)


def test_a_stop_string_may_hold_characters_of_several_bytes():
    assert say([b"x" + OWL[:1], OWL[1:3], OWL[3:] + b"!"], ("🦉!",)) == ("x", "🦉!")


@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=12))
def test_without_stop_strings_any_split_gives_the_text(text, cuts):
    assert say(split(text.encode(), cuts)) == (text, None)


@given(st.binary(max_size=40), st.lists(st.integers(0, 200), max_size=12))
def test_any_split_of_any_bytes_gives_what_they_decode_to(data, cuts):
    assert say(split(data, cuts)) == (data.decode("utf-8", "replace"), None)


@given(
    st.text("abé🦉", max_size=30),
    st.lists(st.text("abé🦉", max_size=4), max_size=3).map(tuple),
)
def test_byte_by_byte_the_reply_ends_where_the_text_first_says_so(text, stops):
    assert say([bytes([byte]) for byte in text.encode()], stops) == naive(text, stops)


@given(
    st.text("abé🦉", max_size=30),
    st.text("abé🦉", min_size=1, max_size=4),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_any_split_meets_one_stop_string_at_the_same_place(text, stop, cuts):
    assert say(split(text.encode(), cuts), (stop,)) == naive(text, (stop,))


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_nothing_is_sent_that_a_stop_string_would_have_held_back(text, stops, cuts):
    sent, stop = say(split(text.encode(), cuts), stops)
    assert not any(s in sent for s in stops)
    assert text.startswith(sent) and (stop is not None or sent == text)
    assert stop is None or text[len(sent) :].startswith(stop)


@pytest.mark.parametrize("n", [1, 10])
def test_no_more_is_held_back_than_a_stop_string_could_need(n):
    reply = ReplyText(("x" * n,))
    sent = "".join(reply.feed(b"x" * (n - 1) + b"y") for _ in range(5))
    assert len(sent) == 5 * n


def test_a_pick_without_a_share_has_the_least_probability_and_no_other_ones():
    """Shares are lost where numbers overflow."""
    nan = float("nan")
    assert left_probabilities(5, [(5, nan), (7, nan)]) == Probs(LEAST_LOG, ())
    assert left_probabilities(5, [(5, 0.0), (7, 1.0)]) == Probs(LEAST_LOG, ((7, 0.0),))
    assert left_probabilities(None, [(5, 1.0)]) is None
