"""The planner for several models: each rule in a sentence, then whole histories in a small world, and broken planners."""

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st

from everwarm.router import plan
from everwarm.router.catalog.catalog import ModelSpec
from everwarm.router.plan import Effect, GrantLease, Load, Phase, Planner, PoolLimits, Refuse, Unload
from support.world import Fate, History, Order, Visit, World, Wrong, planned, stream

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
MIB = 1 << 20


class Story:
    """A planner, told what happens in few words; time goes on by itself where it does not matter."""

    def __init__(self, *models: ModelSpec | str, **limits: Any) -> None:
        specs = [model if isinstance(model, ModelSpec) else planned(model, MIB) for model in models]
        self.planner = Planner(PoolLimits(**limits), specs)
        self.now = 0.0

    def want(self, id: int, model: str, at: float | None = None) -> list[Effect]:
        return self._checked(self.planner.want(id, model, self._at(at)))

    def gone(self, id: int, at: float | None = None) -> list[Effect]:
        return self._checked(self.planner.leave(id, self._at(at)))

    def tick(self, at: float) -> list[Effect]:
        return self._checked(self.planner.tick(self._at(at)))

    def loaded(self, model: str, at: float | None = None) -> list[Effect]:
        return self._checked(self.planner.loaded(model, self._at(at)))

    def stopped(self, model: str) -> list[Effect]:
        return self._checked(self.planner.stopped(model, self._at(None)))

    def fail(self, model: str, reason: str = "bad file") -> list[Effect]:
        return self._checked(self.planner.load_failed(model, reason, self._at(None)))

    def load(self, model: str, at: float | None = None) -> list[Effect]:
        return self._checked(self.planner.request_load(model, self._at(at)))

    def retry(self, model: str) -> list[Effect]:
        return self._checked(self.planner.retry_load(model, self._at(None)))

    def unload(self, model: str) -> list[Effect]:
        return self._checked(self.planner.request_unload(model, self._at(None)))

    def remove(self, model: str) -> list[Effect]:
        return self._checked(self.planner.remove(model, self._at(None)))

    def add(self, spec: ModelSpec, at: float) -> list[Effect]:
        return self._checked(self.planner.add(spec, self._at(at)))

    def use(self, id: int, model: str) -> None:
        """Load it, and have it used once: it is idle then, and the last one used."""
        assert Load(model) in self.want(id, model)
        self.loaded(model)
        self.gone(id)

    def phase(self, model: str) -> Phase:
        status = self.planner.status(model)
        assert status is not None
        return status.phase

    def _at(self, at: float | None) -> float:
        self.now = self.now + 0.01 if at is None else at
        return self.now

    def _checked(self, effects: list[Effect]) -> list[Effect]:
        self.planner.check()
        return effects


# one lease


def test_a_model_is_loaded_for_the_first_who_wants_it_and_leased_when_it_is_there():
    story = Story("a")
    assert story.want(1, "a") == [Load("a")]
    assert story.loaded("a") == [GrantLease(1, "a")]
    assert story.phase("a") == "ready"


def test_all_who_wait_share_one_load():
    story = Story("a")
    assert [story.want(id, "a") for id in (1, 2, 3)] == [[Load("a")], [], []]
    assert story.loaded("a") == [GrantLease(1, "a"), GrantLease(2, "a"), GrantLease(3, "a")]


def test_what_is_ready_is_leased_at_once():
    story = Story("a")
    story.use(1, "a")
    assert story.want(2, "a") == [GrantLease(2, "a")]


def test_an_unknown_model_is_refused_by_name():
    (refusal,) = Story("a", "b").want(1, "c")
    assert refusal == Refuse(1, "model_not_found", "there is no model 'c'; there are: a, b")


def test_status_tells_the_phase_and_who_waits_and_borrows():
    story = Story("a")
    assert story.planner.status("a") == ("asleep", 0, 0, 0.0, None)
    story.want(1, "a", at=1.0)
    assert story.planner.status("a") == ("loading", 0, 1, 0.0, None)
    story.loaded("a", at=2.0)
    assert story.planner.status("a") == ("ready", 1, 0, 2.0, None)
    story.gone(1, at=5.0)
    assert story.planner.status("a") == ("ready", 0, 0, 5.0, None)
    assert story.planner.status("b") is None


