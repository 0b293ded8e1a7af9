"""llama-server's slot actions over HTTP, and its slot files both ways: what it saved we restore, and it what we saved."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.peer import PeerOptions, llama_server
from starlette.requests import Request

from everwarm.demo import EMBEDDED_MODEL
from everwarm.errors import Forbidden
from everwarm.gateway.access.auth import Principal, Role, own_namespace
from everwarm.gateway.llamaserver import routes
from everwarm.gateway.settings import ServerSettings
from everwarm.llama.blobs import in_streams
from everwarm.llama.model import MemoryKind
from everwarm.state.store.slot_file import split_appendix
from support.models import tiny_model
from support.server import Server, serving, until, words
from support.slot_files import read_main

PROMPT = np.random.default_rng(3).integers(12, 2000, 300).tolist()
LEFT = (".tmp-a.bin", ".tmp-a.bin.checkpoints-0123456789abcdef")  # by a crash
MORE = np.random.default_rng(4).integers(12, 2000, 20).tolist()


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("slots")
    return path


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    for name in LEFT:
        (directory / name).write_bytes(b"half of it")
        os.utime(directory / name, (1e9, 1e9))
    with serving("--slot-save-path", str(directory), "--trust-slot-files") as server:
        yield server


def complete(server: Server, tokens: list[int], n: int = 8, **more: Any) -> Any:
    body = {"prompt": tokens, "n_predict": n, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return server.ask("/completion", body | more)


def act(server: Server, action: str, slot: int = 0, **body: Any) -> Any:
    return server.ask(f"/slots/{slot}?action={action}", body)


def test_saved_erased_and_restored_it_is_warm_again(server, directory):
    first = complete(server, PROMPT, id_slot=0)
    whole = [*PROMPT, *first["tokens"]]
    saved = act(server, "save", filename="a.bin")
    assert saved["id_slot"] == 0 and saved["filename"] == "a.bin" and saved["n_saved"] == len(whole) - 1
    size = (directory / "a.bin").stat().st_size
    assert saved["n_written"] == size and saved["timings"]["save_ms"] > 0
    assert act(server, "erase")["n_erased"] == len(whole) - 1
    assert complete(server, [*whole, *MORE], id_slot=1)["timings"]["cache_n"] == 0
    act(server, "erase", slot=1)
    restored = act(server, "restore", filename="a.bin")
    assert restored["n_restored"] == len(whole) - 1 and restored["n_read"] == size
    assert complete(server, [*whole, *MORE])["timings"]["cache_n"] == len(whole) - 1
    assert complete(server, PROMPT)["timings"]["prompt_n"] <= 16
    assert complete(server, PROMPT)["tokens"] == first["tokens"]


def test_a_busy_slot_waits_its_turn(server):
    answers: list[Any] = []
    long = threading.Thread(target=lambda: answers.append(complete(server, PROMPT, 400, id_slot=0)))
    long.start()
    saved = act(server, "save", filename="busy.bin")
    long.join()
    assert saved["n_saved"] in (len(PROMPT) + 399, len(PROMPT) + 7), "either before it began or after its end"
    assert len(answers[0]["tokens"]) == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/slots/0?action=save", {}),
        ("/slots/0?action=save", {"filename": "../a"}),
        ("/slots/0?action=save", {"filename": 7}),
        ("/slots/9?action=save", {"filename": "a"}),
        ("/slots/-1?action=save", {"filename": "a"}),
        ("/slots/x?action=save", {"filename": "a"}),
        ("/slots/99999999999?action=erase", {}),
        ("/slots/0?action=frob", {"filename": "a"}),
        ("/slots/0", {"filename": "a"}),
        ("/slots/0?action=restore", {"filename": "missing.bin"}),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_no_path(server, directory, path, body):
    reply = server.post(path, body)
    assert reply.status == 400, reply.data
    assert str(directory).encode() not in reply.data


def test_without_a_directory_there_are_no_files():
    with serving() as server:
        assert server.post("/slots/0?action=save", {"filename": "a"}).status == 501
        assert server.post("/slots/0?action=erase", {}).status == 200


def test_hostile_names_touch_nothing(server, directory):
    before = sorted(path.name for path in directory.iterdir())
    rng = random.Random(0)
    pieces = ["..", "/", "\\", "\0", "a", ".", "~", "%2e%2e", "CON", " ", "\n", "é", "etc", "passwd", "-", "😀"]
    for _ in range(150):
        name = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 8)))
        if all(c.isascii() and (c.isalnum() or c in "._-") for c in name) and name[0].isalnum():
            continue
        for action in ("save", "restore"):
            assert server.post(f"/slots/0?action={action}", {"filename": name}).status == 400
    assert sorted(path.name for path in directory.iterdir()) == before


def test_a_planted_link_is_not_followed(server, directory, tmp_path):
    (tmp_path / "secret").write_text("precious")
    (directory / "link").symlink_to(tmp_path / "secret")
    assert server.post("/slots/0?action=restore", {"filename": "link"}).status == 400
    complete(server, PROMPT, id_slot=0)
    act(server, "save", filename="link")
    assert (tmp_path / "secret").read_text() == "precious"


def test_a_failed_restore_leaves_the_slot_empty_and_usable(server, directory):
    complete(server, PROMPT, id_slot=0)
    (directory / "bad.bin").write_bytes(b"nonsense" * 100)
    assert server.post("/slots/0?action=restore", {"filename": "bad.bin"}).status == 400
    assert server.post("/slots/0?action=save", {"filename": "x.bin"}).status == 400, "it holds nothing now"
    assert len(complete(server, PROMPT, id_slot=0)["tokens"]) == 8


def test_slot_files_travel_both_ways(server, directory, tmp_path):
    """The same prompt, greedily: whoever restores the other's file goes on with the same tokens and reads only new ones."""
    golden = complete(server, [*PROMPT, *MORE], cache_prompt=False)["tokens"]
    for slot in (0, 1):
        act(server, "erase", slot)
    options = PeerOptions(EMBEDDED_MODEL, 4096, 1, 1, slot_save_path=f"{directory}/")
    with llama_server(options) as peer:
        their_golden = peer.complete([*PROMPT, *MORE], 8, return_tokens=True)["tokens"]
        peer.post("/slots/0?action=erase", {})
        peer.complete(PROMPT, 1, ignore_eos=True)
        theirs = peer.post("/slots/0?action=save", {"filename": "theirs.bin"})
        restored = act(server, "restore", filename="theirs.bin")
        assert restored["n_restored"] == theirs["n_saved"]
        refused = server.post("/slots/0?action=save", {"filename": "again.bin"})
        assert refused.status == 400 and "unknown origin" in refused.json["error"]["message"]
        answer = complete(server, [*PROMPT, *MORE])
        assert answer["timings"]["cache_n"] == len(PROMPT) and answer["tokens"] == golden

        complete(server, PROMPT, 1, id_slot=0, cache_prompt=False)
        ours = act(server, "save", filename="ours.bin")
        peer.post("/slots/0?action=erase", {})
        assert peer.post("/slots/0?action=restore", {"filename": "ours.bin"})["n_restored"] == ours["n_saved"]
        answer = peer.complete([*PROMPT, *MORE], 8, return_tokens=True)
        assert answer["timings"]["cache_n"] == len(PROMPT) and answer["tokens"] == their_golden
    states = [split_appendix(read_main(directory / name, 4096)[1])[0] for name in ("ours.bin", "theirs.bin")]
    assert states[0].tobytes() == states[1].tobytes(), "the same build reads the same prompt alike"


