"""Stored responses that a request can continue: per namespace, bounded, and complete or absent."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everwarm.errors import BadRequest, NotFound
from everwarm.gateway.stores import (
    RESPONSES_FILE,
    RESPONSES_ON_DISK,
    ResponseStore,
    StoredResponse,
    StoreLimits,
)

WRITER = """
import sys
from everwarm.gateway.stores import ResponseStore, StoredResponse
store = ResponseStore(sys.argv[1])
parent = None
for i in range(100_000):
    id = f"resp_{i}"
    shown = {"id": id, "previous_response_id": parent, "output": []}
    store.keep("n", StoredResponse([{"n": i, "text": "x" * 5000}], shown))
    print(i, flush=True)
    parent = id
"""


def kept(id: str, parent: str | None = None, text: str = "") -> StoredResponse:
    return StoredResponse(
        [{"id": f"in_{id}", "text": text}], {"id": id, "previous_response_id": parent, "output": [{"of": id}]}
    )


@contextlib.contextmanager
def opened(directory: Path | None, limits: StoreLimits | None = None, **more: int) -> Iterator[ResponseStore]:
    store = ResponseStore(None if directory is None else str(directory), limits, **more)
    try:
        yield store
    finally:
        store.close()


def chain(store: ResponseStore, id: str, namespace: str = "n") -> list[str]:
    return [link.id for link in store.chain(namespace, id)]


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_conversation_is_its_links_oldest_first(tmp_path: Path, on_disk: bool):
    with opened(tmp_path / "states" if on_disk else None) as store:
        for id, parent in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
            assert store.keep("n", kept(id, parent))
        assert chain(store, "c") == ["a", "b", "c"] and chain(store, "other") == ["a", "other"]
        assert store.chain("n", "b")[1] == kept("b", "a")
    assert (tmp_path / "states" / RESPONSES_FILE).exists() == on_disk
    with opened(tmp_path / "states" if on_disk else None) as store:
        if on_disk:
            assert chain(store, "c") == ["a", "b", "c"]
        else:
            with pytest.raises(NotFound, match="is not stored here"):
                store.chain("n", "c")


def test_another_namespace_sees_and_deletes_nothing():
    with opened(None) as store:
        store.keep("n", kept("a"))
        assert store.get("m", "a") is None and not store.delete("m", "a")
        with pytest.raises(NotFound, match="is not stored here"):
            store.chain("m", "a")
        assert store.get("n", "a") == kept("a") and store.delete("n", "a") and not store.delete("n", "a")


def test_a_conversation_with_a_gap_says_where():
    with opened(None) as store:
        for id, parent in (("a", None), ("b", "a"), ("c", "b")):
            store.keep("n", kept(id, parent))
        store.delete("n", "b")
        with pytest.raises(NotFound, match="'b', which 'c' continues"):
            store.chain("n", "c")


def test_the_least_recently_used_goes_and_what_stays_is_whole():
    with opened(None, StoreLimits(4, 1 << 20)) as store:
        for id, parent in (("old", None), ("old2", "old"), ("a", None), ("b", "a")):
            store.keep("n", kept(id, parent))
        store.chain("n", "old2")
        store.keep("n", kept("new"))
        assert store.get("n", "b") is None and chain(store, "a") == ["a"]  # the later one of the two went
        assert chain(store, "old2") == ["old", "old2"] and store.size()[0] == 4
        store.keep("n", kept("new2", "new"))
        assert store.get("n", "a") is None and chain(store, "new2") == ["new", "new2"]


def test_bytes_are_bounded_and_the_newest_always_stays():
    with opened(None, StoreLimits(1000, 10_000)) as store:
        for i in range(20):
            store.keep("n", kept(f"r{i}", text="x" * 1000))
        n, n_bytes = store.size()
        assert 5 <= n < 10 and n_bytes <= 10_000
        store.keep("n", kept("big", text="x" * 20_000))
        assert store.get("n", "big") is not None and store.size()[0] == 1


def test_a_conversation_that_is_too_much_to_read_is_refused():
    with opened(None, StoreLimits(1000, 1 << 20), max_chain_bytes=5000) as store:
        for i in range(6):
            store.keep("n", kept(f"r{i}", f"r{i - 1}" if i else None, "x" * 1000))
        assert chain(store, "r3") == ["r0", "r1", "r2", "r3"]
        with pytest.raises(BadRequest, match="at most 5,000 can be continued"):
            store.chain("n", "r5")


def test_a_long_conversation_is_stored_once():
    with opened(None) as store:
        sizes = []
        for i in range(100):
            store.keep("n", kept(f"r{i:03}", f"r{i - 1:03}" if i else None, "x" * 100))
            sizes.append(store.size()[1])
        assert sizes[99] - sizes[98] == sizes[2] - sizes[1]


def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    numbers = [int(writer.stdout.readline()) for _ in range(40)]
    os.kill(writer.pid, signal.SIGKILL)
    numbers += [int(line) for line in writer.stdout.read().split()]
    writer.stdout.close()
    writer.wait()
    with opened(tmp_path) as store:
        links = store.chain("n", f"resp_{numbers[-1]}")
        assert [link.input[0]["n"] for link in links] == numbers
        assert all(len(link.input[0]["text"]) == 5000 for link in links)


@pytest.mark.parametrize("damage", [b"", b"not a database at all " * 400, None])
def test_a_damaged_file_is_begun_anew(tmp_path: Path, damage: bytes | None, caplog: Any):
    with opened(tmp_path) as store:
        for i in range(200):
            store.keep("n", kept(f"r{i}", text="x" * 500))
    path = tmp_path / RESPONSES_FILE
    data = bytearray(path.read_bytes())
    data[4096:20_000] = os.urandom(20_000 - 4096)
    path.write_bytes(bytes(data) if damage is None else damage)
    with opened(tmp_path) as store:
        assert store.get("n", "r0") is None and store.keep("n", kept("new")) and chain(store, "new") == ["new"]
    with opened(tmp_path) as store:
        assert chain(store, "new") == ["new"]
    assert path.stat().st_mode & 0o777 == 0o600
    if damage != b"":  # else there was nothing to move aside
        assert (tmp_path / f"{RESPONSES_FILE}.aside-1").read_bytes() == (bytes(data) if damage is None else damage)


def test_a_file_of_a_later_version_is_moved_aside_whole(tmp_path: Path):
    for i in (1, 2):
        with opened(tmp_path) as store:
            store.keep("n", kept(f"of-{i}"))
        with contextlib.closing(sqlite3.connect(tmp_path / RESPONSES_FILE)) as later:
            later.execute("PRAGMA user_version=7")
        with opened(tmp_path) as store:
            assert store.get("n", f"of-{i}") is None
        with contextlib.closing(sqlite3.connect(tmp_path / f"{RESPONSES_FILE}.aside-{i}")) as aside:
            assert aside.execute("SELECT id FROM responses").fetchall() == [(f"of-{i}",)]


def test_another_namespace_pushes_nothing_out():
    for limits in (StoreLimits(1000, 20_000), StoreLimits(8, 1 << 30)):
        with opened(None, limits) as store:
            store.keep("a", kept("mine", text="x" * 1000))
            for i in range(50):
                store.keep("b", kept(f"b{i}", text="x" * 1000))
            assert store.get("a", "mine") is not None and store.get("b", "b49") is not None
            assert store.get("b", "b0") is None, "this test could not fail"
            n, n_bytes = store.size()
            assert n <= limits.max_rows and n_bytes <= limits.max_bytes
            store.keep("a", kept("all", text="x" * 19_000))
            store.keep("a", kept("more", text="x" * 15_000))
            assert limits.max_rows == 8 or store.get("a", "all") is None, "who has most gives of its own"


def test_a_place_that_cannot_be_written_is_memory(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with opened(tmp_path / "file") as store:
        assert store.keep("n", kept("a")) and chain(store, "a") == ["a"]


def test_two_servers_share_a_file(tmp_path: Path):
    with opened(tmp_path) as one, opened(tmp_path) as other:
        one.keep("n", kept("a"))
        other.keep("n", kept("b", "a"))
        assert chain(one, "b") == ["a", "b"]


def test_nothing_of_a_deleted_response_stays_in_the_file(tmp_path: Path):
    with opened(tmp_path, RESPONSES_ON_DISK) as store:
        store.keep("n", kept("a", text="a secret word"))
        assert any(b"a secret word" in path.read_bytes() for path in tmp_path.iterdir())
        store.delete("n", "a")
        assert not any(b"a secret word" in path.read_bytes() for path in tmp_path.iterdir())
