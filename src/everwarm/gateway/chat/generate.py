"""Running a request's choices against the engine and telling them apart. Knows messages; knows no JSON shapes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from everwarm.engine.process import messages as m
from everwarm.gateway.admin.request_log import RequestTracker, TrackedRequest
from everwarm.router.supervise.pending import failure
from everwarm.router.supervise.supervisor import Lend, Supervisor

Heard = m.Begun | m.PromptRead | m.TextPiece | m.Done


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one choice."""

    index: int
    message: Heard


@dataclass(slots=True)
class Choice:
    """One finished reply."""

    text: str
    tokens: list[int]
    probs: list[m.TokenProb]
    done: m.Done


async def events(
    supervisor: Supervisor, submits: Sequence[dict[str, Any]], follow: RequestTracker, lend: Lend | None = None
) -> AsyncGenerator[Event, None]:
    """All choices at once, as they come. A failed one ends them all with its error; leaving early cancels them all. Where
    there are pictures, the first choice reads them, and the others begin when it has."""
    followed = [follow.choice(i) for i in range(len(submits))]
    if len(submits) == 1:
        async with contextlib.aclosing(_heard(supervisor, submits[0], followed[0], lend)) as stream:
            async for message in stream:
                yield Event(0, message)
        return
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(len(submits))  # who is not read waits
    choices = (_heard(supervisor, submit, each, lend) for submit, each in zip(submits, followed, strict=True))
    is_read = asyncio.Event()
    if lend is None:
        is_read.set()
    tasks = [asyncio.create_task(_pump(i, choice, queue, is_read)) for i, choice in enumerate(choices)]
    try:
        left = len(tasks)
        while left:
            got = await queue.get()
            if got is None:
                left -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _heard(
    supervisor: Supervisor, submit: dict[str, Any], followed: TrackedRequest, lend: Lend | None
) -> AsyncGenerator[Heard, None]:
    """What the engine says to one choice, written down on the way."""
    try:
        async with contextlib.aclosing(supervisor.stream(lend, **followed.submit(submit))) as stream:
            async for message in stream:
                if followed.is_for_caller(message):
                    yield _checked(message)
    finally:
        followed.end()


async def _pump(
    index: int,
    choice: AsyncGenerator[Heard, None],
    queue: asyncio.Queue[Event | BaseException | None],
    is_read: asyncio.Event,
) -> None:
    """``is_read``: whether the first choice has read what all of them read."""
    try:
        async with contextlib.aclosing(choice) as stream:
            if index:
                await is_read.wait()
            async for message in stream:
                if isinstance(message, m.TextPiece | m.Done):
                    is_read.set()
                await queue.put(Event(index, message))
        await queue.put(None)
    except Exception as error:  # noqa: BLE001 - raised again where the choices are read
        await queue.put(error)


def _checked(message: m.ToGateway) -> Heard:
    if isinstance(message, m.Failed):
        raise failure(message)
    assert isinstance(message, Heard)
    return message


async def collect(stream: AsyncGenerator[Event, None], n_choices: int) -> list[Choice]:
    """Whole replies, for whoever does not stream."""
    texts: list[list[str]] = [[] for _ in range(n_choices)]
    tokens: list[list[int]] = [[] for _ in range(n_choices)]
    probs: list[list[m.TokenProb]] = [[] for _ in range(n_choices)]
    done: dict[int, m.Done] = {}
    async with contextlib.aclosing(stream):
        async for event in stream:
            match event.message:
                case m.TextPiece() as piece:
                    texts[event.index].append(piece.text)
                    tokens[event.index] += piece.tokens
                    probs[event.index] += piece.probs or []
                case m.Done() as end:
                    texts[event.index].append(end.text)
                    done[event.index] = end
    return [Choice("".join(texts[i]), tokens[i], probs[i], done[i]) for i in range(n_choices)]
