"""Lists in pages, as OpenAI's clients ask for them: ``limit``, ``order`` and ``after``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everwarm.errors import BadRequest
from everwarm.types import Json

MAX_LISTED = 100


def page_of(items: Sequence[Json], query: Mapping[str, str], order: str = "desc") -> Json:
    """``items``: the oldest first. ``order``: where the query has none."""
    limit, order, after = query.get("limit", "20"), query.get("order", order), query.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LISTED):
        raise BadRequest(f"limit is {limit[:20]!r}; give 1 to {MAX_LISTED}")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order is {order[:20]!r}; give asc or desc")
    listed = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in listed]
    if after is not None and after not in ids:
        raise BadRequest(f"after is {after[:80]!r}, which is none of the items")
    start = ids.index(after) + 1 if after is not None else 0
    page = listed[start : start + int(limit[:9])]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(listed),
    }
