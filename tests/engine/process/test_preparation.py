"""What is prepared before a request is queued: beside the reader, namespaces in turn, bounded, and left when cancelled."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from everwarm.config import Constraint
from everwarm.engine.process import messages as m
from everwarm.engine.process.preparation import Preparing, RoundRobin, Task
from everwarm.engine.process.request_handler import LONG_TEXT, RequestHandler
from everwarm.engine.process.worker import Wire
from everwarm.errors import BadRequest, Overloaded
from everwarm.llama.constraints.matcher import ConstraintCompiler
from everwarm.prompt.tokenizer import Tokenizer
from support.drive import open_core

PATIENCE_S = 30.0
DIGITS = Constraint("regex", "[0-9]{3}")


# taking turns


def turns_of(output: list[tuple[str, int]], max_waiting: int = 99, max_waiting_each: int = 99) -> RoundRobin:
    turns = RoundRobin(max_waiting, max_waiting_each)
    for namespace, id in output:
        turns.add(namespace, Task(id, lambda: None))
    return turns


def order(turns: RoundRobin) -> list[int]:
    return [task.id for task in iter(turns.next, None)]


def test_namespaces_take_turns_however_many_one_of_them_sends():
    turns = turns_of([*(("many", i) for i in range(5)), ("one", 10), ("two", 20), ("two", 21)])
    assert order(turns) == [0, 10, 20, 1, 21, 2, 3, 4]
    assert turns.n_waiting == 0


def test_what_waits_is_bounded_for_each_and_for_all():
    turns = turns_of([("a", 1), ("a", 2)], max_waiting=3, max_waiting_each=2)
    with pytest.raises(Overloaded, match="at most 2 and 3"):
        turns.add("a", Task(3, lambda: None))
    turns.add("b", Task(4, lambda: None))
    with pytest.raises(Overloaded):
        turns.add("c", Task(5, lambda: None))
    assert order(turns) == [1, 4, 2]


def test_what_is_cancelled_leaves_and_makes_room():
    turns = turns_of([("a", 1), ("b", 2), ("a", 3)], max_waiting=3)
    assert turns.remove(2)
    assert not turns.remove(2)
    turns.add("b", Task(4, lambda: None))
    assert turns.remove(1)
    assert order(turns) == [3, 4]


def test_a_task_that_is_cancelled_never_begins_or_comes_to_nothing():
    preparing, gate, heard = Preparing("test", n_threads=1), threading.Event(), queue.SimpleQueue[str]()

    def held() -> Callable[[], None]:
        heard.put("begun")
        gate.wait(PATIENCE_S)
        return lambda: heard.put("held")

    preparing.add(1, "", held)
    assert heard.get(timeout=PATIENCE_S) == "begun"
    preparing.add(2, "", lambda: heard.put("waited"))
    assert preparing.cancel(1)
    assert preparing.cancel(2)
    assert not preparing.cancel(3)
    gate.set()
    preparing.add(4, "", lambda: lambda: heard.put(threading.current_thread().name))
    assert heard.get(timeout=PATIENCE_S) == "everwarm-test"
    assert heard.empty()


# a conversation with its engine


class Posted:
    """A loop that only notes what it is told to do."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[object] = queue.SimpleQueue()

    def post(self, job: object) -> None:
        self.jobs.put(job)


@pytest.fixture
def held(monkeypatch) -> Iterator[threading.Event]:
    """Trials of forms last until this is set."""
    gate, compiled = threading.Event(), ConstraintCompiler._compile

    def slowly(forms: ConstraintCompiler, form: Constraint, trial: object) -> object:
        gate.wait(PATIENCE_S)
        return compiled(forms, form, trial)

    monkeypatch.setattr(ConstraintCompiler, "_compile", slowly)
    yield gate
    gate.set()


def test_a_form_that_takes_long_keeps_nobody_waiting(held):
    with open_core() as core:
        output: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
        conversation, loop = RequestHandler(core, output.put), Posted()
        for id in range(4):
            conversation.handle(m.Submit(id, text="a", constraint=DIGITS), loop)
        assert loop.jobs.empty()
        conversation.handle(m.Submit(10, text="a"), loop)
        loop.jobs.get(block=False)  # at once, on the reader's thread
        for id in range(3):
            conversation.handle(m.Cancel(id), loop)
        held.set()
        loop.jobs.get(timeout=PATIENCE_S)  # of number 3
        conversation.handle(m.Submit(11, text="a", constraint=DIGITS), loop)
        loop.jobs.get(block=False)  # the form is known by now
        assert loop.jobs.empty()
        assert output.empty()
        forms, deadline = conversation._constraints, time.monotonic() + PATIENCE_S
        while len(forms._idle) < len(forms._trials):  # those of cancelled requests end, too
            assert time.monotonic() < deadline
            time.sleep(0.01)
        forms.close()


