"""``/lora-adapters`` and the ``lora`` of a request, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.lora import WIDTH, write_lora
from support.models import tiny_model
from support.server import Server, serving, until

USER, ADMIN = {"Authorization": "Bearer the-users-key"}, {"Authorization": "Bearer the-admins-key"}
PROMPT = list(range(40, 100))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("lora")
    return [write_lora(folder / f"{name}.gguf") for name in "ab"]


@pytest.fixture(scope="module")
def server(files: list[Path]) -> Iterator[Server]:
    flags = (
        "--lora-scaled",
        f"{files[0]}:1.0,{files[1]}:0",
        "--api-key",
        "the-users-key",
        "--admin-key",
        "the-admins-key",
    )
    with serving(*flags, model=tiny_model("qwen35", width=WIDTH)) as server:
        yield server


@pytest.fixture(autouse=True)
def as_started(server: Server) -> Iterator[None]:
    yield
    assert change(server, (1.0, 0.0)).status == 200


def change(server: Server, scales: tuple[float, ...], who: dict[str, str] = ADMIN) -> Any:
    return server.post("/lora-adapters", [{"id": i, "scale": scale} for i, scale in enumerate(scales)], **who)


def complete(server: Server, **more: Any) -> Any:
    body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "ignore_eos": True, "return_tokens": True} | more
    reply = server.post("/completion", body, **USER)
    assert reply.status == 200, reply.data
    return reply.json


def tokens(server: Server, **more: Any) -> list[int]:
    return list(complete(server, **more)["tokens"])


def scales(server: Server) -> list[float]:
    return [row["scale"] for row in server.get("/lora-adapters", **USER).json]


def test_the_adapters_are_listed(server: Server, files: list[Path]) -> None:
    shown = server.get("/lora-adapters", **ADMIN).json
    assert shown == [{"id": 0, "path": str(files[0]), "scale": 1.0}, {"id": 1, "path": str(files[1]), "scale": 0.0}]
    assert [row["path"] for row in server.get("/lora-adapters", **USER).json] == ["a.gguf", "b.gguf"]


def test_a_request_has_its_own_scales(server: Server) -> None:
    usual, without = tokens(server), tokens(server, lora=[])
    assert usual != without
    assert tokens(server, lora=[{"id": 0, "scale": 1.0}]) == usual
    assert tokens(server, lora=[{"id": 1, "scale": 1.0}]) == usual  # the same adapter, in another file
    assert tokens(server, lora=[{"id": 0, "scale": 0.5}, {"id": 1, "scale": -0.5}]) == without
    again = complete(server, lora=[])
    assert again["tokens"] == without and again["timings"]["cache_n"] >= len(PROMPT) - 16
    assert complete(server, lora=[{"id": 0, "scale": 0.9}])["timings"]["cache_n"] == 0


def test_an_admin_changes_it_for_all_that_say_nothing(server: Server) -> None:
    usual, without = tokens(server), tokens(server, lora=[])
    assert change(server, (0.0, 0.0)).json == {"success": True}
    assert scales(server) == [0.0, 0.0] and tokens(server) == without
    assert tokens(server, lora=[{"id": 0, "scale": 1.0}]) == usual
    assert server.post("/lora-adapters", [{"id": 1, "scale": 1.0}], **ADMIN).status == 200
    assert scales(server) == [0.0, 1.0] and tokens(server) == usual


def test_a_change_outlives_the_engine(server: Server) -> None:
    without = tokens(server, lora=[])
    change(server, (0.0, 0.0))
    server.kill_engine()
    until(lambda: server.is_ready() and bool(server.engine_pids), "the engine is there again")
    assert tokens(server) == without


def test_only_an_admin_may_change_it(server: Server) -> None:
    assert change(server, (0.0, 0.0), USER).status == 403
    assert change(server, (0.0, 0.0), {}).status == 401
    assert scales(server) == [1.0, 0.0]


@pytest.mark.parametrize(
    "lora",
    [
        [{"id": 2, "scale": 1}],
        [{"id": -1, "scale": 1}],
        [{"id": 0}],
        [{"id": 0, "scale": 1e9}],
        {"id": 0, "scale": 1},
        [0],
    ],
    ids=str,
)
def test_a_wrong_list_is_the_clients_error(server: Server, lora: Any) -> None:
    assert server.post("/completion", {"prompt": "x", "lora": lora}, **USER).status == 400
    assert server.post("/lora-adapters", lora, **ADMIN).status == 400
