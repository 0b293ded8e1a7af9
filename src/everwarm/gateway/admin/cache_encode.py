"""The JSON of the cache API, from the engine's reports and the request log; see ``docs/cache-api.md``. Pure."""

from __future__ import annotations

from everwarm.engine.process import messages as m
from everwarm.gateway.admin.request_log import RequestLog, RequestRecord, Totals
from everwarm.gateway.openai import encode
from everwarm.gateway.rewrite.volatile_lines import VolatileLine
from everwarm.router.pool import Served
from everwarm.types import Json


def request(row: RequestRecord, *, with_words: bool) -> Json:
    """Without ``with_words``, an error is shown by its code only, and a divergence by its position only."""
    done = row.done
    caller = row.caller
    first_s = row.first_s()
    cache = None if done is None else encode.timings(done)["cache"]
    if cache is not None and cache["diverged"] is not None and not with_words:
        cache["diverged"] = {"at": cache["diverged"]["at"]}
    return {
        "id": row.id,
        "at": row.at,
        "model": caller.model,
        "path": caller.path,
        "stream": caller.stream,
        "status": row.status,
        "error": row.error if with_words else row.error_code,
        "n_prompt": row.n_prompt,
        "n_cached": row.n_cached,
        "n_read": row.n_read,
        "n_reply": row.n_reply,
        "reason": None if done is None else done.why.reason,
        "cache": cache,
        "phases": [{"name": name, "ms": 1e3 * seconds} for name, seconds in row.phases()],
        "ttft_ms": None if first_s is None else 1e3 * first_s,
        "slot": row.slot,
    }


def volatile_line(line: VolatileLine, namespace: str, *, with_words: bool) -> Json:
    """Without ``with_words`` the line is shown by its number only."""
    return {
        "namespace": namespace[: m.SHORT_NAMESPACE],
        "line": line.number,
        "before": line.before if with_words else None,
        "after": line.after if with_words else None,
        "n_changes": line.n_changes,
        "n_tokens": line.n_tokens,
        "rule": line.rule() if with_words else None,
    }


def tree(seen: m.TreeSeen, model: str, recent: RequestLog) -> Json:
    nodes = [node(each, model, recent) for each in seen.nodes]
    following = None if seen.next is None else str(seen.next)
    return {"version": seen.version, "n_total": seen.n_total, "next": following, "nodes": nodes}


def node(seen: m.NodeSeen, model: str, recent: RequestLog) -> Json:
    checkpoint = None
    if seen.kind is not None:
        checkpoint = {"kind": seen.kind, "tiers": seen.state_tiers, "bytes": seen.state_bytes}
    running = None
    if seen.running is not None:
        number, at, n_prompt = seen.running
        running = {"request": recent.running(model, number), "at": at, "n_prompt": n_prompt}
    return {
        "id": seen.id,
        "parent": seen.parent,
        "start": seen.start,
        "end": seen.end,
        "namespace": seen.namespace,
        "words": seen.words,
        "n_children": seen.n_children,
        "last_use": seen.last_use,
        "hits": seen.hits,
        "pinned": seen.pinned,
        "checkpoint": checkpoint,
        "kv": {"tiers": seen.kv_tiers, "bytes": seen.kv_bytes},
        "running": running,
    }


def condition(model: Served) -> Json:
    """The state of its engine; after repeated failures, the reason and the time of the next attempt."""
    supervisor, retry = model.supervisor, model.retry
    return {
        "state": supervisor.state,
        "restarts": supervisor.n_restarts,
        "reason": model.reason,
        "attempts": supervisor.deaths.n_given_up,
        "retry_at": None if retry is None else retry.at_time,
    }


def overview(model: Served, models: list[Served], totals: Totals, seen: Json | None, *, text: bool) -> Json:
    """``seen``: the engine's report; ``None`` if it does not run."""
    engine = condition(model)
    speed = None if seen is None else seen["seconds_per_token"]
    return {
        "model": model.spec.id,
        "models": [{"id": each.spec.id, "status": each.status.phase} for each in models],
        "text": text,
        "version": None if seen is None else seen["version"],
        "n_nodes": None if seen is None else seen["n_nodes"],
        "engine": engine | ({} if seen is None else seen["engine"]),
        "tiers": None if seen is None else seen["tiers"],
        "tokens": {
            "prompt": totals.n_prompt,
            "reused": totals.n_reused,
            "read": totals.n_prompt - totals.n_reused,
            "avoidable": totals.n_avoidable,
            "written": totals.n_written,
        },
        "hit_rate": totals.n_reused / totals.n_prompt if totals.n_prompt else 0.0,
        "seconds_saved": totals.seconds_saved(speed),
        "seconds_per_token": speed,
        "requests": {"total": totals.n_requests},
        "evictions": 0 if seen is None else seen["evictions"],
        "quarantines": 0 if seen is None else seen["quarantines"],
        "prewarm": None if seen is None else seen["prewarm"],
        "speculation": None if seen is None else seen["speculation"],
    }
