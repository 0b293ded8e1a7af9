"""The loop: a request right after an answer does not wait for idle work, and no other thread touches the core."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest

from everwarm.engine.core import Core
from everwarm.engine.loop import Loop
from everwarm.engine.process import messages as m
from everwarm.engine.process import request_handler, worker
from everwarm.engine.process.request_handler import RequestHandler
from support.drive import drain, open_core, submit, text, tidy


class Idle:
    """A core without requests that notes what it is told to do."""

    has_work, nap_s = False, None

    def __init__(self) -> None:
        self.done: list[str] = []

    def tidy(self) -> bool:
        self.done.append("tidy")
        return False


@pytest.mark.parametrize(
    ("rest_s", "order"), [(600.0, ["tidy", "first", "second"]), (0.0, ["tidy", "first", "tidy", "second"])]
)
def test_idle_work_waits_until_nobody_has_asked_for_a_while(rest_s, order):
    core = Idle()
    loop = Loop(core, lambda events: None, rest_s)

    def second(_core) -> None:
        core.done.append("second")
        loop.stop()

    def first(_core) -> None:
        core.done.append("first")
        if rest_s:
            threading.Timer(0.02, loop.post, [second]).start()
        else:
            core.tidy = tidy_then_second

    def tidy_then_second() -> bool:
        core.done.append("tidy")
        loop.post(second)
        return False

    loop.post(first)
    loop.run()
    assert core.done == order


def test_idle_work_is_done_once_the_rest_is_over():
    core = Idle()
    loop = Loop(core, lambda events: None, rest_s=0.001)
    tidy = core.tidy

    def then_stop() -> bool:
        if core.done == ["tidy", "first"]:
            loop.stop()
        return tidy()

    core.tidy = then_stop
    loop.post(lambda _core: core.done.append("first"))
    loop.run()
    assert core.done == ["tidy", "first", "tidy"]


CHANGED_BY_STEPS = {
    "context",
    "cache",
    "slots",
    "queue",
    "admission",
    "starter",
    "planner",
    "keeper",
    "counts",
    "prewarm",
    "stall",
}


class Wire:
    """Where frames go. The thread that beats rests when the test is over."""

    def __init__(self) -> None:
        self.frames: list[m.Message] = []
        self.is_over = False

    def send(self, message: m.Message) -> None:
        if self.is_over:
            threading.Event().wait()  # for good
        self.frames.append(message)

    def wait_for(self, kind: type[m.Message]) -> None:
        deadline = time.monotonic() + 60
        while not any(isinstance(frame, kind) for frame in list(self.frames)):
            assert time.monotonic() < deadline, f"no {kind.__name__} has come"
            time.sleep(0.005)


@contextmanager
def guarded(core: Core, owner: threading.Thread) -> Iterator[list[tuple[str, str]]]:
    """Every touch of what steps change, by any other thread than the loop's: which part, and by whom."""
    touched: list[tuple[str, str]] = []

    class Guarded(Core):
        __slots__ = ()

        def __getattribute__(self, name: str):
            thread = threading.current_thread()
            if name in CHANGED_BY_STEPS and thread is not owner:
                touched.append((name, thread.name))
            return super().__getattribute__(name)

    core.__class__ = Guarded
    try:
        yield touched
    finally:
        core.__class__ = Core


def test_only_the_loops_thread_touches_the_core():
    with open_core(n_slots=2) as core:
        wire = Wire()
        handler = RequestHandler(core, wire.send)
        loop = Loop(core, handler.deliver)
        thread = threading.Thread(target=loop.run, daemon=True)
        assert {part.name for part in fields(Core)} >= CHANGED_BY_STEPS
        tiers = core.cache.tiers
        with guarded(core, thread) as touched:
            thread.start()
            worker.Pulse(wire, beat_s=0.002).watch(loop, core.files, tiers)
            questions = [
                m.Inspect(2, "slots"),
                m.Inspect(3, "counts"),
                m.Inspect(4, "cache"),
                m.AskPrompt(5, "count", m.Submit(0, text="one two three")),
                m.Cancel(6),
            ]
            for question in (m.Submit(1, text="one two three", max_tokens=40), *questions):
                handler.handle(question, loop)
            wire.wait_for(m.Done)
            wire.is_over = True
            loop.stop()
            thread.join()
            assert touched == []
            assert len(core.slots) == 2 and touched == [("slots", threading.current_thread().name)], "the control"
    beats = [frame for frame in wire.frames if isinstance(frame, m.Beat) and frame.backlog is not None]
    assert any(beat.n_running == 1 for beat in beats)


def test_the_published_status_follows_what_happens():
    with open_core(n_slots=2) as core:
        assert core.status.n_running == core.status.n_queued == 0
        submit(core, text(1, 100), 20)
        version = core.status.version
        core.step()
        assert (core.status.n_running, core.status.n_queued) == (1, 0)
        drain(core)
        assert core.status.n_running == 0 and core.status.backlog.n_to_write == 0
        tidy(core)
        assert core.status.version == core.cache.tree.version > version


def test_what_a_job_posts_waits_for_a_step():
    with open_core() as core:
        loop = Loop(core, lambda _: None)
        n_decodes: list[int] = []

        def again(core: Core) -> None:
            n_decodes.append(core.context.n_decodes)
            loop.post(again) if len(n_decodes) < 5 else loop.stop()

        submit(core, text(1, 20), 50)
        loop.post(again)
        loop.run()
        assert len(set(n_decodes)) == len(n_decodes) == 5


@pytest.mark.parametrize("computes_aside", [False, True])
def test_tokens_are_sent_while_a_gpu_computes_the_next_step(monkeypatch, computes_aside):
    monkeypatch.setattr(request_handler, "GATHER_S", 0.0)
    with open_core() as core:
        core.computes_aside = computes_aside
        wire = Wire()
        handler = RequestHandler(core, wire.send)
        loop = Loop(core, handler.deliver, meanwhile=handler.send_due)
        n_sent: list[int] = []
        decode = core.context.decode

        def counting(feeds) -> None:
            n_sent.append(sum(len(frame.tokens) for frame in wire.frames if isinstance(frame, m.TextPiece)))
            decode(feeds)

        monkeypatch.setattr(core.context, "decode", counting)
        handler.handle(m.Submit(1, text="one two three", max_tokens=8, ignore_eos=True), loop)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        wire.wait_for(m.Done)
        loop.stop()
        thread.join()
    writing = n_sent[-7:]  # each of these steps continues from one more token
    assert writing == ([1, 1, 2, 3, 4, 5, 6] if computes_aside else [1, 2, 3, 4, 5, 6, 7])
    pieces = [frame for frame in wire.frames if isinstance(frame, m.TextPiece)]
    assert sum(len(piece.tokens) for piece in pieces) == 8
    assert isinstance(wire.frames[-1], m.Done) and wire.frames[-1].n_reply == 8