KINDS = {"qwen35": MemoryKind.HYBRID, "gemma3": MemoryKind.WINDOW, "llama": MemoryKind.ATTENTION}


@pytest.mark.parametrize("arch", KINDS)
def test_slot_files_travel_between_servers_whose_slots_have_shares(arch, tmp_path):
    """llama-server without unified KV writes a stream for each slot, and reads no other file; so do we with its flags. The
    numbers are the same, bit for bit."""
    model = EMBEDDED_MODEL if arch == "qwen35" else tiny_model(arch)
    prompt = [30 + (7 * i) % 200 for i in range(300)]
    more = [*prompt, 9, 8, 7]
    options = PeerOptions(model, 4096, 2, 1, slot_save_path=f"{tmp_path}/")
    flags = ("--slot-save-path", str(tmp_path), "--trust-slot-files", "--slots", "2")

    def state(name: str, n_streams: int = 1, stream: int = 0) -> bytes:
        data = split_appendix(read_main(tmp_path / name, 4096)[1])[0]
        return in_streams(data, KINDS[arch], n_streams, stream).tobytes()

    with llama_server(options) as peer:
        peer.complete(prompt, 1, ignore_eos=True, id_slot=1)
        peer.post("/slots/1?action=save", {"filename": "unified.bin"})
    with llama_server(replace(options, kv_unified=False)) as peer:
        peer.complete(prompt, 1, ignore_eos=True, id_slot=1)
        theirs = peer.post("/slots/1?action=save", {"filename": "theirs.bin"})
        assert state("theirs.bin") == state("unified.bin") and state("theirs.bin", 2, 1) != state("unified.bin")
        assert state("unified.bin", 2, 1) == split_appendix(read_main(tmp_path / "theirs.bin", 4096)[1])[0].tobytes()
        with serving(*flags, "--no-kv-unified", model=model) as server:
            assert act(server, "restore", filename="theirs.bin")["n_restored"] == theirs["n_saved"] == 300
            assert complete(server, more, 1, id_slot=0)["timings"]["cache_n"] == 300
            complete(server, prompt, 1, id_slot=1, cache_prompt=False)
            ours = act(server, "save", 1, filename="ours.bin")
            act(server, "erase", 1)
            assert act(server, "restore", 0, filename="ours.bin")["n_restored"] == ours["n_saved"]
        for slot in (0, 1):
            peer.post(f"/slots/{slot}?action=erase", {})
            assert peer.post(f"/slots/{slot}?action=restore", {"filename": "ours.bin"})["n_restored"] == ours["n_saved"]
            n_cached = peer.complete(more, 1, id_slot=slot)["timings"]["cache_n"]
            assert n_cached >= 299 or arch == "gemma3"  # it wants a checkpoint of a window
        with serving(*flags, model=model) as server:
            complete(server, prompt, 1, id_slot=1)
            act(server, "save", 1, filename="one.bin")
            assert state("ours.bin") == state("one.bin")
            assert act(server, "restore", 0, filename="ours.bin")["n_restored"] == ours["n_saved"]
        with pytest.raises(RuntimeError, match="answered 400"):  # the control: one stream is what it does not take
            peer.post("/slots/0?action=restore", {"filename": "one.bin"})


