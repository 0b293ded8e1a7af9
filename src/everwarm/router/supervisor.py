"""One engine process: started, listened to, killed when it hangs, started again, with its waiting requests replayed.

The gateway never loads libllama; it only ever talks to the process behind this. Requests that have streamed nothing when an
engine dies are sent to the next one, once. Five deaths in a row without one served request, and it stays down, saying why.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from everwarm.engine import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.errors import BadRequest, EngineStopped, FrameTooLarge, PixelsMissing, Refused
from everwarm.router.seen import Seen
from everwarm.state.arena import memory_file

log = logging.getLogger("everwarm.router")

PUT_AWAY_S = 30.0  # for writing to disk what is worth keeping
MAX_DEATHS = 5

Question = m.Question


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an engine may be silent or busy before something is done about it."""

    stalled_s: float = 1.5  # no beat for so long: not ready
    silent_s: float = 6.0  # no beat for so long: killed
    step_s: float = 900.0  # one decode step for so long: killed
    first_back_off_s: float = 0.1
    most_back_off_s: float = 5.0


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    UNHEALTHY = "unhealthy"
    STOPPED = "stopped"


@dataclass(slots=True, eq=False)
class Pending:
    """A request or question on its way: what to send again if the engine dies before it said anything."""

    id: int
    frame: m.Frame
    inbox: asyncio.Queue[m.ToGateway] = field(default_factory=asyncio.Queue)
    has_streamed: bool = False
    was_replayed: bool = False


