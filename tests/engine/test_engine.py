"""The engine as a library: submitted to from many threads, read as it writes, closed at any time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from everwarm.config import GREEDY
from everwarm.engine.engine import Engine, TokenStream
from everwarm.engine.request import Finish, Finished, NewToken, Progress, Started
from everwarm.engine.settings import EngineSettings
from everwarm.errors import BadRequest, EngineStopped, PromptTooLong
from support.drive import text
from support.models import tiny_model

PATIENCE_S = 30.0  # far beyond anything that works: a hang is a failure, not a wait


@contextmanager
def opened(**settings) -> Iterator[Engine]:
    wanted = {"n_slots": 2, "n_ctx": 2048, "n_spares": 2, "n_threads": 1, "ram_bytes": 64 << 20} | settings
    with Engine(tiny_model("qwen35", width=64), EngineSettings(**wanted)) as engine:
        yield engine


def ask(engine: Engine, seed: int = 1, n: int = 40, max_tokens: int = 8, **more) -> TokenStream:
    return engine.submit(text(seed, n), GREEDY, max_tokens=max_tokens, ignore_eos=True, **more)


def in_time(work: Callable[[], object]) -> object:
    """What ``work`` gives or raises, in a thread of its own so that a hang fails the test instead of stopping it."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - handed over
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it hangs"
    return outcome[0]


def test_tokens_come_one_by_one_and_the_result_has_them_all():
    with opened() as engine:
        stream = ask(engine)
        tokens = list(stream)
        result = stream.result()
    assert len(tokens) == 8 and result.tokens == tuple(tokens)
    assert result.finish is Finish.LENGTH and result.n_prompt == 40


def test_the_result_can_be_had_without_iterating_and_again_and_again():
    with opened() as engine:
        stream = ask(engine)
        assert stream.result() is stream.result()
        assert list(stream) == []


def test_events_come_in_order():
    with opened() as engine:
        kinds = [type(event) for event in ask(engine, max_tokens=3).events()]
    assert kinds[0] is Started and kinds[-1] is Finished
    assert kinds.count(NewToken) == 3 and Progress in kinds
    assert kinds.index(Progress) < kinds.index(NewToken)


def test_many_threads_submit_at_once_and_each_gets_its_own_answer():
    with opened() as engine:
        alone = {seed: ask(engine, seed, use_cache=False, deterministic=True).result().tokens for seed in range(6)}
        answers: dict[tuple[int, int], tuple[int, ...]] = {}

        def client(number: int) -> None:
            for seed in range(6):
                answers[number, seed] = ask(engine, seed, deterministic=True, use_cache=False).result().tokens

        threads = [threading.Thread(target=client, args=(i,)) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert len(answers) == 30
    assert all(tokens == alone[seed] for (_, seed), tokens in answers.items())
    assert len(set(alone.values())) > 1  # the control: answers do differ between prompts


def test_requests_without_determinism_run_side_by_side():
    with opened(n_slots=4) as engine:
        streams = [ask(engine, seed, max_tokens=50) for seed in range(8)]
        assert all(len(stream.result().tokens) == 50 for stream in streams)


def test_text_is_tokenized_and_strings_tokens_and_prompts_are_the_same():
    with opened() as engine:
        prompt = engine.prompt("hello there")
        ways = [engine.submit(way, GREEDY, max_tokens=4) for way in ("hello there", prompt, prompt.codes.tolist())]
        assert len({way.result().tokens for way in ways}) == 1
        assert [way.result().n_prompt for way in ways] == [len(prompt)] * 3


def test_a_second_turn_is_cached():
    with opened() as engine:
        first = ask(engine).result()
        again = engine.submit([*text(1, 40), *first.tokens, *text(2, 10)], GREEDY, max_tokens=4).result()
    assert again.n_cached >= 47


def test_cancelling_from_another_thread_ends_the_stream():
    with opened() as engine:
        stream = ask(engine, max_tokens=1900)
        tokens = iter(stream)
        next(tokens)
        threading.Thread(target=stream.cancel).start()
        result = in_time(stream.result)
    assert result.finish is Finish.CANCELLED and 1 <= len(result.tokens) < 1900


def test_cancelling_before_the_start_and_after_the_end_does_no_harm():
    with opened() as engine:
        stream = ask(engine, max_tokens=1000)
        stream.cancel()
        assert in_time(stream.result).finish is Finish.CANCELLED
        stream.cancel()
        assert ask(engine).result().finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"prompt": text(1, 5000)}, PromptTooLong),
        ({"prompt": [1, 2, 9999]}, BadRequest),
    ],
)
def test_what_the_core_refuses_is_raised_by_the_result(bad, error):
    with opened() as engine:
        stream = engine.submit(**bad)
        assert isinstance(in_time(stream.result), error)
        assert ask(engine).result().finish is Finish.LENGTH  # and the engine lives on


