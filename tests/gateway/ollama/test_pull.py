"""Models downloaded and deleted over HTTP, with Ollama's real client and a fake Hub."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ollama
import pytest

from everwarm.errors import BadRequest, NotFound, Overloaded
from everwarm.gateway.admin import models
from everwarm.gateway.admin.models import Pulls
from everwarm.router.catalog import hub
from support.fake_hub import FakeHub, Repo
from support.models import EMBEDDED
from support.server import Server, run_cli, serving, serving_models

REPO = "acme/Tiny-GGUF"
ADMIN, USER = "key-of-an-admin-123456", "key-of-a-user-123456"


@pytest.fixture(scope="module")
def fake(tmp_path_factory) -> Iterator[FakeHub]:
    files = {"Tiny-Q8_0.gguf": EMBEDDED.read_bytes(), "Tiny-Q4_K_M.gguf": b"no model"}
    with pytest.MonkeyPatch.context() as patch, FakeHub({REPO: Repo(files)}).running() as running:
        patch.setenv("HF_ENDPOINT", running.endpoint)
        patch.setenv("HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        yield running


@pytest.fixture(scope="module")
def server(fake) -> Iterator[Server]:
    keys = ("--api-key", USER, "--admin-key", ADMIN)
    with serving_models(Path("hf:"), "--allow-pull", *keys) as server:
        yield server


def client(server: Server, key: str = ADMIN) -> ollama.Client:
    return ollama.Client(server.url, headers={"Authorization": f"Bearer {key}"})


def names(client: ollama.Client) -> list[str]:
    return [str(model.model) for model in client.list().models]


def test_a_model_is_pulled_with_progress_chatted_with_and_deleted(server, fake):
    with client(server) as admin:
        lines = list(admin.pull(f"hf.co/{REPO}:Q8_0", stream=True))
        assert (lines[0].status, lines[-1].status) == ("pulling manifest", "success")
        counted = [(line.completed or 0, line.total) for line in lines if line.digest]
        assert counted == sorted(counted) and counted[-1] == (len(EMBEDDED.read_bytes()),) * 2
        assert names(admin) == [f"{REPO}:Q8_0"]
        output = admin.chat(
            f"hf.co/{REPO}", [{"role": "user", "content": "What is 7 + 8?"}], options={"temperature": 0}
        )
        assert "15" in str(output.message.content)
        assert admin.pull(f"{REPO}:Q8_0").status == "success" and len(fake.downloads("Tiny-Q8_0.gguf")) == 1
        assert admin.delete(f"hf:{REPO}:Q8_0").status == "success"
        assert names(admin) == []
        with pytest.raises(ollama.ResponseError, match="there is no model") as gone:
            admin.delete(f"{REPO}:Q8_0")
        assert gone.value.status_code == 404


@pytest.mark.parametrize("name", ["llama3.2", "../../etc/passwd", "https://example.org/a/b", "a/b/c", "a/..", ""])
def test_what_is_no_name_of_the_hub_is_refused_before_it_is_asked(server, fake, name):
    n_asked = len(fake.asked)
    with client(server) as admin:
        for stream in (True, False):
            answer = server.post("/api/pull", {"model": name, "stream": stream}, **bearer(ADMIN))
            assert answer.status == 400 and (not name or "give owner/repo" in answer.json["error"])
        assert names(admin) == [] and len(fake.asked) == n_asked


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_what_the_hub_does_not_have_is_said(server):
    with client(server) as admin, pytest.raises(ollama.ResponseError, match=r"no repository acme/None"):
        list(admin.pull("acme/None", stream=True))
    with client(server) as admin, pytest.raises(ollama.ResponseError, match=r"has no Q2_K; it has Q4_K_M, Q8_0"):
        admin.pull(f"{REPO}:Q2_K")


def test_only_an_admin_may_and_only_where_it_is_allowed(server, fake):
    n_asked = len(fake.asked)
    with client(server, USER) as user:
        for order in (lambda: user.pull(f"{REPO}:Q8_0"), lambda: user.delete(f"{REPO}:Q8_0")):
            with pytest.raises(ollama.ResponseError, match="needs an admin key") as refused:
                order()
            assert refused.value.status_code == 403
    assert server.get("/v1/models", **bearer(ADMIN)).json["can_pull"] is True
    assert server.get("/v1/models", **bearer(USER)).json["can_pull"] is False
    with serving() as closed, ollama.Client(closed.url) as anyone:
        for order in (lambda: anyone.pull(f"{REPO}:Q8_0"), lambda: anyone.delete("everwarm-tiny")):
            with pytest.raises(ollama.ResponseError, match="--allow-pull") as refused:
                order()
            assert refused.value.status_code == 501
        assert "can_pull" not in closed.get("/v1/models").json
    assert len(fake.asked) == n_asked


@pytest.mark.parametrize("flags", [("--demo",), ("--models", "."), ("--models", "hf:", "--offline")])
def test_pulling_needs_a_server_of_the_cache(flags):
    refused = run_cli("serve", *flags, "--allow-pull")
    assert refused.returncode == 1 and "--allow-pull needs --models hf:" in refused.stderr


class Models:
    """A pool that has one model of a file, which is the default."""

    def __init__(self, source: str = "file") -> None:
        spec = SimpleNamespace(id="here", source=source)
        self.catalog = SimpleNamespace(named=lambda name: spec if name == "here" else None, specs={"here": spec})


def pulls(models: Any = None) -> Pulls:
    return Pulls(models or Models(), allowed=True)


def test_a_download_stops_when_its_client_leaves(monkeypatch):
    began, ended = threading.Event(), threading.Event()

    def endless(name: str, progress: hub.Progress) -> None:
        try:
            for n in range(10**9):
                progress(n, 10**9)
                began.set()
        finally:
            ended.set()

    monkeypatch.setattr(hub, "resolve", endless)

    async def leave() -> None:
        lines = pulls().pull(REPO)
        await anext(lines)
        assert await asyncio.to_thread(began.wait, 60) and not ended.is_set()
        await lines.aclose()
        assert await asyncio.to_thread(ended.wait, 60)

    asyncio.run(leave())


def test_not_more_downloads_wait_than_there_is_room_for(monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(hub, "resolve", lambda name, progress: free.wait(60))

    async def crowd() -> None:
        one = pulls()
        running = [one.pull(f"{REPO}:Q{n}") for n in range(models.MAX_PULLS)]
        for lines in running:
            await anext(lines)
        with pytest.raises(Overloaded):
            await anext(one.pull(REPO))
        free.set()
        for lines in running:
            await lines.aclose()
        assert await anext(one.pull(REPO))

    asyncio.run(crowd())


def test_what_was_not_downloaded_is_not_deleted(monkeypatch):
    monkeypatch.setattr(hub, "remove", lambda name: pytest.fail("it was deleted"))
    with pytest.raises(BadRequest, match="delete its file"):
        asyncio.run(pulls().delete("here"))
    with pytest.raises(NotFound):
        asyncio.run(pulls().delete("another"))
