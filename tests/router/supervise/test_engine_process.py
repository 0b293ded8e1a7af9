"""What an engine's bytes become: messages in order, in the very call in which they come, until one cannot be read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everwarm.engine.process import messages as m
from everwarm.router.supervise.engine_process import Listener

SENT = (m.Begun(1, 9, 4, 0, 0), m.TextPiece(1, "so", [1]), m.TextPiece(1, " it", [2, 3]), m.Loading(0.5))


def as_bytes(*messages: Any) -> bytes:
    return b"".join(part for message in messages for part in m.frame(message))


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 16])
def test_messages_come_in_order_however_their_bytes_are_cut(size: int) -> None:
    async def run() -> None:
        got: list[Any] = []
        listener, data = Listener(got.append), as_bytes(*SENT)
        for at in range(0, len(data), size):
            listener.data_received(data[at : at + size])
        assert tuple(got) == SENT and not listener.ended.done()
        listener.connection_lost(ConnectionResetError())
        assert await listener.ended == ""

    asyncio.run(run())


def test_nothing_is_passed_on_after_a_frame_that_cannot_be_read() -> None:
    async def run() -> None:
        got: list[Any] = []
        listener = Listener(got.append)
        spoilt = bytearray(as_bytes(SENT[1]))
        spoilt[m.HEADER.size :] = b"\xc1" * (len(spoilt) - m.HEADER.size)  # a byte that no message has
        listener.data_received(as_bytes(SENT[0]) + spoilt + as_bytes(SENT[2]))
        listener.data_received(as_bytes(SENT[3]))
        listener.connection_lost(None)
        assert "cannot be read" in await listener.ended
        assert got == [SENT[0]]

    asyncio.run(run())


def test_an_answer_that_is_too_large_fails_its_request_alone() -> None:
    async def run() -> None:
        got: list[Any] = []
        listener = Listener(got.append)
        header = m.HEADER.pack(m.MAX_ANSWER_BYTES + 1, m.MAX_ANSWER_BYTES + 1, 7)
        listener.data_received(header + bytes(1000))
        assert len(got) == 1 and isinstance(got[0], m.Failed) and got[0].id == 7
        assert not listener.ended.done()

    asyncio.run(run())
