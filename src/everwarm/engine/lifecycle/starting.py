"""A request starts: it is checked, gets the namespace that it belongs to, then a slot, and the slot what is known of
its prompt. The same when it continues after it was suspended. And where the rest of its prompt is cut for
checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from everwarm.config import MAX_SCALE, require
from everwarm.engine.cache.prefix_cache import PrefixCache
from everwarm.engine.cache.restore import Goal, Restored, Restorer
from everwarm.engine.inspect.read_reason import ReadFacts, explain
from everwarm.engine.process.messages import ReadReason
from everwarm.engine.process.reply_text import ReplyText, items_text
from everwarm.engine.request import Ask, Request
from everwarm.engine.scheduling.admission import Admission, is_as_before
from everwarm.engine.slots import Slot
from everwarm.engine.stats import EngineStats
from everwarm.engine.tiers.loader import LoadOutcome
from everwarm.errors import BadRequest
from everwarm.llama.context import Context
from everwarm.llama.model import Model
from everwarm.llama.sampler import Sampler, ThinkingLimit
from everwarm.llama.vocab import Vocab
from everwarm.prompt.prompt import Prompt
from everwarm.state import policy
from everwarm.state.lineage import adapted, is_unverified, is_volatile, n_items_of, owner_of
from everwarm.state.policy import Cut, CutKind
from everwarm.state.returns import Partings
from everwarm.state.tree import Match


def new_request(ask: Ask, model: Model, n_ctx: int) -> Request:
    """The engine's record of an ask that is possible, with its sampler. ``n_ctx``: the most tokens that it may have."""
    matcher = None if ask.constraint is None else ask.constraint.matcher(ignore_eos=ask.ignore_eos)
    sampler = Sampler(
        model,
        ask.sampling,
        ask.prompt.tokens,
        matcher,
        ignore_eos=ask.ignore_eos,
        limit=None if ask.thinking is None else ThinkingLimit(model.vocab, ask.thinking),
        n_candidates=ask.n_probs if ask.post_sampling else None,
    )
    n_more = ask.prompt.n_tokens(len(ask.prompt)) - len(ask.prompt)  # cells of images beyond one each
    room = min(len(ask.prompt) + ask.max_tokens, n_ctx - n_more)
    return Request(ask, sampler, room, time.monotonic())


def with_own_namespace(ask: Ask, own: tuple[float, ...]) -> Ask:
    """The request in the namespace of its scales. ``own``: those that the model was opened with."""
    if ask.lora is None:
        return ask
    if len(ask.lora) != len(own):
        raise BadRequest(f"lora has {len(ask.lora)} scales; this model has {len(own)} adapters")
    require(all(-MAX_SCALE <= scale <= MAX_SCALE for scale in ask.lora), f"a scale of lora is not within ±{MAX_SCALE}")
    if ask.lora == own:
        return replace(ask, lora=None)
    return replace(ask, namespace=adapted(ask.namespace, ask.lora))


def stop_watch(vocab: Vocab, stops: Sequence[str]) -> Callable[[int], bool]:
    """Told every token of a reply, it says whether the text, as its reader sees it, holds a stop string after this one."""
    text = ReplyText(stops)

    def holds_a_stop(token: int) -> bool:
        text.feed(vocab.piece(token))
        return text.stop is not None

    return holds_a_stop