# room


def test_the_idle_model_used_longest_ago_makes_room():
    story = Story("a", "b", "c", models_max=2)
    story.use(1, "a")
    story.use(2, "b")
    assert story.want(3, "a") == [GrantLease(3, "a")] and story.gone(3) == []  # b is now the one used longest ago
    assert story.want(4, "c") == [Unload("b")]
    assert story.phase("b") == "stopping"
    assert story.stopped("b") == [Load("c")]


def test_nothing_is_loaded_before_the_memory_is_free():
    story = Story("a", "b")
    story.use(1, "a")
    assert story.want(2, "b") == [Unload("a")]
    assert story.tick(100.0) == []
    assert story.stopped("a") == [Load("b")]


def test_zero_means_any_number_and_any_size():
    story = Story("a", planned("b", 1 << 60), models_max=0)
    assert story.want(1, "a") == [Load("a")] and story.want(2, "b") == [Load("b")]


def test_as_many_as_needed_go_by_size_and_none_that_does_not_help():
    models = [planned("tiny", 1), planned("small", 3), planned("middle", 4), planned("big", 7)]
    story = Story(*models, models_max=0, memory_bytes=8)
    for id, name in enumerate(("tiny", "small", "middle")):
        story.use(id, name)
    assert story.want(9, "big") == [Unload("small"), Unload("middle")]  # tiny was used before them, but may stay
    assert story.stopped("middle") == []
    assert story.stopped("small") == [Load("big")]


def test_of_two_that_would_do_the_one_used_longest_ago_goes():
    models = [planned("a", 5), planned("b", 5), planned("c", 8), planned("d", 13)]
    story = Story(*models, models_max=0, memory_bytes=18)
    for id, name in enumerate("abc"):
        story.use(id, name)
    assert story.want(9, "d") == [Unload("a"), Unload("c")]


def test_what_goes_anyway_spares_another():
    story = Story("a", "b", "c", models_max=2)
    story.use(1, "b")
    story.want(2, "a")
    story.loaded("a")
    story.unload("a")
    assert story.want(3, "c") == []
    assert story.gone(2) == [Unload("a")]
    assert story.stopped("a") == [Load("c")]


def test_memory_that_is_being_freed_is_not_freed_twice():
    story = Story("a", "b", "c", models_max=2)
    story.use(1, "a")
    story.use(2, "b")
    assert story.want(3, "c") == [Unload("a")]
    assert story.want(4, "c") == [] and story.phase("b") == "ready"


def test_a_model_larger_than_all_memory_is_refused_at_once_with_both_sizes():
    story = Story(planned("big", 20 * MIB), "a", "b", memory_bytes=16 * MIB)
    story.want(1, "a")
    story.want(2, "b")  # somebody is in front, which must not matter
    message = "the model 'big' needs 20.0 MiB; all together may take 16.0 MiB"
    assert story.want(3, "big") == [Refuse(3, "model_too_large", message)]


def test_a_busy_model_is_not_stopped():
    story = Story("a", "b")
    story.want(1, "a")
    story.loaded("a")
    assert story.want(2, "b") == []
    assert story.gone(1) == [Unload("a")]


def test_a_pinned_model_stays_and_who_cannot_have_its_place_is_told():
    story = Story(planned("p", MIB, pinned=True), "b")
    story.use(1, "p")
    assert story.want(2, "b") == [Refuse(2, "no_room", "there is no room for the model 'b' beside the pinned ones (p)")]


def test_a_pinned_model_that_is_being_unloaded_is_waited_for():
    story = Story(planned("p", MIB, pinned=True), "b")
    story.want(1, "p")
    story.loaded("p")
    story.unload("p")
    assert story.want(2, "b") == []
    assert story.gone(1) == [Unload("p")]


def test_a_pinned_model_is_passed_over_for_one_that_was_used_later():
    story = Story(planned("p", MIB, pinned=True), "a", "b", models_max=2)
    story.use(1, "p")
    story.use(2, "a")
    assert story.want(3, "b") == [Unload("a")]


def test_nothing_is_unloaded_before_all_that_must_go_is_idle():
    story = Story(planned("a", 1), planned("b", 1), planned("big", 2), models_max=0, memory_bytes=2)
    story.use(1, "a")
    story.want(2, "b")
    story.loaded("b")
    assert story.want(3, "big") == []
    assert story.gone(2) == [Unload("a"), Unload("b")]


