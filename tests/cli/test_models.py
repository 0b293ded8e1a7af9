"""Models by name on the command line: downloaded from a Hub (a fake one), listed, served, unloaded, deleted."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from everwarm.errors import BadRequest
from everwarm.router.catalog import hub
from support.fake_hub import FakeHub, Repo
from support.models import tiny_model
from support.server import run_cli, serving, serving_models, until

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")

REPO = "acme/Tiny-GGUF"


@pytest.fixture(scope="module")
def model() -> bytes:
    return tiny_model("qwen35").read_bytes()


@pytest.fixture
def fake(model, monkeypatch, tmp_path) -> Iterator[FakeHub]:
    """A Hub for this process and for those that it starts."""
    from huggingface_hub import close_session, constants

    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two attempts
    with FakeHub({REPO: Repo({"Tiny-Q8_0.gguf": model, "Tiny-Q4_K_M.gguf": b"no model"})}).running() as running:
        for name, value in {"HF_ENDPOINT": running.endpoint, "HF_HUB_CACHE": str(tmp_path / "hub")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        address = f"{running.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        yield running
        close_session()


def cached(folder: Path) -> set[str]:
    return {model.id for model in hub.cached_models(folder / "hub")}


def test_a_model_is_pulled_listed_and_deleted(fake, here, tmp_path):
    pulled = here("pull", f"hf:{REPO}:Q8_0")
    assert pulled.returncode == 0 and f"everwarm run hf:{REPO}:Q8_0" in pulled.stderr
    assert cached(tmp_path) == {f"{REPO}:Q8_0"}
    listed = here("list").stdout
    assert "--demo" in listed and f"hf:{REPO}:Q8_0" in listed and "qwen35" in listed
    gone = here("rm", f"hf:{REPO}")
    assert gone.returncode == 0 and "freed" in gone.stdout
    assert cached(tmp_path) == set() and not any(path.is_file() for path in (tmp_path / "hub").rglob("blobs/*"))


def test_an_interrupted_pull_continues(fake, here, tmp_path):
    fake.drops["Tiny-Q8_0.gguf"] = [1000] * 50  # more often than one command tries again
    assert here("pull", f"{REPO}:Q8_0").returncode == 1
    fake.drops.clear()
    assert here("pull", f"{REPO}:Q8_0").returncode == 0
    assert cached(tmp_path) == {f"{REPO}:Q8_0"}


@pytest.mark.parametrize("name", ["hf:../../etc/passwd", "hf:a/b:../c", "hf:acme/Tiny-GGUF:Q9_9", "hf:acme/nothing"])
def test_what_cannot_be_pulled_is_one_sentence(fake, here, name):
    done = here("pull", name)
    assert done.returncode == 1 and done.stderr.startswith("everwarm: ") and "Traceback" not in done.stderr


def test_a_file_name_that_leaves_its_folder_is_not_fetched(fake, here, model, tmp_path):
    fake.repos["evil/Tiny"] = Repo({"../../../Tiny-Q8_0.gguf": model})
    done = here("pull", "evil/Tiny")
    assert done.returncode == 1 and "no GGUF model" in done.stderr.replace("\n", " ")
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.fixture
def cache(fake, tmp_path) -> Path:
    """A cache with both versions and a projector."""
    fake.repos[REPO].files["mmproj-F16.gguf"] = b"projector"
    for quant in ("Q8_0", "Q4_K_M"):
        hub.resolve(f"{REPO}:{quant}", endpoint=fake.endpoint, cache=tmp_path / "hub")
    return tmp_path / "hub"


def test_deleting_one_version_leaves_the_other_and_the_projector(cache, model):
    with pytest.raises(BadRequest, match="say which"):
        hub.remove(REPO, cache)
    with pytest.raises(BadRequest, match="it has"):
        hub.remove(f"{REPO}:Q2_K", cache)
    assert hub.remove(f"{REPO}:q8_0", cache) == len(model)
    (left,) = hub.cached_models(cache)
    assert left.id == f"{REPO}:Q4_K_M" and left.mmproj is not None and left.mmproj.is_file()
    hub.remove(REPO, cache)
    assert hub.cached_models(cache) == [] and not [path for path in cache.rglob("blobs/*") if path.is_file()]


def test_deleting_keeps_what_another_snapshot_shares(cache):
    (old,) = (cache / f"models--{REPO.replace('/', '--')}" / "snapshots").iterdir()
    other = old.with_name("0" * 40)
    other.mkdir()
    (other / "other.txt").symlink_to(os.readlink(old / "Tiny-Q8_0.gguf"))
    assert hub.remove(f"{REPO}:Q8_0", cache) == 0
    assert (other / "other.txt").is_file()


def test_a_model_that_is_not_there_cannot_be_deleted(fake, here):
    done = here("rm", "hf:acme/nothing")
    assert done.returncode == 1 and "everwarm list" in done.stderr


def test_run_downloads_serves_and_chats(fake):
    done = run_cli("run", f"hf:{REPO}:Q8_0", "--max-tokens", "4", text="Hello!\n", timeout_s=120)
    assert done.returncode == 0 and "reused 0, read" in done.stdout, done


@pytest.mark.parametrize("name", ["missing.gguf", "missing"])
def test_run_says_that_a_file_is_missing(here, name):
    done = here("run", name)
    assert done.returncode == 1 and "there is no file" in done.stderr


def test_a_folder_is_served_as_many_models_shown_and_unloaded(here, tmp_path, model):
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(model)
    with serving_models(tmp_path) as server:
        assert "no model is in memory" in here("ps", "--url", server.url).stdout
        server.post("/models/load", {"model": "a"})
        until(lambda: server.status_of("a") == "loaded", "a is loaded")
        shown = here("ps", "--url", server.url).stdout
        assert "a" in shown.split() and "b" not in shown.split()
        assert "has no model 'c'; it has a, b" in here("stop", "c", "--url", server.url).stderr
        assert here("stop", "a", "--url", server.url).returncode == 0
        until(lambda: server.status_of("a") == "unloaded", "a is unloaded")


def test_serving_a_folder_needs_no_flag(tmp_path, model):
    (tmp_path / "a.gguf").write_bytes(model)
    with serving(model=tmp_path) as server:
        assert [one["id"] for one in server.get("/v1/models").json["data"]] == ["a"]