def test_a_form_that_was_refused_is_refused_again_without_a_trial(monkeypatch):
    with open_core() as core, ConstraintCompiler(core.model.vocab) as forms:
        wrong, n_trials = Constraint("lark", "start: nowhere"), []
        compiled = ConstraintCompiler._compile
        monkeypatch.setattr(ConstraintCompiler, "_compile", lambda *args: (n_trials.append(1), compiled(*args))[1])
        assert not forms.is_settled(wrong)
        for _ in range(3):
            with pytest.raises(BadRequest, match="cannot be used"):
                forms.compile(wrong)
        assert forms.is_settled(wrong)
        assert len(n_trials) == 1


def test_a_long_text_is_not_tokenized_by_the_reader_and_one_that_cannot_fit_not_at_all(monkeypatch):
    with open_core() as core:
        output: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
        conversation, loop, where = RequestHandler(core, output.put), Posted(), queue.SimpleQueue[str]()
        tokenize = Tokenizer.tokenize

        def noted(self: Tokenizer, text: str, **more: bool) -> object:
            where.put(threading.current_thread().name)
            return tokenize(self, text, **more)

        monkeypatch.setattr(Tokenizer, "tokenize", noted)
        conversation.handle(m.Submit(1, text="a" * LONG_TEXT), loop)
        assert where.get(block=False) == threading.current_thread().name
        core.model.vocab.__dict__["longest_piece_bytes"] = LONG_TEXT  # so that it may just fit
        conversation.handle(m.Submit(2, text="a" * (LONG_TEXT + 1)), loop)
        loop.jobs.get(timeout=PATIENCE_S)
        loop.jobs.get(timeout=PATIENCE_S)
        names = {where.get() for _ in range(where.qsize())}
        assert "everwarm-texts" in names
        core.model.vocab.__dict__["longest_piece_bytes"] = 16
        conversation.handle(m.Submit(3, text="é" * (LONG_TEXT + 8)), loop)
        refused = output.get(timeout=PATIENCE_S)
        assert isinstance(refused, m.Failed)
        assert (refused.id, refused.code, refused.n_prompt) == (3, "exceed_context_size_error", LONG_TEXT // 8 + 1)
        assert "at least" in refused.message
        assert where.empty()


def test_hints_cost_a_text_a_bounded_number_of_times(monkeypatch):
    """Where messages end at no control token, each end costs all the text before it."""
    with open_core() as core:
        tokenizer, n_chars = Tokenizer(core.model.vocab), []
        text = "abc def " * 15_000
        offsets = list(range(8, len(text), 200))
        exact = tokenizer.count_at(text, offsets[-3:])
        plain = core.model.vocab.tokenize
        monkeypatch.setattr(
            core.model.vocab, "tokenize", lambda output, **more: (n_chars.append(len(output)), plain(output, **more))[1]
        )
        counts = tokenizer.count_at(text, offsets)
        assert sum(n_chars) <= 4 * len(text) + (300 << 10)
        assert counts[-3:] == exact
        assert counts[0] == 0  # as far as one cared to look


# frames


@pytest.fixture
def wires() -> Iterator[tuple[Wire, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Wire(theirs, max_read=1000, max_sent=1000), ours


def heard(sock: socket.socket) -> m.ToGateway:
    header = m.header_of(sock.recv(m.HEADER.size, socket.MSG_WAITALL))
    return m.read_to_gateway(sock.recv(header.n_bytes, socket.MSG_WAITALL))


@pytest.mark.parametrize(
    "spoilt",
    [
        m.frame(m.Submit(7, text="x" * 5000))[0],
        m.frame(m.Submit(7, images=(m.SentImage(b"d", 40, 40, bytes(4800)),))),
        m.HEADER.pack(500, 500, 7) + b"\xff" * 500,
        m.HEADER.pack(500, 9000, 7) + b"\xff" * 500,
        m.HEADER.pack(500, 20, 7) + bytes(m.frame(m.Cancel(7))[0][m.HEADER.size :]).ljust(500, b"\xff"),
    ],
    ids=["too long", "pixels", "nonsense", "a wrong header", "more than was said"],
)
def test_a_frame_that_cannot_be_read_is_the_error_of_its_request_and_no_more(wires, spoilt):
    wire, sock = wires
    data = b"".join(spoilt) if isinstance(spoilt, tuple) else bytes(spoilt)
    sender = threading.Thread(target=sock.sendall, args=(data + bytes(m.frame(m.Cancel(8))[0]),))
    sender.start()
    assert wire.read() == m.Cancel(8)
    sender.join()
    refused = heard(sock)
    assert isinstance(refused, m.Failed)
    assert (refused.id, refused.status) == (7, 400)


def test_an_answer_that_is_too_large_is_the_error_of_its_question(wires):
    wire, sock = wires
    wire.send(m.Answer(7, ["x" * 5000]))
    wire.send(m.Answer(8, "y"))
    refused = heard(sock)
    assert isinstance(refused, m.Failed)
    assert (refused.id, refused.code) == (7, "request_too_large")
    assert heard(sock) == m.Answer(8, "y")