@pytest.mark.parametrize("bad", [{"prompt": []}, {"prompt": [-1]}, {"prompt": [1], "max_tokens": -1}])
def test_what_is_malformed_is_raised_at_once(bad):
    with opened() as engine, pytest.raises(BadRequest):
        engine.submit(**bad)


def test_a_refused_stream_raises_again_when_asked_again():
    with opened() as engine:
        stream = engine.submit([1, 2, 9999])
        assert isinstance(in_time(stream.result), BadRequest)
        assert isinstance(in_time(stream.result), BadRequest)


def test_closing_while_requests_run_and_wait_stops_every_stream():
    with opened(n_slots=1) as engine:
        streams = [ask(engine, seed, max_tokens=1900) for seed in range(3)]
        next(iter(streams[0]))
        seen: list[TokenStream] = []
        waiting = [threading.Thread(target=stop_is_seen, args=(stream, seen), daemon=True) for stream in streams]
        for thread in waiting:
            thread.start()
        engine.close()
        for thread in waiting:
            thread.join(PATIENCE_S)
    assert len(seen) == 3


def stop_is_seen(stream: TokenStream, seen: list[TokenStream]) -> None:
    with pytest.raises(EngineStopped):
        stream.result()
    seen.append(stream)


def test_a_closed_engine_refuses_with_a_reason_and_closes_again_without_harm():
    with opened() as engine:
        engine.close()
        for use in (lambda: ask(engine), lambda: engine.call(lambda core: core.has_work)):
            with pytest.raises(EngineStopped, match="closed"):
                use()
        engine.close()


def test_call_runs_on_the_engines_thread_and_returns_or_raises():
    with opened() as engine:
        assert engine.call(lambda core: threading.current_thread().name) == "everwarm-engine"
        assert engine.call(lambda core: len(core.slots)) == 2
        with pytest.raises(ZeroDivisionError):
            engine.call(lambda core: 1 // 0)
        assert ask(engine).result().finish is Finish.LENGTH


def test_call_waits_its_turn_between_steps_of_running_requests():
    with opened() as engine:
        stream = ask(engine, max_tokens=300)
        counts = [engine.call(lambda core: core.counts.n_requests) for _ in range(5)]
        assert max(counts) == 1
        stream.result()


def test_idle_work_is_done_between_requests():
    with opened() as engine:
        ask(engine, n=100).result()
        deadline = time.monotonic() + PATIENCE_S
        while engine.call(lambda core: core.tidy()) and time.monotonic() < deadline:
            pass
        parked = engine.call(lambda core: [n.checkpoint for n in core.cache.tree.nodes() if n.checkpoint])
    assert all(c.state is not None for c in parked if c.kind.value != "prompt-end")


def test_an_engine_that_breaks_tells_everybody(caplog):
    with opened() as engine:
        stream = ask(engine, max_tokens=1900)
        next(iter(stream))

        def break_it(core):
            core.context.decode = lambda feeds: 1 / 0

        engine.call(break_it)
        assert isinstance(in_time(stream.result), EngineStopped)
        with pytest.raises(EngineStopped, match="division by zero"):
            ask(engine)


def test_loading_reports_its_progress():
    seen: list[float] = []
    with Engine(tiny_model("qwen35", width=64), EngineSettings(n_ctx=256, n_spares=0, ram_bytes=0), seen.append):
        pass
    assert seen and seen == sorted(seen) and seen[-1] == 1.0
