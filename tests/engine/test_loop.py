"""The loop: whoever asks right after an answer does not wait for a piece of idle work."""

import threading

import pytest

from everwarm.engine import loop as loops
from everwarm.engine.loop import Loop


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
def test_idle_work_waits_until_nobody_has_asked_for_a_while(monkeypatch, rest_s, order):
    monkeypatch.setattr(loops, "REST_S", rest_s)
    core = Idle()
    loop = Loop(core, lambda events: None)

    def second(_core) -> None:
        core.done.append("second")
        loop.stop()

    def first(_core) -> None:
        core.done.append("first")
        threading.Timer(0.02, loop.post, [second]).start()

    loop.post(first)
    loop.run()
    assert core.done == order


def test_idle_work_is_done_once_the_rest_is_over(monkeypatch):
    monkeypatch.setattr(loops, "REST_S", 0.001)
    core = Idle()
    loop = Loop(core, lambda events: None)
    tidy = core.tidy

    def then_stop() -> bool:
        if core.done == ["tidy", "first"]:
            loop.stop()
        return tidy()

    core.tidy = then_stop
    loop.post(lambda _core: core.done.append("first"))
    loop.run()
    assert core.done == ["tidy", "first", "tidy"]
