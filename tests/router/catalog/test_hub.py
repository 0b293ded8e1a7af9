"""Models from the Hub: what is cached needs no network, what is not is downloaded once, and what fails says why."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everwarm.errors import BadRequest, ModelFileError
from everwarm.router.catalog import hub
from everwarm.router.catalog.hub import HubModel, cached_models, parse_name, resolve
from support.fake_hub import TOKEN, FakeHub, Repo

REPO = "acme/Tiny-GGUF"
CHUNK = 1 << 16
Ask = Callable[..., HubModel]


def data(name: str, n_bytes: int = 1000) -> bytes:
    """Some bytes that are this file's and no other's."""
    return (name.encode() * (n_bytes // len(name) + 1))[:n_bytes]


def repo(*names: str) -> Repo:
    return Repo({name: data(name) for name in names})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import close_session, constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)  # what arrived before a break is kept in such pieces
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two attempts
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    with FakeHub().running() as running:
        yield running
        close_session()


@pytest.fixture
def ask(fake: FakeHub, tmp_path: Path) -> Ask:
    def resolved(name: str, progress: hub.Progress | None = None, **options: object) -> HubModel:
        return resolve(name, progress, endpoint=fake.endpoint, cache=tmp_path / "hub", **options)  # type: ignore[arg-type]

    return resolved


# names


@pytest.mark.parametrize(
    ("name", "repo_id", "quant"),
    [
        ("acme/Tiny-GGUF", "acme/Tiny-GGUF", None),
        ("hf:acme/Tiny-GGUF:Q4_K_M", "acme/Tiny-GGUF", "Q4_K_M"),
        ("hf:a.b/c_d-1.5:UD-Q4_K_XL", "a.b/c_d-1.5", "UD-Q4_K_XL"),
    ],
)
def test_a_name_is_a_repository_and_perhaps_a_quant(name: str, repo_id: str, quant: str | None) -> None:
    assert parse_name(name) == hub.HubName(repo_id, quant)


@pytest.mark.parametrize(
    "name", ["", "hf:", "tiny", "a/b/c", "a/b:", "a/b:c/d", "a--b/c", "../x", "a/..", "a/b?x=1", "http://a/b", "a/b\n"]
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="give owner/repo or owner/repo:QUANT"):
        parse_name(name)


# downloads


def test_a_model_is_downloaded_once_and_then_found_in_the_cache(fake: FakeHub, ask: Ask) -> None:
    fake.repos[REPO] = repo("README.md", "Tiny-Q4_K_M.gguf", "Tiny-Q8_0.gguf")
    model = ask(f"hf:{REPO}:q8_0")
    assert model.id == f"{REPO}:Q8_0" and model.mmproj is None
    assert model.path.name == "Tiny-Q8_0.gguf" and model.path.read_bytes() == data("Tiny-Q8_0.gguf")
    assert not fake.downloads("Tiny-Q4_K_M.gguf") and not fake.downloads("README.md")
    fake.asked.clear()
    assert ask(f"{REPO}:Q8_0") == ask(REPO) == model and ask(f"{REPO}:Q8_0", offline=True) == model
    assert fake.asked == []


def test_the_cache_is_one_that_huggingface_hub_understands(fake: FakeHub, ask: Ask, tmp_path: Path) -> None:
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    fake.repos[REPO] = repo("Tiny-Q8_0.gguf", "mmproj-F16.gguf")
    model = ask(REPO)
    assert try_to_load_from_cache(REPO, "Tiny-Q8_0.gguf", cache_dir=tmp_path / "hub") == str(model.path)
    (found,) = scan_cache_dir(tmp_path / "hub").repos
    assert found.repo_id == REPO and found.nb_files == 2 and {r.refs for r in found.revisions} == {frozenset({"main"})}
    assert not list((tmp_path / "hub").rglob("*.unfinished"))


@pytest.mark.parametrize(
    ("names", "quant", "chosen"),
    [
        (["T-Q2_K.gguf", "T-Q4_K_M.gguf", "T-Q8_0.gguf"], None, "T-Q4_K_M.gguf"),
        (["T-Q2_K.gguf", "T-Q8_0.gguf"], None, "T-Q8_0.gguf"),
        (["T-Q2_K.gguf", "T-Q5_K_S.gguf"], None, "T-Q2_K.gguf"),
        (["t.gguf"], None, "t.gguf"),
        (["T-IQ4_XS.gguf", "T-Q4_K_M.gguf"], "iq4_xs", "T-IQ4_XS.gguf"),
        (["T-UD-Q4_K_M.gguf", "T-Q4_K_M.gguf"], "Q4_K_M", "T-Q4_K_M.gguf"),
        (["T-UD-Q4_K_M.gguf", "T-Q8_0.gguf"], "q4_k_m", "T-UD-Q4_K_M.gguf"),
        (["T.i1-Q4_K_M.gguf"], "Q4_K_M", "T.i1-Q4_K_M.gguf"),
        (["small-Q8_0.gguf", "large-Q8_0.gguf"], "small-q8_0", "small-Q8_0.gguf"),
        (["T-Q8_0.gguf", "imatrix.gguf", "mmproj-Q4_K_M.gguf"], None, "T-Q8_0.gguf"),
    ],
)
def test_the_quant_is_the_end_of_the_name(
    fake: FakeHub, ask: Ask, names: list[str], quant: str | None, chosen: str
) -> None:
    fake.repos[REPO] = repo(*names)
    assert ask(REPO if quant is None else f"{REPO}:{quant}").path.name == chosen


def test_all_parts_and_the_projector_come_along(fake: FakeHub, ask: Ask) -> None:
    parts = [f"Q4_K_M/Tiny-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    fake.repos[REPO] = repo(*parts, "Q8_0/Tiny-Q8_0.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf")
    seen: list[tuple[int, int]] = []
    model = ask(REPO, lambda done, total: seen.append((done, total)))
    assert model.path.name == "Tiny-Q4_K_M-00001-of-00003.gguf" and model.id == f"{REPO}:Q4_K_M"
    assert sorted(path.name for path in model.path.parent.iterdir()) == [Path(part).name for part in parts]
    assert model.mmproj is not None and model.mmproj.name == "mmproj-F16.gguf" and model.mmproj.exists()
    assert seen[0] == (0, 4000) and seen[-1] == (4000, 4000) and seen == sorted(seen)


def test_a_model_with_missing_parts_is_not_offered(fake: FakeHub, ask: Ask) -> None:
    fake.repos[REPO] = repo("T-Q4_K_M-00001-of-00002.gguf", "T-Q8_0.gguf")
    with pytest.raises(ModelFileError, match="has no Q4_K_M; it has Q8_0"):
        ask(f"{REPO}:Q4_K_M")


def test_a_broken_connection_is_resumed_where_it_broke(fake: FakeHub, ask: Ask) -> None:
    name, n_bytes = "T-Q8_0.gguf", 10 * CHUNK
    fake.repos[REPO] = Repo({name: data(name, n_bytes)})
    fake.drops[name] = [3 * CHUNK + 100, 2 * CHUNK]
    seen: list[int] = []
    assert ask(REPO, lambda done, total: seen.append(done)).path.read_bytes() == data(name, n_bytes)
    assert [asked.range for asked in fake.downloads(name)] == [None, f"bytes={3 * CHUNK}-", f"bytes={5 * CHUNK}-"]
    assert seen == sorted(seen) and seen[-1] == n_bytes


def test_what_another_process_had_loaded_is_gone_on_with(fake: FakeHub, ask: Ask, tmp_path: Path) -> None:
    name, n_bytes = "T-Q8_0.gguf", 10 * CHUNK
    fake.repos[REPO] = Repo({name: data(name, n_bytes)})

    def interrupted(done: int, total: int) -> None:
        if done >= 5 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(REPO, interrupted)
    assert cached_models(tmp_path / "hub") == []
    seen: list[int] = []
    assert ask(REPO, lambda done, total: seen.append(done)).path.read_bytes() == data(name, n_bytes)
    assert fake.downloads(name)[1].range == f"bytes={4 * CHUNK}-" and seen[0] == 4 * CHUNK


def test_parts_that_are_there_are_not_loaded_again(fake: FakeHub, ask: Ask) -> None:
    names = ["T-Q8_0-00001-of-00002.gguf", "T-Q8_0-00002-of-00002.gguf"]
    fake.repos[REPO] = repo(*names)

    def interrupted(done: int, total: int) -> None:
        if done > 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(REPO, interrupted)
    ask(REPO)
    assert len(fake.downloads(names[0])) == 1 and len(fake.downloads(names[1])) == 2


def test_a_file_that_arrives_damaged_is_not_kept(fake: FakeHub, ask: Ask, tmp_path: Path) -> None:
    fake.repos[REPO], fake.damaged = repo("T-Q8_0.gguf"), {"T-Q8_0.gguf"}
    with pytest.raises(ModelFileError, match=r"T-Q8_0.gguf of acme/Tiny-GGUF arrived damaged; try again"):
        ask(REPO)
    assert cached_models(tmp_path / "hub") == []
    fake.damaged.clear()
    assert ask(REPO).path.read_bytes() == data("T-Q8_0.gguf")


def test_names_that_lead_out_of_the_cache_are_ignored(fake: FakeHub, ask: Ask, tmp_path: Path) -> None:
    fake.repos[REPO] = repo("../../../evil-Q4_K_M.gguf", "/evil-Q4_K_M.gguf", "T-Q8_0.gguf")
    assert ask(REPO).path.name == "T-Q8_0.gguf"
    assert not list(tmp_path.rglob("evil*"))


# what goes wrong


def test_an_unknown_repository_is_said(fake: FakeHub, ask: Ask) -> None:
    with pytest.raises(ModelFileError, match="there is no repository acme/None on the Hub, or it is private; check"):
        ask("acme/None:Q4_K_M")


def test_an_unknown_quant_lists_what_there_is(fake: FakeHub, ask: Ask) -> None:
    fake.repos[REPO] = repo("T-Q8_0.gguf", "T-Q4_K_M.gguf", "odd.gguf", "mmproj-F16.gguf")
    with pytest.raises(ModelFileError, match=r"^acme/Tiny-GGUF has no Q3_K; it has Q4_K_M, Q8_0, odd$"):
        ask(f"{REPO}:Q3_K")


def test_a_repository_without_gguf_is_said(fake: FakeHub, ask: Ask) -> None:
    fake.repos[REPO] = repo("model.safetensors", "mmproj-F16.gguf")
    with pytest.raises(ModelFileError, match="has no GGUF model; look for a repository with GGUF in its name"):
        ask(REPO)


def test_a_gated_repository_says_how_to_get_in(fake: FakeHub, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.repos[REPO] = Repo({"T-Q8_0.gguf": data("T-Q8_0.gguf")}, is_gated=True)
    with pytest.raises(ModelFileError, match="acme/Tiny-GGUF is gated: accept its terms on its page, then log in"):
        ask(REPO)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert ask(REPO).path.exists()
    tokens = {asked.server: asked.authorization for asked in fake.asked if asked.method == "GET"}
    assert tokens == {"hub": f"Bearer {TOKEN}", "storage": None}  # the token stays on the Hub


@pytest.mark.parametrize(
    ("status", "words"),
    [(500, "answered 500"), (429, "asks for patience"), (403, "refuses acme/Tiny-GGUF to this token")],
)
def test_what_the_hub_answers_is_said(fake: FakeHub, ask: Ask, status: int, words: str) -> None:
    fake.status = status
    with pytest.raises(ModelFileError, match=words):
        ask(REPO)


@pytest.mark.parametrize(
    "page", [b"<html>log in to the hotel's network</html>", b"[1, 2]", b'{"sha": "../../x"}', b"{}"]
)
def test_a_page_that_is_not_the_hub_is_recognised(fake: FakeHub, ask: Ask, page: bytes) -> None:
    fake.page = page
    with pytest.raises(ModelFileError, match="cannot look up acme/Tiny-GGUF: what answers is not the Hub"):
        ask(REPO)


def test_no_network_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ModelFileError, match=r"cannot reach the Hub for acme/T:Q8_0 \(ConnectError\); check the network"
    ):
        resolve("acme/T:Q8_0", endpoint="http://127.0.0.1:9", cache=tmp_path)


def test_offline_nothing_is_asked_for(fake: FakeHub, ask: Ask) -> None:
    fake.repos[REPO] = repo("T-Q4_K_M.gguf", "T-Q8_0.gguf")
    with pytest.raises(ModelFileError, match=r"downloads are off; download it once while there is a network"):
        ask(REPO, offline=True)
    assert fake.asked == []
    ask(f"{REPO}:Q8_0")
    with pytest.raises(ModelFileError, match=rf"{REPO}:Q4_K_M is not in .* downloads are off; it has {REPO}:Q8_0"):
        ask(f"{REPO}:Q4_K_M", offline=True)


def test_a_full_disk_is_said_before_anything_is_loaded(
    fake: FakeHub, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.repos[REPO] = Repo({"T-Q8_0.gguf": data("T", 3_000_000)})
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000_000})())
    with pytest.raises(ModelFileError, match=r"needs 3 MB more but the disk of the Hugging Face cache has 1 MB"):
        ask(REPO)
    assert not fake.downloads("T-Q8_0.gguf")


def test_no_address_and_no_token_is_ever_said(
    fake: FakeHub,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)
    logging.getLogger("huggingface_hub").setLevel(logging.DEBUG)
    name = "T-Q8_0.gguf"
    fake.repos[REPO] = Repo({name: data(name, 4 * CHUNK)})
    fake.drops[name] = [CHUNK] + [0] * 10
    with pytest.raises(ModelFileError) as raised:
        ask(REPO)
    fake.drops.clear()
    ask(REPO)
    captured = capfd.readouterr()
    message = "".join((caplog.text, str(raised.value), captured.out, captured.err))
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert "downloading acme/Tiny-GGUF" in message
    assert not any(secret in message for secret in (TOKEN, "http://", "127.0.0.1", "signature"))


# the cache


def test_the_cache_lists_complete_models_of_every_repository(fake: FakeHub, ask: Ask, tmp_path: Path) -> None:
    assert cached_models(tmp_path / "hub") == []
    fake.repos |= {REPO: repo("T-Q4_K_M.gguf", "T-Q8_0.gguf", "mmproj-F16.gguf"), "b/plain": repo("only.gguf")}
    models = [ask(REPO), ask(f"{REPO}:Q8_0"), ask("b/plain")]
    assert cached_models(tmp_path / "hub") == models
    assert [model.id for model in models] == [f"{REPO}:Q4_K_M", f"{REPO}:Q8_0", "b/plain:only"]
    models[0].path.resolve().unlink()  # its link leads nowhere now
    assert cached_models(tmp_path / "hub") == models[1:]


def test_a_newer_commit_is_taken_when_something_new_is_loaded(fake: FakeHub, ask: Ask, tmp_path: Path) -> None:
    fake.repos[REPO] = repo("T-Q4_K_M.gguf")
    old = ask(REPO)
    fake.repos[REPO] = repo("T-Q4_K_M.gguf", "T-Q8_0.gguf")
    assert ask(f"{REPO}:Q4_K_M") == old
    new = ask(f"{REPO}:Q8_0")
    assert new.path.parent != old.path.parent and ask(f"{REPO}:Q4_K_M") == old
    assert {model.id for model in cached_models(tmp_path / "hub")} == {f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"}


@pytest.mark.parametrize(
    "litter", ["models--a--b", "models--a--b/snapshots", "models--a--b/snapshots/x", "models--a--b/refs/main"]
)
def test_litter_in_the_cache_is_no_model(tmp_path: Path, litter: str) -> None:
    (tmp_path / litter).mkdir(parents=True)
    (tmp_path / "models--a--c").write_text("a file")
    assert cached_models(tmp_path) == []
    with pytest.raises(ModelFileError, match="is not in the Hugging Face cache"):
        resolve("a/b", offline=True, cache=tmp_path)


def test_huggingface_hub_is_loaded_only_when_needed_and_its_variables_are_honoured(
    fake: FakeHub, tmp_path: Path
) -> None:
    fake.repos[REPO] = repo("T-Q8_0.gguf")
    program = (
        "import sys; from everwarm.router.catalog import catalog, hub\n"
        "assert 'huggingface_hub' not in sys.modules and 'everwarm.llama' not in sys.modules\n"
        f"print(hub.resolve('hf:{REPO}').path)"
    )
    places = {"HF_ENDPOINT": fake.endpoint, "HF_HOME": str(tmp_path)}
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):  # the second time from the cache
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | places | more, capture_output=True, text=True, check=True
        )
        path = Path(done.stdout.strip())
        assert path.is_relative_to(tmp_path / "hub") and path.read_bytes() == data("T-Q8_0.gguf")
    assert len(fake.downloads("T-Q8_0.gguf")) == 1