def test_words_of_a_chat_survive_too(server):
    talk = [{"role": "user", "content": f"The code is 4711. {words(100)}"}]
    body = {"messages": talk, "temperature": 0, "max_tokens": 8, "id_slot": 0}
    n_prompt = server.ask("/v1/chat/completions", body)["usage"]["prompt_tokens"]
    act(server, "save", filename="chat.bin")
    act(server, "erase")
    act(server, "restore", filename="chat.bin")
    again = server.ask("/v1/chat/completions", body)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= n_prompt - 16


def test_what_a_crash_left_is_gone_after_the_start(server, directory):
    assert not any((directory / name).exists() for name in LEFT)


def test_by_default_a_file_that_says_nothing_is_refused(directory):
    with serving("--slot-save-path", str(directory)) as server:
        complete(server, PROMPT, 2, id_slot=0)
        act(server, "save", filename="plain.bin")
        (directory / "plain.bin.checkpoints").rename(directory / "aside")
        act(server, "erase")
        reply = server.post("/slots/0?action=restore", {"filename": "plain.bin"})
        assert reply.status == 400 and "--trust-slot-files" in reply.json["error"]["message"]
        assert complete(server, [*PROMPT, *MORE], 2)["timings"]["cache_n"] == 0
        (directory / "aside").rename(directory / "plain.bin.checkpoints")
        assert act(server, "restore", filename="plain.bin")["n_restored"] == len(PROMPT) + 1