@dataclass(slots=True)
class Unverified:
    """Conversations from slot files of unknown origin: which requests continue one, and in which namespace.

    Each file has a namespace of its own (``state.lineage``). A request is moved into it as a whole, before anything is
    looked up for it, and stays there; so no other namespace knows what it reads, and nothing of it leaves RAM."""

    restorer: Restorer
    # By their namespaces: what each holds, and how many items a request must share with it.
    _files: dict[str, tuple[Prompt, int]] = field(default_factory=dict)

    def add(self, namespace: str, prompt: Prompt, points: Iterable[int] = ()) -> None:
        """``points``: after how many items the file has a checkpoint."""
        assert is_unverified(namespace)
        self._files[namespace] = (prompt, min(points, default=len(prompt)))

    def route(self, ask: Ask) -> Ask:
        """Moves a request to the namespace of a file if it continues all that the file holds, or a checkpoint in it, and no
        verified reading reaches as far. A request that shares only a beginning with a file does not count."""
        if not self._files or not ask.use_cache or ask.deterministic or is_volatile(ask.namespace):
            return ask
        self._files = {name: file for name, file in self._files.items() if self.restorer.knows(name)}
        best = ask.namespace
        most = self.restorer.reach(ask.prompt, ask.namespace)
        for name, (prompt, n_least) in self._files.items():
            if owner_of(name) == ask.namespace and int(ask.prompt.common_prefix(prompt)) >= n_least:
                n_items = self.restorer.reach(ask.prompt, name)
                if n_items > most:
                    best, most = name, n_items
        return ask if best == ask.namespace else replace(ask, namespace=best)


