"""A request's choices, run against the engine. Knows the engine's messages; knows no dialect and no JSON."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from everwarm.engine.process import messages as m
from everwarm.gateway.admin.request_log import TrackedRequest
from everwarm.gateway.parsing.output_parser import OutputParser, Piece
from everwarm.router.supervise.pending import failure
from everwarm.router.supervise.supervisor import Lend, Supervisor

EngineMessage = m.Begun | m.PromptRead | m.TextPiece | m.Done


class ReplyEvent(msgspec.Struct, frozen=True):
    """A message of the engine about one choice, with its text parsed. ``finish`` comes with ``Done``: stop, length or
    tool_calls."""

    index: int
    message: EngineMessage
    pieces: Sequence[Piece] = ()
    finish: str = ""


@dataclass(slots=True)
class Choice:
    """One reply, complete once ``finish`` is set."""

    texts: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    probs: list[m.TokenProb] = field(default_factory=list)
    begun: m.Begun | None = None
    ended: m.Done | None = None
    finish: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def done(self) -> m.Done:
        assert self.ended is not None, "the reply has no end"
        return self.ended

    def add(self, event: ReplyEvent) -> None:
        self.pieces += event.pieces
        match event.message:
            case m.Begun() as begun:
                self.begun = begun
            case m.TextPiece() as piece:
                self.texts.append(piece.text)
                self.tokens += piece.tokens
                self.probs += piece.probs or ()
            case m.Done() as done:
                self.texts.append(done.text)
                self.ended = done
                self.finish = event.finish


def finish_reason(done: m.Done, n_calls: int = 0) -> str:
    """OpenAI's ``finish_reason``."""
    if done.finish != "stop":
        return "length"
    return "tool_calls" if n_calls else "stop"


@dataclass(frozen=True, slots=True)
class ChoiceRun:
    """One running choice: what the engine gets, the parser of its text, and its line in the request log."""

    index: int
    submit: m.Submit
    parser: OutputParser
    tracked: TrackedRequest
    notes: m.PromptNotes

    def event(self, message: m.ToGateway) -> ReplyEvent | None:
        """None if the message is not for the caller; raises the error of a failed request."""
        if isinstance(message, m.Done):
            message = msgspec.structs.replace(message, notes=self.notes)
        if not self.tracked.record(message):
            return None
        match message:
            case m.TextPiece(text=text):
                return ReplyEvent(self.index, message, self.parser.read(text))
            case m.Done(text=text):
                pieces = [*self.parser.read(text), *self.parser.rest()]
                return ReplyEvent(self.index, message, pieces, finish_reason(message, self.parser.n_calls))
            case m.Failed():
                raise failure(message)
        assert isinstance(message, m.Begun | m.PromptRead)
        return ReplyEvent(self.index, message)


Observe = Callable[[ReplyEvent], Awaitable[None] | None]


async def generate(
    supervisor: Supervisor,
    submits: Sequence[m.Submit],
    parser: Callable[[], OutputParser],
    follow: Callable[[int], TrackedRequest],
    lend: Lend | None = None,
    observe: Observe = lambda _: None,
    notes: m.PromptNotes = m.PromptNotes(),  # noqa: B008 - frozen
) -> AsyncGenerator[ReplyEvent, None]:
    """Runs all choices at once and yields their events as they come. The error of one ends them all; closing the generator
    cancels them all. ``follow`` begins the record of a choice; ``observe`` gets every event before the caller does, and
    what it returns is awaited."""
    with contextlib.ExitStack() as stack:
        runs = [
            ChoiceRun(i, submit, parser(), stack.enter_context(follow(i)), notes) for i, submit in enumerate(submits)
        ]
        if len(runs) == 1:
            (run,) = runs
            async with contextlib.aclosing(supervisor.stream(run.tracked.submit(run.submit), lend)) as messages:
                async for message in messages:
                    if (event := run.event(message)) is not None:
                        if (effect := observe(event)) is not None:
                            await effect
                        yield event
            return
        queue: _Queue = asyncio.Queue(len(runs))  # bounded: choices wait for a slow caller
        tasks = _start(supervisor, runs, queue, lend)
        try:
            n_running = len(tasks)
            while n_running:
                got = await queue.get()
                if isinstance(got, BaseException):
                    raise got
                if got is None:
                    n_running -= 1
                else:
                    if (effect := observe(got)) is not None:
                        await effect
                    yield got
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


_Queue = asyncio.Queue[ReplyEvent | BaseException | None]


def _start(
    supervisor: Supervisor, runs: Sequence[ChoiceRun], queue: _Queue, lend: Lend | None
) -> list[asyncio.Task[None]]:
    """If there are images, the first choice reads them, and the others start afterwards."""
    is_read = asyncio.Event()
    if lend is None:
        is_read.set()
    return [asyncio.create_task(_pump(supervisor, run, queue, lend, is_read)) for run in runs]


async def _pump(
    supervisor: Supervisor, run: ChoiceRun, queue: _Queue, lend: Lend | None, is_read: asyncio.Event
) -> None:
    """``is_read``: set when the first choice has read the shared prompt."""
    try:
        if run.index:
            await is_read.wait()
        async with contextlib.aclosing(supervisor.stream(run.tracked.submit(run.submit), lend)) as messages:
            async for message in messages:
                if isinstance(message, m.TextPiece | m.Done):
                    is_read.set()
                if (event := run.event(message)) is not None:
                    await queue.put(event)
        run.tracked.end()
        await queue.put(None)
    except Exception as error:  # noqa: BLE001 - raised again where the choices are read
        await queue.put(error)


async def collect(events: AsyncGenerator[ReplyEvent, None], n_choices: int) -> list[Choice]:
    """Whole replies, for clients that do not stream."""
    choices = [Choice() for _ in range(n_choices)]
    async with contextlib.aclosing(events):
        async for event in events:
            choices[event.index].add(event)
    return choices