# namespaces


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("mine", "yours"), [("A", "B"), ("A", None), (None, "B")])
def test_slot_files_of_another_namespace_cannot_be_read_written_over_or_told_from_none(server, directory, mine, yours):
    prompt = [100 + sum(f"{mine}{yours}".encode()), *PROMPT]  # which nobody here has begun with
    first = complete(server, prompt, id_slot=0, cache_salt=mine)
    saved = act(server, "save", filename="memo.bin", cache_salt=mine)
    kept = files_in(directory)
    for action in ("save", "restore", "erase"):
        body = {"filename": "memo.bin", "cache_salt": yours}
        theirs = server.post(f"/slots/0?action={action}", body)
        nothing = server.post(f"/slots/0?action={action}", body | {"filename": "never.bin"})
        message = [
            reply.json.get("error", {}).get("message", reply.json.get("n_erased")) for reply in (theirs, nothing)
        ]
        assert theirs.status == nothing.status == (200 if action == "erase" else 400) and message[0] == message[1], (
            message
        )
    assert act(server, "save", filename="memo.bin", cache_salt=mine)["n_saved"] == saved["n_saved"], "it is still there"
    complete(server, MORE, 2, id_slot=1, cache_salt=yours)
    act(server, "save", slot=1, filename="memo.bin", cache_salt=yours)
    now = files_in(directory)
    assert {name for name in kept if "memo" in name} < {name for name in now if "memo" in name}, (
        "names are each one's own"
    )
    act(server, "erase", cache_salt=mine)
    assert act(server, "restore", filename="memo.bin", cache_salt=mine)["n_restored"] == saved["n_saved"]
    whole = [*prompt, *first["tokens"], *MORE]
    assert complete(server, whole, 2, cache_salt=yours)["timings"]["cache_n"] == 0
    assert complete(server, whole, 2, cache_salt=mine)["timings"]["cache_n"] == saved["n_saved"]
    for path in list(directory.rglob("memo.bin*")):
        path.unlink()


def test_a_pair_that_was_carried_to_another_namespace_is_not_there(server, directory):
    complete(server, PROMPT, 2, id_slot=0, cache_salt="A")
    act(server, "save", filename="carried.bin", cache_salt="A")
    for path in list(directory.glob(".ns-*/carried.bin*")):
        path.rename(directory / path.name)
    assert (directory / "carried.bin.checkpoints").exists(), "this test could not fail"
    message = [
        server.post("/slots/1?action=restore", {"filename": name}).json["error"]["message"]
        for name in ("carried.bin", "n")
    ]
    assert message[0] == message[1]
    complete(server, PROMPT, 2, id_slot=0)
    assert server.post("/slots/0?action=save", {"filename": "carried.bin"}).status == 400, "nor written over"


# an engine that restarts


def test_a_slot_action_while_the_engine_dies_is_a_503_that_says_when_to_try_again(server):
    for action in ("save", "restore", "erase"):
        complete(server, PROMPT, 2, id_slot=0)
        act(server, "save", filename="dying.bin")
        pid, replies = server.engine_pid, []
        os.kill(pid, signal.SIGSTOP)
        url = f"/slots/0?action={action}"
        asking = threading.Thread(
            target=lambda url=url, to=replies: to.append(server.post(url, {"filename": "dying.bin"}))
        )
        asking.start()
        time.sleep(0.2)  # so that the engine dies with it; if that is not enough it is refused for being restarted
        os.kill(pid, signal.SIGKILL)
        asking.join()
        assert replies[0].status == 503 and int(replies[0].headers["retry-after"]) > 0, replies[0].data
        until(lambda pid=pid: server.is_ready() and server.engine_pid != pid, "it is back")
    assert act(server, "restore", filename="dying.bin")["n_restored"] == len(PROMPT) + 1