def test_a_younger_wish_passes_only_into_room_the_older_one_does_not_need():
    models = [planned("busy", 5), planned("big", 8), planned("two", 2), planned("three", 3)]
    story = Story(*models, models_max=0, memory_bytes=10)
    story.want(1, "busy")
    story.loaded("busy")
    assert story.want(2, "big") == []
    assert story.want(3, "three") == []  # would fit now, but not beside big
    assert story.want(4, "two") == []  # behind three, who waits for the same bytes
    story.gone(3)
    assert story.phase("two") == "loading"
    story.loaded("two")
    assert story.gone(1) == [Unload("busy")]
    assert story.stopped("busy") == [Load("big")]


# turns


def busy_and_waited_for(**limits: Any) -> Story:
    """``a`` is leased by 1, and since time 10 request 2 waits for ``b``, which needs its place."""
    story = Story("a", "b", "c", **limits)
    story.want(1, "a", at=0.0)
    story.loaded("a", at=1.0)
    assert story.want(2, "b", at=10.0) == []
    return story


def test_newcomers_are_served_until_the_other_has_waited_long_enough():
    story = busy_and_waited_for(patience_s=5.0)
    assert story.want(3, "a", at=14.9) == [GrantLease(3, "a")]
    assert story.want(4, "a", at=15.0) == []  # without any tick between
    assert story.phase("a") == "draining"
    assert story.gone(1) == [] and story.gone(3) == [Unload("a")]


def test_without_patience_nobody_passes():
    assert busy_and_waited_for(patience_s=0.0).want(3, "a", at=10.0) == []


def test_two_busy_models_take_turns_and_everybody_who_waited_is_served():
    story = busy_and_waited_for()
    story.want(3, "a", at=16.0)
    story.want(4, "b", at=17.0)
    story.gone(1, at=18.0)
    assert story.stopped("a") == [Load("b")]
    story.want(5, "a", at=19.0)
    assert story.loaded("b", at=30.0) == [
        GrantLease(2, "b"),
        GrantLease(4, "b"),
    ]  # before those who wait for a drain it
    assert story.phase("b") == "draining"
    assert story.want(6, "b", at=31.0) == []
    story.gone(2)
    assert story.gone(4) == [Unload("b")]
    assert story.stopped("b") == [Load("a")]
    assert story.loaded("a") == [GrantLease(3, "a"), GrantLease(5, "a")]


def test_the_oldest_wish_has_the_first_turn():
    story = busy_and_waited_for()
    story.want(3, "c", at=11.0)
    story.gone(1)
    assert story.stopped("a") == [Load("b")]
    assert story.loaded("b") == [GrantLease(2, "b")]
    assert story.gone(2) == [Unload("b")]
    assert story.stopped("b") == [Load("c")]


def test_draining_is_called_off_when_nobody_waits_for_the_place_any_more():
    story = busy_and_waited_for()
    assert story.want(3, "a", at=20.0) == [] and story.phase("a") == "draining"
    assert story.gone(2) == [GrantLease(3, "a")]
    assert story.phase("a") == "ready"


def test_draining_is_called_off_when_another_model_can_give_the_place():
    story = Story("a", "b", "c", models_max=2)
    for id, name in ((1, "a"), (2, "b")):
        story.want(id, name)
        story.loaded(name)
    story.want(3, "c", at=10.0)
    story.tick(15.0)
    assert (story.phase("a"), story.phase("b")) == ("draining", "ready")
    assert story.gone(2) == [Unload("b")]
    assert story.phase("a") == "ready"


def test_what_began_to_drain_is_not_exchanged_for_another_busy_model():
    story = Story("a", "b", "c", models_max=2)
    for id, name in ((1, "a"), (2, "a"), (3, "b")):
        story.want(id, name)
        if story.phase(name) == "loading" and id != 1:
            story.loaded(name)
    story.want(4, "c", at=10.0)
    story.tick(15.0)
    story.gone(1, at=16.0)  # a was used later than b now
    assert (story.phase("a"), story.phase("b")) == ("draining", "ready")


