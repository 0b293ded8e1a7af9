"""Slot actions from frames: file work on a thread of its own, the slot itself on the loop's, when it is idle.

A restore is answered when the conversation and what its next request may need are back; the thread then reads the other
checkpoints of the file, before it does the file work of a later action."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from everwarm.engine.core import Core
from everwarm.engine.loop import Loop
from everwarm.engine.process import messages as m
from everwarm.engine.slotfile import slot_io
from everwarm.engine.slots import Slot
from everwarm.engine.tiers.loader import Arriving, Fetch, LoadedPoint, LoadOutcome
from everwarm.errors import BadRequest, EngineStopped, EverwarmError
from everwarm.state.lineage import owner_of
from everwarm.state.store.object import Damaged, SlotPoint
from everwarm.state.store.slot_file import Claim

log = logging.getLogger("everwarm.engine")

KEPT_WITHIN_S = 1.0  # the next checkpoint of a file is read when the one before it was weighed, or after so long


class SlotCommands:
    def __init__(self, core: Core, send: Callable[[m.Message], None]) -> None:
        self._slots = core.slots
        self._n_ctx = core.context.n_ctx
        self._arena = core.cache.ram.arena
        self._model = core.model
        self._settings = core.settings
        self._is_right = core.files.is_right
        self._send = send
        self._loader = core.cache.loader
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
            case "save":  # after what is still being read of a file: it belongs to the conversation
                job = partial(self._capture, slot=slot, message=message, began=began)
                self._files.submit(loop.post, lambda core: self._when_idle(slot, lambda: job(core)))
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

    def _capture(self, core: Core, *, slot: Slot, message: m.SlotAction, began: float) -> None:
        try:
            with core.cache.ram_budget.lifted():  # states are copied to RAM to be written
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
        """Reads and verifies the conversation before the slot is touched."""

        def make_room(n_bytes: int) -> None:
            loop.post(lambda core: core.cache.ram_budget.make_room(n_bytes, core.cache.tree.root(message.namespace)))

        try:
            saved, n_bytes = slot_io.read(Path(message.path), self._claim(message), self._n_ctx, self._arena, make_room)
        except (Damaged, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            reason = BadRequest(f"the slot file cannot be restored: {why}")
            return loop.post(lambda core: self._when_idle(slot, lambda: self._fail(core, slot, message, reason)))
        if saved.unverified:
            log.warning("slot %d gets a file of unknown origin; nothing that is decoded from it is kept", message.slot)
        job = partial(self._put_back, slot=slot, message=message, saved=saved, n_bytes=n_bytes, began=began, loop=loop)
        loop.post(lambda core: self._when_idle(slot, lambda: job(core)))

    def _put_back(
        self,
        core: Core,
        *,
        slot: Slot,
        message: m.SlotAction,
        saved: slot_io.Saved,
        n_bytes: int,
        began: float,
        loop: Loop,
    ) -> None:
        def work() -> dict[str, Any]:
            with contextlib.ExitStack() as unread:
                if saved.later is not None:
                    unread.callback(saved.later.close)
                try:
                    n = slot_io.put_back(core, slot, saved, message.namespace)
                except EverwarmError:
                    self._empty_own(core, slot, message)
                    raise
                if saved.later is not None:
                    self._expect(core, slot, saved.later, loop)
                unread.pop_all()  # the thread that reads it closes it
            ms = 1e3 * (time.monotonic() - began)
            return {"n_restored": n, "n_read": n_bytes, "timings": {"restore_ms": ms}}

        self._answer(message, work)

    def _expect(self, core: Core, slot: Slot, later: slot_io.Later, loop: Loop) -> None:
        """Begins to read the rest of the checkpoints. A request that needs one of them waits for it."""
        points = {point.n_items: point.clean for point in later.points}
        arriving = Arriving.of(slot.content, slot.namespace, points)
        self._loader.expect(arriving)
        self._files.submit(self._read_later, core, later, arriving, loop)

    def _read_later(self, core: Core, later: slot_io.Later, arriving: Arriving, loop: Loop) -> None:
        """On the thread for files. What cannot be read costs only that checkpoint. Where RAM is full, each is weighed
        against everything else as it comes: making room for all of them would evict what the next request needs."""
        try:
            for point in later.points:
                if arriving.is_stopped:
                    break
                loaded = self._read_point(core, later, point)
                if isinstance(loaded, LoadOutcome):
                    arriving.lost.add(point.n_items)
                arriving.points[point.n_items].set_result(loaded)
                is_kept = threading.Event()
                loop.post(partial(self._keep_later, arriving=arriving, n_items=point.n_items, is_kept=is_kept))
                is_kept.wait(KEPT_WITHIN_S)
        except Exception:
            log.exception("the rest of a slot file could not be read")
        finally:
            later.close()
            for future in arriving.points.values():
                if not future.done():
                    future.set_result(LoadOutcome())
            loop.post(lambda core: core.cache.loader.expect_no_more(arriving))

    @staticmethod
    def _read_point(core: Core, later: slot_io.Later, point: SlotPoint) -> LoadedPoint | LoadOutcome:
        began = time.monotonic()
        try:
            checkpoint = slot_io.checkpoint_of(core, later.read(point))
        except (Damaged, OSError) as error:
            log.warning("a checkpoint of a slot file at %d could not be read: %s", point.n_items, error)
            return LoadOutcome(n_spoilt=point.n_items)
        return LoadedPoint(point.n_items, (), checkpoint, [], max(1e-6, time.monotonic() - began), "ram")

    def _keep_later(self, core: Core, *, arriving: Arriving, n_items: int, is_kept: threading.Event) -> None:
        """A request that waited for it may have added it to the tree already."""
        core.cache.loader.lay(Fetch(n_items, arriving.prompt, arriving.namespace, arriving.points[n_items], arriving))
        core.cache.ram_budget.enforce()
        is_kept.set()

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
