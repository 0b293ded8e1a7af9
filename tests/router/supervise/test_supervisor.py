"""A supervisor with real engine processes: what happens when they work, die, hang or never start."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from everwarm.config import GREEDY
from everwarm.engine.process import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.errors import BadRequest, EngineStopped, FrameTooLarge, Refused
from everwarm.router.supervise import engine_process
from everwarm.router.supervise.pending import Pending
from everwarm.router.supervise.restart_policy import MAX_DEATHS, RestartLimits
from everwarm.router.supervise.supervisor import Supervisor
from support.models import EMBEDDED
from support.server import children, is_alive

SETTINGS = EngineSettings(n_slots=2, n_ctx=4096, n_threads=1, ram_bytes=256 << 20)
QUICK = RestartLimits(first_back_off_s=0.01, most_back_off_s=0.02)
QUESTION = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PATIENCE_S = 30.0


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


@contextlib.asynccontextmanager
async def supervised(limits: RestartLimits = QUICK, model: str = str(EMBEDDED)) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(model, SETTINGS, limits=limits)
    supervisor.start()
    try:
        await asyncio.wait_for(supervisor.wait_ready(), PATIENCE_S)
        yield supervisor
    finally:
        await supervisor.stop(0.0)
        supervisor.forget()


async def answer(supervisor: Supervisor, text: str = QUESTION, **more: Any) -> list[int]:
    frames = await everything(supervisor, text, **more)
    assert isinstance(frames[-1], m.Done), frames[-1]
    return [token for message in frames if isinstance(message, m.TextPiece) for token in message.tokens]


async def everything(supervisor: Supervisor, text: str = QUESTION, **more: Any) -> list[m.ToGateway]:
    submit = {"sampling": GREEDY, "max_tokens": 24} | more
    return [message async for message in supervisor.stream(m.Submit(0, text=text, **submit))]


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.02)


async def nobody_is_processing(supervisor: Supervisor) -> bool:
    return not any(slot["is_processing"] for slot in await supervisor.ask(m.Inspect, what="slots"))


def kill(supervisor: Supervisor, sig: signal.Signals = signal.SIGKILL) -> int:
    assert supervisor.pid is not None
    os.kill(supervisor.pid, sig)
    return supervisor.pid


async def back(supervisor: Supervisor, dead: int) -> None:
    await until(lambda: supervisor.is_ready and supervisor.pid != dead, "the engine is back")


def long_prompt(seed: int, n: int = 2500) -> str:
    return " ".join(f"{seed + 3 * i}" for i in range(n // 4))


# working


def test_a_ready_engine_says_what_it_is_and_streams_an_answer():
    async def test() -> None:
        async with supervised() as supervisor:
            assert supervisor.is_ready and supervisor.state == "ready" and supervisor.reason is None
            assert supervisor.info is not None
            assert (supervisor.info.n_slots, supervisor.info.n_ctx) == (2, 4096)
            assert supervisor.info.memory_kind == "hybrid" and "<|im_start|>" in (supervisor.info.chat_template or "")
            frames = await everything(supervisor)
            assert [type(message) for message in (frames[0], frames[-1])] == [m.Begun, m.Done]
            pieces = [message for message in frames if isinstance(message, m.TextPiece)]
            assert sum(len(piece.tokens) for piece in pieces) == frames[-1].n_reply > 0
            assert "Everwarm Tiny" in "".join(piece.text for piece in pieces) + frames[-1].text
            assert len(supervisor.pending) == 0

    run(test)


def test_questions_are_answered_and_refusals_are_raised_or_told():
    async def test() -> None:
        async with supervised() as supervisor:
            found = msgspec.convert(await supervisor.ask(m.Tokenize, text="warm words", add_special=False), m.Tokenized)
            assert found.pieces == b"warm words"
            tokens = list(memoryview(found.ids).cast("i"))
            assert sum(memoryview(found.sizes).cast("I")) == len(found.pieces)
            assert await supervisor.ask(m.Detokenize, tokens=tokens) == b"warm words"
            with pytest.raises((Refused, BadRequest)) as refused:
                await supervisor.ask(m.Detokenize, tokens=[1 << 30])
            assert refused.value.status == 400
            (too_long,) = await everything(supervisor, "a b " * 5000)
            assert isinstance(too_long, m.Failed)
            assert (too_long.status, too_long.code) == (400, "exceed_context_size_error")
            assert too_long.n_context == 4096 and (too_long.n_prompt or 0) > 4096
            assert await answer(supervisor)

    run(test)


def test_leaving_a_stream_frees_its_slot():
    async def test() -> None:
        async with supervised() as supervisor:
            stream = supervisor.stream(m.Submit(0, text=QUESTION, sampling=GREEDY, max_tokens=4000, ignore_eos=True))
            async for message in stream:
                if isinstance(message, m.TextPiece):
                    break
            assert not await nobody_is_processing(supervisor)
            await stream.aclose()
            assert len(supervisor.pending) == 0
            await until(lambda: nobody_is_processing(supervisor), "the slot is free")

    run(test)


def test_leaving_while_waiting_or_reading_frees_everything_too():
    async def test() -> None:
        async with supervised() as supervisor:
            tasks = [asyncio.create_task(everything(supervisor, long_prompt(seed), max_tokens=50)) for seed in range(6)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert len(supervisor.pending) == 0
            await until(lambda: nobody_is_processing(supervisor), "the slots are free")
            await until(lambda: (supervisor.load or m.Beat(None, 1, 1)).n_queued == 0, "the queue is empty")
            assert await answer(supervisor)

    run(test)


# dying


def test_after_a_kill_the_engine_is_back_and_answers_the_same():
    async def test() -> None:
        async with supervised() as supervisor:
            golden = await answer(supervisor)
            for n in (1, 2):
                dead = kill(supervisor)
                await until(lambda: not supervisor.is_ready, "it is not ready", 2)
                await back(supervisor, dead)
                assert not is_alive(dead) and supervisor.n_restarts == n
                assert await answer(supervisor) == golden

    run(test)


def test_a_request_that_had_streamed_nothing_is_answered_by_the_next_engine():
    async def test() -> None:
        async with supervised() as supervisor:
            golden = await answer(supervisor, long_prompt(1), max_tokens=8)
            dead = kill(supervisor)
            await back(supervisor, dead)
            waiting = asyncio.create_task(answer(supervisor, long_prompt(1), max_tokens=8))
            await asyncio.sleep(0)
            dead = kill(supervisor)
            assert await waiting == golden
            assert supervisor.pid != dead and supervisor.n_restarts == 2

    run(test)


def test_a_request_that_was_begun_is_replayed_only_once():
    async def test() -> None:
        async with supervised() as supervisor:
            waiting = asyncio.create_task(everything(supervisor, long_prompt(1), max_tokens=8))
            for _ in range(2):
                await until(lambda: supervisor.state == "ready", "the engine is up")
                await until(lambda: all(pending.has_begun for pending in supervisor.pending), "it is read")
                dead = kill(supervisor)
                await until(lambda dead=dead: not is_alive(dead), "it is dead")
                await until(lambda: supervisor.state != "ready", "its death is noticed")
            failed = (await waiting)[-1]
            assert isinstance(failed, m.Failed) and failed.status == 503
            assert await answer(supervisor)

    run(test)


@pytest.mark.parametrize(
    ("has_begun", "has_streamed", "is_of_one_life", "n_lives"),
    [(True, False, False, 2), (False, False, False, 4), (True, True, False, 1), (False, False, True, 1)],
)
def test_how_many_engines_a_request_may_outlive(has_begun, has_streamed, is_of_one_life, n_lives):
    pending = Pending(1, (), has_streamed=has_streamed, is_of_one_life=is_of_one_life)
    n = 1
    for _ in range(10):
        pending.has_begun = has_begun
        if not pending.may_be_replayed:
            break
        pending.n_replays += 1
        n += 1
    assert n == n_lives < 5, "a request that kills every engine is refused before the engine is given up"


def test_a_slot_action_is_never_for_the_next_engine():
    """Its slots hold nothing: what was asked of this one's is answered by nobody else."""

    async def test() -> None:
        async with supervised(RestartLimits(first_back_off_s=1.0)) as supervisor:
            dead = kill(supervisor, signal.SIGSTOP)
            asked = asyncio.create_task(supervisor.ask(m.SlotAction, slot=0, action="erase"))
            await until(lambda: len(supervisor.pending) == 1, "it is asked")
            kill(supervisor)
            with pytest.raises(Refused) as died:
                await asked
            assert died.value.status == 503
            await until(lambda: supervisor.state == "restarting", "it is being restarted")
            with pytest.raises(EngineStopped, match="restarted"):
                await supervisor.ask(m.SlotAction, slot=0, action="erase")
            await back(supervisor, dead)
            assert (await supervisor.ask(m.SlotAction, slot=0, action="erase"))["n_erased"] == 0

    run(test)


