"""When one conversation's numbers overflow: it is told, and those beside it go on as if nothing had been."""

from everwarm.engine.request import Finish
from everwarm.errors import DecodeFailed
from support.drive import check, drain, open_core, run, submit, text


def _overflows(*_: object) -> int:
    raise DecodeFailed("the model's numbers overflowed (NaN)")


def test_a_conversation_that_overflows_costs_its_neighbours_nothing_but_time():
    with open_core(n_slots=3, n_spares=2) as core:
        run(core, text(3, 200), stable=180, slot=2)
        guilty, innocent = submit(core, text(1, 100)), submit(core, text(2, 100), max_tokens=6)
        guilty.sampler.pick = _overflows
        results = drain(core)
        assert results[guilty.id].finish is Finish.ERROR and guilty.attempts == 3
        assert results[innocent.id].finish is Finish.LENGTH and len(results[innocent.id].tokens) == 6
        assert innocent.attempts == 0, "three overflows beside it would end it as well"
        assert run(core, [*text(3, 200)[:180], *text(4, 20)]).n_cached == 180, "who did not run is still known"
        check(core)
