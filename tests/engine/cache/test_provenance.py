"""A conversation of deterministic turns stays one reading: each turn reads only what is new, also at another engine, and
has the bits of a server that nobody disturbed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from everwarm.engine.cache import ram_writer, restore
from everwarm.engine.core import Core
from everwarm.engine.tiers import loader
from everwarm.engine.tiers.loader import Loader
from everwarm.engine.verify import compare_with_cold
from support.drive import check, memory_of, open_core, record_logits, replay, run, text, tidy
from support.kept_cores import kept_core, put_away, sharing

KINDS = ["qwen35", "jamba", "mamba2", "gemma3"]
OPENING = [7, 8, 9, 10, 11]  # of a reply, as templates write it: the next turn shares a part of it


class Chat:
    """``n_opening``: how much of the opening the next turn begins with. ``by_message``: cuts at the ends of replies;
    ``by_reply``: also where they end as the next turn has them."""

    def __init__(
        self, n_opening: int = 3, *, by_message: bool = False, by_reply: bool = False, seed: int = 0, n_first: int = 300
    ) -> None:
        self._seed, self._n_first = seed, n_first
        self._n_opening = n_opening
        self._by_message, self._by_reply = by_message, by_reply
        self._said: list[int] = []
        self.ends: list[int] = []
        self.regrets: list[int] = []
        self.rows: list[np.ndarray] = []

    def turn(self, core: Core, **more: object) -> None:
        n = len(self.regrets)
        new = text(100 * self._seed + 10 + n, 60) if n else [*OPENING, *text(100 * self._seed, self._n_first)]
        body = self.next_prompt(new)
        self.ends.append(len(body))
        rows = record_logits(core)
        asked = {"boundaries": tuple(self.ends), "stable": len(body), "deterministic": True, **more}
        result = run(core, [*body, *OPENING], 6, **asked)
        del core.context.decode  # of the recording
        self.rows.extend(rows)
        self.regrets.append(len(self._said) - result.n_cached if n else 0)
        self._said = [*body, *OPENING[: self._n_opening], *result.tokens, 5, 5]
        if self._by_message:
            self.ends.append(len(body) + len(OPENING))
        if self._by_reply:
            self.ends.append(len(self._said))

    def next_prompt(self, new: list[int]) -> list[int]:
        return [*self._said, *new]

    @property
    def regret(self) -> int:
        """Of a turn at most: what it read of what had been said before, beyond the last reply and its opening."""
        return max(self.regrets) - (self._n_opening + 6 + 2)


def turns(core: Core, chat: Chat, n: int, **more: object) -> Chat:
    for _ in range(n):
        chat.turn(core, **more)
        check(core)
    return chat


def same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@pytest.mark.parametrize(("n_opening", "by_message", "n_spares"), [(1, False, 0), (3, True, 16), (3, True, 0)])
@pytest.mark.parametrize("arch", KINDS)
def test_every_turn_reads_only_what_is_new(arch: str, n_opening: int, by_message: bool, n_spares: int) -> None:
    with open_core(arch, n_slots=1, n_spares=n_spares) as core:
        chat = turns(core, Chat(n_opening, by_message=by_message), 6)
        tidy(core)
        report = compare_with_cold(core, 6)
    assert chat.regret <= 0, chat.regrets
    assert report.is_exact and report.n_compared == 6, report


def test_without_kv_of_their_own_reading_turns_would_read_more_and_more(monkeypatch) -> None:
    """The control of the tests around it."""
    monkeypatch.setattr(ram_writer, "reach_back", lambda node, _: node)
    with open_core(n_slots=1) as core:
        chat = turns(core, Chat(1), 6)
    assert chat.regret > 3 * 60, chat.regrets


@pytest.mark.parametrize("n_spares", [0, 16])
def test_conversations_that_begin_with_the_same_few_words_leave_each_other_alone(n_spares: int) -> None:
    """As all do that a template opens. Their first messages have other lengths, so they are read in other pieces."""
    chats = [Chat(1, seed=seed, n_first=200 + 7 * seed) for seed in (1, 2, 3)]
    with open_core(n_slots=2, n_spares=n_spares, n_ctx=4096) as core:
        for _ in range(4):
            for chat in chats:
                chat.turn(core)
                check(core)
        report = compare_with_cold(core, 6)
    assert max(chat.regret for chat in chats) <= 0, [chat.regrets for chat in chats]
    assert report.is_exact, report


@pytest.mark.parametrize("arch", KINDS)
def test_a_state_with_kv_of_another_reading_is_not_called_clean(arch: str) -> None:
    """Two ways on from one point, in turns, nobody asking for exactness: what says it is clean is."""
    with open_core(arch, n_slots=1) as core:
        base = text(1, 200)
        for i in range(6):
            other = [*base, *OPENING, *text(2 + i % 2, 40 + 10 * i)]
            run(core, [*other, *OPENING], 6, boundaries=(200, len(other)), stable=len(other))
            core.cache.room.clear()
            check(core)
        report = compare_with_cold(core, 8)
    assert report.is_exact, report


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "mamba2"])
def test_another_engine_goes_on_with_the_same_bits_and_back(arch: str, url: str) -> None:
    with open_core(arch, n_slots=1) as core:
        golden = turns(core, Chat(), 6)
    chat = Chat()
    with sharing(url, arch, n_slots=1) as one, sharing(url, arch, n_slots=1) as two:
        for core in (one, two, one, two, one, two):
            chat.turn(core)
            put_away(core)
        assert two.cache.tiers.remote.counts.n_hits == 3
    assert chat.regret <= 0, chat.regrets
    assert same(chat.rows, golden.rows)
    with open_core(arch, n_slots=1) as core:
        other = turns(core, Chat(2), 6)
    assert not same(other.rows, golden.rows), "a control: other words, other numbers"


def test_conversations_that_begin_alike_move_one_after_the_other(url: str) -> None:
    chats = [Chat(seed=seed) for seed in (1, 2, 3)]
    for n in (3, 2):
        with sharing(url, n_slots=2, n_spares=16, n_ctx=4096) as core:
            for chat in chats:
                turns(core, chat, n)
            put_away(core)
    assert max(chat.regret for chat in chats) <= 0, [chat.regrets for chat in chats]


@pytest.mark.parametrize("exact", [True, False])
def test_kv_of_another_reading_is_fetched_again(url: str, exact: bool, monkeypatch) -> None:
    """The second engine has read the beginning in other pieces before the first one's turns come to it."""
    with open_core(n_slots=1) as core:
        golden = turns(core, Chat(1), 4)
    chat = Chat(1)
    with sharing(url, n_slots=1) as core:
        turns(core, chat, 3)
        put_away(core)
    if not exact:
        seek = Loader.seek
        monkeypatch.setattr(Loader, "seek", lambda *args, exact: seek(*args))
    with sharing(url, n_slots=1) as core:
        turns(core, Chat(1), 1, boundaries=(150,), stable=150)
        tidy(core)
        chat.turn(core)
        assert core.cache.tiers.remote.counts.n_hits == 1
    assert same(chat.rows, golden.rows) or not exact
    assert (chat.regret <= 0) == exact, f"KV of another reading was of use: {chat.regrets}"


