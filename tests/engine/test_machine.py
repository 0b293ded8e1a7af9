"""Random conversations against a dictionary of everything that was ever read, on a real hybrid model.

Prompts are submitted, extended, edited, branched, retried and cancelled while memory is taken away and libllama is made
to refuse. Whatever happens: nothing is reused that was not read, every ledger adds up after every step, and every reply
is what a cold reading of its prompt would say.
"""

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everwarm.engine.request import Finish, Finished, Request, Result, Started
from support.drive import check, memory_of, open_core, regrets, replay, submit, tidy
from support.refusals import fail_decodes, refuse_restores, refuse_splices

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
NEAR_TIE = 0.02
KIB = 1024
CONVOLUTION = 4  # shorter sequences still hold zeros from before their start, whose sign depends on the past

lengths = st.sampled_from([1, 2, 3, 15, 17, 40, 70])
seeds = st.integers(0, 4)


def words(seed: int, n: int) -> tuple[int, ...]:
    return tuple((seed * 53 + 7 * i * i + i) % 250 for i in range(n))


def n_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class ConversationMachine(RuleBasedStateMachine):
    N_CTX = 2048
    BUDGETS = (400 * KIB, 64 << 20)
    REFUSALS = (refuse_restores, fail_decodes)
    EXACT = False

    @initialize(n_spares=st.sampled_from([0, 1, 3]), data=st.data())
    def open(self, n_spares, data):
        budget = data.draw(st.sampled_from(self.BUDGETS))
        self.opened = open_core(width=64, n_ctx=self.N_CTX, n_spares=n_spares, ram_bytes=budget)
        self.core = self.opened.__enter__()
        self.budget = budget
        self.read: dict[int, tuple[str, tuple[int, ...]]] = {}  # by request: everything its sequence ever held
        self.running: dict[int, tuple[Request, tuple[int, ...]]] = {}
        self.histories: list[tuple[int, ...]] = [words(0, 30)]
        self.bounds: dict[int, int] = {}
        self.is_whole = True  # no step was left half-way: whatever is wrong has been said

    # asking

    @rule(seed=seeds, n=lengths, data=st.data())
    def start_anew(self, seed, n, data):
        self.ask(words(seed, n), data)

    @rule(seed=seeds, n=lengths, data=st.data())
    def extend(self, seed, n, data):
        self.ask((*data.draw(st.sampled_from(self.histories)), *words(seed, n)), data)

    @rule(seed=seeds, n=lengths, data=st.data())
    def edit_or_branch(self, seed, n, data):
        history = data.draw(st.sampled_from(self.histories))
        kept = history[: data.draw(st.integers(0, len(history)))]
        self.ask((*kept, *words(seed, n)), data)

    @rule(data=st.data())
    def retry(self, data):
        self.ask(data.draw(st.sampled_from(self.histories)), data)

    @rule(data=st.data())
    def truncate(self, data):
        history = data.draw(st.sampled_from(self.histories))
        self.ask(history[: data.draw(st.integers(1, len(history)))], data)

    def ask(self, prompt: tuple[int, ...], data) -> None:
        prompt = prompt[:180]
        n = len(prompt)
        request = submit(
            self.core,
            prompt,
            data.draw(st.sampled_from([0, 1, 6])),
            boundaries=tuple(data.draw(st.lists(st.integers(0, n), max_size=2))),
            stable=data.draw(st.none() | st.integers(0, n)),
            namespace=data.draw(st.sampled_from(["", "", "", "other"])),
            deterministic=data.draw(st.sampled_from([False, False, True])),
        )
        self.running[request.id] = (request, prompt)
        self.histories = [*self.histories[-7:], prompt]
        self.steps(data.draw(st.integers(0, 4)))

    # running

    @rule(n=st.integers(1, 30))
    def steps(self, n):
        for _ in range(n):
            if self.core.has_work:
                self.one_step()

    def one_step(self) -> None:
        self.is_whole = False
        before = list(self.read.values())
        for event in self.core.step():
            if isinstance(event, Started):
                request, prompt = self.running[event.request_id]
                known = [items for ns, items in before if ns == request.ask.namespace]
                self.bounds[event.request_id] = max((n_common(prompt, items) for items in known), default=0)
            if isinstance(event, Finished):
                self.finished(event.request_id, event.result)
        for slot in self.core.slots:
            if slot.request is not None:
                self.remember(slot.request, tuple(slot.resident().codes.tolist()))
        check(self.core)
        self.is_whole = True

    def remember(self, request: Request, items: tuple[int, ...]) -> None:
        key = request.id
        while key in self.read and n_common(self.read[key][1], items) < len(self.read[key][1]):
            key += 10**9  # it was started over: what it had read before is still known
        self.read[key] = (request.ask.namespace, items)

    def finished(self, request_id: int, result: Result) -> None:
        request, prompt = self.running.pop(request_id)
        fed = (*prompt, *result.tokens)
        if request_id in self.bounds:
            assert result.n_cached <= self.bounds[request_id], "reused more than anybody had read"
            assert result.n_shared <= self.bounds[request_id], "claims to know more than anybody had read"
            self.remember(request, fed if result.finish is not Finish.CANCELLED else fed[: len(prompt)])
        if result.finish is Finish.ERROR:
            return
        self.histories = [*self.histories[-7:], fed]
        expected = request.ask.max_tokens
        assert result.finish is Finish.CANCELLED or len(result.tokens) == expected
        assert regrets(self.core, prompt, result.tokens).max(initial=0.0) < NEAR_TIE
        if self.EXACT and request.ask.deterministic and result.finish is not Finish.CANCELLED:
            self.is_exact(fed)

    def is_exact(self, fed: tuple[int, ...]) -> None:
        idle = [slot for slot in self.core.slots if slot.is_idle and slot.n_fed]
        for slot in idle:
            if slot.n_fed >= CONVOLUTION and tuple(slot.items.codes.tolist()) == fed[: slot.n_fed]:
                assert memory_of(self.core.context, slot.seq) == replay(self.core, slot)

    @rule()
    def run_to_the_end(self):
        for _ in range(3000):
            if not self.core.has_work:
                break
            self.one_step()
        assert not self.core.has_work, "it spins"
        assert not self.running

    # trouble

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data):
        self.core.cancel(data.draw(st.sampled_from(sorted(self.running))))

    @rule(share=st.sampled_from([0.0, 0.3, 0.8]))
    def evict(self, share):
        self.core.cache.ram_budget.n_bytes = int(self.core.cache.tree.ram_bytes * share)
        self.core.cache.ram_budget.enforce()
        check(self.core)
        self.core.cache.ram_budget.n_bytes = self.budget

    @rule(data=st.data())
    def refuse_once(self, data):
        for name in ("restore", "splice_segment", "decode"):
            self.core.context.__dict__.pop(name, None)  # one refusal at a time
        data.draw(st.sampled_from(self.REFUSALS))(self.core)

    @rule()
    def idle_work(self):
        if not self.core.has_work:
            tidy(self.core)

    # always

    @invariant()
    def everything_adds_up(self):
        if hasattr(self, "core"):
            check(self.core)

    def teardown(self):
        if hasattr(self, "core"):
            try:
                if self.is_whole:
                    self.run_to_the_end()
            finally:
                self.opened.__exit__(None, None, None)


class CrowdedMachine(ConversationMachine):
    """Hardly any room on the device or in RAM: everything moves in and out all the time."""

    N_CTX = 256
    BUDGETS = (0, 150 * KIB, 400 * KIB, 64 << 20)
    REFUSALS = (refuse_restores, refuse_splices, fail_decodes)


class ExactMachine(ConversationMachine):
    """Deterministic requests beside others: their whole memory equals a cold replay, bit for bit."""

    EXACT = True
    REFUSALS = (refuse_restores,)


def how_long(short: int, long: int) -> settings:
    n = long if CAMPAIGN else short
    return settings(max_examples=n, stateful_step_count=25, deadline=None, derandomize=not CAMPAIGN)


ConversationMachine.TestCase.settings = how_long(12, 2400)
CrowdedMachine.TestCase.settings = how_long(12, 2400)
ExactMachine.TestCase.settings = how_long(8, 1560)

TestConversations = ConversationMachine.TestCase
TestCrowded = CrowdedMachine.TestCase
TestExact = ExactMachine.TestCase
