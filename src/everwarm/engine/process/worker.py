"""The engine process: ``python -m everwarm.engine.process.worker SOCKET MEMORY PARENT_PID``; the first two are descriptors.

    reader thread   frames in: tokenizes, posts jobs          main thread    the loop: the only one that touches the core
    writer thread   what the socket did not take at once      beat thread    says "alive" while the loop is busy, too

Exits 0 after ``Stop``, 2 when the model cannot be served, 3 when a file of it was overwritten, and at once when the gateway
is gone.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from everwarm.engine.build import assemble
from everwarm.engine.core import Core
from everwarm.engine.inspect.report import placement_of
from everwarm.engine.loop import Loop
from everwarm.engine.process import messages as m
from everwarm.engine.process.embedding_worker import EmbeddingHandler, info, open_embedder
from everwarm.engine.process.request_handler import RequestHandler
from everwarm.engine.settings import EngineSettings
from everwarm.engine.tiers.lower_tiers import LowerTiers
from everwarm.errors import BadRequest, ContextTooBig, EverwarmError, FrameTooLarge, ModelChanged
from everwarm.llama.abi import BUILD
from everwarm.llama.model import Progress
from everwarm.llama.system.model_files import WatchedFiles
from everwarm.llama.system.process import collect_rarely, die_with_parent
from everwarm.llama.vocab import Vocab
from everwarm.logs import log_to_stderr
from everwarm.memory_limits import tightest_limit

log = logging.getLogger("everwarm.worker")

T = TypeVar("T")

BEAT_S = 0.25
EXIT_FATAL = 2
EXIT_CHANGED = 3
REST_S = 0.5  # before a model is opened again that was changed while it was opened
STILL_S = 60.0  # at most, until a model file is written to no more


class Wire:
    """Frames over a socket. Reads block on one thread; writes never wait: what the socket does not take at once is kept and
    written by a thread of its own."""

    def __init__(
        self, sock: socket.socket, max_read: int = m.MAX_FRAME_BYTES, max_sent: int = m.MAX_ANSWER_BYTES
    ) -> None:
        """The most bytes of a frame that is read, and of one that is sent."""
        self._max_read = max_read
        self._max_sent = max_sent
        self._sock = sock
        self._file = sock.makefile("rb")
        self.n_read = 0  # bytes of messages and pixels
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._has_kept = threading.Event()
        threading.Thread(target=self._write_kept, name="everwarm-writer", daemon=True).start()

    def read(self) -> m.ToEngine | None:
        """The next message that can be understood, or None when the gateway is gone. One that is too large or no message
        is skipped, and its sender gets an error."""
        while True:
            data = self._file.read(m.HEADER.size)
            if len(data) < m.HEADER.size:
                return None
            header, before = m.header_of(data), self.n_read
            try:
                return self._message(header)
            except EOFError:
                return None
            except (EverwarmError, ValueError, msgspec.MsgspecError) as error:
                log.error("a frame of %d bytes for request %d is skipped: %s", header.n_bytes, header.id, error)
                self._skip(header.n_bytes - (self.n_read - before))
                refusal = (
                    error
                    if isinstance(error, EverwarmError)
                    else BadRequest(f"the engine got a message it cannot use: {error}")
                )
                self.send(m.failed(header.id, refusal))

    def _message(self, header: m.FrameHeader) -> m.ToEngine:
        header.check(self._max_read)
        message = m.read_to_engine(self._exactly(header.n_message))
        sizes = m.wanted_pixels(message)
        if header.n_message + sum(sizes) != header.n_bytes:
            raise ValueError(
                f"{sum(sizes)} bytes of pixels were announced, {header.n_bytes - header.n_message} are sent"
            )
        return m.with_pixels(message, [self._exactly(size) for size in sizes])

    def _exactly(self, n_bytes: int) -> bytes:
        data = self._file.read(n_bytes)
        self.n_read += len(data)
        if len(data) < n_bytes:
            raise EOFError
        return data

    def _skip(self, n_bytes: int) -> None:
        while n_bytes > 0 and (data := self._file.read(min(n_bytes, 1 << 20))):
            n_bytes -= len(data)

    def send(self, message: m.Message) -> None:
        try:
            (data,) = m.frame(message, self._max_sent)
        except FrameTooLarge as error:
            log.error("an answer is not sent: %s", error)
            (data,) = m.frame(m.failed(getattr(message, "id", 0), error))
        with self._lock:
            n = 0 if self._kept else self._send_now(data)
            if n < len(data):
                self._kept += memoryview(data)[n:]
                self._has_kept.set()

    def _send_now(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            os._exit(1)  # the gateway is gone

    def flush(self) -> None:
        """Wait until everything is written, but not for ever."""
        deadline = time.monotonic() + 5
        while self._kept and time.monotonic() < deadline:
            time.sleep(0.005)

    def _write_kept(self) -> None:
        while True:
            self._has_kept.wait()
            select.select([], [self._sock], [])
            with self._lock:
                del self._kept[: self._send_now(bytes(self._kept[: 1 << 18]))]
                if not self._kept:
                    self._has_kept.clear()


class Pulse:
    """Beats from the first moment on, also while a model loads or a step takes minutes."""

    def __init__(self, wire: Wire, beat_s: float = BEAT_S) -> None:
        self._wire = wire
        self._beat_s = beat_s
        self._beat = partial(m.Beat, None, 0, 0)
        threading.Thread(target=self._run, name="everwarm-beat", daemon=True).start()

    def watch(self, loop: Loop, files: WatchedFiles, tiers: LowerTiers) -> None:
        """Reports these from now on: parts that may be read from any thread."""
        self._beat = partial(_look, loop, files, tiers)

    def _run(self) -> None:
        while True:
            self._wire.send(self._beat())
            time.sleep(self._beat_s)


def _look(loop: Loop, files: WatchedFiles, tiers: LowerTiers) -> m.Beat:
    """Also looks whether a file has changed: the engine may be idle."""
    if files.look():
        loop.post(Core.require_same_model)
    status = loop.status
    reason = tiers.degraded
    return msgspec.structs.replace(
        status,
        step_age_s=loop.step_age_s(),
        version=status.version + tiers.disk.version,
        degraded={} if reason is None else {"disk": reason},
    )


def main() -> None:
    fd, memory, parent_pid = map(int, sys.argv[1:4])
    die_with_parent(parent_pid)
    for sig in (signal.SIGINT, signal.SIGTERM):  # for the gateway, which tells us when to stop
        signal.signal(sig, signal.SIG_IGN)
    log_to_stderr()
    wire = Wire(socket.socket(fileno=fd))
    first = wire.read()
    if not isinstance(first, m.Open):
        os._exit(1)
    pulse = Pulse(wire)
    if first.settings.embedding is not None:
        return _serve_embeddings(first, wire)
    core = _open(partial(assemble, memory=memory), first, wire)
    _call_test_hook(core)
    collect_rarely()
    wire.send(_info(core))
    _serve(core, wire, pulse)


def _serve_embeddings(first: m.Open, wire: Wire) -> None:
    embedder = _open(open_embedder, first, wire)
    wire.send(info(embedder))
    try:
        EmbeddingHandler(embedder, wire.send).run(wire.read, gone=lambda: os._exit(1))
    except ModelChanged as error:
        wire.send(m.Fatal(str(error), "model_changed"))
        wire.flush()
        embedder.model.files.wait_still(STILL_S)
        os._exit(EXIT_CHANGED)
    wire.flush()
    embedder.close()


def _open(open_model: Callable[[Path, EngineSettings, Progress], T], message: m.Open, wire: Wire) -> T:
    """Opens it, and says how far that is; ends the process if it cannot be opened."""
    shown = [-1.0]

    def progress(fraction: float) -> None:
        if fraction - shown[0] >= 0.01 or fraction >= 1.0:
            shown[0] = fraction
            wire.send(m.Loading(fraction))

    try:
        return open_model(Path(message.model), message.settings, progress)
    except ModelChanged as error:
        wire.send(m.Fatal(str(error), "model_changed"))
        wire.flush()
        time.sleep(REST_S)
        sys.exit(EXIT_CHANGED)
    except EverwarmError as error:
        fatal = m.Fatal(str(error), "out_of_memory" if isinstance(error, ContextTooBig) else "cannot_serve")
    except MemoryError:
        fatal = _out_of_memory()
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        fatal = _out_of_memory()
    wire.send(fatal)
    wire.flush()
    sys.exit(EXIT_FATAL)


def _out_of_memory() -> m.Fatal:
    limit = tightest_limit()
    there = "this machine has no more" if limit is None else f"the limit is {limit}"
    message = f"the model could not be loaded for lack of memory: {there}; raise it, or give less"
    return m.Fatal(message, "out_of_memory")


def _call_test_hook(core: Core) -> None:
    """For tests only: what EVERWARM_TEST_HOOK names as ``module:function`` gets the core before the first request."""
    named = os.environ.get("EVERWARM_TEST_HOOK")
    if named:
        log.warning("EVERWARM_TEST_HOOK is set: %s changes this engine, which is for tests only", named)
        module, _, function = named.partition(":")
        getattr(importlib.import_module(module), function)(core)


def _serve(core: Core, wire: Wire, pulse: Pulse) -> None:
    handler = RequestHandler(core, wire.send)
    loop = Loop(core, handler.deliver, meanwhile=handler.send_due)
    pulse.watch(loop, core.files, core.cache.tiers)
    threading.Thread(target=_read_all, args=(wire, loop, handler), name="everwarm-reader", daemon=True).start()
    try:
        loop.run()
    except ModelChanged as error:
        return _leave(core, wire, error)
    began = time.monotonic()
    core.put_away()
    log.info("put away what is worth keeping in %.3f s: %.1f MiB in RAM", time.monotonic() - began, _mib_kept(core))
    wire.flush()
    core.close()


def _leave(core: Core, wire: Wire, error: ModelChanged) -> None:
    """Exits without saving: what is not kept yet may have been computed with other weights. The writer may finish
    first."""
    log.error("%s; no more of its states are kept", error)
    wire.send(m.Fatal(str(error), "model_changed"))
    wire.flush()
    core.files.wait_still(STILL_S)
    os._exit(EXIT_CHANGED)


def _mib_kept(core: Core) -> float:
    return core.cache.tree.ram_bytes / (1 << 20)


def _read_all(wire: Wire, loop: Loop, handler: RequestHandler) -> None:
    """Reads messages until ``Stop``. Exits when the gateway is gone."""
    try:
        while (message := wire.read()) is not None:
            if isinstance(message, m.Stop):
                return loop.stop()
            handler.handle(message, loop)
    except Exception:
        log.exception("a frame could not be understood")
    os._exit(1)


def _info(core: Core) -> m.ModelInfo:
    model = core.model
    sizes = core.sizes
    vocab = core.model.vocab
    return m.ModelInfo(
        description=model.description,
        memory_kind=model.memory_kind.value,
        n_params=model.n_params,
        size_bytes=model.size_bytes,
        n_ctx=core.settings.n_ctx_of_request(core.context.n_ctx),
        n_ctx_train=model.n_ctx_train,
        n_vocab=vocab.n_tokens,
        n_slots=len(core.slots),
        n_spares=sizes.n_spares,
        ram_bytes=sizes.ram_bytes,
        state_bytes=sizes.shape.state_bytes,
        kv_bytes_per_token=sizes.shape.kv_bytes_per_token,
        every_n_tokens=sizes.spacing.every_n_tokens,
        max_checkpoints=sizes.spacing.max_checkpoints,
        chat_template=model.chat_template,
        bos=vocab.piece(vocab.bos).decode("utf-8", "replace") if vocab.bos is not None else "",
        eos=vocab.piece(vocab.eos).decode("utf-8", "replace") if vocab.eos is not None else "",
        adds_bos=vocab.adds_bos,
        build=BUILD,
        sees=core.images is not None and core.images.media.sees,
        sample_rate=0 if core.images is None else core.images.media.sample_rate,
        fill_in=_fill_in(vocab),
        n_batch=core.settings.n_batch,
        eog=tuple(sorted(vocab.eog)),
        placement=placement_of(core),
    )


def _fill_in(vocab: Vocab) -> m.FillIn | None:
    prefix = vocab.fill_in("pre")
    suffix = vocab.fill_in("suf")
    middle = vocab.fill_in("mid")
    if prefix is None or suffix is None or middle is None:
        return None
    bos = vocab.bos if vocab.adds_bos else None
    return m.FillIn(prefix, suffix, middle, vocab.fill_in("rep"), vocab.fill_in("sep"), bos)


if __name__ == "__main__":
    main()