def test_a_request_that_had_streamed_is_told_so_with_503():
    async def test() -> None:
        async with supervised() as supervisor:
            frames = []
            stream = supervisor.stream(m.Submit(0, text=QUESTION, sampling=GREEDY, max_tokens=4000, ignore_eos=True))
            async for message in stream:
                frames.append(message)
                if isinstance(message, m.TextPiece) and supervisor.n_restarts == 0 and len(frames) < 5:
                    dead = kill(supervisor)
            assert isinstance(frames[-1], m.Failed)
            assert (frames[-1].status, frames[-1].code) == (503, "unavailable_error")
            await back(supervisor, dead)
            assert await answer(supervisor)

    run(test)


def test_a_hung_engine_is_not_ready_soon_then_killed_and_back():
    async def test() -> None:
        limits = RestartLimits(stalled_s=1.0, silent_s=2.5, first_back_off_s=0.01)
        async with supervised(limits) as supervisor:
            golden = await answer(supervisor)
            dead = kill(supervisor, signal.SIGSTOP)
            await until(lambda: not supervisor.is_ready, "it is not ready", 2)
            assert supervisor.state == "ready" and is_alive(dead)
            waiting = asyncio.create_task(answer(supervisor))
            await until(lambda: not is_alive(dead), "it is killed")
            assert await waiting == golden
            assert supervisor.n_restarts == 1

    run(test)


