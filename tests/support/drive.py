"""Driving a ``Core`` by hand: open one on a tiny model, ask, step, and check everything that must always hold."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from everwarm.config import GREEDY
from everwarm.engine.build import assemble
from everwarm.engine.core import Core
from everwarm.engine.process.messages import CutHints
from everwarm.engine.request import Ask, Event, Finished, NewToken, Request, Result
from everwarm.engine.settings import EngineSettings
from everwarm.engine.slots import Slot
from everwarm.engine.verify import replay as read_cold
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.prompt.prompt import Prompt
from support.models import tiny_model

HYBRIDS = ("qwen35", "jamba", "falcon-h1", "granitehybrid", "nemotron_h", "lfm2")
RECURRENT = ("mamba2",)
STATEFUL = (*HYBRIDS, *RECURRENT)
EVERY_KIND = ("qwen35", "mamba2", "gemma3", "llama")
GUARD = 16
NEAR_TIE = 0.02  # of logits; a reply to another prompt is worse by 2 and more


class AtOnce:
    """In place of a loop: every job runs when it is posted, on the thread that posts it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def post(self, job: Callable[[Core], None]) -> None:
        job(self._core)


@contextmanager
def open_core(arch: str = "qwen35", *, width: int = 64, path=None, memory=None, **settings) -> Iterator[Core]:
    """``memory``: the file of the RAM tier, which stays open. Without drafts, which depend on the clock."""
    usual = {"n_slots": 2, "n_ctx": 2048, "n_spares": 0, "n_threads": 1, "ram_bytes": 256 << 20, "speculate": "off"}
    wanted = usual | settings
    given = None if memory is None else os.dup(memory)
    core = assemble(path or tiny_model(arch, width=width), EngineSettings(**wanted), memory=given)
    try:
        yield core
    finally:
        core.close()


def text(seed: int, n: int) -> list[int]:
    """``n`` byte tokens that no other seed begins with."""
    rng = np.random.default_rng(seed)
    return [seed % 251, *rng.integers(0, 250, n - 1).tolist()]


# asking


def with_hints(options: dict) -> dict:
    """The same options of a request, with its cut hints together."""
    hints = {name: value for name, value in options.items() if name in CutHints.__struct_fields__}
    return {name: value for name, value in options.items() if name not in hints} | {"hints": CutHints(**hints)}


def submit(core: Core, tokens: Sequence[int], max_tokens: int = 4, **more) -> Request:
    options = {"sampling": GREEDY, "ignore_eos": True} | with_hints(more)
    return core.submit(Ask(Prompt.of_tokens(tokens), max_tokens=max_tokens, **options))


def drain(core: Core, most: int = 4000, after_step: Callable[[Core], None] | None = None) -> dict[int, Result]:
    """Step until nothing is left to do; spinning is a failure."""
    results: dict[int, Result] = {}
    for _ in range(most):
        if not core.has_work:
            return results
        for event in core.step():
            if isinstance(event, Finished):
                assert event.request_id not in results, "a request finished twice"
                results[event.request_id] = event.result
        core.keep_ends()
        (after_step or check)(core)
    raise AssertionError(f"{most} steps and still work to do")


def run(core: Core, tokens: Sequence[int], max_tokens: int = 4, **more) -> Result:
    request = submit(core, tokens, max_tokens, **more)
    result = drain(core)[request.id]
    assert result.error is None
    return result


def finish(core: Core, tokens: Sequence[int], max_tokens: int = 4, *, n_pieces: int = 1000, **more) -> Finished:
    """Steps as the loop does until this request has ended; nothing of what an idle engine does is done."""
    request = submit(core, tokens, max_tokens, **more)
    while core.has_work:
        events = core.step()
        core.keep_ends()
        if n_pieces > 0:
            core.cache.offload.not_before = 0.0
            core.tidy_overdue()
            n_pieces -= 1
        check(core)
        for event in events:
            if isinstance(event, Finished) and event.request_id == request.id:
                return event
    raise AssertionError("it never ended")


def step_until(core: Core, kind: type[Event], most: int = 500) -> Event:
    for _ in range(most):
        for event in core.step():
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__} in {most} steps")


def tidy(core: Core) -> None:
    for _ in range(500):
        if not core.tidy():
            return
        check(core)
    raise AssertionError("idle work never ends")


def replies(events: list[Event], request_id: int) -> list[int]:
    return [event.token for event in events if isinstance(event, NewToken) and event.request_id == request_id]


