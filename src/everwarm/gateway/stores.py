"""What the server keeps in SQLite: responses and chat completions that clients stored, and replies that models wrote.

Each store is a file if the server has a state directory, else in memory. After any crash a row is complete or absent.
Every row belongs to one namespace: another cannot see it. When a store is full, the namespace that holds most loses
its least recently used rows, so no other can evict them while it holds more itself. Knows rows, and the
error for a conversation of which a response is missing; knows no HTTP.

Responses: each row holds what one response added (its own input and its output) and the id of the response before, so a
conversation is stored once, however long it gets. Replies belong to one chat template, too, and are kept for
``chat.reply_memory``.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everwarm.errors import BadRequest, EverwarmError, NotFound
from everwarm.gateway.chat.reply_memory import RememberedReply
from everwarm.state.store.files import Files, make_folder
from everwarm.types import Json

log = logging.getLogger("everwarm.gateway")
responses_log = logging.getLogger("everwarm.responses")

_BUSY_S = 5.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    max_rows: int
    max_bytes: int


class SqliteStore:
    """What all stores share. Opened at its first use; thread-safe. ``directory``: None keeps everything in memory.
    ``what``: for messages."""

    def __init__(
        self, directory: str | None, file: str, tables: Sequence[str], version: int, what: str, limits: StoreLimits
    ) -> None:
        self._path = None if directory is None else Path(directory).expanduser() / file
        self._limits = limits
        self._tables = tables
        self._version = version
        self._what = what
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            database = self._opened
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")

    def truncate_log(self) -> None:
        """Leaves no copy of deleted rows in the write-ahead log."""
        with self._lock:
            if self._opened is not None:
                self._opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _open(self) -> sqlite3.Connection:
        """A file that is damaged or of another version is moved aside, and a new one is created. If no file can be used,
        rows are kept in memory until the server stops."""
        if self._path is not None:
            for _ in range(2):
                try:
                    return self._prepared(_connect(self._path))
                except (sqlite3.OperationalError, OSError) as error:  # locked, full, read-only: the file may be good
                    log.warning("%s are kept in memory: %s", self._what, error)
                    break
                except sqlite3.DatabaseError as error:
                    log.warning("stored %s cannot be used: %s", self._what, error)
                    if not _move_aside(self._path):
                        break
        return self._prepared(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))

    def _prepared(self, database: sqlite3.Connection) -> sqlite3.Connection:
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.execute("PRAGMA secure_delete=ON")
            if database.execute("PRAGMA user_version").fetchone()[0] not in (0, self._version):
                raise sqlite3.DatabaseError("it is of another version")
            if database.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("it is damaged")
            for table in self._tables:
                database.execute(table)
            database.execute(f"PRAGMA user_version={self._version}")
        except sqlite3.Error:
            database.close()
            raise
        return database


def victims(database: sqlite3.Connection, table: str, order: str, newest: object, limits: StoreLimits) -> list[str]:
    """The ids to evict until the limits hold: always of the largest namespace, in this order; never the newest."""
    rows = f"SELECT id, n_bytes FROM {table} WHERE namespace = ? AND id != ? ORDER BY {order}"
    sums = f"SELECT namespace, COUNT(*), SUM(n_bytes) FROM {table} GROUP BY namespace"
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for namespace, n, n_bytes in database.execute(sums).fetchall():
        counts[namespace] = n
        sizes[namespace] = n_bytes
    left = {namespace: database.execute(rows, (namespace, newest)) for namespace in counts}
    n_over = sum(counts.values()) - limits.max_rows
    bytes_over = sum(sizes.values()) - limits.max_bytes
    gone = []
    while left and (n_over > 0 or bytes_over > 0):
        by = sizes if bytes_over > 0 else counts
        largest = max(left, key=by.__getitem__)
        row = next(left[largest], None)
        if row is None:
            del left[largest]
            continue
        gone.append(row[0])
        counts[largest] -= 1
        sizes[largest] -= row[1]
        n_over -= 1
        bytes_over -= row[1]
    return gone


def _connect(path: Path) -> sqlite3.Connection:
    make_folder(path.parent, Files())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    os.fchmod(fd, 0o600)
    os.close(fd)
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def _move_aside(path: Path) -> bool:
    """The file is not deleted: a later version may read it, or an operator may repair it."""
    aside = next(p for i in itertools.count(1) if not (p := path.with_name(f"{path.name}.aside-{i}")).exists())
    try:
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    except OSError as error:
        log.warning("%s cannot be moved aside: %s", path, error)
        return False
    log.warning("%s was moved to %s, and a new file was created", path, aside)
    return True


def _next_use(database: sqlite3.Connection, table: str) -> int:
    return int(database.execute(f"SELECT COALESCE(MAX(used), 0) + 1 FROM {table}").fetchone()[0])


_encode = msgspec.json.Encoder().encode


# responses and chat completions

RESPONSES_FILE = "responses.sqlite"
MAX_LINKS = 10_000  # of one conversation
MAX_LISTED = 1_000  # answers that a list looks at: the newest
MAX_PAGE = 100
_RESPONSES_VERSION = 1

_RESPONSE_TABLES = (  # bodies are apart, because every use rewrites the row
    "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, namespace TEXT NOT NULL, parent TEXT, "
    "used INTEGER NOT NULL, n_bytes INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS bodies (id TEXT PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS by_use ON responses (used)",
)


RESPONSES_ON_DISK = StoreLimits(20_000, 512 << 20)
RESPONSES_IN_MEMORY = StoreLimits(20_000, 128 << 20)
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


WHY_MISSING = "it still runs, was never stored, was deleted, or was evicted"


def missing_link(link: str, id: str) -> NotFound:
    """A link of the conversation that ends with a response is not stored: that response, or one before it."""
    words = f"the previous response {id[:80]!r} is not stored here: {WHY_MISSING}"
    if link != id:
        words = f"{link[:80]!r}, which {id[:80]!r} continues, is not stored any more"
    return NotFound(f"{words}; send the whole conversation as input", "previous_response_not_found")


_decode_response = msgspec.json.Decoder(StoredResponse).decode


_undecoded_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ResponseStore(SqliteStore):
    """A disk error is logged and counts as a miss."""

    def __init__(
        self, directory: str | None, limits: StoreLimits | None = None, max_chain_bytes: int = MAX_CHAIN_BYTES
    ) -> None:
        usual = RESPONSES_IN_MEMORY if directory is None else RESPONSES_ON_DISK
        super().__init__(directory, RESPONSES_FILE, _RESPONSE_TABLES, _RESPONSES_VERSION, "responses", limits or usual)
        self._max_chain_bytes = max_chain_bytes

    def keep(self, namespace: str, kept: StoredResponse) -> bool:
        """Whether it is stored, so that it survives a crash of this process."""
        body = _encode(kept)
        try:
            with self.transaction() as database:
                used = _next_use(database, "responses")
                row = (kept.id, namespace, kept.parent, used, len(body))
                database.execute("INSERT INTO responses VALUES (?,?,?,?,?)", row)
                database.execute("INSERT INTO bodies VALUES (?,?)", (kept.id, body))
                _touch(database, _chain_ids(database, namespace, kept.id), used)
                self._evict(database, kept.id)
        except (sqlite3.Error, OSError) as error:
            responses_log.warning("a response cannot be stored: %s", error)
            return False
        return True

    def get(self, namespace: str, id: str) -> StoredResponse | None:
        try:
            with self.transaction() as database:
                return _read(database, namespace, id)
        except (sqlite3.Error, OSError) as error:
            responses_log.warning("a response cannot be read: %s", error)
            return None

    def listed(self, namespace: str, prefix: str, is_wanted: Callable[[Json], bool]) -> list[Json]:
        """The newest ``MAX_LISTED`` answers whose ids have this prefix, as far as they are wanted; the oldest first. Their
        inputs are not decoded, and an answer that is not wanted does not stay in memory."""
        query = (
            "SELECT responses.id FROM responses WHERE namespace = ? AND substr(responses.id, 1, ?) = ? ORDER BY rowid"
        )
        body = "SELECT body FROM bodies WHERE id = ?"
        found: list[Json] = []
        try:
            with self.transaction() as database:
                ids = [id for (id,) in database.execute(query, (namespace, len(prefix), prefix)).fetchall()]
                for id in ids[-MAX_LISTED:]:
                    for (encoded,) in database.execute(body, (id,)):
                        answer = msgspec.json.decode(_undecoded_fields(encoded)["response"])
                        found += [answer] if is_wanted(answer) else []
                return found
        except (sqlite3.Error, OSError) as error:
            responses_log.warning("stored answers cannot be listed: %s", error)
            return []

    def replace(self, namespace: str, kept: StoredResponse) -> bool:
        """Replaces a stored response; False: it is not stored."""
        body = _encode(kept)
        try:
            with self.transaction() as database:
                changed = "UPDATE responses SET n_bytes = ?, used = ? WHERE id = ? AND namespace = ?"
                row = (len(body), _next_use(database, "responses"), kept.id, namespace)
                if database.execute(changed, row).rowcount == 0:
                    return False
                database.execute("UPDATE bodies SET body = ? WHERE id = ?", (body, kept.id))
                self._evict(database, kept.id)
        except (sqlite3.Error, OSError) as error:
            raise EverwarmError(f"the answer cannot be changed now: {error}") from None
        return True

    def chain(self, namespace: str, id: str) -> list[StoredResponse]:
        """The conversation that ends with this response, oldest first. ``NotFound`` if a part of it is not stored,
        ``BadRequest`` if it is too large."""
        found: list[StoredResponse] = []
        try:
            with self.transaction() as database:
                _require_small(database, _chain_ids(database, namespace, id), self._max_chain_bytes)
                link: str | None = id
                while link is not None:
                    kept = _read(database, namespace, link) if len(found) < MAX_LINKS else None
                    if kept is None:
                        raise missing_link(link, id)
                    found.append(kept)
                    link = kept.parent
                _touch(database, [kept.id for kept in found], _next_use(database, "responses"))
        except (sqlite3.Error, OSError) as error:
            responses_log.warning("a response cannot be read: %s", error)
            raise missing_link(id, id) from None
        return found[::-1]

    def delete(self, namespace: str, id: str) -> bool:
        """Whether it was stored."""
        try:
            with self.transaction() as database:
                query = "SELECT id FROM responses WHERE id = ? AND namespace = ?"
                was_there = database.execute(query, (id, namespace)).fetchone() is not None
                _drop_responses(database, [id] if was_there else [])
            self.truncate_log()
        except (sqlite3.Error, OSError) as error:
            raise EverwarmError(f"the response cannot be deleted now: {error}") from None
        return was_there

    def delete_all(self, namespace: str) -> int:
        """Deletes the responses of namespaces with this prefix; returns how many there were."""
        try:
            with self.transaction() as database:
                rows = database.execute("SELECT id, namespace FROM responses").fetchall()
                gone = [id for id, own in rows if own.startswith(namespace)]
                _drop_responses(database, gone)
            self.truncate_log()
        except (sqlite3.Error, OSError) as error:
            raise EverwarmError(f"the responses cannot be deleted now: {error}") from None
        return len(gone)

    def size(self) -> tuple[int, int]:
        """How many responses, and their bytes."""
        with self.transaction() as database:
            return _size(database)

    def _evict(self, database: sqlite3.Connection, newest: str) -> None:
        n, n_bytes = _size(database)
        if n > self._limits.max_rows or n_bytes > self._limits.max_bytes:
            # of one conversation the later ones first, so that what stays is complete
            _drop_responses(database, victims(database, "responses", "used, rowid DESC", newest, self._limits))


def _size(database: sqlite3.Connection) -> tuple[int, int]:
    n, n_bytes = database.execute("SELECT COUNT(*), COALESCE(SUM(n_bytes), 0) FROM responses").fetchone()
    return int(n), int(n_bytes)


def _read(database: sqlite3.Connection, namespace: str, id: str) -> StoredResponse | None:
    query = "SELECT body FROM responses JOIN bodies USING (id) WHERE id = ? AND namespace = ?"
    row = database.execute(query, (id, namespace)).fetchone()
    try:
        return _decode_response(row[0]) if row is not None else None
    except (msgspec.MsgspecError, RecursionError, TypeError) as error:
        responses_log.warning("a stored response is damaged: %s", error)
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


def _drop_responses(database: sqlite3.Connection, ids: list[str]) -> None:
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


# replies of models

REPLIES_FILE = "replies.sqlite"
_REPLIES_VERSION = 1
_AT_ONCE = 500  # keys of one query
_REPLY_TABLES = (
    "CREATE TABLE IF NOT EXISTS replies (id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, used INTEGER NOT NULL, "
    "n_bytes INTEGER NOT NULL, body BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY, reply INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS by_reply ON keys (reply)",
    "CREATE INDEX IF NOT EXISTS by_use ON replies (used, namespace, n_bytes)",
)

REPLIES_ON_DISK = StoreLimits(50_000, 256 << 20)
REPLIES_IN_MEMORY = StoreLimits(50_000, 64 << 20)

_decode_reply = msgspec.json.Decoder(RememberedReply).decode


class ReplyStore(SqliteStore):
    """A disk error is logged and counts as a miss."""

    def __init__(self, directory: str | None, limits: StoreLimits | None = None) -> None:
        usual = REPLIES_IN_MEMORY if directory is None else REPLIES_ON_DISK
        super().__init__(directory, REPLIES_FILE, _REPLY_TABLES, _REPLIES_VERSION, "replies", limits or usual)

    def keep(self, namespace: str, template: str, keys: Sequence[str], reply: RememberedReply) -> None:
        """``template``: the source of the chat template that the reply belongs to."""
        body = _encode(reply)
        try:
            with self.transaction() as database:
                row = (namespace, _next_use(database, "replies"), len(body), body)
                cursor = database.execute("INSERT INTO replies (namespace, used, n_bytes, body) VALUES (?,?,?,?)", row)
                rows = [(key, cursor.lastrowid) for key in _own(namespace, template, keys)]
                database.executemany("INSERT OR REPLACE INTO keys VALUES (?,?)", rows)
                self._evict(database, cursor.lastrowid)
        except (sqlite3.Error, OSError) as error:
            log.warning("a reply cannot be remembered: %s", error)

    def find(self, namespace: str, template: str, keys: Sequence[str]) -> dict[str, RememberedReply]:
        """The replies under these keys."""
        by_own = dict(zip(_own(namespace, template, keys), keys, strict=True))
        found: dict[str, RememberedReply] = {}
        used: set[int] = set()
        try:
            with self.transaction() as database:
                wanted = list(by_own)
                for some in (wanted[at : at + _AT_ONCE] for at in range(0, len(wanted), _AT_ONCE)):
                    marks = ",".join("?" * len(some))
                    query = f"SELECT key, id, body FROM keys JOIN replies ON reply = id WHERE key IN ({marks})"
                    for key, id, body in database.execute(query, some):
                        found[by_own[key]] = _decode_reply(body)
                        used.add(id)
                at = _next_use(database, "replies") if used else 0
                database.executemany("UPDATE replies SET used = ? WHERE id = ?", [(at, id) for id in used])
        except (sqlite3.Error, OSError, msgspec.MsgspecError) as error:
            log.warning("remembered replies cannot be read: %s", error)
        return found

    def forget(self, namespace: str) -> int:
        """Forgets the replies of namespaces with this prefix; returns how many there were."""
        try:
            with self.transaction() as database:
                rows = database.execute("SELECT id, namespace FROM replies").fetchall()
                gone = [id for id, own in rows if own.startswith(namespace)]
                _drop_replies(database, gone)
            self.truncate_log()
        except (sqlite3.Error, OSError) as error:
            raise EverwarmError(f"remembered replies cannot be deleted now: {error}") from None
        return len(gone)

    def _evict(self, database: sqlite3.Connection, newest: int | None) -> None:
        n, n_bytes = database.execute("SELECT COUNT(*), COALESCE(SUM(n_bytes), 0) FROM replies").fetchone()
        if n > self._limits.max_rows or n_bytes > self._limits.max_bytes:
            _drop_replies(database, map(int, victims(database, "replies", "used", newest, self._limits)))


def _own(namespace: str, template: str, keys: Sequence[str]) -> list[str]:
    """The keys as they are stored: those of another namespace or template are never found."""
    scope = hashlib.blake2b(f"{namespace}\0{template}".encode(), digest_size=16).hexdigest()
    return [f"{scope} {key}" for key in keys]


def _drop_replies(database: sqlite3.Connection, ids: Iterable[int]) -> None:
    gone = [(id,) for id in ids]
    database.executemany("DELETE FROM replies WHERE id = ?", gone)
    database.executemany("DELETE FROM keys WHERE reply = ?", gone)
