"""A restore is answered before the whole file is read: who needs the rest waits for it, and it comes to nobody else."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from everwarm.config import GREEDY
from everwarm.engine.cache.checkpointing import Checkpointer
from everwarm.engine.engine import Engine
from everwarm.engine.process import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.engine.slotfile import slot_io
from everwarm.engine.slotfile.slot_commands import SlotCommands
from everwarm.engine.tiers.loader import Arriving
from support.drive import text
from support.models import tiny_model
from support.server import until
from support.slot_files import damage_state, header_of

HISTORY, NEW = text(1, 400), text(2, 30)
ENDS, STABLE = (60, 120, 180, 240, 300), 380
OLD = 180  # what is read later


class Gate:
    """Reading the rest of a file stops here until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.reached = threading.Event()
        read = slot_io.Later.read

        def wait(later, point):
            self.reached.set()
            assert self.is_open.wait(60)
            return read(later, point)

        monkeypatch.setattr(slot_io.Later, "read", wait)


@dataclass
class Serving:
    engine: Engine
    files: SlotCommands
    answers: queue.SimpleQueue

    def start(self, action: str, path: Path, slot: int = 0) -> None:
        self.files.handle(m.SlotAction(7, slot, action, str(path)), self.engine._loop)

    def answer(self):
        return self.answers.get(timeout=60)

    def act(self, action: str, path: Path, slot: int = 0):
        self.start(action, path, slot)
        return self.answer()

    def restore_until(self, gate: Gate, path: Path, slot: int = 0) -> None:
        """Restores a slot; the rest of its file is about to be read."""
        assert isinstance(self.act("restore", path, slot), m.Answer)
        assert gate.reached.wait(60)

    def run(self, tokens: list[int], n: int = 4, **more):
        return self.engine.submit(tokens, GREEDY, max_tokens=n, ignore_eos=True, **more).result()

    def settle(self) -> None:
        """Until everything that was begun with files is done."""
        self.files._files.submit(lambda: None).result(60)
        self.engine.call(lambda core: None)

    def points(self) -> set[int]:
        return self.engine.call(
            lambda core: {
                n.n_items for n in core.cache.tree.nodes() if n.checkpoint is not None and n.checkpoint.is_held
            }
        )


@contextlib.contextmanager
def serving(**more) -> Iterator[Serving]:
    settings = EngineSettings(
        **{"n_slots": 2, "n_ctx": 2048, "n_spares": 4, "n_threads": 1, "ram_bytes": 256 << 20, "speculate": "off"}
        | more
    )
    with Engine(tiny_model("qwen35", width=64), settings) as engine:
        answers: queue.SimpleQueue = queue.SimpleQueue()
        yield Serving(engine, SlotCommands(engine.core, answers.put), answers)


@pytest.fixture
def path(tmp_path) -> Path:
    """A saved conversation."""
    with serving() as server:
        server.run(HISTORY, boundaries=ENDS, stable=STABLE)
        assert isinstance(server.act("save", tmp_path / "a.bin"), m.Answer)
    assert {OLD, STABLE} < {point.n_items for point in header_of(tmp_path / "a.bin").points}
    return tmp_path / "a.bin"


def golden(prompt: list[int]) -> list[int]:
    with serving() as server:
        return list(server.run(prompt, 8).tokens)


def test_a_restore_is_answered_before_the_rest_is_read(path, monkeypatch):
    gate = Gate(monkeypatch)
    with serving() as server:
        assert isinstance(server.act("restore", path), m.Answer)
        assert gate.reached.wait(60) and OLD not in server.points()
        assert server.run([*HISTORY, *NEW]).n_cached >= len(HISTORY) - 20
        assert server.run([*HISTORY[:STABLE], *NEW]).n_cached == STABLE
        gate.is_open.set()
        server.settle()
        assert OLD in server.points()
        assert server.run([*HISTORY[:OLD], *NEW]).n_cached == OLD
        assert server.engine.call(lambda core: core.cache.loader._arriving) == []


