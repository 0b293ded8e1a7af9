"""The list of models, orders about them, and everything that can be wrong with one of them while the others serve."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everwarm.gateway.access.auth import ROLES
from support.models import tiny_model
from support.server import GUARD, Reply, Server, frozen, run_cli, serving_models, until

TOKENS = list(range(60, 160))
MORE = list(range(10, 30))
SMALL, OTHER = tiny_model("llama", width=64), tiny_model("mamba2", width=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("models")
    shutil.copy(SMALL, path / "small.gguf")
    shutil.copy(OTHER, path / "other.gguf")
    (path / "junk.gguf").write_bytes(b"nonsense" * 100)
    return path


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    with serving_models(folder) as server:
        yield server


@pytest.fixture(scope="module")
def roomy(folder) -> Iterator[Server]:
    """Of the same models, which need not make room for each other."""
    with serving_models(folder, "--models-max", "0") as server:
        yield server


def post(server: Server, model: str | None, **more: Any) -> Reply:
    return server.post("/completion", {"model": model, "prompt": TOKENS, "n_predict": 4} | more)


def message(reply: Reply) -> str:
    return str(reply.json["error"]["message"])


def rows(server: Server, path: str = "/v1/models") -> dict[str, Any]:
    return {row["id"]: row["status"] for row in server.get(path).json["data"]}


def order(server: Server, what: str, model: str) -> None:
    assert server.ask(f"/models/{what}", {"model": model}) == {"success": True}


def others_serve(server: Server) -> bool:
    return all(post(server, name).status == 200 for name in ("small", "other"))


def cut_off(path: Path) -> bytes:
    """A file with a whole header that ends within its last tensor."""
    return path.read_bytes()[:-16]


# the list and the orders


def test_the_list_says_what_is_loaded_and_what_cannot_be(server):
    server.complete("small", TOKENS)
    found = rows(server)
    assert found.keys() == {"small", "other", "junk"}
    assert found["small"] == {"value": "loaded"} and found["other"] == {"value": "unloaded"}
    assert found["junk"]["failed"] and "not a GGUF file" in found["junk"]["reason"]
    assert server.get("/models").data == server.get("/v1/models").data


def test_a_model_is_loaded_and_unloaded_by_order_and_says_when_it_is_loading(server):
    server.complete("small", TOKENS)
    before = server.engine_pids
    order(server, "load", "other")
    with frozen(server.next_engine(before)):
        status = server.listed("other")["status"]
        assert status["value"] == "loading" and 0 <= status["progress"] < 1
        assert server.status_of("small") == "unloaded"
    until(lambda: server.status_of("other") == "loaded", "it is loaded")
    order(server, "unload", "other")
    until(lambda: not server.engine_pids, "its process has ended")
    assert server.status_of("other") == "unloaded" and others_serve(server)


def test_orders_about_nobody_are_refused(server):
    for what in ("load", "unload"):
        reply = server.post(f"/models/{what}", {"model": "nobody"})
        assert reply.status == 404 and "other, small" in message(reply)
        assert server.post(f"/models/{what}", {}).status == 400
    assert server.post("/models/load", {"model": "junk"}).status == 404


def test_an_unknown_name_is_a_404_with_the_list(server):
    for stream in (False, True):
        for name, told in (("nobody", "no model 'nobody'"), (None, "no model was named"), ("", "no model was named")):
            reply = post(server, name, stream=stream)
            assert reply.status == 404 and reply.json["error"]["reason"] == "model_not_found"
            assert told in message(reply) and "there are: other, small" in message(reply)
    for more in ({}, {"background": True}):
        reply = server.post("/v1/responses", {"model": "nobody", "input": "x", **more})
        assert reply.status == 404 and "there are: other, small" in message(reply), more
    for path in ("/slots", "/slots?model=nobody", "/props?model=nobody", "/metrics?model=nobody"):
        assert server.get(path).status == 404


def test_looking_loads_and_unloads_nothing(server, folder):
    """Whatever is asked by GET or HEAD: a page of another site can have its visitor's browser ask that."""
    assert post(server, "small").status == 200
    until(lambda: server.status_of("other") == "unloaded", "one of two is in memory")
    engines, n_loads = server.engine_pids, server.n_loads
    paths = [
        route.split(" ")[1].replace("{id:path}", "other").replace("{id}", "0") for route in ROLES if route[0] == "G"
    ]
    for path in paths:
        for query in ("", "?model=other", "?model=small", "?model=nobody"):
            for method in ("GET", "HEAD"):
                if not (path == "/cache/events" and method == "GET"):
                    assert server.call(method, path + query).status < 504
    assert server.engine_pids == engines and server.n_loads == n_loads
    assert (server.status_of("small"), server.status_of("other")) == ("loaded", "unloaded")
    asleep, awake = server.get("/props?model=other").json, server.get("/props?model=small").json
    assert asleep["is_sleeping"] is True and awake["is_sleeping"] is False and asleep.keys() <= awake.keys()
    assert asleep["default_generation_settings"] == awake["default_generation_settings"]
    refused = server.get("/slots?model=other")
    assert refused.status == 503 and "other is not loaded" in message(refused)
    assert post(server, "other").status == 200, "asking for a reply does load it"