def test_only_an_admin_vouches_for_a_file_that_says_nothing(tmp_path):
    keys = {who: {"authorization": f"Bearer {who}-{'x' * 16}"} for who in ("user", "admin")}
    given = ("--api-key", f"user-{'x' * 16}", "--admin-key", f"admin-{'x' * 16}")
    with serving("--slot-save-path", str(tmp_path), "--trust-slot-files", *given) as server:
        body = {"prompt": words(60, 5), "n_predict": 2, "id_slot": 0}
        for who in ("user", "admin"):
            assert server.post("/completion", body, **keys[who]).status == 200
            saved = server.post("/slots/0?action=save", {"filename": "a.bin"}, **keys[who])
            assert saved.status == 200, saved.data
        for companion in tmp_path.rglob("*.checkpoints"):
            companion.unlink()
        statuses = {}
        for who in ("user", "admin"):
            statuses[who] = server.post("/slots/1?action=restore", {"filename": "a.bin"}, **keys[who]).status
        assert statuses == {"user": 400, "admin": 200}


def test_a_user_has_so_many_slot_files_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(routes, "MAX_FILES_OF_A_USER", 2)
    for name in ("a.bin", "a.bin.checkpoints", "b.bin"):
        (tmp_path / name).write_bytes(b"")
    settings = ServerSettings(slot_save_path=str(tmp_path))
    for role, name, may in ((Role.USER, "a.bin", True), (Role.USER, "c.bin", False), (Role.ADMIN, "c.bin", True)):
        request = Request({"type": "http", "state": {"principal": Principal(role, "0:")}})
        with contextlib.nullcontext() if may else pytest.raises(Forbidden, match="2 slot files of yours"):
            routes.slot_file_fields(request, settings, name, own_namespace(None))


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_checkpoints_in_a_slot_file_travel_with_it(arch, tmp_path):
    """A prompt that parts from the file's before its end goes on from a checkpoint in the file, with the tokens of a cold
    reading. A window's checkpoints are not written for llama-server."""
    model = EMBEDDED_MODEL if arch == "qwen35" else tiny_model(arch)
    prompt = [30 + (7 * i) % 200 for i in range(900)]
    other = [*prompt, 9, 8, 7]
    options = PeerOptions(
        model, 4096, 1, 1, n_batch=128, n_ubatch=128, checkpoint_min_step=64, slot_save_path=f"{tmp_path}/"
    )
    with (
        serving("--slot-save-path", str(tmp_path), "--trust-slot-files", model=model) as server,
        llama_server(options) as peer,
    ):
        golden = complete(server, other, 4, cache_prompt=False)["tokens"]
        act(server, "erase", 0)
        act(server, "erase", 1)
        peer.complete(prompt, 4, ignore_eos=True)
        saved = peer.post("/slots/0?action=save", {"filename": "theirs.bin"})
        assert act(server, "restore", filename="theirs.bin")["n_read"] == saved["n_written"]
        answer = complete(server, other, 4)
        assert 700 < answer["timings"]["cache_n"] < 900 and answer["tokens"] == golden
        if arch == "gemma3":
            return
        complete(server, prompt, 4, id_slot=0, cache_prompt=False)
        ours = act(server, "save", filename="ours.bin")
        assert ours["n_written"] == (tmp_path / "ours.bin").stat().st_size
        peer.post("/slots/0?action=erase", {})
        assert peer.post("/slots/0?action=restore", {"filename": "ours.bin"})["n_read"] == ours["n_written"]
        again = peer.complete(other, 8, return_tokens=True)
        assert again["timings"]["cache_n"] > 500, "it reads all of it again without our checkpoints"