WATCHED = """
import asyncio, sys
from everwarm.engine.settings import EngineSettings
from everwarm.router.supervise.restart_policy import RestartLimits
from everwarm.router.supervise.supervisor import Supervisor

async def main():
    settings = EngineSettings(n_slots=2, n_ctx=1024, n_threads=1, ram_bytes=1 << 26)
    supervisor = Supervisor(sys.argv[1], settings, limits=RestartLimits(silent_s=1.2))
    supervisor.start()
    await supervisor.wait_ready()
    while True:
        print(supervisor.pid, supervisor.n_restarts, flush=True)
        if not await asyncio.to_thread(sys.stdin.readline):
            return await supervisor.stop(0.0)
        await asyncio.sleep(2.0)  # longer than silence is borne

asyncio.run(main())
"""


@pytest.mark.parametrize("who", ["gateway", "both"])
def test_a_pause_of_the_gateway_kills_no_engine(who):
    """That an engine which hangs alone is killed, the test above says."""
    command = [sys.executable, "-c", WATCHED, str(EMBEDDED)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdin is not None and gateway.stdout is not None
        pid, n_restarts = map(int, gateway.stdout.readline().split())
        stopped = [gateway.pid, *([pid] if who == "both" else [])]
        for each in stopped:
            os.kill(each, signal.SIGSTOP)
        time.sleep(2.0)
        for each in reversed(stopped):
            os.kill(each, signal.SIGCONT)
        gateway.stdin.write("go on\n")
        gateway.stdin.flush()
        assert gateway.stdout.readline().split() == [str(pid), str(n_restarts)] == [str(pid), "0"]
        gateway.stdin.close()
        assert gateway.wait(PATIENCE_S) == 0


# memory

LIMITED = """
import asyncio, resource, sys
from everwarm.engine.settings import EngineSettings
from everwarm.router.supervise.supervisor import Supervisor

async def main():
    resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20))
    supervisor = Supervisor(sys.argv[1], EngineSettings(n_slots=2, n_ctx=1024, n_threads=1, ram_bytes=1 << 26))
    supervisor.start()
    await supervisor.until("ready", "restarting")
    print(supervisor.reason, flush=True)
    await supervisor.stop(0.0)

asyncio.run(main())
"""


def test_an_engine_without_address_space_says_that_memory_is_missing():
    command = [sys.executable, "-c", LIMITED, str(EMBEDDED)]
    arenas = os.environ | {"MALLOC_ARENA_MAX": "1"}  # otherwise chance decides how much of it glibc reserves
    frames = subprocess.run(command, env=arenas, capture_output=True, text=True, check=True)
    assert "memory" in frames.stdout and "500 MiB (ulimit -v)" in frames.stdout, frames


class Kernel:
    """Counts kills for lack of memory, as a cgroup does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_kills = 0
        monkeypatch.setattr(engine_process, "n_oom_kills", lambda: self.n_kills)

    def kill(self, supervisor: Supervisor) -> int:
        self.n_kills += 1
        return kill(supervisor)


def test_an_engine_that_died_of_memory_comes_back_with_half_the_ram_tier(monkeypatch):
    async def test() -> None:
        async with supervised() as supervisor:
            kernel = Kernel(monkeypatch)
            golden = await everything(supervisor, long_prompt(3, 600), max_tokens=2)
            await until(lambda: is_settled(supervisor), "it is in RAM")
            await back(supervisor, kill(supervisor))
            assert supervisor.shrunk_to is None and await ram_budget(supervisor) == SETTINGS.ram_bytes
            await back(supervisor, kernel.kill(supervisor))
            half = (SETTINGS.ram_bytes or 0) // 2
            assert supervisor.shrunk_to == await ram_budget(supervisor) == half and supervisor.died_of["memory"] == 1
            again = (await everything(supervisor, long_prompt(3, 600), max_tokens=2))[-1]
            assert isinstance(again, m.Done) and isinstance(golden[-1], m.Done)
            assert again.n_prompt - again.n_cached <= 16, "what has room is still there"

    run(test)


def test_where_half_is_not_enough_the_ram_tier_begins_empty(monkeypatch):
    async def test() -> None:
        async with supervised() as supervisor:
            kernel = Kernel(monkeypatch)
            await answer(supervisor, long_prompt(3, 600), max_tokens=2)
            await until(lambda: is_settled(supervisor), "it is in RAM")
            dead = kernel.kill(supervisor)
            await until(lambda: supervisor.pid != dead and supervisor.state == "restarting", "another is started")
            assert os.fstat(supervisor._memory.fd).st_blocks > 0, "this test could not fail"
            await back(supervisor, kernel.kill(supervisor))
            again = (await everything(supervisor, long_prompt(3, 600), max_tokens=2))[-1]
            assert isinstance(again, m.Done) and again.n_cached == 0
            assert supervisor.shrunk_to == (SETTINGS.ram_bytes or 0) // 4

    run(test)


async def ram_budget(supervisor: Supervisor) -> int:
    return int((await supervisor.ask(m.Inspect, what="counts"))["ram_budget_bytes"])


async def is_settled(supervisor: Supervisor) -> bool:
    stats = await supervisor.ask(m.Inspect, what="counts")
    return bool(stats["ram_arena_bytes"] > 0 and stats["ram_n_waiting"] == 0 and stats["ram_bytes"] > 0)


def test_a_model_file_that_is_none_is_said_at_once(tmp_path):
    async def test() -> None:
        path = tmp_path / "not-a-model.gguf"
        path.write_bytes(b"GGUF" + bytes(100))
        supervisor = Supervisor(str(path), SETTINGS, limits=QUICK)
        supervisor.start()
        with pytest.raises(EngineStopped) as stopped:
            await asyncio.wait_for(supervisor.wait_ready(), PATIENCE_S)
        assert "not-a-model.gguf" in str(stopped.value)
        assert supervisor.state == "unhealthy" and supervisor.n_restarts == 0
        with pytest.raises(EngineStopped, match="not-a-model"):
            await everything(supervisor)
        pid = supervisor.pid
        await supervisor.stop(0.0)
        assert pid is not None and not is_alive(pid)

    run(test)


def test_one_that_was_stopped_starts_again_and_remembers():
    async def test() -> None:
        async with supervised() as supervisor:
            golden = await everything(supervisor)
            assert isinstance(golden[-1], m.Done) and golden[-1].n_cached == 0
            for _ in range(2):
                await supervisor.stop(0.0)
                assert not supervisor.is_running
                with pytest.raises(EngineStopped):
                    await everything(supervisor)
                supervisor.start()
                again = (await everything(supervisor))[-1]  # it may be asked while it is starting
                assert isinstance(again, m.Done) and again.n_cached >= again.n_prompt - 16
            supervisor.forget()
            await supervisor.stop(0.0)

    run(test)


def test_five_deaths_in_a_row_and_it_stays_down_saying_why():
    async def test() -> None:
        async with supervised() as supervisor:
            waiting = asyncio.create_task(everything(supervisor, long_prompt(2), max_tokens=4))
            dead = -1
            for _ in range(MAX_DEATHS):
                await until(lambda dead=dead: supervisor.pid not in (None, dead), "a new process")
                dead = kill(supervisor)
                await until(lambda dead=dead: not is_alive(dead), "it is dead")
            await until(lambda: supervisor.state == "unhealthy", "it is given up")
            assert "5 times" in (supervisor.reason or "")
            assert isinstance((await waiting)[-1], m.Failed)
            with pytest.raises(EngineStopped, match="5 times"):
                await supervisor.wait_ready()
            await asyncio.sleep(0.2)
            assert not is_alive(dead) and supervisor.pid == dead

    run(test)


def test_a_served_request_makes_deaths_forgotten():
    async def test() -> None:
        async with supervised() as supervisor:
            for _ in range(MAX_DEATHS + 1):
                await answer(supervisor, max_tokens=1)
                await back(supervisor, kill(supervisor))
            assert supervisor.n_restarts == MAX_DEATHS + 1

    run(test)


# ending


def test_stop_ends_the_process_and_leaves_no_children():
    async def test() -> None:
        async with supervised() as supervisor:
            pid = supervisor.pid
            await supervisor.stop(0.0)
            assert supervisor.state == "stopped" and not supervisor.is_ready
            assert pid is not None and not is_alive(pid)
            assert pid not in children(os.getpid())
            with pytest.raises(EngineStopped):
                await everything(supervisor)

    run(test)


def test_stop_lets_a_running_request_finish_within_its_grace():
    async def test() -> None:
        async with supervised() as supervisor:
            running = asyncio.create_task(answer(supervisor, max_tokens=60, ignore_eos=True))
            await until(lambda: len(supervisor.pending) == 1, "it is on its way")
            await supervisor.stop(PATIENCE_S)
            assert len(await running) == 60

    run(test)


def test_stop_without_grace_tells_those_who_wait():
    async def test() -> None:
        async with supervised() as supervisor:
            running = asyncio.create_task(everything(supervisor, max_tokens=4000, ignore_eos=True))
            await until(lambda: len(supervisor.pending) == 1, "it is on its way")
            await supervisor.stop(0.0)
            failed = (await running)[-1]
            assert isinstance(failed, m.Failed) and failed.status == 503 and "stopping" in failed.message

    run(test)


GATEWAY = """
import asyncio, sys
from everwarm.engine.settings import EngineSettings
from everwarm.router.supervise.supervisor import Supervisor

async def main():
    supervisor = Supervisor(sys.argv[1], EngineSettings(n_slots=2, n_ctx=1024, n_threads=1, ram_bytes=1 << 26))
    supervisor.start()
    await supervisor.wait_ready()
    print(supervisor.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_gateway_leaves_no_engine_behind():
    command = [sys.executable, "-c", GATEWAY, str(EMBEDDED)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        pid = int(gateway.stdout.readline())
        assert is_alive(pid)
        gateway.kill()
        gateway.wait()
    deadline = time.monotonic() + 2
    while is_alive(pid):
        assert time.monotonic() < deadline, "the engine outlived its gateway"
        time.sleep(0.02)


# what cannot be sent

UNPACKABLE = m.Submit(0, tokens=[1 << 64], sampling=GREEDY)


def test_what_cannot_be_packed_is_refused_and_forgotten():
    async def test() -> None:
        async with supervised() as supervisor:
            with pytest.raises((OverflowError, BadRequest)):
                await anext(supervisor.stream(UNPACKABLE))
            assert len(supervisor.pending) == 0

    run(test)


def test_what_cannot_be_packed_does_not_end_the_supervisor_at_the_next_death():
    async def test() -> None:
        async with supervised() as supervisor:
            with pytest.raises((OverflowError, BadRequest)):
                await anext(supervisor.stream(UNPACKABLE))
            dead = kill(supervisor)
            await until(lambda: supervisor.pid != dead, "a new process")
            assert await asyncio.wait_for(answer(supervisor), PATIENCE_S)

    run(test)


def test_a_token_id_no_int64_can_hold_is_refused_not_fatal():
    async def test() -> None:
        async with supervised() as supervisor:
            frames = [message async for message in supervisor.stream(m.Submit(0, tokens=[1 << 63], sampling=GREEDY))]
            assert isinstance(frames[-1], m.Failed) and frames[-1].status == 400
            assert supervisor.n_restarts == 0

    run(test)


def test_a_prompt_that_fits_no_frame_is_refused_and_the_engine_lives():
    async def test() -> None:
        async with supervised() as supervisor:
            pid = supervisor.pid
            for question in ({"text": "x" * (m.MAX_FRAME_BYTES + 1)}, {"text": "é" * (m.MAX_FRAME_BYTES // 2)}):
                with pytest.raises(FrameTooLarge, match=rf"{m.MAX_FRAME_BYTES:,} are the most"):
                    await anext(supervisor.stream(m.Submit(0, **question, sampling=GREEDY)))
            supervisor.tell(m.Prewarm("x" * (m.MAX_FRAME_BYTES + 1)))
            assert len(supervisor.pending) == 0
            assert await answer(supervisor)
            assert (supervisor.pid, supervisor.n_restarts) == (pid, 0)

    run(test)
