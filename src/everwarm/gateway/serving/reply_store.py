"""What models wrote, kept for ``chat.reply_memory``: SQLite, in a file if the server has a state directory, else in memory.

A reply belongs to one namespace and one chat template; no other finds it. Bounded: the namespace that holds most
loses what it used least recently. Knows rows; knows no messages.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from everwarm.errors import EverwarmError
from everwarm.gateway.chat.reply_memory import RememberedReply
from everwarm.gateway.sqlite_store import SqliteStore, StoreLimits, victims

log = logging.getLogger("everwarm.gateway")

FILE = "replies.sqlite"
_VERSION = 1
_AT_ONCE = 500  # keys of one query
_TABLES = (
    "CREATE TABLE IF NOT EXISTS replies (id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, used INTEGER NOT NULL, "
    "n_bytes INTEGER NOT NULL, body BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY, reply INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS by_reply ON keys (reply)",
    "CREATE INDEX IF NOT EXISTS by_use ON replies (used, namespace, n_bytes)",
)

ON_DISK = StoreLimits(50_000, 256 << 20)
IN_MEMORY = StoreLimits(50_000, 64 << 20)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RememberedReply).decode


class ReplyStore:
    """A disk error is logged and counts as a miss."""

    def __init__(self, directory: str | None, limits: StoreLimits | None = None) -> None:
        path = Path(directory).expanduser() / FILE if directory is not None else None
        self._limits = limits or (IN_MEMORY if directory is None else ON_DISK)
        self._store = SqliteStore(path, _TABLES, _VERSION, "replies")

    def close(self) -> None:
        self._store.close()

    def keep(self, namespace: str, template: str, keys: Sequence[str], reply: RememberedReply) -> None:
        """``template``: the source of the chat template that the reply belongs to."""
        body = _encode(reply)
        try:
            with self._store.transaction() as database:
                row = (namespace, _next_use(database), len(body), body)
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
            with self._store.transaction() as database:
                wanted = list(by_own)
                for some in (wanted[at : at + _AT_ONCE] for at in range(0, len(wanted), _AT_ONCE)):
                    marks = ",".join("?" * len(some))
                    query = f"SELECT key, id, body FROM keys JOIN replies ON reply = id WHERE key IN ({marks})"
                    for key, id, body in database.execute(query, some):
                        found[by_own[key]] = _decode(body)
                        used.add(id)
                at = _next_use(database) if used else 0
                database.executemany("UPDATE replies SET used = ? WHERE id = ?", [(at, id) for id in used])
        except (sqlite3.Error, OSError, msgspec.MsgspecError) as error:
            log.warning("remembered replies cannot be read: %s", error)
        return found

    def forget(self, namespace: str) -> int:
        """Forgets the replies of namespaces with this prefix; returns how many there were."""
        try:
            with self._store.transaction() as database:
                rows = database.execute("SELECT id, namespace FROM replies").fetchall()
                gone = [id for id, own in rows if own.startswith(namespace)]
                _drop(database, gone)
            self._store.truncate_log()
        except (sqlite3.Error, OSError) as error:
            raise EverwarmError(f"remembered replies cannot be deleted now: {error}") from None
        return len(gone)

    def _evict(self, database: sqlite3.Connection, newest: int | None) -> None:
        n, n_bytes = database.execute("SELECT COUNT(*), COALESCE(SUM(n_bytes), 0) FROM replies").fetchone()
        if n > self._limits.max_rows or n_bytes > self._limits.max_bytes:
            _drop(database, map(int, victims(database, "replies", "used", newest, self._limits)))


def _own(namespace: str, template: str, keys: Sequence[str]) -> list[str]:
    """The keys as they are stored: those of another namespace or template are never found."""
    scope = hashlib.blake2b(f"{namespace}\0{template}".encode(), digest_size=16).hexdigest()
    return [f"{scope} {key}" for key in keys]


def _next_use(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT COALESCE(MAX(used), 0) + 1 FROM replies").fetchone()[0])


def _drop(database: sqlite3.Connection, ids: Iterable[int]) -> None:
    gone = [(id,) for id in ids]
    database.executemany("DELETE FROM replies WHERE id = ?", gone)
    database.executemany("DELETE FROM keys WHERE reply = ?", gone)
