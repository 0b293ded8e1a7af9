"""When an engine that dies is started again, and what it died of. Pure.

    dies → again at once, then after longer and longer waits → five deaths in a row: given up → a try after each wait

Deaths are forgotten after an answered request or a minute of being ready. A try after giving up is one start, not five,
and there is always a next one.

The heartbeat counts how long an engine has been silent. A watcher that was stopped (SIGSTOP, ``docker pause``, a
suspended laptop) or whose event loop was busy cannot tell whether the engine spoke meanwhile. So time counts in ticks
of the watcher, and a tick that came late begins the count anew.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal, get_args

from everwarm.memory_limits import ADDRESS_SPACE, MemoryLimit

MAX_DEATHS = 5
JITTER = 0.25  # of a wait: servers that failed together do not all try at once
MOST_REQUEST_GAP_S = 5.0  # a request starts a failed model at once, but not more often than this
FREE_TRIES = 3  # of a model whose engine reported why it cannot be served: a request starts it again without a wait
_MIB = 1 << 20
_MOST_DOUBLINGS = 16
_MEMORY_WORDS = (
    "std::bad_alloc",
    "MemoryError",
    "Cannot allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "failed to allocate",
    "unable to allocate",
    "ArrayMemoryError",
    "can't start new thread",
    "Thread creation failed",
)
_SIGNALS = {
    signal.SIGBUS: "a file it had mapped became shorter, like the model file, or a file system in memory is full",
    signal.SIGSEGV: "a fault in libllama or a driver",
    signal.SIGILL: "this CPU lacks an instruction that libllama was built with; use a build for this machine",
    signal.SIGFPE: "a fault in libllama or a driver",
    signal.SIGABRT: "libllama gave up; the log has its last words",
    signal.SIGKILL: "it was killed; if the kernel did it, its log says so",
}
TICK_S = 0.1  # how often the watcher looks
LATE_S = 0.5  # a tick later than this says nothing about the engine
MOST_LATE = 10  # late ticks in a row that are forgiven; a loop that is always late must still notice a hang


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How long an engine may be silent or busy before something is done about it, and how long until it is tried again."""

    stalled_s: float = 1.5  # no beat for so long: not ready
    silent_s: float = 6.0  # no beat for so long: killed
    start_s: float = 60.0  # the same before the first one: a cold disk is slow
    step_s: float = 900.0  # one decode step for so long: killed
    steady_s: float = 60.0  # after being ready this long, earlier deaths are forgotten
    first_back_off_s: float = 0.1
    most_back_off_s: float = 5.0
    first_retry_s: float = 1.0  # after giving up
    most_retry_s: float = 60.0


@dataclass(slots=True)
class RestartHistory:
    """Counts an engine's deaths in a row, and the tries since it was given up."""

    limits: RestartLimits
    n_in_row: int = 0
    n_given_up: int = 0
    _ready_at: float | None = None

    def ready(self, at: float) -> None:
        self._ready_at = at

    def forgive(self) -> None:
        """Forget the deaths: a request was answered, or an admin asks for another try."""
        self.n_in_row = self.n_given_up = 0

    def died(self, at: float) -> None:
        if self._ready_at is not None and at - self._ready_at >= self.limits.steady_s:
            self.forgive()
        self._ready_at = None
        self.n_in_row += 1

    @property
    def is_enough(self) -> bool:
        return self.n_in_row >= MAX_DEATHS or self.n_given_up > 0

    @property
    def back_off_s(self) -> float:
        """Seconds until the next start; the first one comes soon."""
        return _doubled(self.limits.first_back_off_s, self.n_in_row, self.limits.most_back_off_s)

    def give_up(self) -> None:
        self.n_given_up += 1
        self.n_in_row = 0

    def retry_s(self, chance: float) -> float:
        """Seconds until the next try after giving up; ``chance`` from 0 to 1 spreads it."""
        wait_s = _doubled(self.limits.first_retry_s, self.n_given_up, self.limits.most_retry_s)
        return min(self.limits.most_retry_s, wait_s * (1 + JITTER * (2 * chance - 1)))

    def request_gap_s(self, *, gave_reason: bool) -> float:
        """How soon after giving up a request may start it again. ``gave_reason``: the engine did not crash but refused."""
        wait_s = _doubled(self.limits.first_retry_s, self.n_given_up, self.limits.most_retry_s)
        return 0.0 if gave_reason and self.n_given_up <= FREE_TRIES else min(MOST_REQUEST_GAP_S, wait_s / 2)


