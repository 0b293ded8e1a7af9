"""One line in the log for each request that an engine answered: what was asked, reused, read, and how long it took.

Numbers, names and codes; never a word of a prompt, a reply or an error that may quote one.
"""

from __future__ import annotations

import logging
from typing import Any

from everwarm.gateway.admin.request_log import Row
from everwarm.logs import FIELDS

log = logging.getLogger("everwarm.requests")

Json = dict[str, Any]

_KINDS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/api/chat": "chat",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/api/generate": "generate",
}


def log_request(row: Row) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", line(row), extra={FIELDS: fields(row)})


def line(row: Row) -> str:
    """``chat 3,135 tokens: 3,117 reused, 18 read, 48 ms; 12 written, 310 ms; stop; MODEL; req_…``."""
    said = [f"{_kind(row)} {row.n_prompt:,} tokens: {row.n_cached:,} reused, {row.n_read:,} read"]
    first_s = row.first_s()
    if first_s is not None:
        said[0] += f", {1e3 * first_s:,.0f} ms"
    written_s = dict(row.phases()).get("decode")
    if row.n_reply and written_s is not None:
        said.append(f"{row.n_reply:,} written, {1e3 * written_s:,.0f} ms")
    return "; ".join([*said, _end(row), row.caller.model, row.id])


def fields(row: Row) -> Json:
    """The same as values, for a log in JSON."""
    first_s = row.first_s()
    return {
        "request": row.id,
        "kind": _kind(row),
        "path": row.caller.path,
        "model": row.caller.model,
        "stream": row.caller.stream,
        "status": row.status,
        "end": _end(row),
        "n_prompt": row.n_prompt,
        "n_cached": row.n_cached,
        "n_read": row.n_read,
        "n_reply": row.n_reply,
        "reason": None if row.done is None else row.done.why.reason,
        "ttft_ms": None if first_s is None else round(1e3 * first_s, 1),
        "phases_ms": {name: round(1e3 * seconds, 1) for name, seconds in row.phases()},
    }


def _kind(row: Row) -> str:
    return _KINDS.get(row.caller.path, "completion")


def _end(row: Row) -> str:
    """How it ended: the finish reason, or the status with the error's code."""
    if row.status == "done" and row.done is not None:
        return row.done.finish
    return row.status if row.error_code is None else f"{row.status} ({row.error_code})"
