"""How much work is ahead of a new request: what is still to be read and to be written, and how fast that goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everwarm.engine.process import messages as m
from everwarm.engine.request import Finish, Request
from everwarm.engine.slots import Slot

STEP_MEMORY = 0.99  # single steps are often disturbed
REPLY_MEMORY = 0.8
FIRST_REPLY = 256.0  # tokens of a reply, until one has ended


@dataclass(slots=True)
class Pace:
    """What was measured of replies: seconds for each token of all that are written together, and how long they are."""

    write_s: float = 0.02
    n_reply: float = FIRST_REPLY
    n_steps: int = 0
    n_ended: int = 0

    def wrote(self, n_tokens: int, seconds: float) -> None:
        self.write_s = _mixed(self.write_s, seconds / n_tokens, self.n_steps, STEP_MEMORY)
        self.n_steps += 1

    def ended(self, request: Request, finish: Finish) -> None:
        if finish in (Finish.STOP, Finish.LENGTH) and not request.ask.ahead:
            self.n_reply = _mixed(self.n_reply, request.n_reply, self.n_ended, REPLY_MEMORY)
            self.n_ended += 1


def backlog_of(
    slots: Sequence[Slot], queue: Iterable[Request], pace: Pace, *, read_s: float, new_share: float
) -> m.Backlog:
    """``read_s``: seconds for each token of a prompt; ``new_share``: how much of a prompt is usually to be read."""
    running = [(slot.n_fed, request) for slot in slots if (request := slot.request) is not None]
    waiting = list(queue)
    reads = [max(0.0, request.n_prompt - n_fed) for n_fed, request in running]
    writes = [_n_expected(pace, request) for _, request in running]
    soonest = min(zip(reads, writes, strict=True), key=sum, default=(0.0, 0.0))
    return m.Backlog(
        n_slots=len(slots),
        n_running=len(running),
        n_waiting=len(waiting),
        n_reply=pace.n_reply,
        n_to_read=sum(reads) + sum(new_share * request.n_prompt for request in waiting),
        n_to_write=sum(writes) + sum(_n_expected(pace, request) for request in waiting),
        n_next_read=soonest[0],
        n_next_write=soonest[1],
        read_s=read_s,
        write_s=pace.write_s,
    )


def _n_expected(pace: Pace, request: Request) -> float:
    """Tokens it will still write: as many as a reply has on average, or as it has already, but no more than it may; all
    that it may where nothing else ends it."""
    if request.ask.ignore_eos:
        return float(request.n_left)
    return min(float(request.n_left), max(pace.n_reply, request.n_reply))


def _mixed(known: float, new: float, n: int, most: float) -> float:
    """A moving average. The first measurement replaces the guess."""
    memory = min(most, n / (n + 1))
    return memory * known + (1 - memory) * new
