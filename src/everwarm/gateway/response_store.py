"""Stored responses that a request can continue, and stored chat completions: SQLite, in a file if the server has a state
directory, else in memory.

Each row holds what one response added (its own input and its output) and the id of the response before: a conversation is
stored once, however long it gets. After any crash a row is complete or absent. When the store is full, the namespace that
holds most loses its least recently used responses. Every row belongs to one namespace; another namespace cannot see it,
and cannot evict it while it holds more itself. Knows rows; knows no HTTP.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from everwarm.errors import BadRequest, EverwarmError
from everwarm.gateway.sqlite_store import SqliteStore, StoreLimits, victims
from everwarm.types import Json

log = logging.getLogger("everwarm.responses")


FILE = "responses.sqlite"
MAX_LINKS = 10_000  # of one conversation
MAX_LISTED = 1_000  # answers that a list looks at: the newest
MAX_PAGE = 100
_VERSION = 1

_TABLES = (  # bodies are apart, because every use rewrites the row
    "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, namespace TEXT NOT NULL, parent TEXT, "
    "used INTEGER NOT NULL, n_bytes INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS bodies (id TEXT PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS by_use ON responses (used)",
)


ON_DISK = StoreLimits(20_000, 512 << 20)
IN_MEMORY = StoreLimits(20_000, 128 << 20)
MAX_CHAIN_BYTES = 32 << 20  # of a conversation that is continued: as much as a body may have


class StoredResponse(msgspec.Struct, frozen=True):
    """What one response added. ``response`` is the answer that was sent, with its output."""

    input: list[Json]
    response: Json

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def parent(self) -> str | None:
        found: str | None = self.response.get("previous_response_id")
        return found

    @property
    def items(self) -> list[Json]:
        return [*self.input, *self.response["output"]]


class LinkMissing(Exception):
    """A response is not stored: the requested one, or one before it."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StoredResponse).decode


class _Answer(msgspec.Struct, frozen=True):
    """The part of a ``StoredResponse`` that a list shows."""

    response: Json


_decode_answer = msgspec.json.Decoder(_Answer).decode


class ResponseStore:
    """A disk error is logged and counts as a miss."""

    def __init__(
        self, directory: str | None, limits: StoreLimits | None = None, max_chain_bytes: int = MAX_CHAIN_BYTES
    ) -> None:
        path = Path(directory).expanduser() / FILE if directory is not None else None
        self._limits = limits or (IN_MEMORY if directory is None else ON_DISK)
        self._max_chain_bytes = max_chain_bytes
        self._store = SqliteStore(path, _TABLES, _VERSION, "responses")

    def close(self) -> None:
        self._store.close()

    def keep(self, namespace: str, kept: StoredResponse) -> bool:
        """Whether it is stored, so that it survives a crash of this process."""
        body = _encode(kept)
        try:
            with self._store.transaction() as database:
                used = _next_use(database)
                row = (kept.id, namespace, kept.parent, used, len(body))
                database.execute("INSERT INTO responses VALUES (?,?,?,?,?)", row)
                database.execute("INSERT INTO bodies VALUES (?,?)", (kept.id, body))
                _touch(database, _chain_ids(database, namespace, kept.id), used)
                self._evict(database, kept.id)
        except (sqlite3.Error, OSError) as error:
            log.warning("a response cannot be stored: %s", error)
            return False
        return True

    def get(self, namespace: str, id: str) -> StoredResponse | None:
        try:
            with self._store.transaction() as database:
                return _read(database, namespace, id)
        except (sqlite3.Error, OSError) as error:
            log.warning("a response cannot be read: %s", error)
            return None

    def listed(self, namespace: str, prefix: str, is_wanted: Callable[[Json], bool]) -> list[Json]:
        """The answers whose ids begin so, the oldest first, of the newest so many; what they answer is not decoded. One
        that is not wanted does not stay in memory."""
        query = (
            "SELECT responses.id FROM responses WHERE namespace = ? AND substr(responses.id, 1, ?) = ? ORDER BY rowid"
        )
        body = "SELECT body FROM bodies WHERE id = ?"
        found: list[Json] = []
        try:
            with self._store.transaction() as database:
                ids = [id for (id,) in database.execute(query, (namespace, len(prefix), prefix)).fetchall()]
                for id in ids[-MAX_LISTED:]:
                    for (encoded,) in database.execute(body, (id,)):
                        answer = _decode_answer(encoded).response
                        found += [answer] if is_wanted(answer) else []
                return found
        except (sqlite3.Error, OSError) as error:
            log.warning("stored answers cannot be listed: %s", error)
            return []

    def replace(self, namespace: str, kept: StoredResponse) -> bool:
        """Whether it was stored, and is now as given."""
        body = _encode(kept)
        try:
            with self._store.transaction() as database:
                changed = "UPDATE responses SET n_bytes = ?, used = ? WHERE id = ? AND namespace = ?"
                row = (len(body), _next_use(database), kept.id, namespace)
                if database.execute(changed, row).rowcount == 0:
                    return False
                database.execute("UPDATE bodies SET body = ? WHERE id = ?", (body, kept.id))
                self._evict(database, kept.id)
        except (sqlite3.Error, OSError) as error:
            raise EverwarmError(f"the answer cannot be changed now: {error}") from None
        return True

    def chain(self, namespace: str, id: str) -> list[StoredResponse]:
        """The conversation that ends with this response, oldest first. ``LinkMissing`` if a part of it is not stored,
        ``BadRequest`` if it is too large."""
        found: list[StoredResponse] = []
        try:
            with self._store.transaction() as database:
                _require_small(database, _chain_ids(database, namespace, id), self._max_chain_bytes)
                link: str | None = id
                while link is not None:
                    kept = _read(database, namespace, link) if len(found) < MAX_LINKS else None
                    if kept is None:
                        raise LinkMissing(link)
                    found.append(kept)
                    link = kept.parent
                _touch(database, [kept.id for kept in found], _next_use(database))
        except (sqlite3.Error, OSError) as error:
            log.warning("a response cannot be read: %s", error)
            raise LinkMissing(id) from None
        return found[::-1]

    def delete(self, namespace: str, id: str) -> bool:
        """Whether it was stored."""
        try:
            with self._store.transaction() as database:
                query = "SELECT id FROM responses WHERE id = ? AND namespace = ?"
                was_there = database.execute(query, (id, namespace)).fetchone() is not None
                _drop(database, [id] if was_there else [])
            self._store.truncate_log()
        except (sqlite3.Error, OSError) as error:
            raise EverwarmError(f"the response cannot be deleted now: {error}") from None
        return was_there

    def delete_all(self, namespace: str) -> int:
        """Deletes the responses of namespaces with this prefix; returns how many there were."""
        try:
            with self._store.transaction() as database:
                rows = database.execute("SELECT id, namespace FROM responses").fetchall()
                gone = [id for id, own in rows if own.startswith(namespace)]
                _drop(database, gone)
            self._store.truncate_log()
        except (sqlite3.Error, OSError) as error:
            raise EverwarmError(f"the responses cannot be deleted now: {error}") from None
        return len(gone)

    def size(self) -> tuple[int, int]:
        """How many responses, and their bytes."""
        with self._store.transaction() as database:
            return _size(database)

    def _evict(self, database: sqlite3.Connection, newest: str) -> None:
        n, n_bytes = _size(database)
        if n > self._limits.max_rows or n_bytes > self._limits.max_bytes:
            # of one conversation the later ones first, so that what stays is complete
            _drop(database, victims(database, "responses", "used, rowid DESC", newest, self._limits))