def _doubled(first_s: float, n: int, most_s: float) -> float:
    return min(most_s, first_s * 2.0 ** min(max(0, n - 1), _MOST_DOUBLINGS))


# what an engine died of

Cause = Literal["memory", "hang", "killed", "crash", "exit", "not started"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known when a process has ended. ``code`` is negative for a signal."""

    code: int
    killed_for: str = ""  # why we killed it ourselves
    last_words: str = ""  # on its standard error
    was_oom_killed: bool = False  # the kernel counted a kill for lack of memory meanwhile
    limit: MemoryLimit | None = None  # the one that leaves the least
    needed_bytes: int = 0  # about what it takes; 0: not known


def cause_of(ending: Ending) -> Cause:
    if ending.killed_for:
        return "hang"
    if ending.was_oom_killed and ending.code == -signal.SIGKILL:
        return "memory"
    if ending.code != 0 and any(words in ending.last_words for words in _MEMORY_WORDS):
        return "memory"
    if ending.code == -signal.SIGABRT and ending.limit is not None and ending.limit.name == ADDRESS_SPACE:
        return "memory"  # a thread or a mapping that was refused: libraries abort without a word
    if ending.code == -signal.SIGKILL:
        return "killed"
    return "crash" if ending.code < 0 else "exit"


def explained(ending: Ending) -> str:
    """Why it ended, as a sentence's end."""
    how = _named(ending.code)
    match cause_of(ending):
        case "hang":
            return ending.killed_for
        case "memory":
            by = "the kernel killed it" if ending.was_oom_killed else how
            return f"it ran out of memory ({by}); {memory_advice(ending.limit, ending.needed_bytes)}"
        case "exit":
            return f"{how}; the log has its last words"
    known = _SIGNALS.get(signal.Signals(-ending.code)) if how.startswith("SIG") else None
    return f"{how}: {known}" if known else how


def memory_advice(limit: MemoryLimit | None, needed_bytes: int) -> str:
    """What there is, what is needed, and what would be right."""
    parts = [f"the limit is {limit}" if limit is not None else "this machine has no more"]
    if limit is not None and limit.name == ADDRESS_SPACE:
        parts.append("which counts what is mapped, touched or not: about 1 GiB for the libraries alone")
    if needed_bytes:
        parts.append(f"and model and context need about {needed_bytes / _MIB:,.0f} MiB beside --cache-ram")
    return f"{', '.join(parts)}; raise the limit, or give a smaller --ctx-size, --cache-ram or model"


def _named(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"


@dataclass(slots=True)
class Heartbeat:
    """``silent_s`` since the last message, ``step_s`` since the running step was first seen."""

    at: float
    silent_s: float = 0.0
    step_s: float = 0.0
    has_spoken: bool = False
    _n_late: int = 0
    _step_age_s: float | None = None

    def note_message(self) -> None:
        self.silent_s = 0.0
        self._n_late = 0
        self.has_spoken = True

    def tick(self, at: float, step_age_s: float | None) -> None:
        """Count the time since the last tick. ``step_age_s``: the running step's age as the engine last reported it."""
        passed_s = at - self.at
        self.at = at
        is_late = passed_s > LATE_S
        self._n_late += is_late
        if is_late and self._n_late <= MOST_LATE:
            self.silent_s = passed_s = 0.0
        self.silent_s += passed_s
        is_same_step = None not in (step_age_s, self._step_age_s) and (step_age_s or 0.0) >= (self._step_age_s or 0.0)
        self.step_s = self.step_s + passed_s if is_same_step else 0.0
        self._step_age_s = step_age_s