def test_a_stop_is_final_and_who_comes_late_has_it_loaded_again():
    story = Story("a", "b")
    story.use(1, "a")
    assert story.want(2, "b") == [Unload("a")]
    assert story.want(3, "a") == [] and story.gone(2) == []
    assert story.stopped("a") == [Load("a")]
    assert story.loaded("a") == [GrantLease(3, "a")]


# leaving and failing


def test_a_load_nobody_waits_for_any_more_completes():
    story = Story("a")
    story.want(1, "a")
    assert story.gone(1) == [] and story.loaded("a") == []
    assert story.want(2, "a") == [GrantLease(2, "a")]


def test_whoever_is_unknown_may_leave():
    assert Story("a").gone(7) == []


def test_a_failed_load_is_the_answer_for_all_and_is_tried_again_when_asked():
    story = Story("a")
    story.want(1, "a")
    story.want(2, "a")
    message = "the model 'a' cannot be used: bad file"
    assert story.fail("a") == [Refuse(1, "load_failed", message), Refuse(2, "load_failed", message)]
    assert story.planner.status("a") == ("asleep", 0, 0, 0.0, message)
    assert story.tick(99.0) == []
    assert story.want(3, "a") == [Load("a")]
    assert story.planner.status("a").reason is None


def test_a_model_that_failed_is_tried_again_where_there_is_room():
    story = Story("a", "b")
    story.use(1, "a")
    story.fail("a", "died")
    assert story.retry("a") == [Load("a")]
    assert story.retry("a") == [], "it is on its way"


def test_a_model_that_failed_takes_nobodys_place_when_it_is_tried_again():
    story = Story("a", "b")
    story.use(1, "a")
    story.fail("a", "died")
    story.use(2, "b")
    assert story.retry("a") == [] and story.phase("b") == "ready"
    assert story.tick(99.0) == [] and story.phase("a") == "asleep"
    assert story.load("a") == [Unload("b")], "an order would have it loaded"


def test_a_model_that_failed_does_not_pass_those_who_wait():
    story = Story(planned("a", MIB), planned("b", MIB), planned("c", MIB), models_max=2)
    story.use(1, "a")
    story.want(2, "b")
    story.loaded("b")
    story.fail("a", "died")
    story.want(3, "c")
    assert story.retry("a") == [] and story.phase("c") == "loading"


def test_an_engine_that_is_given_up_while_in_use_frees_its_place():
    story = busy_and_waited_for()
    assert story.fail("a", "died") == [Load("b")]
    assert story.gone(1) == [] and story.phase("a") == "asleep"


def test_a_death_while_stopping_changes_nothing():
    story = Story("a", "b")
    story.use(1, "a")
    story.want(2, "b")
    assert story.fail("a", "died") == []
    assert story.stopped("a") == [Load("b")]


# being asked


def test_a_model_can_be_loaded_for_nobody():
    story = Story("a", "b")
    assert story.load("a") == [Load("a")]
    assert story.load("a") == []
    assert story.loaded("a") == []
    assert story.load("b") == [Unload("a")]
    assert story.stopped("a") == [Load("b")]


def test_asking_for_what_has_no_room_leaves_a_reason():
    story = Story(planned("p", MIB, pinned=True), "b")
    story.use(1, "p")
    assert story.load("b") == []
    assert "no room" in story.planner.status("b").reason


def test_asking_twice_keeps_the_first_place():
    story = Story("a", "b")
    story.want(1, "a", at=0.0)
    story.loaded("a", at=1.0)
    story.load("b", at=10.0)
    story.load("b", at=14.0)
    story.tick(15.0)
    assert story.phase("a") == "draining"


def test_unloading_waits_for_leases_and_those_who_wait_have_it_loaded_again():
    story = Story(planned("a", MIB, pinned=True))
    story.want(1, "a")
    story.loaded("a")
    assert story.unload("a") == [] and story.phase("a") == "draining"
    assert story.want(2, "a") == []
    assert story.gone(1) == [Unload("a")]
    assert story.stopped("a") == [Load("a")]
    assert story.loaded("a") == [GrantLease(2, "a")]


def test_unloading_what_loads_lets_those_have_it_who_wait():
    story = Story("a")
    story.want(1, "a")
    assert story.unload("a") == []
    assert story.loaded("a") == [GrantLease(1, "a")]
    assert story.gone(1) == [Unload("a")]
    assert story.stopped("a") == []