# what must hold after every step


def check(core: Core) -> None:
    core.cache.tree.check()
    core.context.check()
    assert core.cache.tree.ram_bytes <= core.cache.ram_budget.n_bytes, (
        f"{core.cache.tree.ram_bytes} of {core.cache.ram_budget.n_bytes} bytes"
    )
    check_slots(core)
    check_spares(core)
    assert all(node.pins == 0 for node in core.cache.tree.nodes()), "a pin outlived its restore"


def check_slots(core: Core) -> None:
    known = {id(node) for node in core.cache.tree.nodes()}
    standing = Counter(id(slot.node) for slot in core.slots)
    for node in core.cache.tree.nodes():
        held = standing[id(node)] + (node in core.cache.returns.visits)
        assert node.holders == held, "a node is held by other than slots and remembered requests"
    for slot in core.slots:
        assert id(slot.node) in known, "a slot stands at a node that is not in the tree"
        assert core.context.end(slot.seq) == slot.resident().end and slot.n_fed == len(slot.resident())
        assert slot.node.n_items <= slot.n_fed
        assert slot.resident().common_prefix(slot.node.path) >= slot.node.n_items, "a slot left its node's lineage"


def check_spares(core: Core) -> None:
    parked = {
        n.checkpoint.parked: n for n in core.cache.tree.nodes() if n.checkpoint and n.checkpoint.parked is not None
    }
    taken = dict(core.cache.residents.spares.parked())
    assert parked == taken, "spares and parked checkpoints disagree"
    for spare in core.cache.residents.spares:
        node = core.cache.residents.spares.node(spare)
        assert core.context.end(spare).n_tokens == (0 if node is None else node.n_items)


def checkpoints(core: Core) -> list[int]:
    return sorted(node.n_items for node in core.cache.tree.nodes() if node.checkpoint is not None)


# exactness


def record_logits(core: Core) -> list[np.ndarray]:
    """Every row of logits that is decoded from now on."""
    rows: list[np.ndarray] = []
    decode = core.context.decode

    def recording(feeds: Sequence[Feed]) -> None:
        decode(feeds)
        rows.extend(core.context.logits(i).copy() for i in range(sum(feed.wants_logits for feed in feeds)))

    core.context.decode = recording
    return rows


def memory_of(context: Context, seq: int) -> bytes:
    """Everything a sequence is made of, without the header that names it."""
    return context.capture_sequence(seq).tobytes()


def replay(core: Core, slot: Slot, tokens: Sequence[int] | None = None) -> bytes:
    """The memory of a fresh context that read the slot's items cold, in the same chunks and with the same cuts."""
    prompt = slot.items if tokens is None else Prompt.of_tokens(tokens)
    with Context(core.model, core.settings.context(core.sizes.n_spares)) as context:
        read_cold(context, slot.seq, prompt, tuple(slot.chunks))
        return memory_of(context, slot.seq)


def slot_holding(core: Core, tokens: Sequence[int]) -> Slot:
    """The idle slot whose conversation began with this prompt."""
    prompt = Prompt.of_tokens(tokens)
    return next(
        s for s in core.slots if s.is_idle and s.resident().common_prefix(prompt) == min(s.n_fed, len(prompt)) > 0
    )


def regrets(core: Core, prompt: Sequence[int], reply: Sequence[int]) -> np.ndarray:
    """How far each token of a greedy reply is from the best one when a fresh context reads it cold; 0 is the best. Tokens
    that end a reply do not count: requests ignore them."""
    tokens = np.array([*prompt, *reply], np.int32)
    counted = [token for token in range(core.model.vocab.n_tokens) if token not in core.model.vocab.eog]
    found = []
    with Context(core.model, core.settings.context(0)) as context:
        for i, token in enumerate(reply):
            start = 0 if i == 0 else len(prompt) + i - 1
            stop = len(prompt) + i
            context.decode([Feed(0, tokens[start:stop], context.end(0), wants_logits=True)])
            logits = context.logits(0)
            found.append(float(logits[counted].max() - logits[token]))
    return np.array(found)


def assert_greedy(core: Core, prompt: Sequence[int], result: Result) -> None:
    """The reply is what a cold reading would say; where floats differ in their last bits a near tie may go either way."""
    assert regrets(core, prompt, result.tokens).max(initial=0.0) < NEAR_TIE
