"""Slot actions from frames: file work on a thread of its own, the slot itself on the loop's, when it is idle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everwarm.engine import messages as m
from everwarm.engine import slotio
from everwarm.engine.core import Core
from everwarm.engine.loop import Loop
from everwarm.engine.slots import Slot
from everwarm.errors import BadRequest, EngineStopped, EverwarmError
from everwarm.prompt.prompt import Prompt
from everwarm.state.object import Damaged

log = logging.getLogger("everwarm.engine")


@dataclass(slots=True)
class Restoring:
    """A slot file on its way back."""

    slot: Slot
    message: m.SlotAction
    prompt: Prompt
    main: slotio.Main
    began: float
    points: tuple[slotio.SavedPoint, ...] = ()
    n_bytes: int = field(init=False)
    n_tokens: int | None = None  # None: not in the slot

    def __post_init__(self) -> None:
        self.n_bytes = self.main.n_bytes


class SlotFiles:
    def __init__(self, core: Core, send: Callable[[m.Message], None]) -> None:
        self._core = core
        self._send = send
        self._files = ThreadPoolExecutor(1, "everwarm-slots")
        self._aside = ThreadPoolExecutor(1, "everwarm-companions")
        self._waiting: list[tuple[Slot, Callable[[], None]]] = []  # for their slots to be idle

    def handle(self, message: m.SlotAction, loop: Loop) -> None:
        """On the reader's thread."""
        n_slots = len(self._core.slots)
        if not 0 <= message.slot < n_slots:
            raise BadRequest(f"slot {message.slot} does not exist; give 0 to {n_slots - 1}")
        slot, began = self._core.slots[message.slot], time.monotonic()
        loop.post(lambda core: core.prewarm.give_way(core))
        match message.action:
            case "save":
                loop.post(lambda core: self._when_idle(slot, lambda: self._capture(core, slot, message, began)))
            case "restore":
                self._files.submit(self._answering, message, lambda: self._read(slot, message, began, loop))
            case "erase":
                loop.post(lambda core: self._when_idle(slot, lambda: self._erase(core, slot, message)))

    def go_on(self) -> None:
        """On the loop's thread, after every step: whoever waited for a slot that is idle now."""
        if not self._waiting:
            return
        ready = [entry for entry in self._waiting if entry[0].is_idle]
        self._waiting = [entry for entry in self._waiting if not entry[0].is_idle]
        for _, job in ready:
            job()

    def _when_idle(self, slot: Slot, job: Callable[[], None]) -> None:
        if slot.is_idle:
            job()
        else:
            self._waiting.append((slot, job))

    def _answer(self, message: m.SlotAction, work: Callable[[], dict[str, Any]]) -> None:
        self._answering(message, lambda: self._send(m.Answer(message.id, {"id_slot": message.slot, **work()})))

    def _answering(self, message: m.SlotAction, work: Callable[[], None]) -> None:
        """Whatever goes wrong is said to whoever asked."""
        try:
            work()
        except EverwarmError as error:
            self._send(m.failed(message.id, error))
        except OSError as error:
            reason = BadRequest(f"the slot file could not be used: {error.strerror}")
            self._send(m.failed(message.id, reason))
        except Exception:
            log.exception("a slot action failed")
            self._send(m.failed(message.id, EverwarmError("internal error")))

    # save

    def _capture(self, core: Core, slot: Slot, message: m.SlotAction, began: float) -> None:
        try:
            saved = slotio.capture(core, slot, message.namespace)
        except EverwarmError as error:
            return self._send(m.failed(message.id, error))
        self._files.submit(self._answer, message, lambda: self._write(saved, message, began))

    def _write(self, saved: slotio.Saved, message: m.SlotAction, began: float) -> dict[str, Any]:
        fingerprint = self._fingerprint()
        if not self._core.is_right():
            raise EngineStopped("a file of the model was changed: the engine starts again, and nothing was saved")
        n_bytes = slotio.write(Path(message.path), saved, fingerprint)
        return {
            "n_saved": saved.n_tokens,
            "n_written": n_bytes,
            "timings": {"save_ms": 1e3 * (time.monotonic() - began)},
        }

    # restore

    def _read(self, slot: Slot, message: m.SlotAction, began: float, loop: Loop) -> None:
        """The main file is put into the slot while its companion is read: only pictures make the one wait for the other."""
        path, fingerprint = Path(message.path), self._fingerprint()
        reading = self._aside.submit(slotio.read_companion, path, fingerprint, self._core.ram.arena)
        try:
            main = slotio.read_main_file(path, self._core.context.n_ctx, self._core.ram.arena.lend)
            prompt = slotio.prompt_of(main, reading.result() if main.has_pictures else None)
        except (Damaged, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            reason = BadRequest(f"the slot file cannot be restored: {why}")
            return loop.post(lambda core: self._when_idle(slot, lambda: self._fail(core, slot, message, reason)))
        restoring = Restoring(slot, message, prompt, main, began)
        loop.post(lambda core: self._when_idle(slot, lambda: self._put_sequence(core, restoring)))
        _ = main.digest  # needed soon, and the companion is still being read
        companion = reading.result()
        if companion is not None and companion.belongs_to(main):
            restoring.points, restoring.n_bytes = companion.points, main.n_bytes + companion.n_bytes
        loop.post(lambda core: self._when_idle(slot, lambda: self._put_points(core, restoring)))

    def _put_sequence(self, core: Core, restoring: Restoring) -> None:
        message = restoring.message
        try:
            restoring.n_tokens = slotio.put_sequence(
                core, restoring.slot, restoring.prompt, restoring.main.state, message.namespace
            )
        except EverwarmError as error:
            self._send(m.failed(message.id, error))

    def _put_points(self, core: Core, restoring: Restoring) -> None:
        """Last, and answer; unless that was done already because it failed."""
        if restoring.n_tokens is None:
            return

        def work() -> dict[str, Any]:
            if restoring.slot.content is restoring.prompt:  # else somebody was quicker
                slotio.put_points(core, restoring.slot, restoring.points)
            ms = 1e3 * (time.monotonic() - restoring.began)
            return {
                "n_restored": restoring.n_tokens,
                "n_read": restoring.n_bytes,
                "timings": {"restore_ms": ms},
            }

        self._answer(restoring.message, work)

    def _fail(self, core: Core, slot: Slot, message: m.SlotAction, error: EverwarmError) -> None:
        """A slot that could not be restored is empty; what it held before is still known."""
        slotio.empty(core, slot)
        self._send(m.failed(message.id, error))

    # erase

    def _erase(self, core: Core, slot: Slot, message: m.SlotAction) -> None:
        self._answer(message, lambda: {"n_erased": slotio.erase(core, slot, message.namespace)})

    def _fingerprint(self) -> str:
        model = self._core.model
        return self._core.settings.fingerprint(model.fingerprint, model.rope_limit)