def test_unloading_and_loading_at_once_restarts():
    story = Story("a")
    story.use(1, "a")
    assert story.unload("a") == [Unload("a")]
    assert story.load("a") == []
    assert story.stopped("a") == [Load("a")]


def test_unloading_takes_back_what_was_asked_before():
    story = busy_and_waited_for()
    story.load("c")
    story.unload("c")
    story.gone(2)
    assert story.gone(1) == []


def test_an_unused_model_is_put_to_sleep_after_its_time():
    story = Story(planned("a", MIB, ttl_s=60.0), planned("p", MIB, pinned=True, ttl_s=60.0), "z", models_max=0)
    for id, name in enumerate("apz"):
        story.want(id, name, at=1.0)
        story.loaded(name, at=2.0)
    assert story.tick(500.0) == []  # leased
    for id in range(3):
        story.gone(id, at=500.0)
    assert story.tick(559.9) == []
    assert story.tick(560.0) == [Unload("a")]
    assert story.tick(9999.0) == []


def test_a_model_that_is_waited_for_is_not_put_to_sleep():
    small = [planned(name, 1, ttl_s=3.0) for name in "ab"]
    story = Story(*small, planned("big", 2), models_max=0, memory_bytes=2)
    story.use(1, "a")
    story.want(2, "b")
    story.loaded("b")
    story.want(3, "big", at=10.0)
    assert story.want(4, "a", at=11.0) == [GrantLease(4, "a")] and story.gone(4, at=15.0) == []
    assert story.want(5, "a", at=16.0) == [] and story.tick(20.0) == []
    assert story.gone(3) == [GrantLease(5, "a")]


# models that come and go


def test_a_model_that_was_added_can_be_wanted():
    story = Story()
    assert story.want(1, "a")[0].code == "model_not_found"
    story.add(planned("a", MIB), 1.0)
    assert story.want(2, "a") == [Load("a")]


def test_a_removed_model_is_refused_to_all_and_stops_when_its_leases_end():
    story = busy_and_waited_for()
    assert [e.code for e in story.remove("b")] == ["model_not_found"]
    assert story.remove("a") == []
    assert story.want(5, "a")[0].code == "model_not_found" and story.planner.status("a") is None
    assert story.gone(1) == [Unload("a")]
    assert story.stopped("a") == []


def test_a_model_removed_and_added_is_loaded_anew():
    story = Story("a")
    story.want(1, "a")
    story.loaded("a")
    story.remove("a")
    story.add(planned("a", 2 * MIB), 50.0)
    assert story.want(2, "a") == [] and story.gone(1) == [Unload("a")]
    assert story.stopped("a") == [Load("a")]


def test_a_process_counts_with_the_size_it_was_loaded_with():
    story = Story(planned("a", 4), planned("b", 5), models_max=0, memory_bytes=9)
    story.use(1, "a")
    story.add(planned("a", 9), 50.0)
    assert story.want(2, "b") == [Load("b")]


# whole histories


def history_of(draw: st.DrawFn) -> History:
    names = "abcd"[: draw(st.sampled_from([1, 2, 3, 4, 4]))]

    def model(name: str) -> ModelSpec:
        pinned = draw(st.sampled_from([False] * 7 + [True]))
        return planned(name, draw(st.integers(1, 6)), pinned, draw(st.sampled_from([0.0, 0.0, 3.0, 8.0])))

    def visit() -> Visit:
        at, hold_s, leaves = (
            draw(st.integers(0, 60)),
            draw(st.sampled_from([0, 1, 2, 6])),
            st.none() | st.integers(0, 12),
        )
        return Visit(at, draw(st.sampled_from([*names, *names, "x"])), hold_s, draw(st.none() | leaves))

    def order() -> Order:
        what = draw(st.sampled_from(["load", "unload", "remove", "add", "crash"]))
        return Order(draw(st.integers(0, 60)), what, model(draw(st.sampled_from(names))))

    memory = draw(st.sampled_from([0, 0, 5, 8, 12]))
    limits = PoolLimits(draw(st.sampled_from([0, 1, 2, 2, 3])), memory, draw(st.sampled_from([0.0, 2.0, 5.0])))
    flood = ()
    if draw(st.integers(0, 3)) == 0:
        period = draw(st.integers(1, 3))
        flood = tuple(stream(draw(st.sampled_from(names)), draw(st.integers(0, 9)), period, period + 1, 80))
    fates = st.builds(Fate, st.integers(0, 4), st.integers(0, 3), st.sampled_from([False] * 5 + [True]))
    return History(
        limits,
        tuple(model(name) for name in names),
        tuple(visit() for _ in range(draw(st.integers(0, 30)))) + flood,
        tuple(order() for _ in range(draw(st.integers(0, 6)))),
        tuple(draw(st.lists(fates, min_size=1, max_size=6))),
    )


