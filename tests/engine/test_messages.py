"""Frames between gateway and engine: what goes in comes out, and nothing else is understood."""

import contextlib
import math
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.config import Form, Sampling, Thought
from everwarm.engine import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.errors import EverwarmError
from everwarm.state.params import CheckpointParams

INFO = m.ModelInfo("d", "hybrid", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, "{{ x }}", "", "</s>", False, "b1")
SAMPLING = Sampling(temperature=0.5, seed=7, logit_bias={3: -1.5, 4: -math.inf})
TO_ENGINE = [
    m.Open("/m.gguf", EngineSettings(n_slots=2, checkpoints=CheckpointParams(4, 100, 1, 2), ram_bytes=5)),
    m.Submit(1),
    m.Submit(4, text="abc", stables=(1, 2), breakpoints=(3,)),
    m.Submit(2, text="naïve 🦉\0", boundaries=(1, 2), stable=2, sampling=SAMPLING, stop=("a", "b"), n_probs=0, slot=1),
    m.Submit(3, tokens=[0, 2047], use_cache=False, deterministic=True, session="s", namespace="n"),
    m.Submit(4, text="", form=Form("lark", "start: tag_0", ("<a>",), Thought("</b>"))),
    m.Cancel(4),
    m.Tokenize(5, "x", True),
    m.Count(5, "x <p>", True, "<p>", (m.Picture(b"d" * 32, 2, 2, b""),)),
    m.Prewarm("x", namespace="n", session="s"),
    m.Detokenize(6, [1, 2]),
    m.AskSlots(7),
    m.AskStats(8),
    m.SlotAction(9, 1, "restore", "a.bin", "n"),
    m.AskCache(10),
    m.AskTree(11, 5, after=1 << 52, namespace="ab", words_of="ab", alone=True),
    m.CacheOrder(12, "pin", 7),
    m.CacheOrder(13, "drop", namespace="ab", pin_quota=0.5),
    m.Stop(),
]
TO_GATEWAY = [
    m.Loading(0.5),
    m.Ready(INFO),
    m.Changed("m.gguf was changed"),
    m.Fatal("why"),
    m.Beat(None, 0, 0),
    m.Beat(1.5, 2, 3),
    m.Begun(1, 10, 5, 0),
    m.PromptRead(1, 5, 10, 0, 0.1),
    m.Piece(1, "text", [5], [m.TokenProb(5, b"\xff", -0.5, [(1, b"a", -1.0)])]),
    m.Done(1, "", "stop", None, 10, 5, 6, 3, 0, None, 0.1, 0.2, 0.3, 0.4),
    m.Failed(1, 400, "code", "message", 5, 4),
    m.Answer(1, [{"id": 0, "is_processing": False}]),
]


def name(message: m.Message) -> str:
    return type(message).__name__


def body(message: m.Message) -> bytes:
    """A frame's body, after checking that its header tells its length."""
    frame = m.frame(message)
    size = m.frame_size(frame[: m.HEADER.size])
    assert len(frame) == m.HEADER.size + size
    return frame[m.HEADER.size :]


@pytest.mark.parametrize("message", TO_ENGINE, ids=name)
def test_what_the_gateway_says_is_what_the_engine_hears(message):
    assert m.read_to_engine(body(message)) == message


@pytest.mark.parametrize("message", TO_GATEWAY, ids=name)
def test_what_the_engine_says_is_what_the_gateway_hears(message):
    assert m.read_to_gateway(body(message)) == message


def test_every_kind_of_message_is_tried_here():
    assert {type(message) for message in TO_ENGINE} == set(typing.get_args(m.ToEngine))
    assert {type(message) for message in TO_GATEWAY} == set(typing.get_args(m.ToGateway))


@pytest.mark.parametrize("message", TO_GATEWAY, ids=name)
def test_the_engine_does_not_listen_to_itself(message):
    with pytest.raises(msgspec.ValidationError):
        m.read_to_engine(body(message))


@pytest.mark.parametrize("message", TO_ENGINE, ids=name)
def test_the_gateway_does_not_listen_to_itself(message):
    with pytest.raises(msgspec.ValidationError):
        m.read_to_gateway(body(message))


@pytest.mark.parametrize("size", [m.MAX_FRAME_BYTES + 1, (1 << 32) - 1])
def test_a_frame_over_the_limit_is_refused_before_it_is_read(size):
    with pytest.raises(ValueError, match="over the limit"):
        m.frame_size(m.HEADER.pack(size))


@pytest.mark.parametrize("size", [0, 1, m.MAX_FRAME_BYTES])
def test_a_frame_within_the_limit_is_taken(size):
    assert m.frame_size(m.HEADER.pack(size)) == size


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_becomes_nothing(data):
    for read in (m.read_to_engine, m.read_to_gateway):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            read(data)


@given(st.sampled_from([*TO_ENGINE, *TO_GATEWAY]), st.data())
def test_a_cut_or_changed_frame_is_refused_or_is_another_message(message, data):
    whole = bytearray(body(message))
    at = data.draw(st.integers(0, len(whole) - 1))
    for spoilt in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :]):
        for read in (m.read_to_engine, m.read_to_gateway):
            with contextlib.suppress(
                msgspec.MsgspecError, ValueError, EverwarmError
            ):  # settings refuse in their own words
                assert isinstance(read(bytes(spoilt)), m.Message)
