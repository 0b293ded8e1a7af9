"""The suite's accounts on small cases, the way it plays, and one tiny scenario on a real server."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from bench.suite import report
from bench.suite.account import Account
from bench.suite.play import Differs, play
from bench.suite.servers import Answer, Setup, runner
from bench.suite.sessions import ALL, Played, request
from bench.suite.summary import figures, quantile, spread
from bench.suite.weight import NOTHING, Weight

START = 1  # the token that begins every message
LONG = [START, *range(10, 60)]


def conversation(*messages: list[int]) -> list[int]:
    return [token for message in messages for token in [START, *message]]


class Fake:
    """A server that remembers whole prompts, in units of so many tokens, and forgets everything when it is killed."""

    def __init__(self, name: str, unit: int = 1) -> None:
        self.name = name
        self.unit = unit
        self.seen: list[list[int]] = []
        self.happened: list[str] = []

    def start(self) -> None:
        self.happened.append("start")

    def stop(self) -> None:
        self.happened.append("stop")

    def kill(self) -> None:
        self.happened.append("kill")
        self.seen.clear()

    def swap(self) -> None:
        self.happened.append("swap")

    def tokens(self, body: Mapping[str, Any]) -> list[int]:
        text = json.dumps(body["messages"])
        return [START, *(ord(letter) for letter in text)]

    def ask(self, body: Mapping[str, Any]) -> Answer:
        tokens = self.tokens(body)
        n_cached = max((shared(tokens, seen) for seen in self.seen), default=0) // self.unit * self.unit
        self.seen.append(tokens)
        self.happened.append("ask")
        return Answer(len(tokens), n_cached, len(tokens), 0.001, why={"reason": "hit", "again": None})

    def hang_up(self, body: Mapping[str, Any], share: float) -> Answer:
        tokens = self.tokens(body)
        n_reached = int(share * len(tokens))
        self.seen.append(tokens[:n_reached])
        self.happened.append("hang up")
        return Answer(len(tokens), 0, n_reached, 0.001)

    def weight(self) -> Weight:
        return Weight(100, 200, len(self.seen))


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_what_was_read_once_is_avoidable_and_what_is_read_again_of_it_is_regret():
    account = Account(START)
    first = account.add(LONG, 0)
    assert (first.n_avoidable, first.n_regret) == (0, 0)
    longer = account.add([*LONG, 7, 8], 40)
    assert (longer.n_known, longer.n_avoidable, longer.n_regret) == (len(LONG), len(LONG), len(LONG) - 40)
    assert account.add([*LONG, 7, 8], len(LONG) + 2).n_regret == 0


def test_a_prompt_of_which_reading_ended_early_is_known_as_far_as_it_was_read():
    account = Account(START)
    cancelled = account.add(LONG, 0, 30)
    assert (cancelled.n_avoidable, cancelled.n_regret) == (0, 0)
    again = account.add(LONG, 20)
    assert (again.n_known, again.n_avoidable, again.n_regret) == (30, 30, 10)
    stopped = account.add(LONG, 0, 10)
    assert (stopped.n_avoidable, stopped.n_regret) == (10, 10)  # only what it came to


def test_tokens_that_no_request_has_shown_are_told_as_read_ahead_and_are_no_regret():
    account = Account(START)
    account.add(LONG, 0)
    ahead = account.add([*LONG, 7, 8, 9], len(LONG) + 2)
    assert (ahead.n_ahead, ahead.n_regret, ahead.n_avoidable) == (2, 0, len(LONG))


def test_only_the_first_parting_at_a_place_inside_a_message_is_told_apart():
    account = Account(START)
    words = list(range(100, 160))
    account.add(conversation(words, [5]), 0)
    edited = [*words[:40], 7, *words[41:]]
    assert account.add(conversation(edited, [5]), 0).is_first_inside
    assert not account.add(conversation([*words[:40], 8, *words[41:]], [5]), 0).is_first_inside  # the same place
    assert account.add(conversation([*words[:30], 8, *words[31:]], [5]), 0).is_first_inside  # another one


@pytest.mark.parametrize("tail", [[6], [7, 8]], ids=["another message", "a longer one"])
def test_a_parting_at_a_message_is_never_told_apart(tail):
    account = Account(START)
    words = list(range(100, 160))
    account.add(conversation(words, [5]), 0)
    assert not account.add(conversation(words, tail), 0).is_first_inside
    assert not account.add(conversation(words, [5], tail), 0).is_first_inside


def test_every_server_gets_every_request_and_each_is_first_in_turn():
    order: list[str] = []

    class Noting(Fake):
        def ask(self, body: Mapping[str, Any]) -> Answer:
            order.append(self.name)
            return super().ask(body)

    steps = Played("append").steps(0, 0.01)[:3]
    result = play(steps, [Noting("a"), Noting("b")], pause_s=0)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(rows) for rows in result["rows"].values()] == [3, 3]


def test_a_server_that_forgets_has_the_regret_and_one_that_does_not_has_none():
    good, coarse = Fake("good"), Fake("coarse", unit=1 << 30)
    rows = play(Played("append").steps(0, 0.01), [good, coarse], pause_s=0)["rows"]
    best, worst = figures(rows["good"]), figures(rows["coarse"])
    assert best.n_regret == 0 and best.n_avoidable == worst.n_avoidable > 0
    assert worst.regret_percent == 100.0


def test_what_happens_to_a_conversation_happens_to_the_server():
    killed, swapped, cancelled = Fake("k"), Fake("s"), Fake("c")
    rows = play(Played("kill_restart").steps(0, 0.01), [killed], pause_s=0)["rows"]["k"]
    play(Played("swap").steps(0, 0.01), [swapped], pause_s=0)
    play(Played("cancel_retry").steps(0, 0.01), [cancelled], pause_s=0)
    assert killed.happened.count("kill") == 2 and figures(rows).n_regret > 0  # it forgot
    assert swapped.happened.count("swap") == 4
    assert cancelled.happened.count("hang up") == 5
    assert all(fake.happened[-1] == "stop" for fake in (killed, swapped, cancelled))


def test_servers_that_make_different_tokens_of_a_request_are_not_compared():
    class Other(Fake):
        def tokens(self, body: Mapping[str, Any]) -> list[int]:
            return [*super().tokens(body), 3]

    fakes = [Fake("a"), Other("b")]
    with pytest.raises(Differs, match="b and a make different tokens"):
        play(Played("append").steps(0, 0.01), fakes, pause_s=0)
    assert all(fake.happened == ["start", "stop"] for fake in fakes)


def test_a_server_that_counts_another_prompt_than_it_rendered_is_an_error():
    class Short(Fake):
        def ask(self, body: Mapping[str, Any]) -> Answer:
            assert super().ask(body).n_prompt != 5
            return Answer(5, 0, 5, 0.001)

    with pytest.raises(Differs, match="read a prompt of 5 tokens"):
        play(Played("append").steps(0, 0.01), [Short("a")], pause_s=0)


@pytest.mark.parametrize("played", ALL, ids=lambda played: played.name)
def test_every_scenario_is_the_same_every_time_and_can_be_sent(played):
    steps = played.steps(3, 0.01)
    bodies = [request(step) for step in steps]
    assert json.dumps(bodies) == json.dumps([request(step) for step in played.steps(3, 0.01)])
    assert json.dumps(bodies) != json.dumps([request(step) for step in played.steps(4, 0.01)])
    calls = [call for body in bodies for m in body["messages"] for call in m.get("tool_calls", ())]
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


def test_figures_of_rows():
    assert quantile([5, 1, 3, 2, 4], 0.5) == 3 and quantile([1, 2], 0.95) == 2 and quantile([9], 0.01) == 9
    assert spread([2.0]) == "2" and spread([1.0, 3.0, 2.0]) == "2 (1–3)"


def test_the_report_says_what_the_rows_say():
    fakes = [Fake("Everwarm", unit=64), Fake("llama-server", unit=1 << 30)]
    result = play(Played("append").steps(0, 0.01), fakes, pause_s=0)
    line = {"scenario": "append", "seed": 0, "load": 1.0, **result}
    for row in line["rows"]["Everwarm"]:
        row.setdefault("why", {}).update({"n_kv": 0, "n_checkpoint": 0, "checkpoint": None})
        if row["regret"] <= 16:
            del row["why"]
        else:
            row["why"].setdefault("reason", "no_checkpoint"), row["why"].setdefault("again", None)
    about = {
        "settings": {"size": 1, "seeds": 1, "ctx": 1, "threads": 1, "pause": 0, "note": "noted"},
        "servers": ["Everwarm", "llama-server"],
        "machine": {"cores": 2, "cpu": "x", "arch": "y", "system": "z"},
        "versions": {"everwarm": "0", "libllama": "b1", "python": "3"},
    }
    found = report.files(about, [line], "suite")
    wanted = figures(line["rows"]["llama-server"])
    assert f"| llama-server | {wanted.n_avoidable:,} | {wanted.n_regret:,} | 100.00 |" in found["suite.md"]
    assert "noted" in found["suite.md"] and found["suite-regret.svg"].count("<polyline") == 4
    assert found["suite-time.svg"].startswith("<svg")


def test_weights_go_on_when_a_process_takes_anothers_place():
    assert Weight(5, 10, 7).after(Weight(50, 100, 3)) == Weight(5, 100, 10)
    assert Weight(5, 10, 7).after(NOTHING) == Weight(5, 10, 7)


def test_a_real_server_reads_almost_nothing_again_though_it_is_killed():
    """The control: the same server without its folder of states reads everything again after the kill."""
    setup = Setup(n_ctx=4096, n_threads=1, n_slots=2, ram_mib=256)
    steps = Played("kill_restart").steps(0, 0.02)[:6]
    kept, forgetful = runner("Everwarm", setup), runner("Everwarm", setup)
    kept.name, forgetful.name = "kept", "forgetful"
    forgetful.kill = lambda: (forgetful.stop(), forgetful.start())  # type: ignore[method-assign]
    rows = play(steps, [kept, forgetful], pause_s=0.05)["rows"]
    found, control = figures(rows["kept"]), figures(rows["forgetful"])
    assert found.n_avoidable == control.n_avoidable > 1000
    assert found.n_regret <= 16 * len(steps)  # the guard tokens
    assert control.n_regret >= rows["forgetful"][3]["avoidable"] > 200