# files that come, go and are bad


def test_a_file_that_comes_later_is_found(roomy, folder):
    shutil.copy(SMALL, folder / "later.gguf")
    assert "later" not in rows(roomy) and "later" in rows(roomy, "/models?reload=1")
    assert post(roomy, "later").status == 200
    shutil.copy(SMALL, folder / "latest.gguf")
    until(lambda: post(roomy, "latest").status == 200, "it is found without being told")
    for name in ("later", "latest"):
        (folder / f"{name}.gguf").unlink()
    assert "later" not in rows(roomy, "/models?reload=1") and post(roomy, "later").status == 404
    assert others_serve(roomy)


def test_a_file_that_is_deleted_serves_until_it_is_unloaded(server, folder):
    shutil.copy(SMALL, folder / "brief.gguf")
    server.get("/models?reload=1")
    golden = server.complete("brief", TOKENS)["tokens"]
    (folder / "brief.gguf").unlink()
    assert server.complete("brief", TOKENS)["tokens"] == golden
    assert others_serve(server), "it was put to sleep for them"
    for _ in range(2):
        reply = post(server, "brief")
        assert reply.status == 503 and "No such file" in message(reply)
    assert server.listed("brief")["status"]["failed"] and others_serve(server)
    assert "brief" not in rows(server, "/models?reload=1")


def test_a_file_that_is_no_model_is_a_404_with_the_reason(roomy):
    reply = post(roomy, "junk")
    assert reply.status == 404 and "not a GGUF file" in message(reply) and others_serve(roomy)


@pytest.mark.parametrize("stream", [False, True])
def test_a_load_that_fails_is_told_and_tried_again(roomy, folder, stream):
    name = f"cut-{stream}"
    path = folder / f"{name}.gguf"
    path.write_bytes(cut_off(SMALL))
    assert rows(roomy, "/models?reload=1")[name] == {"value": "unloaded"}, "its header is whole"
    for _ in range(2):
        reply = post(roomy, name, stream=stream)
        told = reply.events[-1] if stream and reply.status == 200 else reply.json  # a stream may have begun to wait
        assert (reply.status == 503 or stream) and "not within the file bounds" in told["error"]["message"]
    assert "not within the file bounds" in roomy.listed(name)["status"]["reason"] and others_serve(roomy)
    shutil.copy(SMALL, path)
    assert post(roomy, name).status == 200 and roomy.listed(name)["status"] == {"value": "loaded"}
    path.unlink()
    roomy.get("/models?reload=1")


def test_all_who_wait_for_a_load_that_fails_are_told(roomy, folder):
    (folder / "cut.gguf").write_bytes(cut_off(SMALL))
    roomy.get("/models?reload=1")
    order(roomy, "unload", "small")
    replies = _at_once(lambda: post(roomy, "cut"), 4)
    assert [reply.status for reply in replies] == [503] * 4 and others_serve(roomy)
    (folder / "cut.gguf").unlink()
    roomy.get("/models?reload=1")