@pytest.mark.parametrize("n_looks", [8, 1])
@pytest.mark.parametrize("where", ["remote", "disk"])
def test_a_deeper_state_of_several_readings_hides_none_of_one(
    where: str, n_looks: int, url: str, tmp_path: Path, monkeypatch
) -> None:
    """Where another conversation's first tokens are in RAM, a request that does not ask for exactness takes those, and
    keeps a deeper state. One look alone, the control, finds only that one."""
    monkeypatch.setattr(loader, "MOST_LOOKS", n_looks)
    with open_core(n_slots=1) as core:
        golden = turns(core, Chat(by_reply=True), 3)
    chat = Chat(by_reply=True)

    def engine(n_slots: int) -> AbstractContextManager[Core]:
        return sharing(url, n_slots=n_slots) if where == "remote" else kept_core(tmp_path, n_slots=n_slots)

    with engine(1) as core:
        for each in (Chat(by_reply=True, seed=1), chat):  # of equal length: the second needs KV of the first
            turns(core, each, 2)
            put_away(core)
    with engine(2) as core:
        turns(core, Chat(by_reply=True, seed=7, n_first=207), 2)
        body = chat.next_prompt(text(99, 20))
        run(core, [*body, *OPENING], 6, boundaries=(*chat.ends, len(body)), stable=len(body))
        put_away(core)
        chat.turn(core)
    assert same(chat.rows, golden.rows) and (chat.regret <= 0) == (n_looks > 1), chat.regrets


@pytest.mark.parametrize("steps_back", [True, False])
def test_what_the_slot_has_of_another_reading_gives_way_to_the_states_own(steps_back: bool, monkeypatch) -> None:
    """The slot still holds the beginning, its last few tokens as the prompt in between had read them."""
    if not steps_back:  # the control
        monkeypatch.setattr(restore, "entry", lambda _path, n_have, _n_items, _chunks: n_have)
    base, one, other = text(1, 101), text(3, 30), text(4, 10)
    with open_core(n_slots=1, n_spares=0) as core:
        for prompt in (base, [*base, *one], [*base, *other], [*base, *one]):
            run(core, prompt, 4)
        slot = core.slots[0]
        assert core.context.is_clean(slot.seq) is steps_back
        assert not steps_back or memory_of(core.context, slot.seq) == replay(core, slot)