def _next_use(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT COALESCE(MAX(used), 0) + 1 FROM responses").fetchone()[0])


def _size(database: sqlite3.Connection) -> tuple[int, int]:
    n, n_bytes = database.execute("SELECT COUNT(*), COALESCE(SUM(n_bytes), 0) FROM responses").fetchone()
    return int(n), int(n_bytes)


def _read(database: sqlite3.Connection, namespace: str, id: str) -> StoredResponse | None:
    query = "SELECT body FROM responses JOIN bodies USING (id) WHERE id = ? AND namespace = ?"
    row = database.execute(query, (id, namespace)).fetchone()
    try:
        return _decode(row[0]) if row is not None else None
    except (msgspec.MsgspecError, RecursionError, TypeError) as error:
        log.warning("a stored response is damaged: %s", error)
        return None


def _chain_ids(database: sqlite3.Connection, namespace: str, id: str) -> list[str]:
    ids: list[str] = []
    link: str | None = id
    while link is not None and len(ids) < MAX_LINKS:
        query = "SELECT parent FROM responses WHERE id = ? AND namespace = ?"
        row = database.execute(query, (link, namespace)).fetchone()
        if row is None:
            break
        ids.append(link)
        link = row[0]
    return ids


def _require_small(database: sqlite3.Connection, ids: list[str], most: int) -> None:
    query = "SELECT n_bytes FROM responses WHERE id = ?"
    n_bytes = sum(int(database.execute(query, (id,)).fetchone()[0]) for id in ids)
    if n_bytes > most:
        raise BadRequest(
            f"the conversation before this response has {n_bytes:,} bytes; at most {most:,} can be continued"
            ": send what matters of it as input"
        )


def _drop(database: sqlite3.Connection, ids: list[str]) -> None:
    for table in ("responses", "bodies"):
        database.executemany(f"DELETE FROM {table} WHERE id = ?", [(id,) for id in ids])


def _touch(database: sqlite3.Connection, ids: list[str], used: int) -> None:
    database.executemany("UPDATE responses SET used = ? WHERE id = ?", [(used, id) for id in ids])


def page_of(items: Sequence[Json], query: Mapping[str, str], order: str = "desc") -> Json:
    """A part of a list, as OpenAI's clients ask for it: ``limit``, ``order`` and ``after``. ``items``: the oldest first;
    ``order``: where the query has none."""
    limit = query.get("limit", "20")
    order = query.get("order", order)
    after = query.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_PAGE):
        raise BadRequest(f"limit is {limit[:20]!r}; give 1 to {MAX_PAGE}")
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
