"""Why a request read what it read, as one of a few codes. Pure: what was known, what was restored, what was allowed.

A prompt's tokens are of three sorts: restored, known but read again, and never read before. The reason explains the
larger part of what was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from everwarm.engine.process.messages import N_SHOWN, Diverged, Evicted, ReadReason, Reason
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import GUARD, is_new_conversation
from everwarm.state.tree import Eviction, Match, Parting

_GIB = 1 << 30

TextOf = Callable[[Prompt], str]


@dataclass(frozen=True, slots=True)
class ReadFacts:
    """Everything that the reason depends on."""

    prompt: Prompt
    match: Match
    n_cached: int  # restored
    n_refused: int = 0  # ways to restore more that failed
    n_passed: int = 0  # on disk, but reading them again is faster
    n_spoilt: int = 0  # on disk, but they could not be used
    n_elsewhere: int = 0  # on disk for another fingerprint
    first: range | None = None  # the first message after the system text
    forgotten: Parting | None = None
    use_cache: bool = True
    deterministic: bool = False
    has_attention: bool = True
    needs_checkpoints: bool = True
    max_checkpoints: int = 1
    eviction: Callable[[int], Eviction | None] = lambda _beyond: None  # of a point after so many items
    now: float = 0.0

    @property
    def n_forgotten(self) -> int:
        return 0 if self.forgotten is None else self.forgotten.at

    @property
    def n_known(self) -> int:
        """Items that were ever read."""
        return max(self.match.n_shared, self.n_forgotten, self.n_passed, self.n_spoilt, self.n_cached)


def explain(seen: ReadFacts, text_of: TextOf) -> ReadReason:
    """Counts are items of the prompt."""
    again = _why_again(seen)
    parting = _parting(seen)
    kept = [n.n_items for n in (*seen.match.usable, *seen.match.path) if n.checkpoint and n.n_items <= seen.n_known]
    return ReadReason(
        _main_reason(seen, again, parting),
        again,
        seen.n_known,
        min(seen.match.n_kv, len(seen.prompt)) if seen.has_attention else None,
        max((*kept, *(node.n_items for node in seen.match.usable)), default=0),
        diverged=None if parting is None else _diverged(seen.prompt, parting, text_of),
        evicted=_evicted(seen) if again is Reason.EVICTED else None,
    )


def _evicted(seen: ReadFacts) -> Evicted | None:
    found = seen.eviction(seen.n_cached)
    if found is None:
        return None
    least = None if found.least_kept is None else found.least_kept * _GIB
    ago_s = round(max(0.0, seen.now - found.at), 3)
    return Evicted(found.n_items, ago_s, found.worth * _GIB, least, found.budget_bytes)


def counted(why: ReadReason, n_tokens: Callable[[int], int]) -> ReadReason:
    """The same with every number of items as tokens."""
    diverged = why.diverged
    evicted = why.evicted
    return msgspec.structs.replace(
        why,
        n_shared=n_tokens(why.n_shared),
        n_kv=None if why.n_kv is None else n_tokens(why.n_kv),
        n_checkpoint=n_tokens(why.n_checkpoint),
        diverged=None if diverged is None else msgspec.structs.replace(diverged, at=n_tokens(diverged.at)),
        evicted=None if evicted is None else msgspec.structs.replace(evicted, at=n_tokens(evicted.at)),
    )


def _main_reason(seen: ReadFacts, again: Reason | None, parting: Parting | None) -> Reason:
    n_known = seen.n_known
    n_prompt = len(seen.prompt)
    n_elsewhere = seen.n_elsewhere
    if not seen.use_cache:
        return Reason.CACHE_OFF
    if again is not None and n_known - seen.n_cached >= n_prompt - n_known:
        return again
    if n_elsewhere > n_known + GUARD and n_elsewhere - n_known >= n_prompt - n_elsewhere:
        return Reason.FINGERPRINT
    if n_known == n_prompt:
        return Reason.HIT
    if is_new_conversation(n_known, n_prompt, seen.first, parts=parting is not None):
        return Reason.NEW
    return Reason.EXTENDED if parting is None else Reason.EDITED


def _why_again(seen: ReadFacts) -> Reason | None:
    """What kept known items from being restored; None: at most a few were read again."""
    match = seen.match
    n_cached = seen.n_cached
    if seen.n_known - n_cached <= GUARD:
        return None
    if not seen.use_cache:
        return Reason.CACHE_OFF
    if seen.needs_checkpoints and seen.max_checkpoints == 0:
        return Reason.CHECKPOINTS_OFF
    if seen.n_refused or seen.n_spoilt > n_cached + GUARD:
        return Reason.REFUSED
    if seen.n_passed > n_cached + GUARD:
        return Reason.LOAD_SLOWER
    if seen.deterministic and _has_more(seen):
        return Reason.DETERMINISTIC
    if not seen.needs_checkpoints or seen.n_forgotten > match.n_shared + GUARD or _has_more(seen):
        return Reason.EVICTED
    if seen.has_attention and match.n_kv < match.n_shared - GUARD:
        return Reason.EVICTED
    beyond = [node for node in match.path if n_cached < node.n_items <= match.n_shared]
    was_evicted = any(n_cached < node.n_evicted <= match.n_shared for node in match.path)
    if was_evicted or any(node.evicted or node.checkpoint is not None for node in beyond):
        return Reason.EVICTED
    return Reason.NO_CHECKPOINT


def _has_more(seen: ReadFacts) -> bool:
    """Whether more could have been restored than was."""
    if not seen.needs_checkpoints:
        return min(seen.match.n_kv, len(seen.prompt) - 1) > seen.n_cached
    return any(seen.n_cached < node.n_items < len(seen.prompt) for node in seen.match.usable)


def _parting(seen: ReadFacts) -> Parting | None:
    """Where the prompt leaves what was known, and for what; None: it does not, or what is known ends there."""
    n_shared = seen.match.n_shared
    forgotten = seen.forgotten
    if forgotten is not None and forgotten.at > n_shared:
        at = forgotten.at
        known = forgotten.known
        return forgotten if at < min(len(known), len(seen.prompt)) else None
    if not seen.match.path:  # not even a beginning in common
        return None
    node = seen.match.path[-1]
    while node.n_items < n_shared + N_SHOWN and node.children:
        node = next(reversed(node.children.values()))  # the latest
    return Parting(n_shared, node.path.first(node.n_items)) if n_shared < min(node.n_items, len(seen.prompt)) else None


def _diverged(prompt: Prompt, parting: Parting, text_of: TextOf) -> Diverged:
    """The first item that differs, with its surroundings: what comes before, what was known, what was given."""
    at = parting.at
    stop = parting.at + N_SHOWN
    parts = (prompt.part(max(0, at - N_SHOWN), at), parting.known.part(at, stop), prompt.part(at, stop))
    return Diverged(at, *map(text_of, parts))