def _at_once(ask: Callable[[], Reply], n: int) -> list[Reply]:
    replies: list[Reply] = []
    threads = [threading.Thread(target=lambda: replies.append(ask())) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies


def test_what_clients_are_told_names_no_folder(roomy, folder):
    (folder / "cut.gguf").write_bytes(cut_off(SMALL))
    roomy.get("/models?reload=1")
    try:
        told = post(roomy, "cut").data + roomy.get("/v1/models").data
        assert str(folder).encode() not in told
    finally:
        (folder / "cut.gguf").unlink()
        roomy.get("/models?reload=1")


def test_a_file_that_changed_is_loaded_again_for_whoever_asks_next(server, folder):
    server.complete("small", TOKENS)
    before = server.engine_pids
    os.utime(folder / "small.gguf")
    assert "failed" not in rows(server, "/models?reload=1")["small"]
    assert post(server, "small").status == 200 and server.engine_pids != before


def test_a_file_that_changes_while_it_is_waited_for_is_still_waited_for(server, folder):
    server.complete("other", TOKENS)
    before, replies = server.engine_pids, []
    asking = threading.Thread(target=lambda: replies.append(post(server, "small")))
    asking.start()
    with frozen(server.next_engine(before)):
        os.utime(folder / "small.gguf")
        server.get("/models?reload=1")
    asking.join()
    assert replies[0].status == 200, replies[0].data


def test_weights_that_were_exchanged_while_it_slept_do_not_get_the_old_states(server, folder):
    """Same name, same size, same date: nothing that a list of files shows has changed."""
    path, twin = folder / "twin.gguf", tiny_model("llama", width=64, seed=1)
    shutil.copy(SMALL, path)
    before = path.stat()
    server.get("/models?reload=1")
    first = server.complete("twin", TOKENS)["tokens"]
    longer = [*TOKENS, *first, *MORE]
    assert others_serve(server) and server.status_of("twin") == "unloaded"
    path.write_bytes(twin.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    answer = server.complete("twin", longer)
    assert answer["timings"]["cache_n"] == 0 and server.complete("twin", TOKENS)["tokens"] != first
    path.unlink()
    server.get("/models?reload=1")


def test_a_path_that_is_corrected_while_the_old_one_fails_is_taken(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(cut_off(SMALL))
    toml = tmp_path / "models.toml"
    toml.write_text("[models.a]\npath = 'cut.gguf'")
    with serving_models(toml) as server:
        order(server, "load", "a")
        with frozen(server.next_engine([])):
            written(tmp_path, a="")
            server.get("/models?reload=1")
        until(lambda: server.status_of("a") == "unloaded", "the old one has failed")
        reply = post(server, "a")
        assert reply.status == 200, reply.data


# limits


def test_a_model_that_is_larger_than_the_limit_is_refused_with_both_sizes(folder):
    with serving_models(folder, "--memory-limit", "1MiB") as server:
        for stream in (False, True):
            reply = post(server, "small", stream=stream)
            assert reply.status == 503 and reply.json["error"]["reason"] == "no_room_for_model"
            found = re.search(r"'small' needs ([0-9.]+) MiB; all together may take 1.0 MiB", message(reply))
            assert found and float(found[1]) > 1
        assert "may take 1.0 MiB" in server.listed("small")["status"]["reason"] and not server.engine_pids


def test_memory_is_shared_by_as_many_as_fit(server, folder):
    """A number of models is no limit here; that two are held at once where both fit is shown below."""
    sizes = [float(size) for size in re.findall(r"· \w+: about ([0-9.]+) MiB", server.log)]
    assert len(sizes) == 2 and sum(sizes) > max(sizes) + 2
    with serving_models(folder, "--memory-limit", f"{max(sizes) + 2}MiB", "--models-max", "0") as server:
        assert others_serve(server) and len(server.engine_pids) == 1, "there is room for either, not for both"


def test_a_name_nobody_has_gets_the_default_and_only_orders_load(folder):
    flags = ("--models-default", "small", "--no-models-autoload")
    with serving_models(folder, *flags) as server:
        for name in ("small", "nobody", None):
            reply = post(server, name)
            assert reply.status == 400 and "'small' is not loaded" in message(reply)
        assert post(server, "junk").status == 404, "a broken model is not replaced by another"
        assert not server.engine_pids
        order(server, "load", "small")
        until(lambda: server.status_of("small") == "loaded", "it is loaded")
        answers = {tuple(server.complete(name, TOKENS)["tokens"]) for name in ("small", "nobody", "gpt-4o")}
        assert len(answers) == 1 and post(server, "other").status == 400 and post(server, None).status == 200


def test_without_autoload_an_unloaded_model_stays_so(folder):
    with serving_models(folder, "--no-models-autoload") as server:
        order(server, "load", "small")
        until(lambda: server.status_of("small") == "loaded", "it is loaded")
        busy = threading.Thread(target=post, args=(server, "small"), kwargs={"n_predict": 1000, "ignore_eos": True})
        busy.start()
        until(lambda: server.listed("small")["n_running"] == 1, "it is busy")
        order(server, "unload", "small")
        late = post(server, "small")
        busy.join()
        assert late.status == 400 and server.n_loads == 1


def test_a_server_whose_only_model_sleeps_is_ready(tmp_path):
    shutil.copy(SMALL, tmp_path / "small.gguf")
    with serving_models(tmp_path) as server:
        assert server.get("/ready").status == 200
        assert post(server, "small").status == 200


# a file that describes them


def written(path: Path, **tables: str) -> Path:
    """A TOML file of models: each has a path and these lines."""
    text = "".join(f"[models.{name}]\npath = '{SMALL}'\n{lines}\n" for name, lines in tables.items())
    (path / "models.toml").write_text(text)
    return path / "models.toml"


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def configured(tmp_path_factory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("configured")
    (path / "odd.jinja").write_text(TEMPLATE)
    toml = written(
        path,
        keep="pinned = true\nload-on-start = true",
        sleepy="ttl = 1",
        odd="alias = ['nick', 'name']\nctx-size = 512\nslots = 1\ntemplate = 'odd.jinja'",
    )
    with serving_models(toml, "--models-max", "2") as server:
        until(lambda: server.status_of("keep") == "loaded", "what is loaded at the start is")
        yield server


def test_an_alias_is_as_good_as_a_name(configured):
    assert configured.complete("nick", TOKENS)["tokens"] == configured.complete("odd", TOKENS)["tokens"]
    assert configured.listed("odd")["aliases"] == ["nick", "name"] and configured.status_of("odd") == "loaded"
    assert post(configured, "nickname").status == 404


def test_settings_of_one_model_are_its_own(configured):
    odd, keep = (configured.get(f"/props?model={name}").json for name in ("name", "keep"))
    assert (odd["default_generation_settings"]["n_ctx"], odd["total_slots"]) == (512, 1)
    assert (keep["default_generation_settings"]["n_ctx"], keep["total_slots"]) == (4096, 2)
    assert odd["chat_template"] == TEMPLATE != keep["chat_template"]
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    assert configured.ask("/apply-template", talk | {"model": "odd"})["prompt"] == "<user>hi"
    assert configured.ask("/apply-template", talk | {"model": "keep"})["prompt"] != "<user>hi"
    assert post(configured, "odd", prompt=TOKENS * 6).status == 400, "600 tokens are too many for it"
    assert post(configured, "keep", prompt=TOKENS * 6).status == 200


def test_a_pinned_model_stays_whatever_comes(configured):
    order(configured, "unload", "odd")
    order(configured, "unload", "sleepy")
    until(lambda: len(configured.engine_pids) == 1, "the others are gone")
    (pinned,) = configured.engine_pids
    for name in ("odd", "sleepy", "odd", "keep", "sleepy"):
        configured.complete(name, TOKENS)
        assert pinned in configured.engine_pids and len(configured.engine_pids) == 2
    assert configured.status_of("keep") == "loaded"


def test_an_idle_model_goes_to_sleep_and_wakes_up_warm(configured):
    before = time.monotonic()
    first = configured.complete("sleepy", TOKENS)
    assert configured.status_of("sleepy") == "loaded"
    until(lambda: configured.status_of("sleepy") == "unloaded", "it sleeps")
    assert time.monotonic() - before > 0.5 and configured.status_of("keep") == "loaded"
    again = configured.complete("sleepy", [*TOKENS, *first["tokens"], *MORE])
    assert again["timings"]["prompt_n"] <= len(MORE) + GUARD < len(TOKENS)


def test_there_is_no_room_beside_pinned_models(tmp_path):
    toml = written(tmp_path, keep="pinned = true\nload-on-start = true", other="")
    with serving_models(toml) as server:
        assert post(server, "keep").status == 200
        reply = post(server, "other")
        assert reply.status == 503 and "no room for the model 'other' beside the pinned ones (keep)" in message(reply)
        order(server, "unload", "keep")
        assert post(server, "other").status == 200


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"a": "alias = 'x'", "b": "alias = 'x'"}, "two models are called 'x'"),
        ({"a": "alias = 'b'", "b": ""}, "two models are called 'b'"),
        ({"a": "ctx-sise = 5"}, "did you mean 'ctx-size'?"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused_in_one_sentence(tmp_path, tables, told):
    result = run_cli("serve", "--models", str(written(tmp_path, **tables)), "--port", "0")
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1 and len(lines) == 1 and told in lines[0] and "Traceback" not in result.stderr
