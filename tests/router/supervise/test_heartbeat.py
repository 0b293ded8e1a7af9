"""How long an engine has been silent, by a watcher that may have been away itself."""

from everwarm.router.supervise.restart_policy import LATE_S, MOST_LATE, TICK_S, Heartbeat

LIMIT_S = 6.0


def ticks(silence: Heartbeat, at: float, n: int, every_s: float = TICK_S, *, step_age_s: float | None = None) -> float:
    for _ in range(n):
        at += every_s
        silence.tick(at, None if step_age_s is None else step_age_s + at)
    return at


def test_an_engine_that_is_silent_while_it_is_watched_is_noticed():
    silence = Heartbeat(0.0)
    ticks(silence, 0.0, round(LIMIT_S / TICK_S) - 1)
    assert silence.silent_s < LIMIT_S
    ticks(silence, LIMIT_S - TICK_S, 2)
    assert silence.silent_s > LIMIT_S
    silence.note_message()
    assert silence.silent_s == 0.0


def test_a_pause_of_the_watcher_says_nothing_about_the_engine():
    silence = Heartbeat(0.0)
    at = ticks(silence, 0.0, 50)
    silence.tick(at + 9.0, None)
    assert silence.silent_s == 0.0
    assert at + 9.0 - 0.0 > LIMIT_S, "by the clock alone it would have been killed"
    ticks(silence, at + 9.0, round(LIMIT_S / TICK_S) + 1)
    assert silence.silent_s > LIMIT_S, "an engine that stays silent afterwards is noticed all the same"


def test_a_watcher_that_is_always_late_notices_a_hang_in_the_end():
    silence = Heartbeat(0.0)
    at = ticks(silence, 0.0, MOST_LATE, 2 * LATE_S)
    assert silence.silent_s == 0.0
    ticks(silence, at, round(LIMIT_S / LATE_S), 2 * LATE_S)
    assert silence.silent_s > LIMIT_S
    silence.note_message()
    silence.tick(at + 1000.0, None)
    assert silence.silent_s == 0.0, "once it was heard of, being late is forgiven again"


def test_a_step_is_as_old_as_it_was_seen_to_be():
    silence = Heartbeat(0.0)
    at = ticks(silence, 0.0, 100, step_age_s=0.0)
    assert abs(silence.step_s - 99 * TICK_S) < 1e-6
    silence.tick(at + 3600.0, 3600.0 + at)
    assert silence.step_s < 100 * TICK_S, "an hour in which both were stopped is no hour of a step"
    silence.tick(at + 3600.0 + TICK_S, 0.05)
    assert silence.step_s == 0.0, "another step"
    silence.tick(at + 3600.0 + 2 * TICK_S, None)
    assert silence.step_s == 0.0