class Supervisor:
    def __init__(
        self,
        model: str,
        settings: EngineSettings,
        *,
        patience: Patience | None = None,
        on_loading: Callable[[float], None] | None = None,
    ) -> None:
        self._open = m.Open(model, settings)
        self._patience = patience or Patience()
        self._on_loading = on_loading
        self.state = State.STOPPED
        self.info: m.ModelInfo | None = None
        self.reason: str | None = None
        self.n_restarts = 0
        self.load: m.Beat | None = None
        self.loaded = 0.0
        self._n_deaths = 0
        self._last_beat = time.monotonic()
        self._pending: dict[int, Pending] = {}
        self._next_id = 0
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._kill_reason = ""
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._seen = Seen()
        self._memory = memory_file()  # the RAM tier: it outlives the engine and goes with us

    # what callers see

    @property
    def is_ready(self) -> bool:
        fresh = time.monotonic() - self._last_beat < self._patience.stalled_s
        return self.state is State.READY and fresh

    @property
    def is_running(self) -> bool:
        return not self._is_over

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    @property
    def is_worn_out(self) -> bool:
        """Whether it was given up because it kept dying."""
        return self.state is State.UNHEALTHY and self._n_deaths >= MAX_DEATHS

    def start(self) -> None:
        """Also again, after it was stopped or given up: what was kept in RAM is still there."""
        assert self._is_over, f"it is {self.state.value} already"
        self.state, self.reason, self.loaded, self._n_deaths = State.STARTING, None, 0.0, 0
        self._task = asyncio.create_task(self._run(), name="everwarm-supervisor")

    async def until(self, *states: State) -> State:
        """Until it is in one of these states, or its life is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.state in states or self._is_over)
        return self.state

    async def ended(self) -> None:
        """Until the process of a life that is over is gone."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait_ready(self) -> m.ModelInfo:
        """Until the model is known, or EngineStopped with the reason why it never will be."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.info is not None or self._is_over)
        if self.info is None or self._is_over:
            raise self._down()
        return self.info

    async def stream(self, **submit: Any) -> AsyncGenerator[m.ToGateway, None]:
        """Submit a prompt; its messages until ``Done`` or ``Failed``. Leaving early cancels it in the engine.

        Pictures that the engine has seen go without their pixels; where it needs them after all, they follow."""
        light, has_begun = submit | {"pictures": self._seen.without_pixels(submit.get("pictures", ()))}, False
        async with contextlib.aclosing(self._stream(**light)) as messages:
            async for message in messages:
                if isinstance(message, m.Failed) and message.code == PixelsMissing.code:
                    break
                has_begun = has_begun or isinstance(message, m.Begun)
                yield message
            else:
                self._seen.add(submit.get("pictures", ()))
                return
        async with contextlib.aclosing(self._stream(**submit)) as messages:
            async for message in messages:
                if not (has_begun and isinstance(message, m.Begun)):
                    yield message

    async def _stream(self, **submit: Any) -> AsyncGenerator[m.ToGateway, None]:
        with self._asking(m.Submit(self._new_id(), **submit)) as pending:
            while True:
                message = await pending.inbox.get()
                yield message
                if isinstance(message, m.Done | m.Failed):
                    return

    async def ask(self, question: type[Question], **fields: Any) -> Any:
        with self._asking(question(self._new_id(), **fields)) as pending:
            message = await pending.inbox.get()
        if isinstance(message, m.Failed):
            raise failure(message)
        assert isinstance(message, m.Answer)
        return message.data

    async def stop(self, grace_s: float) -> None:
        """Let what runs finish within ``grace_s``, then stop the process and wait for it."""
        deadline = time.monotonic() + grace_s
        while self._pending and time.monotonic() < deadline and not self._is_over:
            await asyncio.sleep(0.02)
        was_ready = self.state is State.READY
        await self._set(State.STOPPED, "the server is stopping")
        self._fail_everybody("the server is stopping")
        self._send(m.Stop())
        if not was_ready:
            self._kill("it was still loading")
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), PUT_AWAY_S)
            self._kill("it did not stop when told to")
        if self._task is not None:
            self._task.cancel()
            await self.ended()

    def forget(self) -> None:
        """Give back the memory of the RAM tier."""
        if self._memory >= 0:
            os.close(self._memory)
        self._memory = -1

    # asking

    @contextlib.contextmanager
    def _asking(self, message: Question | m.Submit) -> Iterator[Pending]:
        """While a question is open it survives the engine; whoever leaves before the answer cancels it."""
        if self._is_over:
            raise self._down()
        try:
            pending = Pending(message.id, m.frame(message))
        except OverflowError:
            raise BadRequest("a number is too large; give at most 64 bits") from None
        self._pending[message.id] = pending
        if self.state is State.READY:
            self._write(pending.frame)
        try:
            yield pending
        finally:
            if self._pending.pop(message.id, None) is not None:
                self._send(m.Cancel(message.id))

    def tell(self, message: m.Prewarm) -> None:
        """Something that needs no answer, and nobody misses if it is lost."""
        with contextlib.suppress(FrameTooLarge):
            self._send(message)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _send(self, message: m.Message) -> None:
        self._write(m.frame(message))

    def _write(self, frame: m.Frame) -> None:
        if self._writer is not None and not self._writer.is_closing():
            for part in frame.parts:
                self._writer.write(part)

    def _down(self) -> EngineStopped:
        return EngineStopped(self.reason or "the engine is not running")

    @property
    def _is_over(self) -> bool:
        return self.state in (State.UNHEALTHY, State.STOPPED)

    # the life of the process

    async def _run(self) -> None:
        back_off = self._patience.first_back_off_s
        while not self._is_over:
            served_before = self._n_deaths == 0
            try:
                why = await self._live_once()
            except OSError as error:
                why = f"its process could not be started: {error}"
            if self._is_over:
                return None
            self._n_deaths += 1
            log.error("the engine died (%s); death %d without a served request", why, self._n_deaths)
            if self._n_deaths >= MAX_DEATHS:
                return await self._give_up(f"the engine died {self._n_deaths} times in a row: {why}")
            self.n_restarts += 1
            await self._set(State.RESTARTING, why)
            self._keep_for_replay(why)
            back_off = (
                self._patience.first_back_off_s if served_before else min(2 * back_off, self._patience.most_back_off_s)
            )
            await asyncio.sleep(back_off)

    async def _live_once(self) -> str:
        """One engine process from its start to its end; returns why it ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "everwarm.engine.worker",
                str(theirs.fileno()),
                str(self._memory),
                str(os.getpid()),
                pass_fds=(theirs.fileno(), self._memory),
                stdin=asyncio.subprocess.DEVNULL,
                env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # else an abort waits for a debugger
            )
            theirs.close()
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
            self._last_beat, self._kill_reason = time.monotonic(), ""
            self._send(self._open)
            watch = asyncio.create_task(self._watch())
            try:
                why = await self._listen(reader)
            finally:
                watch.cancel()
                self._writer.close()
                self._writer = None
                self._kill(self._kill_reason or "its connection ended")
            code = await self._process.wait()
            return why or f"exit code {code}"

    async def _listen(self, reader: asyncio.StreamReader) -> str:
        """Messages until the connection ends; returns a reason if one is known."""
        frames = m.FrameBuffer()
        try:
            while data := await reader.read(1 << 16):
                for body in frames.feed(data):
                    if isinstance(body, m.Failed):
                        log.error("the engine's answer to %d is skipped: %s", body.id, body.message)
                    await self._on_message(body if isinstance(body, m.Failed) else m.read_to_gateway(body))
        except ConnectionError:
            pass
        except (ValueError, msgspec.MsgspecError) as error:
            return f"it sent a frame that cannot be read: {error}"
        return self._kill_reason

    async def _on_message(self, message: m.ToGateway) -> None:
        self._last_beat = time.monotonic()
        match message:
            case m.Beat():
                self.load = message
            case m.Loading(fraction=fraction):
                self.loaded = fraction
                if self._on_loading is not None:
                    self._on_loading(fraction)
            case m.Ready(info=info):
                self.info = info
                await self._set(State.READY, None)
                for pending in self._pending.values():
                    self._write(pending.frame)
            case m.Fatal(message=text):
                await self._give_up(text)
            case _:
                self._route(message)

    def _route(self, message: Any) -> None:
        pending = self._pending.get(message.id)
        if pending is None:
            return
        if isinstance(message, m.Piece):
            pending.has_streamed = True
        if isinstance(message, m.Done):
            self._n_deaths = 0
        if isinstance(message, m.Done | m.Failed | m.Answer):
            del self._pending[message.id]
        pending.inbox.put_nowait(message)

    async def _watch(self) -> None:
        """Kill a process that neither beats nor finishes a step."""
        while True:
            await asyncio.sleep(0.1)
            silent = time.monotonic() - self._last_beat
            if silent > self._patience.silent_s:
                return self._kill(f"no sign of life for {silent:.1f} s")
            age = self.load.step_age_s if self.load is not None else None
            if age is not None and age > self._patience.step_s:
                return self._kill(f"one step has been running for {age:.0f} s")

    def _kill(self, reason: str) -> None:
        if self._process is not None and self._process.returncode is None:
            self._kill_reason = reason
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    # after a death

    def _keep_for_replay(self, why: str) -> None:
        self.load = None
        for id, pending in list(self._pending.items()):
            if pending.has_streamed or pending.was_replayed:
                self._fail(id, pending, f"the engine died while answering ({why}); it is being restarted, try again")
            else:
                pending.was_replayed = True

    async def _give_up(self, reason: str) -> None:
        log.error("giving up: %s", reason)
        await self._set(State.UNHEALTHY, reason)
        self._fail_everybody(reason)

    def _fail_everybody(self, reason: str) -> None:
        for id, pending in list(self._pending.items()):
            self._fail(id, pending, reason)

    def _fail(self, id: int, pending: Pending, reason: str) -> None:
        pending.inbox.put_nowait(m.Failed(id, EngineStopped.status, EngineStopped.code, reason))
        self._pending.pop(id, None)

    async def _set(self, state: State, reason: str | None) -> None:
        async with self._changed:
            self.state, self.reason = state, reason
            self._changed.notify_all()


def failure(message: m.Failed) -> Refused:
    """An engine's refusal as an error to raise."""
    return Refused(message.status, message.code, message.message, message.n_prompt, message.n_context)