@pytest.mark.parametrize("waits", [True, False])
def test_a_request_that_needs_the_rest_waits_for_it(path, monkeypatch, waits):
    expected = golden([*HISTORY[:OLD], *NEW])
    gate = Gate(monkeypatch)
    if not waits:
        monkeypatch.setattr(Arriving, "best_for", lambda *_, **__: None)
    with serving() as server:
        server.restore_until(gate, path)
        stream = server.engine.submit([*HISTORY[:OLD], *NEW], GREEDY, max_tokens=8, ignore_eos=True)
        if not waits:
            assert stream.result().n_cached == 0, "this test could not fail"
        gate.is_open.set()
        result = stream.result()
        assert result.n_cached == (OLD if waits else 0) and list(result.tokens) == expected
        server.settle()


def test_what_is_erased_meanwhile_does_not_come_back(path, monkeypatch):
    gate = Gate(monkeypatch)
    with serving() as server:
        server.restore_until(gate, path)
        assert server.act("erase", path).data["n_erased"] > 0
        gate.is_open.set()
        server.settle()
        assert server.points() == set()
        assert server.run([*HISTORY[:OLD], *NEW]).n_cached == 0


@pytest.mark.parametrize("namespace", ["", "other"])
def test_what_is_dropped_meanwhile_does_not_come_back(path, monkeypatch, namespace):
    """The control drops another namespace."""
    gate = Gate(monkeypatch)
    with serving() as server:
        server.restore_until(gate, path)
        server.engine.call(lambda core: core.forget_ahead(namespace))
        gate.is_open.set()
        server.settle()
        assert (OLD in server.points()) is (namespace == "other")


