"""Frames between gateway and engine: what goes in comes out, and nothing else is understood."""

import contextlib
import math
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.config import Constraint, Sampling, Thought
from everwarm.engine.process import messages as m
from everwarm.engine.process.messages import CutHints
from everwarm.engine.settings import EngineSettings
from everwarm.errors import EverwarmError, FrameTooLarge
from everwarm.state.policy import CheckpointParams

INFO = m.ModelInfo("d", "hybrid", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, "{{ x }}", "", "</s>", False, "b1")
SAMPLING = Sampling(temperature=0.5, seed=7, logit_bias={3: -1.5, 4: -math.inf})
TO_ENGINE = [
    m.Open("/m.gguf", EngineSettings(n_slots=2, checkpoints=CheckpointParams(4, 100, 1, 2), ram_bytes=5)),
    m.Submit(1),
    m.Submit(4, text="abc", hints=CutHints(stables=(1, 2), breakpoints=(3,))),
    m.Submit(2, text="naïve 🦉\0", hints=CutHints((1, 2), 2), sampling=SAMPLING, stop=("a", "b"), n_probs=0, slot=1),
    m.Submit(3, tokens=[0, 2047], use_cache=False, deterministic=True, session="s", namespace="n"),
    m.Submit(4, text="", constraint=Constraint("lark", "start: tag_0", ("<a>",), Thought("</b>"))),
    m.Cancel(4),
    m.Tokenize(5, "x", True),
    m.Embed(5, ["x", [1, 2]], "query"),
    m.Submit(5, text="x", lora=(0.5, -1.0)),
    m.AskPrompt(5, "cost", m.Submit(0, text="a", namespace="n")),
    m.AskPrompt(5, "hold", m.Submit(0, text="a", namespace="n"), 60.0, 0.5),
    m.AskPrompt(5, "count", m.Submit(0, text="x <p>", marker="<p>", images=(m.SentImage(b"d" * 32, 2, 2, b""),))),
    m.Prewarm("x", namespace="n", session="s"),
    m.Detokenize(6, [1, 2]),
    m.Inspect(7, "slots", "a"),
    m.Inspect(8, "counts"),
    m.SlotAction(9, 1, "restore", "a.bin", "n"),
    m.Inspect(10, "cache"),
    m.AskTree(11, 5, after=1 << 52, namespace="ab", words_of="ab", alone=True),
    m.CacheOrder(12, "pin", 7),
    m.CacheOrder(13, "drop", namespace="ab", pin_quota=0.5),
    m.Stop(),
]
TO_GATEWAY = [
    m.Loading(0.5),
    INFO,
    m.Fatal("m.gguf was changed", "model_changed"),
    m.Fatal("why"),
    m.Beat(None, 0, 0),
    m.Beat(1.5, 2, 3),
    m.Begun(1, 10, 5, 0),
    m.PromptRead(1, 5, 10, 0, 0.1),
    m.TextPiece(1, "text", [5], [m.TokenProb(5, b"\xff", -0.5, [(1, b"a", -1.0)])]),
    m.Done(1, "", "stop", None, 10, 5, 6, 3, 0, None, 0.1, 0.2, 0.3, 0.4),
    m.Failed(1, 400, "code", "message", 5, 4),
    m.Answer(1, [{"id": 0, "is_processing": False}]),
]


def name(message: m.Message) -> str:
    return type(message).__name__


def body(message: m.Message) -> bytes:
    """A frame's body, after checking that its header tells its length."""
    (data,) = m.frame(message)
    header = m.header_of(data)
    assert len(data) == m.HEADER.size + header.n_bytes
    assert header.n_message == header.n_bytes
    assert header.id == getattr(message, "id", 0)
    return bytes(data[m.HEADER.size :])


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
    for sizes in ((size, 1), (1, size)):
        with pytest.raises(FrameTooLarge, match=f"{size:,} bytes .* {m.MAX_FRAME_BYTES:,} are the most"):
            m.header_of(m.HEADER.pack(*sizes, 7)).check(m.MAX_FRAME_BYTES)


@pytest.mark.parametrize("size", [0, 1, m.MAX_FRAME_BYTES])
def test_a_frame_within_the_limit_is_taken(size):
    m.header_of(m.HEADER.pack(size, size, 7)).check(m.MAX_FRAME_BYTES)


@pytest.mark.parametrize(
    "message",
    [
        m.Submit(1, text="x" * 101),
        m.Submit(1, text="é" * 51),
        m.Submit(1, tokens=[1 << 30] * 30),
        m.Submit(1, stop=("x" * 60, "y" * 60)),
        m.Submit(1, constraint=Constraint("lark", "x" * 101)),
        m.Submit(1, sampling=Sampling(logit_bias=dict.fromkeys(range(99), 0.5))),
        m.Submit(1, images=(m.SentImage(b"d", 10, 10, bytes(300)),)),
        m.Prewarm("x" * 101),
        m.Tokenize(1, "x" * 101, True),
        m.SlotAction(1, 1, "save", "x" * 101),
        m.Answer(1, ["x" * 60, "y" * 60]),
    ],
    ids=name,
)
def test_what_does_not_fit_a_frame_is_refused_by_whoever_would_send_it(message):
    with pytest.raises(FrameTooLarge):
        m.frame(message, 100)
    assert sum(map(len, m.frame(message, 10_000))) > 100


def test_pixels_follow_the_message_as_they_are():
    seen, new = m.SentImage(b"a", 1, 1), [m.SentImage(b"b", 2, 1, b"123456"), m.SentImage(b"c", 1, 1, b"789")]
    submit = m.Submit(9, text="x", images=(new[0], seen, new[1]))
    frame = m.frame(submit)
    data, *pixels = frame
    assert pixels == [b"123456", b"789"]
    assert pixels[0] is new[0].data  # not copied
    header = m.header_of(data)
    assert (header.n_bytes, header.id) == (sum(map(len, frame)) - m.HEADER.size, 9)
    bare = m.read_to_engine(bytes(data[m.HEADER.size :]))
    assert m.wanted_pixels(bare) == [6, 3]
    assert m.with_pixels(bare, pixels) == submit


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 50))
def test_a_frame_that_is_too_large_is_skipped_and_its_request_told(sizes, cut):
    """Whatever the pieces in which the stream arrives; the frames around it are heard."""
    frames = [m.frame(m.Answer(i, "x" * size))[0] for i, size in enumerate(sizes)]
    bodies = [bytes(frame[m.HEADER.size :]) for frame in frames]
    buffer, stream, heard = m.FrameBuffer(most=40), b"".join(frames), []
    for at in range(0, len(stream), cut):
        heard += buffer.feed(stream[at : at + cut])
    assert [each.id if isinstance(each, m.Failed) else each for each in heard] == [
        i if len(body) > 40 else body for i, body in enumerate(bodies)
    ]


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