histories = st.composite(history_of)


def live_through_histories(planner: type[Planner], n: int, *, derandomize: bool = True) -> Counter[str]:
    """Random histories in a world of their own; returns what happened in all of them."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=n,
        deadline=None,
        database=None,
        derandomize=derandomize,
        report_multiple_bugs=False,
        phases=[Stage.generate, Stage.shrink] if planner is Planner else [Stage.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(histories())
    def live(history: History) -> None:
        seen.update(World(history, planner).run())

    live()
    return seen


EVERYTHING = {
    *("served at once", "served later", "drained", "called off", "failed loads", "deaths"),
    *("evicted", "chosen", "expired", "unloaded"),
    *("model_not_found", "model_too_large", "no_room", "load_failed"),
}


def test_no_history_breaks_a_rule():
    seen = live_through_histories(Planner, 5000 if CAMPAIGN else 150, derandomize=not CAMPAIGN)
    assert not EVERYTHING - {what for what, n in seen.items() if n > 0}, seen  # otherwise it would prove little


# planners that are wrong, and do not notice it themselves


class Blind(Planner):
    def check(self) -> None:
        pass


class LoadsTwice(Blind):
    def want(self, request_id: int, id: str, at: float) -> list[Effect]:
        status = self.status(id)
        again: list[Effect] = [Load(id)] if status is not None and status.phase == "loading" else []
        return super().want(request_id, id, at) + again


class Starves(Blind):
    def __init__(self, limits: PoolLimits, models: Any) -> None:
        super().__init__(replace(limits, patience_s=1e9), models)


class Forgets(Blind):
    """Whoever waits for memory that becomes free is not thought of."""

    is_dozing = False

    def stopped(self, id: str, at: float) -> list[Effect]:
        self.is_dozing = True
        return super().stopped(id, at)

    def tick(self, at: float) -> list[Effect]:
        self.is_dozing = True
        return super().tick(at)

    def _settle(self) -> None:
        if not self.is_dozing:
            super()._settle()
        self.is_dozing = False


class EvictsPinned(Blind):
    def __init__(self, limits: PoolLimits, models: Any) -> None:
        super().__init__(limits, [replace(model, pinned=False) for model in models])


class Overfills(Blind):
    def __init__(self, limits: PoolLimits, models: Any) -> None:
        super().__init__(replace(limits, models_max=limits.models_max and limits.models_max + 1), models)


class OverfillsBytes(Blind):
    def __init__(self, limits: PoolLimits, models: Any) -> None:
        super().__init__(replace(limits, memory_bytes=2 * limits.memory_bytes), models)


class ForgetsWhatStops(Blind):
    """Memory counts as free as soon as ``Unload`` is said."""

    def _held(self) -> Any:
        return [m for m in super()._held() if m.phase != "stopping"]


class EvictsAll(Blind):
    def _victims(self, coming: Any, going: Any) -> Any:
        found = super()._victims(coming, going)
        more = [m for m in self._held() if m.is_idle and m.stays and not m.spec.pinned]
        return more if found and all(m.is_idle for m in found) else found


class KeepsWaiting(Blind):
    """Who comes to a model that is there waits for the next occasion."""

    def _grant(self, model: Any) -> None:
        if not model.leases:
            super()._grant(model)


class GrantsTwice(Blind):
    def _settled(self) -> list[Effect]:
        effects = super()._settled()
        return effects + [effect for effect in effects if isinstance(effect, GrantLease)]


@pytest.mark.parametrize(
    ("planner", "sentence"),
    [
        (LoadsTwice, "only what is asleep is loaded"),
        (Starves, "nobody waits for ever"),
        (Forgets, "nobody waits for ever"),
        (EvictsPinned, "a pinned model is only stopped when asked to"),
        (Overfills, "never more models than allowed"),
        (OverfillsBytes, "never more memory than allowed|nobody waits for what can never be"),
        (ForgetsWhatStops, "never more (models|memory) than allowed"),
        (EvictsAll, "nothing goes that does not help"),
        (KeepsWaiting, "what is ready is leased at once"),
        (GrantsTwice, "only who waits is served, once"),
    ],
)
def test_a_broken_planner_is_caught(planner, sentence):
    with pytest.raises(Wrong, match=sentence):
        live_through_histories(planner, 1000)


def test_a_planner_that_evicts_what_is_leased_is_caught(monkeypatch):
    monkeypatch.setattr(plan._Model, "is_idle", property(lambda m: m.phase in ("ready", "draining")))
    with pytest.raises(Wrong, match="nothing is stopped while it is leased"):
        live_through_histories(Blind, 1000)


def test_a_planner_that_evicts_what_was_used_last_is_caught(monkeypatch):
    monkeypatch.setattr(plan._Model, "eviction_order", property(lambda m: (not m.is_idle, -m.last_used)))
    with pytest.raises(Wrong, match="what was used longest ago goes first"):
        live_through_histories(Blind, 1000)


CROWD = (*stream("a", 0.0, 2.0, 6.0, 120), *stream("b", 0.5, 2.0, 6.0, 120))
A_PLACE_FOR_C = History(PoolLimits(2), tuple(planned(name, 1) for name in "abc"), (*CROWD, Visit(20.0, "c")))
ROOM_FOR_BIG = History(
    PoolLimits(0, memory_bytes=2),
    (planned("a", 1), planned("b", 1), planned("big", 2)),
    (*CROWD, Visit(20.0, "big")),
    fates=(Fate(stop_s=1.0), Fate(stop_s=2.0)),
)


@pytest.mark.parametrize("history", [A_PLACE_FOR_C, ROOM_FOR_BIG], ids=["a place", "room"])
def test_in_a_crowd_everybody_has_his_turn(history):
    assert World(history).run()["served later"] > 0


def test_a_planner_that_goes_from_one_busy_model_to_the_other_is_caught(monkeypatch):
    monkeypatch.setattr(plan._Model, "eviction_order", property(lambda m: (not m.is_idle, m.last_used)))
    with pytest.raises(Wrong, match="nobody waits for ever"):
        World(A_PLACE_FOR_C, Blind).run()


class GivesRoomAway(Blind):
    """A younger wish takes the first room that an older one is making."""

    def _victims(self, coming: Any, _: Any) -> Any:
        return super()._victims(coming[-1:], ())


def test_a_planner_that_gives_room_away_is_caught():
    with pytest.raises(Wrong, match="nobody waits for ever"):
        World(ROOM_FOR_BIG, GivesRoomAway).run()


# checking itself


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda planner, a, b: b.__setattr__("phase", "loading"), "more is in memory than allowed"),
        (lambda planner, a, b: a.__setattr__("phase", "stopping"), "a is stopping and leased"),
        (lambda planner, a, b: a.waiting.update({9: 0.0}), "a is ready and a request waits for it"),
        (lambda planner, a, b: b.__setattr__("held_bytes", 1), "b sleeps and counts"),
        (lambda planner, a, b: (a.leases.clear(), a.__setattr__("must_go", True)), "a should have been stopped"),
        (lambda planner, a, b: planner._requests.clear(), "a request is lost"),
    ],
)
def test_a_planner_notices_when_it_is_wrong(spoil, sentence):
    story = Story("a", "b")
    story.want(1, "a")
    story.loaded("a")
    spoil(story.planner, story.planner._models["a"], story.planner._models["b"])
    with pytest.raises(AssertionError, match=sentence):
        story.planner.check()


@pytest.mark.parametrize("tell", [Story.loaded, Story.stopped, Story.fail])
def test_what_cannot_have_happened_is_not_believed(tell):
    with pytest.raises(AssertionError, match="asleep"):
        tell(Story("a"), "a")


def test_a_request_has_one_place():
    story = Story("a")
    story.want(1, "a")
    with pytest.raises(AssertionError, match="has its place already"):
        story.want(1, "a")
