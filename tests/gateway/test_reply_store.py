"""Remembered replies: per namespace and template, bounded, and there after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from everwarm.gateway.chat.reply_memory import RememberedCall, RememberedReply
from everwarm.gateway.stores import REPLIES_FILE, ReplyStore, StoreLimits


def reply(text: str) -> RememberedReply:
    return RememberedReply(text, (RememberedCall("c", "write", '{"a":  1}'),))


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_reply_is_found_by_its_own_namespace_and_template_alone(on_disk, tmp_path):
    store = ReplyStore(str(tmp_path) if on_disk else None)
    store.keep("n", "t", ["a", "b"], reply("x"))
    assert store.find("n", "t", ["b", "c", "a"]) == {"a": reply("x"), "b": reply("x")}
    assert store.find("m", "t", ["a"]) == store.find("n", "u", ["a"]) == store.find("n", "t", []) == {}
    store.keep("n", "t", ["b"], reply("y"))
    assert store.find("n", "t", ["a", "b"]) == {"a": reply("x"), "b": reply("y")}, "the latest of a key"
    store.close()
    again = ReplyStore(str(tmp_path) if on_disk else None)
    assert again.find("n", "t", ["a"]) == ({"a": reply("x")} if on_disk else {})
    again.close()


def test_many_keys_are_found_at_once():
    store = ReplyStore(None)
    for i in range(3):
        store.keep("n", "t", [f"{i} {j}" for j in range(900)], reply(str(i)))
    wanted = [f"{i} {j}" for i in range(4) for j in range(900)]
    assert store.find("n", "t", wanted) == {f"{i} {j}": reply(str(i)) for i in range(3) for j in range(900)}


def test_forgetting_reaches_a_prefix_of_namespaces(tmp_path):
    store = ReplyStore(str(tmp_path))
    for namespace in ("a", "a/1", "b"):
        store.keep(namespace, "t", ["k"], reply(f"secret of {namespace}"))
    assert store.forget("a") == 2
    assert [bool(store.find(namespace, "t", ["k"])) for namespace in ("a", "a/1", "b")] == [False, False, True]
    assert store.forget("") == 1 and store.forget("") == 0
    store.close()
    assert b"secret of" not in (tmp_path / REPLIES_FILE).read_bytes()


def test_the_largest_namespace_loses_what_it_used_least_recently():
    store = ReplyStore(None, StoreLimits(4, 1 << 20))
    store.keep("small", "t", ["k"], reply("s"))
    for i in range(3):
        store.keep("large", "t", [str(i)], reply(str(i)))
    assert store.find("large", "t", ["0"])
    store.keep("large", "t", ["3"], reply("3"))
    assert sorted(store.find("large", "t", ["0", "1", "2", "3"])) == ["0", "2", "3"]
    assert store.find("small", "t", ["k"])
    tight = ReplyStore(None, StoreLimits(100, 2000))
    for i in range(20):
        tight.keep("n", "t", [str(i)], reply("x" * 500))
    assert sorted(tight.find("n", "t", [str(i) for i in range(20)])) == ["17", "18", "19"]


def test_a_file_that_cannot_be_used_is_a_miss(tmp_path):
    Path(tmp_path / REPLIES_FILE).write_bytes(b"no database" * 1000)
    store = ReplyStore(str(tmp_path))
    store.keep("n", "t", ["a"], reply("x"))
    assert store.find("n", "t", ["a"]) == {"a": reply("x")}
    store.close()
    assert [path.name for path in tmp_path.glob("*.aside-*")] == [f"{REPLIES_FILE}.aside-1"]
