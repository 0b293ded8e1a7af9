"""Why a prompt was read, in the words of the wire: ``timings.cache``, OpenAI's usage and its diagnostics. Pure."""

from __future__ import annotations

import msgspec

from everwarm.engine.inspect.reasons import Reason
from everwarm.engine.process import messages as m
from everwarm.types import Json


def cache(done: m.Done) -> Json:
    """``checkpoint`` is the short form of ``restored``."""
    why = done.why
    return {
        "reason": why.reason,
        "again": why.again,
        "n_shared": max(done.n_shared, why.n_shared),
        "n_kv": why.n_kv,
        "n_checkpoint": why.n_checkpoint,
        "checkpoint": done.checkpoint,
        "restored": None if why.restored is None else msgspec.structs.asdict(why.restored),
        "diverged": _diverged(why),
    }


def n_written(done: m.Done) -> int:
    """Tokens that were read and are kept from now on."""
    return 0 if done.why.reason == Reason.CACHE_OFF.value else done.n_prompt - done.n_cached


def diagnostics(done: m.Done) -> Json:
    """For whoever asked with ``prompt_cache_diagnostics``."""
    why = done.why
    return {
        "status": _status(done),
        "reason": why.reason,
        "explanation": Reason(why.reason).words,
        "cached_tokens": done.n_cached,
        "read_tokens": done.n_prompt - done.n_cached,
        "known_tokens": max(done.n_shared, why.n_shared),
        "diverged": _diverged(why),
    }


def _status(done: m.Done) -> str:
    if done.why.reason == Reason.HIT.value:
        return "hit"
    return "partial" if done.n_cached else "miss"


def _diverged(why: m.ReadReasonMessage) -> Json | None:
    """Words that nobody asked for are not there."""
    if why.diverged is None:
        return None
    return {name: value for name, value in msgspec.structs.asdict(why.diverged).items() if value is not None}
