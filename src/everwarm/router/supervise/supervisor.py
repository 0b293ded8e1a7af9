"""One engine process: started, listened to, killed when it hangs, started again, with its waiting requests replayed.

The gateway never loads libllama; it only ever talks to the process behind this. Requests that have streamed nothing when an
engine dies are sent to the next one, once: a request that kills every engine ends at its second. After too many deaths in a
row it is given up, saying why; when it is tried again is the pool's business (``deaths`` has the rules). An engine that
died of memory comes back with half the RAM tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import http
import logging
import math
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from everwarm.engine.process import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.errors import BadRequest, EngineStopped, FrameTooLarge, ModelFileError, PixelsMissing, Refused
from everwarm.lru import NamespacedLru
from everwarm.memory_limits import address_space_limit, cgroup_limits, n_oom_kills
from everwarm.router.catalog.gguf_header import read_header
from everwarm.router.catalog.memory_estimate import loaded_bytes
from everwarm.router.supervise.engine_stderr import Stderr
from everwarm.router.supervise.restart_policy import (
    TICK_S,
    Cause,
    Ending,
    Heartbeat,
    RestartHistory,
    RestartLimits,
    cause_of,
    explained,
)
from everwarm.state.store.arena import budget_in, memory_file

log = logging.getLogger("everwarm.router")

_MIB = 1 << 20
PUT_AWAY_S = 30.0  # for writing to disk what is worth keeping
MAX_UNREAD_BYTES, MAX_ALL_UNREAD_BYTES = 8 << 20, 128 << 20  # of a reply that nobody takes, and of all of them
MAX_REPLAYS, MAX_REPLAYS_WAITING = (
    1,
    3,
)  # by other engines; of a request that was being answered, and of one that waited
LAST_WORDS_S = 0.5  # for an engine's last lines to be read
LEAST_RAM_BYTES = 1 << 20  # half of less is nothing

SLOW_CLIENT = http.HTTPStatus.REQUEST_TIMEOUT

Question = m.Question
Lend = Callable[[], AbstractAsyncContextManager[tuple[m.SentImage, ...]]]  # a request's pictures with their pixels


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
    has_begun: bool = False  # in the engine that runs now
    has_streamed: bool = False
    is_of_one_life: bool = False  # another engine would not understand it
    n_replays: int = 0
    n_unread: int = 0  # bytes of the reply that wait in the inbox

    def put(self, message: m.ToGateway) -> None:
        self.n_unread += weight_of(message)
        self.inbox.put_nowait(message)

    @property
    def may_be_replayed(self) -> bool:
        """Whoever was being answered when engines died may be what they died of; who only waited hardly is."""
        n_most = MAX_REPLAYS if self.has_begun else MAX_REPLAYS_WAITING
        return not self.has_streamed and not self.is_of_one_life and self.n_replays < n_most

    async def get(self) -> m.ToGateway:
        message = await self.inbox.get()
        self.n_unread -= weight_of(message)
        return message


def weight_of(message: m.ToGateway) -> int:
    """About how many bytes a piece of a reply takes while it waits."""
    if not isinstance(message, m.TextPiece):
        return 0
    n_probs = sum(1 + len(prob.top) for prob in message.probs or ())
    return 200 + len(message.text) + 8 * len(message.tokens) + 160 * n_probs


def unread_limit(n_pending: int) -> int:
    """How far behind a client may be before its reply is ended. The more replies, the less for each."""
    return max(MAX_UNREAD_BYTES // 16, min(MAX_UNREAD_BYTES, MAX_ALL_UNREAD_BYTES // max(1, n_pending)))


class Supervisor:
    def __init__(
        self,
        model: str,
        settings: EngineSettings,
        *,
        patience: RestartLimits | None = None,
        on_loading: Callable[[float], None] | None = None,
    ) -> None:
        self._open = m.Open(model, settings)
        self._patience = patience or RestartLimits()
        self._on_loading = on_loading
        self.state = State.STOPPED
        self.info: m.ModelInfo | None = None
        self.reason: str | None = None
        self.last_failure: str | None = None  # the last reason why it was not ready, until it is again
        self.n_restarts = 0
        self.load: m.Beat | None = None
        self.loaded = 0.0
        self.load_s: float | None = None  # that the last load took
        self._began_at = 0.0
        self.deaths = RestartHistory(self._patience)
        self.died_of: Counter[Cause] = Counter()
        self.said_why = False  # whether the engine itself refused, in words
        self.shrunk_to: int | None = None  # bytes of the RAM tier, after a death for lack of memory
        self._must_forget = False  # the RAM tier begins empty with the next engine
        self._silence = Heartbeat(time.monotonic())
        self._pending: dict[int, Pending] = {}
        self._next_id = 0
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._kill_reason = ""
        self._is_outdated = False  # the engine that runs has said that a file of its model was overwritten
        self.last_restart: str | None = None  # why the engine was started again last
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._seen = KnownImages()
        self._memory = memory_file()  # the RAM tier: it outlives the engine and goes with us

    # what callers see

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY and self._silence.silent_s < self._patience.stalled_s

    @property
    def is_running(self) -> bool:
        return not self._is_over

    @property
    def back_in_s(self) -> int | None:
        """When it will be ready again, as long as the last load took; None: nobody knows."""
        is_coming = self.state in (State.STARTING, State.RESTARTING)
        return max(1, math.ceil(self.load_s)) if is_coming and self.load_s is not None else None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    def start(self) -> None:
        """Also again, after it was stopped or given up: what was kept in RAM is still there."""
        assert self._is_over, f"it is {self.state.value} already"
        self.state, self.reason, self.loaded, self.said_why = State.STARTING, None, 0.0, False
        self.deaths.n_in_row = 0
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

    async def stream(self, submit: m.Submit, lend: Lend | None = None) -> AsyncGenerator[m.ToGateway, None]:
        """Submit a prompt under a new number; its messages until ``Done`` or ``Failed``. Leaving early cancels it in the
        engine.

        Images that the engine has seen go without their pixels; where it needs them after all, they are lent to it for
        as long as the request lasts."""
        has_begun = False
        message: m.ToGateway | None = None
        if lend is None or self._seen.knows(submit.namespace, submit.pictures):
            with self._asking(msgspec.structs.replace(submit, id=self._new_id())) as pending:
                while not isinstance(message, m.Done | m.Failed):
                    message = await pending.get()
                    if lend is not None and isinstance(message, m.Failed) and message.code == PixelsMissing.code:
                        break
                    has_begun = has_begun or isinstance(message, m.Begun)
                    yield message
                else:
                    return
        assert lend is not None, "only who has pixels is asked for them"
        message = None
        async with lend() as pictures:
            asking = self._asking(msgspec.structs.replace(submit, id=self._new_id(), pictures=pictures))
            del pictures  # from here on only the frame has them
            with asking as pending:
                while not isinstance(message, m.Done | m.Failed):
                    message = await pending.get()
                    if isinstance(message, m.TextPiece | m.Done):
                        self._seen.add(submit.namespace, submit.pictures)
                    if not (has_begun and isinstance(message, m.Begun)):
                        yield message

    async def ask(self, question: type[Question], **fields: Any) -> Any:
        with self._asking(question(self._new_id(), **fields)) as pending:
            message = await pending.get()
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
        is_of_one_life = isinstance(message, m.SlotAction)  # about what slots of this very process hold
        if is_of_one_life and self.state is not State.READY:
            raise EngineStopped("the engine is being restarted, and its slots with it; try again in a moment")
        try:
            pending = Pending(message.id, m.frame(message), is_of_one_life=is_of_one_life)
        except OverflowError:
            raise BadRequest("a number is too large; give at most 64 bits") from None
        id = message.id
        del message  # it may have pixels, and the frame has them, too
        self._pending[id] = pending
        if self.state is State.READY:
            self._write(pending.frame)
        try:
            yield pending
        finally:
            if self._pending.pop(id, None) is not None:
                self._send(m.Cancel(id))

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
        return EngineStopped(self.reason or "the engine is not running", self.back_in_s)

    @property
    def _is_over(self) -> bool:
        return self.state in (State.UNHEALTHY, State.STOPPED)

    # the life of the process

    async def _run(self) -> None:
        while not self._is_over:
            try:
                ending = await self._live_once()
                cause, why = cause_of(ending), explained(ending)
            except OSError as error:
                cause, why = Cause.NOT_STARTED, f"its process could not be started: {error}"
            if self._is_outdated:
                self._is_outdated = False  # it did not fail
            elif not self._is_over:
                await self._on_death(cause, why)

    async def _on_death(self, cause: Cause, why: str) -> None:
        was_ready = self.state is State.READY
        self.deaths.died(time.monotonic())
        self.died_of[cause] += 1
        log.error("the engine died (%s); death %d without a served request", why, self.deaths.n_in_row)
        if cause is Cause.MEMORY:
            self._shrink_ram(forget=self.shrunk_to is not None and not was_ready)
        if self.deaths.is_enough:
            n = self.deaths.n_in_row
            return await self._give_up(f"the engine died{f' {n} times in a row' if n > 1 else ''}: {why}")
        await self._begin_again(why)
        await asyncio.sleep(self.deaths.back_off_s)

    async def _begin_again(self, why: str) -> None:
        self.n_restarts += 1
        self.last_restart = why
        await self._set(State.RESTARTING, why)
        self._keep_for_replay(why)

    async def _live_once(self) -> Ending:
        """One engine process from its start to its end; returns how it ended."""
        if self._must_forget:  # nobody has it mapped now
            os.ftruncate(self._memory, 0)
            self._must_forget = False
        n_kills, stderr = n_oom_kills(), Stderr()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            try:
                self._process = await self._spawn(theirs, stderr)
            finally:
                stderr.close_theirs()
            theirs.close()
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
            self._began_at = time.monotonic()
            self._silence, self._kill_reason = Heartbeat(self._began_at), ""
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
        words = await asyncio.to_thread(stderr.last_words, LAST_WORDS_S)
        return self._ending(code, why, words, was_oom_killed=n_oom_kills() > n_kills)

    async def _spawn(self, theirs: socket.socket, stderr: Stderr) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "everwarm.engine.process.worker",
            str(theirs.fileno()),
            str(self._memory),
            str(os.getpid()),
            pass_fds=(theirs.fileno(), self._memory),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=stderr.fd,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # else an abort waits for a debugger
        )

    def _ending(self, code: int, why: str, words: str, *, was_oom_killed: bool) -> Ending:
        limit = min(cgroup_limits(), key=lambda each: each.limit_bytes, default=None)
        if not was_oom_killed:
            limit = address_space_limit() or limit
        needed = 0
        with contextlib.suppress(ModelFileError, OSError):
            path = Path(self._open.model)
            needed = loaded_bytes(read_header(path), path.stat().st_size, self._open.settings)
        return Ending(code, why, words, was_oom_killed, limit, needed)

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
        self._silence.heard()
        match message:
            case m.Beat():
                self.load = message
            case m.Loading(fraction=fraction):
                self.loaded = fraction
                if self._on_loading is not None:
                    self._on_loading(fraction)
            case m.Ready(info=info):
                self.info = info
                self.load_s = time.monotonic() - self._began_at
                self.deaths.ready(time.monotonic())
                await self._set(State.READY, None)
                for pending in self._pending.values():
                    self._write(pending.frame)
            case m.Changed(message=text):
                self._is_outdated = True
                log.warning("%s: the engine is started again on what it is now", text)
                await self._begin_again(text)
            case m.Fatal(message=text, of_memory=of_memory):
                self.said_why = True
                if of_memory:
                    self.died_of[Cause.MEMORY] += 1
                    self._shrink_ram(forget=self.shrunk_to is not None)
                await self._give_up(text)
            case _:
                self._route(message)

    def _route(self, message: Any) -> None:
        pending = self._pending.get(message.id)
        if pending is None:
            return
        if isinstance(message, m.Begun):
            pending.has_begun = True
        if isinstance(message, m.TextPiece):
            pending.has_streamed = True
            pending.frame = m.Frame(())  # it will not be sent again
        if isinstance(message, m.Done):
            self.deaths.forgive()
        if isinstance(message, m.Done | m.Failed | m.Answer):
            del self._pending[message.id]
        pending.put(message)
        if pending.n_unread > unread_limit(len(self._pending)) and message.id in self._pending:
            self._end_unread(message.id, pending)

    def _end_unread(self, id: int, pending: Pending) -> None:
        """Its client takes less than the engine writes. What it has written is kept, as for any request that ends early."""
        del self._pending[id]
        self._send(m.Cancel(id))
        reason = f"the reply was ended: its client was {pending.n_unread:,} bytes behind; read faster or ask for less"
        pending.put(m.Failed(id, SLOW_CLIENT.value, "client_too_slow", reason))

    async def _watch(self) -> None:
        """Kill a process that neither beats nor finishes a step, as far as we were awake to see it."""
        silence = self._silence
        while True:
            await asyncio.sleep(TICK_S)
            silence.tick(time.monotonic(), self.load.step_age_s if self.load is not None else None)
            if silence.silent_s > (self._patience.silent_s if silence.has_spoken else self._patience.start_s):
                return self._kill(f"no sign of life for {silence.silent_s:.1f} s")
            if silence.step_s > self._patience.step_s:
                return self._kill(f"one step has been running for {silence.step_s:.0f} s")

    def _kill(self, reason: str) -> None:
        if self._process is not None and self._process.returncode is None:
            self._kill_reason = reason
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # the transport would reap it, and nobody learn how it died

    # after a death

    def _keep_for_replay(self, why: str) -> None:
        self.load = None
        for id, pending in list(self._pending.items()):
            if pending.may_be_replayed:
                pending.n_replays, pending.has_begun = pending.n_replays + 1, False
            else:
                self._fail(id, pending, f"the engine died while answering ({why}); it is being restarted, try again")

    def _shrink_ram(self, *, forget: bool) -> None:
        """Give the RAM tier half of what it had: it counts against the same limit, and outlived the engine. The next engine
        drops what is worth least. ``forget``: that did not help, so everything goes."""
        settings = self._open.settings
        known = [n for n in (budget_in(self._memory), settings.ram_bytes) if n is not None]
        self._must_forget = self._must_forget or forget
        if not known:
            return  # it died before there was one
        half = min(known) // 2 if min(known) >= 2 * LEAST_RAM_BYTES else 0
        log.warning("the RAM tier has %.1f MiB from now on (it had %.1f)", half / _MIB, min(known) / _MIB)
        self.shrunk_to = half
        self._open = m.Open(self._open.model, replace(settings, ram_bytes=half))

    async def _give_up(self, reason: str) -> None:
        log.error("giving up for now: %s", reason)
        self.deaths.give_up()
        await self._set(State.UNHEALTHY, reason)
        self._fail_everybody(reason)

    def _fail_everybody(self, reason: str) -> None:
        for id, pending in list(self._pending.items()):
            self._fail(id, pending, reason)

    def _fail(self, id: int, pending: Pending, reason: str) -> None:
        about = (EngineStopped.status, EngineStopped.code, reason)
        pending.inbox.put_nowait(m.Failed(id, *about, retry_after_s=self.back_in_s))
        self._pending.pop(id, None)

    async def _set(self, state: State, reason: str | None) -> None:
        async with self._changed:
            self.state, self.reason = state, reason
            if state is not State.STOPPED:
                self.last_failure = reason
            self._changed.notify_all()


def failure(message: m.Failed) -> Refused:
    """An engine's refusal as an error to raise."""
    about = (message.n_prompt, message.n_context, message.retry_after_s)
    return Refused(message.status, message.code, message.message, *about)


MAX_SEEN = 4096


class KnownImages:
    def __init__(self) -> None:
        self._digests: NamespacedLru[bool] = NamespacedLru(MAX_SEEN)

    def knows(self, namespace: str, pictures: Sequence[m.SentImage]) -> bool:
        """Whether it has seen all of them, in this namespace: what it knows of others it will not use."""
        return all(self._digests.get(namespace, picture.digest) for picture in pictures)

    def add(self, namespace: str, pictures: Sequence[m.SentImage]) -> None:
        for picture in pictures:
            self._digests.put(namespace, picture.digest, True, 1)
