"""Keeps one model's engine running: starts it, restarts it when it dies, and replays the requests that waited.

The gateway never loads libllama; it only talks to the engine process behind this. ``EngineProcess`` owns one process,
``PendingRequests`` what it has not answered, ``RamMemory`` the RAM tier that outlives it; ``restart_policy`` decides when
the next one starts. After too many deaths in a row the supervisor gives up and says why; the pool decides when it is tried
again.

The RAM tier's memory file outlives the engine. An engine that died for lack of memory comes back with half the RAM
tier, because that counts against the same limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Literal

import msgspec

from everwarm.engine.process import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.errors import PIXELS_MISSING, BadRequest, EngineStopped, FrameTooLarge
from everwarm.lru import NamespacedLru
from everwarm.router.supervise.engine_process import EngineProcess
from everwarm.router.supervise.pending import Pending, PendingRequests, failure
from everwarm.router.supervise.restart_policy import Cause, Ending, RestartHistory, RestartLimits, cause_of, explained
from everwarm.state.store.arena_file import budget_in, memory_file

log = logging.getLogger("everwarm.router")

_MIB = 1 << 20
LEAST_RAM_BYTES = 1 << 20  # half of less is nothing
PUT_AWAY_S = 30.0  # for writing to disk what is worth keeping
MAX_KNOWN_IMAGES = 4096


class RamMemory:
    """``budget_bytes`` None: the engine chooses one from the machine's free memory."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.shrunk_to: int | None = None  # bytes, after a death for lack of memory
        self.fd = memory_file()
        self._must_clear = False

    def prepare(self) -> None:
        """Prepares the file for the next engine; call it while no process has the file mapped."""
        if self._must_clear:
            os.ftruncate(self.fd, 0)
            self._must_clear = False

    def shrink(self, *, was_ready: bool) -> None:
        """Halve the budget; the next engine drops what is worth least. If an engine with half the budget does not even
        become ready, the next one begins with an empty RAM tier."""
        self._must_clear = self._must_clear or (self.shrunk_to is not None and not was_ready)
        known = [n for n in (budget_in(self.fd), self.budget_bytes) if n is not None]
        if not known:
            return  # the engine died before there was an arena
        before = min(known)
        half = before // 2 if before >= 2 * LEAST_RAM_BYTES else 0
        log.warning("the RAM tier has %.1f MiB from now on (it had %.1f)", half / _MIB, before / _MIB)
        self.shrunk_to = self.budget_bytes = half

    def close(self) -> None:
        """Frees the memory."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


Question = m.Question
Lend = Callable[[], AbstractAsyncContextManager[tuple[m.SentMedia, ...]]]  # a request's images with their pixels
State = Literal["starting", "ready", "restarting", "unhealthy", "stopped"]


class Supervisor:
    """One model's engine, whichever process it is at the moment."""

    def __init__(
        self,
        model: str,
        settings: EngineSettings,
        *,
        limits: RestartLimits | None = None,
        on_loading: Callable[[float], None] | None = None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._limits = limits or RestartLimits()
        self._on_loading = on_loading
        self.state: State = "stopped"
        self.info: m.ModelInfo | None = None
        self.reason: str | None = None
        self.last_failure: str | None = None  # the last reason why it was not ready, until it is again
        self.last_restart: str | None = None  # why the engine was last started again
        self.n_restarts = 0
        self.load: m.Beat | None = None  # what the engine last reported about its work
        self.loaded = 0.0  # how much of the model
        self.load_s: float | None = None  # how long the last load took
        self.deaths = RestartHistory(self._limits)
        self.died_of: Counter[Cause] = Counter()
        self.gave_reason = False  # whether the engine itself reported why the model cannot be served
        self._is_outdated = False  # a file of the model was overwritten, and the engine ends because of that
        self._changed = asyncio.Event()  # set, and another one put in its place, with every change of the state
        self._task: asyncio.Task[None] | None = None
        self._engine: EngineProcess | None = None  # the last one that was started, alive or not
        self.pending = PendingRequests()
        # by digest; a namespace cannot use the images of others
        self._seen_images: NamespacedLru[bool] = NamespacedLru(MAX_KNOWN_IMAGES)
        self._memory = RamMemory(settings.ram_bytes)

    # what callers see

    @property
    def is_ready(self) -> bool:
        if self._engine is None or self.state != "ready":
            return False
        return self._engine.heartbeat.silent_s < self._limits.stalled_s

    @property
    def is_running(self) -> bool:
        return not self._is_over

    @property
    def back_in_s(self) -> int | None:
        """When it will be ready again, if that takes as long as the last load; None: unknown."""
        is_coming = self.state in ("starting", "restarting")
        return max(1, math.ceil(self.load_s)) if is_coming and self.load_s is not None else None

    @property
    def pid(self) -> int | None:
        return None if self._engine is None else self._engine.pid

    @property
    def shrunk_to(self) -> int | None:
        """Bytes of the RAM tier, after a death for lack of memory."""
        return self._memory.shrunk_to

    def start(self) -> None:
        """Starts the engine, also again after it was stopped or given up: the RAM tier is still there."""
        assert self._is_over, f"it is {self.state} already"
        self.state = "starting"
        self.reason = None
        self.loaded = 0.0
        self.gave_reason = False
        self.deaths.n_in_row = 0
        self._task = asyncio.create_task(self._run(), name="everwarm-supervisor")

    async def until(self, *states: State) -> State:
        """Wait for one of these states, or until it is stopped or given up."""
        while self.state not in states and not self._is_over:
            await self._changed.wait()
        return self.state

    async def ended(self) -> None:
        """Wait until the process of a stopped or given up engine is gone."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait_ready(self) -> m.ModelInfo:
        """Waits until the model is loaded; EngineStopped with the reason if it never will be."""
        while self.info is None and not self._is_over:
            await self._changed.wait()
        if self.info is None or self._is_over:
            raise self._down()
        return self.info

    async def stop(self, grace_s: float) -> None:
        """Lets running requests finish within ``grace_s``, then stops the process and waits for it."""
        deadline = time.monotonic() + grace_s
        while self.pending and time.monotonic() < deadline and not self._is_over:
            await asyncio.sleep(0.02)
        was_ready = self.state == "ready"
        self._set("stopped", "the server is stopping")
        self.pending.fail_all("the server is stopping")
        if self._engine is not None:
            self._engine.send(m.Stop())
            if not was_ready:
                self._engine.kill("it was still loading")
            await self._engine.stop(PUT_AWAY_S)
        if self._task is not None:
            self._task.cancel()
            await self.ended()

    def forget(self) -> None:
        """Frees the memory of the RAM tier."""
        self._memory.close()

    # requests

    async def stream(self, submit: m.Submit, lend: Lend | None = None) -> AsyncGenerator[m.ToGateway, None]:
        """Submit a prompt under a new id; its messages until ``Done`` or ``Failed``. Leaving early cancels it.

        Images that the engine has seen are sent without their pixels. If it needs the pixels after all, they are lent to
        it for as long as the request lasts."""
        has_begun = False
        message: m.ToGateway | None = None
        if lend is None or self._has_seen(submit):
            with self._open_request(msgspec.structs.replace(submit, id=self.pending.new_id())) as pending:
                while not isinstance(message, m.Done | m.Failed):
                    message = await pending.get()
                    if lend is not None and isinstance(message, m.Failed) and message.code == PIXELS_MISSING:
                        break
                    has_begun = has_begun or isinstance(message, m.Begun)
                    yield message
                else:
                    return
        assert lend is not None, "the engine requests pixels only if the prompt has images"
        message = None
        async with lend() as images:
            opened = self._open_request(msgspec.structs.replace(submit, id=self.pending.new_id(), images=images))
            del images  # from here on only the frame holds the pixels
            with opened as pending:
                while not isinstance(message, m.Done | m.Failed):
                    message = await pending.get()
                    if isinstance(message, m.TextPiece | m.Done):
                        self._note_images(submit)
                    if not (has_begun and isinstance(message, m.Begun)):
                        yield message

    def _has_seen(self, submit: m.Submit) -> bool:
        """Whether the engine has seen all images of the prompt, in this namespace."""
        return all(self._seen_images.get(submit.namespace, image.digest) for image in submit.images)

    def _note_images(self, submit: m.Submit) -> None:
        for image in submit.images:
            self._seen_images.put(submit.namespace, image.digest, True, 1)

    async def ask(self, question: type[Question], **fields: Any) -> Any:
        with self._open_request(question(self.pending.new_id(), **fields)) as pending:
            message = await pending.get()
        if isinstance(message, m.Failed):
            raise failure(message)
        assert isinstance(message, m.Answer)
        return message.data

    def tell(self, message: m.Prewarm) -> None:
        """Sends a message that needs no answer and may be lost."""
        with contextlib.suppress(FrameTooLarge):
            self._write(m.frame(message))

    @contextlib.contextmanager
    def _open_request(self, message: Question | m.Submit) -> Iterator[Pending]:
        """While a request is open it survives the engine; leaving before the last answer cancels it."""
        if self._is_over:
            raise self._down()
        is_of_one_life = isinstance(message, m.SlotAction)  # about what slots of this very process hold
        if is_of_one_life and self.state != "ready":
            raise EngineStopped("the engine is being restarted, and its slots with it; try again in a moment")
        try:
            pending = Pending(message.id, m.frame(message), is_of_one_life=is_of_one_life)
        except OverflowError:
            raise BadRequest("a number is too large; give at most 64 bits") from None
        del message  # it may have pixels, and the frame holds them, too
        self.pending.add(pending)
        if self.state == "ready":
            self._write(pending.frame)
        try:
            yield pending
        finally:
            if self.pending.remove(pending.id):
                self._write(m.frame(m.Cancel(pending.id)))

    def _write(self, frame: m.Frame) -> None:
        if self._engine is not None:
            self._engine.write(frame)

    def _down(self) -> EngineStopped:
        return EngineStopped(self.reason or "the engine is not running", self.back_in_s)

    # one process after the other

    @property
    def _is_over(self) -> bool:
        return self.state in ("unhealthy", "stopped")

    async def _run(self) -> None:
        while not self._is_over:
            try:
                ending = await self._live_once()
                cause = cause_of(ending)
                why = explained(ending)
            except OSError as error:
                cause = "not started"
                why = f"its process could not be started: {error}"
            if self._is_outdated:
                self._is_outdated = False  # it did not fail
            elif not self._is_over:
                await self._on_death(cause, why)

    async def _live_once(self) -> Ending:
        """One engine process from its start to its end."""
        self._memory.prepare()
        engine = EngineProcess(self._limits)
        await engine.start(self._memory.fd)
        self._engine = engine
        settings = replace(self._settings, ram_bytes=self._memory.budget_bytes)
        return await engine.run(m.Open(self._model, settings), self._on_message)

    def _on_message(self, message: m.ToGateway) -> None:
        match message:
            case m.TextPiece():
                self._deliver(message)  # most of all
            case m.Beat():
                self.load = message
            case m.Loading(fraction=fraction):
                self.loaded = fraction
                if self._on_loading is not None:
                    self._on_loading(fraction)
            case m.ModelInfo():
                self._on_ready(message)
            case m.Fatal(message=text, reason="model_changed"):
                self._is_outdated = True
                log.warning("%s: the engine is restarted with the new file", text)
                self._begin_again(text)
            case m.Fatal(message=text, reason=reason):
                self.gave_reason = True
                if reason == "out_of_memory":
                    self.died_of["memory"] += 1
                    self._memory.shrink(was_ready=False)
                self._give_up(text)
            case _:
                self._deliver(message)

    def _on_ready(self, info: m.ModelInfo) -> None:
        assert self._engine is not None
        now = time.monotonic()
        self.info = info
        self.load_s = now - self._engine.started_at
        self.deaths.ready(now)
        self._set("ready", None)
        for pending in self.pending:
            self._write(pending.frame)

    def _deliver(self, message: m.ToGateway) -> None:
        if isinstance(message, m.Done) and message.id in self.pending:
            self.deaths.forgive()
        cancel = self.pending.deliver(message)
        if cancel is not None:
            self._write(m.frame(cancel))

    async def _on_death(self, cause: Cause, why: str) -> None:
        was_ready = self.state == "ready"
        self.deaths.died(time.monotonic())
        self.died_of[cause] += 1
        log.error("the engine died (%s); death %d without a served request", why, self.deaths.n_in_row)
        if cause == "memory":
            self._memory.shrink(was_ready=was_ready)
        if self.deaths.is_enough:
            n = self.deaths.n_in_row
            return self._give_up(f"the engine died{f' {n} times in a row' if n > 1 else ''}: {why}")
        self._begin_again(why)
        await asyncio.sleep(self.deaths.back_off_s)

    def _begin_again(self, why: str) -> None:
        self.n_restarts += 1
        self.last_restart = why
        self._set("restarting", why)
        self.load = None
        self.pending.keep_for_replay(why, self.back_in_s)

    def _give_up(self, reason: str) -> None:
        log.error("giving up for now: %s", reason)
        self.deaths.give_up()
        self._set("unhealthy", reason)
        self.pending.fail_all(reason)

    def _set(self, state: State, reason: str | None) -> None:
        self.state = state
        self.reason = reason
        if state != "stopped":
            self.last_failure = reason
        self._changed.set()
        self._changed = asyncio.Event()
