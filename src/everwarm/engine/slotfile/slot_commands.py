"""Slot actions from frames: file work on a thread of its own, the slot itself on the loop's, when it is idle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from everwarm.engine.core import Core
from everwarm.engine.loop import Loop
from everwarm.engine.process import messages as m
from everwarm.engine.slotfile import slot_io
from everwarm.engine.slots import Slot
from everwarm.errors import BadRequest, EngineStopped, EverwarmError
from everwarm.state.namespace import owner_of
from everwarm.state.store.object import Damaged
from everwarm.state.store.slot_file import Claim

log = logging.getLogger("everwarm.engine")


class SlotFiles:
    def __init__(self, core: Core, send: Callable[[m.Message], None]) -> None:
        self._slots = core.slots
        self._n_ctx = core.context.n_ctx
        self._arena = core.cache.ram.arena
        self._model = core.model
        self._settings = core.settings
        self._is_right = core.files.is_right
        self._send = send
        self._files = ThreadPoolExecutor(1, "everwarm-slots")
        self._waiting: list[tuple[Slot, Callable[[], None]]] = []  # for their slots to be idle

    def handle(self, message: m.SlotAction, loop: Loop) -> None:
        """On the reader's thread."""
        n_slots = len(self._slots)
        if not 0 <= message.slot < n_slots:
            raise BadRequest(f"slot {message.slot} does not exist; give 0 to {n_slots - 1}")
        slot, began = self._slots[message.slot], time.monotonic()
        loop.post(Core.give_way)
        match message.action:
            case "save":
                loop.post(lambda core: self._when_idle(slot, lambda: self._capture(core, slot, message, began)))
            case "restore":
                self._files.submit(self._answering, message, lambda: self._read(slot, message, began, loop))
            case "erase":
                loop.post(lambda core: self._when_idle(slot, lambda: self._erase(core, slot, message)))

    def go_on(self) -> None:
        """On the loop's thread, after every step: carries out commands whose slot has become idle."""
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
        """An error becomes the answer."""
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
            saved = slot_io.capture(core, slot, message.namespace)
        except EverwarmError as error:
            return self._send(m.failed(message.id, error))
        self._files.submit(self._answer, message, lambda: self._write(saved, message, began))

    def _write(self, saved: slot_io.Saved, message: m.SlotAction, began: float) -> dict[str, Any]:
        claim = self._claim(message)  # the digest of a large model may take its time
        if not self._is_right():
            raise EngineStopped("a file of the model was changed: the engine starts again, and nothing was saved")
        n_bytes = slot_io.write(Path(message.path), saved, claim)
        return {
            "n_saved": saved.n_tokens,
            "n_written": n_bytes,
            "timings": {"save_ms": 1e3 * (time.monotonic() - began)},
        }

    # restore

    def _read(self, slot: Slot, message: m.SlotAction, began: float, loop: Loop) -> None:
        """Reads and verifies the whole file before the slot is touched."""
        try:
            saved, n_bytes = slot_io.read(Path(message.path), self._claim(message), self._n_ctx, self._arena)
        except (Damaged, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            reason = BadRequest(f"the slot file cannot be restored: {why}")
            return loop.post(lambda core: self._when_idle(slot, lambda: self._fail(core, slot, message, reason)))
        if saved.unverified:
            log.warning("slot %d gets a file of unknown origin; nothing that is decoded from it is kept", message.slot)
        loop.post(
            lambda core: self._when_idle(slot, lambda: self._put_back(core, slot, message, saved, n_bytes, began))
        )

    def _put_back(
        self, core: Core, slot: Slot, message: m.SlotAction, saved: slot_io.Saved, n_bytes: int, began: float
    ) -> None:
        def work() -> dict[str, Any]:
            try:
                n = slot_io.put_back(core, slot, saved, message.namespace)
            except EverwarmError:
                self._empty_own(core, slot, message)
                raise
            ms = 1e3 * (time.monotonic() - began)
            return {"n_restored": n, "n_read": n_bytes, "timings": {"restore_ms": ms}}

        self._answer(message, work)

    def _fail(self, core: Core, slot: Slot, message: m.SlotAction, error: EverwarmError) -> None:
        self._empty_own(core, slot, message)
        self._send(m.failed(message.id, error))

    def _empty_own(self, core: Core, slot: Slot, message: m.SlotAction) -> None:
        """Empties a slot that could not be restored; what it held before stays cached. Another namespace's slot is not
        touched."""
        if owner_of(slot.namespace) == message.namespace:
            slot_io.empty(core, slot)

    # erase

    def _erase(self, core: Core, slot: Slot, message: m.SlotAction) -> None:
        self._answer(message, lambda: {"n_erased": slot_io.erase(core, slot, message.namespace)})

    def _claim(self, message: m.SlotAction) -> Claim:
        fingerprint = self._settings.fingerprint(self._model.fingerprint, self._model.rope_limit)
        return Claim(fingerprint, message.namespace, message.owns_unbound, message.trusts_origin)
