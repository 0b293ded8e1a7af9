"""Bringing a conversation back from disk holds nobody up: others go on, and whoever waits may leave."""

from __future__ import annotations

import threading

from everwarm.engine.core import Core
from everwarm.engine.request import Finish, Finished, NewToken
from everwarm.state.store.object import Damaged
from support.drive import check, drain, run, submit, text
from support.kept_cores import HISTORY, NEW, STABLE, kept_core, put_away

NEXT = [*HISTORY[:STABLE], *NEW]


def slow(core: Core) -> threading.Event:
    """Have everything that is read from disk wait for an event."""
    go, load = threading.Event(), core.cache.loader._load

    def wait(*args):
        assert go.wait(30)
        return load(*args)

    core.cache.loader._load = wait
    return go


def one_kept(tmp_path) -> None:
    with kept_core(tmp_path) as core:
        run(core, HISTORY, stable=STABLE)
        put_away(core)


def test_others_read_and_write_while_one_waits_for_the_disk(tmp_path):
    one_kept(tmp_path)
    with kept_core(tmp_path) as core:
        go = slow(core)
        waiting = submit(core, NEXT)
        other = submit(core, text(7, 100), max_tokens=20)
        events = [event for _ in range(40) for event in core.step()]
        assert [e.request_id for e in events if isinstance(e, Finished)] == [other.id]
        assert sum(isinstance(e, NewToken) for e in events) == 20 and waiting.started_at is None
        check(core)
        go.set()
        result = drain(core)[waiting.id]
        assert result.n_cached == STABLE and result.checkpoint is not None and result.checkpoint.how == "from disk"


def test_who_waits_for_the_disk_can_leave(tmp_path):
    one_kept(tmp_path)
    with kept_core(tmp_path) as core:
        go = slow(core)
        waiting = submit(core, NEXT)
        core.step()
        core.cancel(waiting.id)
        (finished,) = core.step()
        assert isinstance(finished, Finished) and finished.result.finish is Finish.CANCELLED
        assert not core.has_work and core.admission._fetches == {}
        go.set()
        assert run(core, NEXT).n_cached == STABLE


def test_many_may_wait_for_the_same_conversation(tmp_path):
    one_kept(tmp_path)
    with kept_core(tmp_path) as core:
        requests = [submit(core, [*HISTORY[:STABLE], *text(30 + i, 20)]) for i in range(7)]
        results = drain(core)
        assert [results[r.id].n_cached for r in requests] == [STABLE] * 7
        assert core.admission._fetches == {}


def test_what_cannot_be_read_is_read_again_from_the_prompt(tmp_path):
    one_kept(tmp_path)
    with kept_core(tmp_path) as core:

        def broken(*_):
            raise Damaged("it is not what it was")

        core.cache.loader._load = broken
        assert run(core, NEXT).n_cached == 0
        check(core)