@dataclass(frozen=True, slots=True)
class Starter:
    context: Context
    slots: Sequence[Slot]
    cache: PrefixCache
    admission: Admission
    counts: EngineStats
    n_ubatch: int
    partings: Partings = field(default_factory=Partings)

    def start(self, request: Request) -> tuple[Slot, Restored]:
        """For a request that was judged ``START``: where it runs from now on, and what was there of its prompt."""
        cache = self.cache
        ask = request.ask
        cache.ram_budget.awaited.pop(request.id, None)
        is_first = request.started_at is None
        request.started_at = request.started_at or time.monotonic()
        if ask.deterministic:
            cache.room.clear()  # it runs alone, from the first cell on
        prompt = request.items(request.n_items)
        brought = self.admission.lay_fetched(request)
        goal = Goal(prompt, ask.namespace, ask.deterministic, brought.n_items, brought.tier)
        sources = cache.restorer.sources(prompt, goal.namespace) if ask.use_cache else {}
        slot = self.admission.seat(request, sources)
        match = cache.restorer.match(prompt, goal.namespace, sources)
        if is_first and not ask.ahead and not ask.is_background:
            request.continuation = cache.returns.arrive(match, time.monotonic())
        if ask.use_cache:
            restored = cache.restorer.bring(slot, goal, match, sources)
        else:
            restored = cache.restorer.start_cold(slot, goal)
        if not is_as_before(slot, request, is_clean=self.context.is_clean(slot.seq)):
            restored = cache.restorer.start_cold(slot, goal)  # its suspended state was lost: it is read again
        slot.seat(request, self._cuts(request, match, restored))
        if not ask.ahead:
            cache.room.limit_idle(slot)
        cache.ram_budget.enforce()  # what was pinned meanwhile may go now
        self._touch_session(slot)
        if is_first:
            self._note_first(request, match, restored, brought)
        return slot, restored

    # where a prompt is cut for checkpoints

    def _cuts(self, request: Request, match: Match, restored: Restored) -> list[Cut]:
        """The cuts that are still ahead of a request, the nearest last: ``state.policy`` decides where, from the caller's
        hints and what was learned."""
        found = self._found(request, match, restored)
        if request.chunks:
            found = request.cuts  # as before it was suspended
        elif request.ask.deterministic:
            request.cuts = found
        if not self.context.kind.needs_checkpoints:
            return []
        n_passed = max(restored.n_items, n_items_of(request.chunks))
        ahead = self._as_kept(request.ask, [cut for cut in reversed(found) if cut.at > n_passed])
        return [cut for cut in ahead if request.ask.deterministic or self.cache.checkpointer.is_worth_a_cut(cut.kind)]

    def _found(self, request: Request, match: Match, restored: Restored) -> tuple[Cut, ...]:
        ask = request.ask
        known = match.n_shared if match.n_shared - restored.n_items > policy.GUARD else None
        found = policy.cuts(
            request.n_prompt,
            self.cache.checkpointer.spacing,
            n_ubatch=self.n_ubatch,
            boundaries=ask.hints.boundaries,
            stable=ask.hints.stable,
            branch=known,
            media=ask.prompt.media,
            stables=ask.hints.stables,
            breakpoints=ask.hints.breakpoints,
            learned=self._learned(request, restored.n_items, known),
            volatile=ask.hints.volatile,
            joints=ask.hints.joints if self._may_guess(ask) else (),
            kept=0 if ask.deterministic else _n_kept(match, restored),
        )
        return tuple(found)

    def _as_kept(self, ask: Ask, cuts: list[Cut]) -> list[Cut]:
        """Of what is read ahead only the end is kept, and where a guess begins; of background work the stable points."""
        if ask.ahead:
            return [Cut(cut.at, CutKind.PREWARM) for cut in cuts if cut.at == ask.hints.stable]
        if ask.is_background and not ask.deterministic:
            return [Cut(cut.at, CutKind.BACKGROUND) for cut in cuts if cut.kind is CutKind.STABLE]
        return cuts

    def _learned(self, request: Request, n_restored: int, branch: int | None) -> list[int]:
        ask = request.ask
        if ask.deterministic or not ask.use_cache:
            return []
        if branch is not None and not any(0 <= branch - end <= policy.GUARD for end in ask.hints.boundaries):
            self.partings.note(ask.namespace, ask.prompt, branch)  # inside a message
        found = self.partings.places(ask.namespace, ask.prompt, n_restored)
        return [*self.cache.returns.places(request.n_prompt, self.cache.checkpointer.spacing), *found]

    def _may_guess(self, ask: Ask) -> bool:
        """Whether to stop at joints. They are worth little, so only while RAM has room to spare; and the chunks of a
        deterministic request must not depend on that."""
        return not ask.deterministic and self.cache.ram_budget.is_roomy(ask.namespace)

    # what is noted of the start

    def _touch_session(self, slot: Slot) -> None:
        """Slots of an active session are reused last."""
        for other in self.slots:
            if slot.session is not None and other.session == slot.session:
                other.touch(time.monotonic())

    def _note_first(self, request: Request, match: Match, restored: Restored, brought: LoadOutcome) -> None:
        request.note_start(restored.n_items, match.n_shared, restored.use)
        if not request.ask.ahead:
            request.why = self._why(request, match, restored, brought)
            self.counts.add(request, request.why)

    def _why(self, request: Request, match: Match, restored: Restored, brought: LoadOutcome) -> ReadReason:
        """Why a request read what it read. Looks up only what the reason may depend on."""
        ask = request.ask
        forgotten = self.cache.tree.forgotten
        is_known = request.n_prompt - match.n_shared <= policy.GUARD
        facts = ReadFacts(
            ask.prompt,
            match,
            request.n_cached,
            n_refused=restored.n_refused,
            n_passed=brought.n_passed,
            n_spoilt=brought.n_spoilt,
            n_elsewhere=brought.n_elsewhere,
            first=policy.first_message(ask.hints.opening, ask.hints.boundaries),
            forgotten=None if is_known else forgotten.parting(ask.namespace, ask.prompt),
            use_cache=ask.use_cache,
            deterministic=ask.deterministic,
            has_attention=self.context.kind.has_attention,
            needs_checkpoints=self.context.kind.needs_checkpoints,
            max_checkpoints=self.cache.checkpointer.spacing.max_checkpoints,
            eviction=partial(forgotten.eviction, ask.namespace, ask.prompt),
            now=time.monotonic(),
        )
        return explain(facts, partial(items_text, self.context.model.vocab))


def _n_kept(match: Match, restored: Restored) -> int:
    """Where a request continues, if another one could continue there as well; else 0."""
    return restored.n_items if any(node.n_items == restored.n_items for node in match.usable) else 0