def test_a_second_save_has_all_of_it(path, tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with serving() as server:
        server.restore_until(gate, path)
        server.start("save", tmp_path / "b.bin")
        gate.is_open.set()
        assert isinstance(server.answer(), m.Answer)
    first, again = (header_of(tmp_path / name) for name in ("a.bin", "b.bin"))
    assert [(p.n_items, p.digest) for p in first.points] == [(p.n_items, p.digest) for p in again.points]
    assert path.read_bytes() == (tmp_path / "b.bin").read_bytes()


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_goes_away_meanwhile_is_read_all_the_same(path, monkeypatch, how):
    gate = Gate(monkeypatch)
    with serving() as server:
        server.restore_until(gate, path)
        for file in list(path.parent.iterdir()):
            file.unlink()
            if how == "replaced":
                file.write_bytes(b"something else")
        gate.is_open.set()
        server.settle()
        result = server.run([*HISTORY[:OLD], *NEW], 8)
    assert result.n_cached == OLD and list(result.tokens) == golden([*HISTORY[:OLD], *NEW])


@pytest.mark.parametrize("how", ["changed", "cut short"])
def test_what_is_damaged_costs_only_what_it_is(path, how):
    """A checkpoint that is read later: the conversation and all others are there."""
    if how == "changed":
        damage_state(path, OLD)
    with serving() as server:
        if how == "cut short":
            read = slot_io.Later.read

            def cut(later, point):
                if point.n_items == OLD:
                    raise slot_io.Damaged("it ends early")
                return read(later, point)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(slot_io.Later, "read", cut)
                assert isinstance(server.act("restore", path), m.Answer)
                server.settle()
        else:
            assert isinstance(server.act("restore", path), m.Answer)
            server.settle()
        result = server.run([*HISTORY[:OLD], *NEW], 8)
        assert 0 < result.n_cached < OLD and list(result.tokens) == golden([*HISTORY[:OLD], *NEW])
        assert server.run([*HISTORY, *NEW]).n_cached >= len(HISTORY) - 20


def test_an_engine_can_stop_meanwhile(path, monkeypatch):
    gate = Gate(monkeypatch)
    with serving() as server:
        server.restore_until(gate, path)
        files = server.files._files
    gate.is_open.set()
    files.submit(lambda: None).result(60)


@pytest.mark.parametrize("n_cut", [1, 100_000])
def test_a_truncated_file_is_refused_and_harms_no_running_slot(path, n_cut):
    with serving() as server:
        server.run([*HISTORY, *NEW])
        path.write_bytes(path.read_bytes()[:-n_cut])
        refused = server.act("restore", path)
        assert isinstance(refused, m.Failed) and "belongs to another file" in refused.message
        assert server.run([*HISTORY, *NEW, 5]).n_cached >= len(HISTORY) + len(NEW)


@pytest.mark.parametrize(("ram_kib", "is_parked"), [(3072, True), (2400, False), (1200, False), (800, False)])
def test_room_is_made_before_the_file_is_read(path, monkeypatch, ram_kib, is_parked):
    """A RAM tier that is full of other conversations evicts them first, and stays within its budget; of the conversation
    itself it keeps what the next turn needs, also where the slot's own state goes to RAM."""
    if not is_parked:
        monkeypatch.setattr(Checkpointer, "_is_parked_sooner", lambda *_: False)
    with serving(ram_bytes=ram_kib << 10) as server:
        for seed in range(3, 12):
            server.run(text(seed, 300), boundaries=(100, 200))
        assert isinstance(server.act("restore", path), m.Answer)
        server.settle()
        assert server.engine.call(lambda core: core.cache.tree.ram_bytes) <= ram_kib << 10
        assert server.run([*HISTORY, *NEW]).n_cached >= len(HISTORY) - 20


def test_an_erased_slot_holds_up_nobody_who_waits_for_the_rest_of_its_file(path, monkeypatch):
    """The file's thread stands still meanwhile: the loop does not wait for it."""
    expected = golden([*HISTORY[:OLD], *NEW])
    gate = Gate(monkeypatch)
    with serving() as server:
        server.restore_until(gate, path)
        stream = server.engine.submit([*HISTORY[:OLD], *NEW], GREEDY, max_tokens=8, ignore_eos=True)
        until(lambda: server.engine.call(lambda core: core.admission.is_waiting_for_disk), "it waits for the file")
        assert server.act("erase", path).data["n_erased"] > 0
        reader = threading.Thread(target=stream.result)
        reader.start()
        reader.join(30)
        was_held_up = reader.is_alive()
        gate.is_open.set()
        reader.join(60)
        assert not was_held_up and list(stream.result().tokens) == expected and stream.result().n_cached == 0
        server.settle()


def test_erasing_another_conversation_leaves_the_rest_of_a_file_alone(path, monkeypatch):
    gate = Gate(monkeypatch)
    with serving() as server:
        server.run([*HISTORY[:50], *text(9, 60)])
        server.restore_until(gate, path, slot=1)
        assert server.act("erase", path).data["n_erased"] > 0
        gate.is_open.set()
        server.settle()
        assert OLD in server.points() and server.run([*HISTORY[:OLD], *NEW]).n_cached == OLD


def test_who_waits_for_a_damaged_checkpoint_gets_the_one_before_it(path, monkeypatch):
    damage_state(path, OLD)
    expected = golden([*HISTORY[:OLD], *NEW])
    gate = Gate(monkeypatch)
    with serving() as server:
        server.restore_until(gate, path)
        stream = server.engine.submit([*HISTORY[:OLD], *NEW], GREEDY, max_tokens=8, ignore_eos=True)
        until(lambda: server.engine.call(lambda core: core.admission.is_waiting_for_disk), "it waits for the file")
        gate.is_open.set()
        assert list(stream.result().tokens) == expected and stream.result().n_cached == 120
        server.settle()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_restore_evicts_nobody_else_who_keeps_within_a_share(path, share):
    """The control has no shares: the other namespace, which nobody came back to, gives way."""
    with serving(ram_bytes=4 << 20, namespace_share=share) as server:
        for seed in range(3, 14):
            server.run(text(seed, 300), boundaries=(100, 200), namespace="other")
        for seed in range(3, 14):
            server.run(text(seed, 300), boundaries=(100, 200))
            server.run([*text(seed, 300), *NEW], boundaries=(100, 200))

        def of_other(core):
            return core.cache.tree.root("other").ram_bytes

        server.engine.call(lambda core: core.cache.ram_budget.enforce())
        before = server.engine.call(of_other)
        assert isinstance(server.act("restore", path), m.Answer)
        server.settle()
        after = server.engine.call(of_other)
        assert (after == before) is (share == 0.5), (before, after)


def test_a_save_leaves_ram_within_its_budget(path):
    with serving(n_spares=8, ram_bytes=400 << 10) as server:
        server.run(HISTORY, boundaries=ENDS, stable=STABLE)
        assert isinstance(server.act("save", path.parent / "b.bin"), m.Answer)
        assert server.engine.call(lambda core: core.cache.tree.ram_bytes) <= 400 << 10
    assert len(header_of(path.parent / "b.bin").points) > 2, "and the file has more than fits into it"
