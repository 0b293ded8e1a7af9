"""Models by name from the Hugging Face Hub: found in the local cache first, else downloaded into it.

Knows names, the layout of that cache and how downloads fail. huggingface_hub does the requests and is loaded only when it
is needed. Neither tokens nor addresses reach a log or an error: signed addresses are secrets, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from everwarm.config import require
from everwarm.errors import ModelFileError
from everwarm.router.catalog.gguf_files import LATEST, Group, choose, groups, is_gguf, is_projector, projector_for

log = logging.getLogger("everwarm.router")

Progress = Callable[[int, int], None]  # bytes done, bytes in all; an exception ends the download

PREFIX = "hf:"
_HOSTS = (PREFIX, "hf.co/", "huggingface.co/")  # as Ollama's clients write them
ANSWER_S = 30.0
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ETAG = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{7,127}")
_UNFINISHED = ".unfinished"
_NOT_LANGUAGE_MODELS = ("imatrix",)


@dataclass(frozen=True, slots=True)
class HubModel:
    """Files in the local cache: the model's first part, and the projector beside it."""

    id: str  # owner/repo:QUANT
    path: Path
    mmproj: Path | None = None
    n_bytes: int = 0  # of all its parts


@dataclass(frozen=True, slots=True)
class HubName:
    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def parse_name(name: str) -> HubName:
    """``owner/repo`` or ``owner/repo:QUANT``, with or without ``hf:`` or the Hub's host before it."""
    found = _NAME.fullmatch(without_prefix(name).removesuffix(LATEST))
    usable = found is not None and not re.search(r"--|\.\.|\.git$", found["repo"])
    require(usable, f"{name!r} is not a model on the Hub; give owner/repo or owner/repo:QUANT")
    assert found is not None
    return HubName(found["repo"], found["quant"])


def without_prefix(name: str) -> str:
    return next((name.removeprefix(start) for start in _HOSTS if name.startswith(start)), name)


def resolve(
    name: str,
    progress: Progress | None = None,
    *,
    offline: bool = False,
    endpoint: str | None = None,
    cache: Path | None = None,
) -> HubModel:
    """The model in the cache; it is downloaded if it is not there and ``offline`` does not forbid it."""
    wanted = parse_name(name)
    cache = cache or cache_directory()
    for snapshot in _snapshots(cache / _folder(wanted.repo)):
        found = _in_snapshot(wanted, snapshot)
        if found is not None:
            return found
    if offline or _is_offline():
        raise ModelFileError(
            f"{wanted} is not in the Hugging Face cache, and downloads are off; {_instead(wanted, cache)}"
        )
    return _Download(wanted, endpoint, cache, progress or (lambda _done, _total: None)).run()


def cached_models(cache: Path | None = None) -> list[HubModel]:
    """Every GGUF model in the cache that is complete."""
    cache = cache or cache_directory()
    found: dict[str, HubModel] = {}
    for folder in sorted(cache.glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in _snapshots(folder):
            names = _files(snapshot)
            for group in _models(names):
                model = _as_model(repo, group, snapshot, names)
                found.setdefault(model.id, model)
    return list(found.values())


def remove(name: str, cache: Path | None = None) -> int:
    """Delete one model from the cache: its files in every snapshot, and the bytes that no other file shares.

    Returns the bytes freed. The projector goes with the last model of its repository. Files that are no models stay.
    """
    wanted = parse_name(name)
    cache = cache or cache_directory()
    folder = cache / _folder(wanted.repo)
    here = [model.id for model in cached_models(cache) if model.id.startswith(f"{wanted.repo}:")]
    require(bool(here), f"{wanted} is not in the Hugging Face cache; `everwarm list` shows what is")
    require(wanted.quant is not None or len(here) == 1, f"{wanted} is there as {', '.join(here)}; say which")
    label = here[0].partition(":")[2] if wanted.quant is None else wanted.quant
    links = [link for snapshot in _snapshots(folder) for link in _links(snapshot, label)]
    require(bool(links), f"{wanted} is not in the Hugging Face cache; it has {', '.join(here)}")
    return _unlink(folder, links)


def _links(snapshot: Path, label: str) -> list[Path]:
    names = _files(snapshot)
    models = _models(names)
    gone = [group for group in models if group.label.lower() == label.lower()]
    others = [name for name in names if is_projector(name)] if gone and len(gone) == len(models) else []
    return [snapshot / name for name in (*(name for group in gone for name in group.names), *others)]


def _unlink(folder: Path, links: list[Path]) -> int:
    blobs = {link.resolve() for link in links}
    for link in links:
        link.unlink()
        for parent in link.parents:
            if parent == folder or any(parent.iterdir()):
                break
            parent.rmdir()
    linked = {path.resolve() for path in (folder / "snapshots").rglob("*")}
    freed = 0
    for blob in blobs - linked:
        if blob.parent == (folder / "blobs").resolve():  # else the cache has no links, and the file is gone already
            freed += blob.stat().st_size
            blob.unlink()
    return freed


def cache_directory() -> Path:
    """Where huggingface_hub keeps models on this machine, as its environment variables say."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


# the cache


def _folder(repo: str) -> str:
    return "models--" + repo.replace("/", "--")


def _snapshots(folder: Path) -> list[Path]:
    """What was downloaded of a repository: its main branch first, then by age."""
    try:
        found = [entry for entry in (folder / "snapshots").iterdir() if entry.is_dir()]
        ages = {snapshot: snapshot.stat().st_mtime for snapshot in found}
    except OSError:
        return []
    try:
        main = (folder / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    return sorted(found, key=lambda snapshot: (snapshot.name != main, -ages[snapshot], snapshot.name))


def _files(snapshot: Path) -> list[str]:
    found = (path for path in snapshot.rglob("*") if is_gguf(path.name) and path.is_file())
    return sorted(path.relative_to(snapshot).as_posix() for path in found)


def _models(names: list[str]) -> list[Group]:
    """The complete language models among the files of a repository."""
    found = (group for group in groups(names) if group.missing is None)
    return [group for group in found if not any(word in group.stem.lower() for word in _NOT_LANGUAGE_MODELS)]


def _in_snapshot(wanted: HubName, snapshot: Path) -> HubModel | None:
    names = _files(snapshot)
    group = choose(_models(names), wanted.quant)
    return None if group is None else _as_model(wanted.repo, group, snapshot, names)


def _as_model(repo: str, group: Group, snapshot: Path, names: list[str]) -> HubModel:
    mmproj = _projector(group, names)
    n_bytes = sum((snapshot / name).stat().st_size for name in group.names)
    path = snapshot / group.names[0]
    return HubModel(f"{repo}:{group.label}", path, None if mmproj is None else snapshot / mmproj, n_bytes)


def _projector(group: Group, names: list[str]) -> str | None:
    """A repository holds one model in several versions, so that its projector fits them all."""
    return projector_for(group, [name for name in names if is_projector(name)], is_alone=True)


def _instead(wanted: HubName, cache: Path) -> str:
    here = [model.id for model in cached_models(cache) if model.id.startswith(f"{wanted.repo}:")]
    return f"it has {', '.join(here)}" if here else "download it once while there is a network"


# downloads


class _Download:
    """Downloads one model into the cache. The next download continues a partial file."""

    def __init__(self, wanted: HubName, endpoint: str | None, cache: Path, progress: Progress) -> None:
        self._wanted = wanted
        self._endpoint = endpoint
        self._folder = cache / _folder(wanted.repo)
        self._cache = cache
        self._progress = progress
        self._n_done = self._n_total = 0

    def run(self) -> HubModel:
        _quiet()
        with _explained(self._wanted):
            commit, sizes = self._list()
            group = self._chosen(list(sizes))
            projector = _projector(group, list(sizes))
            names = [*group.names, *([projector] if projector else [])]
            snapshot = self._folder / "snapshots" / commit
            self._n_total = sum(sizes[name] for name in names)
            self._require_room(sum(sizes[name] for name in names if not (snapshot / name).exists()))
            log.info("downloading %s: %d files, %d MB", self._wanted, len(names), self._n_total // 10**6)
            for name in names:
                self._fetch(commit, name)
                self._n_done += sizes[name]
                self._progress(self._n_done, self._n_total)
            main = self._folder / "refs" / "main"
            main.parent.mkdir(parents=True, exist_ok=True)
            main.write_text(commit)
        return _as_model(self._wanted.repo, group, snapshot, names)

    def _list(self) -> tuple[str, dict[str, int]]:
        """The newest commit and the sizes of its files."""
        from huggingface_hub import HfApi

        try:
            info = HfApi(endpoint=self._endpoint).model_info(self._wanted.repo, files_metadata=True, timeout=ANSWER_S)
            sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
        except (ValueError, TypeError, KeyError, AttributeError):
            sizes = {}
            info = None
        if info is None or not _COMMIT.fullmatch(str(info.sha)):
            raise ModelFileError(
                f"cannot look up {self._wanted}: what answers is not the Hub; check HF_ENDPOINT and the network's proxy"
            )
        return str(info.sha), {name: size for name, size in sizes.items() if not {"", ".", ".."} & {*name.split("/")}}

    def _chosen(self, names: list[str]) -> Group:
        models = _models(names)
        if not models:
            raise ModelFileError(f"{self._wanted.repo} has no GGUF model; look for a repository with GGUF in its name")
        group = choose(models, self._wanted.quant)
        if group is None:
            there = ", ".join(sorted({model.label for model in models}))
            raise ModelFileError(f"{self._wanted.repo} has no {self._wanted.quant}; it has {there}")
        return group

    def _require_room(self, n_bytes: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        needed = n_bytes - sum(path.stat().st_size for path in self._folder.glob(f"blobs/*{_UNFINISHED}"))
        if needed > free:
            raise ModelFileError(
                f"{self._wanted} needs {needed // 10**6} MB more but the disk of the Hugging Face cache has "
                f"{free // 10**6} MB; make room, or set HF_HOME to another disk"
            )

    def _fetch(self, commit: str, name: str) -> None:
        """Bring the contents to where the cache expects them; huggingface_hub then finds them there and links them.

        It could download them itself, but would start again from zero after an interruption.
        """
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

        repo = self._wanted.repo
        endpoint = self._endpoint
        if not (self._folder / "snapshots" / commit / name).exists():
            url = hf_hub_url(repo, name, revision=commit, endpoint=endpoint)
            facts = get_hf_file_metadata(url, endpoint=endpoint)
            is_plain = facts.size is not None and facts.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
            if is_plain and _ETAG.fullmatch(facts.etag or ""):
                self._fill(url, name, self._folder / "blobs" / str(facts.etag), facts.size or 0)
        hf_hub_download(repo, name, revision=commit, endpoint=endpoint, cache_dir=self._cache)

    def _fill(self, url: str, name: str, blob: Path, n_bytes: int) -> None:
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        blob.parent.mkdir(parents=True, exist_ok=True)
        unfinished = blob.with_name(blob.name + _UNFINISHED)
        with unfinished.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may be downloading it; then it is there after the wait
            if blob.exists():
                unfinished.unlink(missing_ok=True)
                return
            n_there = file.tell()
            if n_there > n_bytes:
                n_there = file.truncate(0)
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            bar = cast(Any, _Bar(self._progress, self._n_done, self._n_total).begin)
            http_get(url, file, resume_size=n_there, headers=headers, expected_size=n_bytes, tqdm_class=bar)
            file.flush()
            os.fsync(file.fileno())
            if _SHA256.fullmatch(blob.name) and _sha256(unfinished) != blob.name:
                unfinished.unlink()
                raise ModelFileError(f"{name} of {self._wanted} arrived damaged; try again")
            unfinished.replace(blob)


class _Bar:
    """What huggingface_hub takes for a progress bar."""

    def __init__(self, progress: Progress, n_before: int, n_total: int) -> None:
        self._progress = progress
        self._n_before = self._n_done = n_before
        self._n_total = n_total

    def begin(self, *, initial: int = 0, **_: Any) -> _Bar:
        self._n_done = self._n_before + initial
        self._progress(self._n_done, self._n_total)
        return self

    def update(self, n_bytes: int) -> None:
        self._n_done += n_bytes
        self._progress(self._n_done, self._n_total)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _quiet() -> None:
    """huggingface_hub and its HTTP client write addresses into their logs."""
    import huggingface_hub.utils  # noqa: F401 - sets its own level when it is loaded

    for name, level in (
        ("huggingface_hub", logging.CRITICAL),
        ("httpx2", logging.WARNING),
        ("httpcore2", logging.WARNING),
    ):
        logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _explained(wanted: HubName) -> Iterator[None]:
    """Translates every way a download fails: the original messages contain addresses."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise ModelFileError(
            f"{wanted.repo} is gated: accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelFileError(
            f"there is no repository {wanted.repo} on the Hub, or it is private; check the name, or log in with "
            "`hf auth login`"
        ) from None
    except errors.HfHubHTTPError as error:
        raise ModelFileError(_status(wanted, error.response.status_code)) from None
    except (httpx2.HTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise ModelFileError(
            f"cannot reach the Hub for {wanted} ({type(error).__name__}); check the network, "
            "and start it again: it continues where it stopped"
        ) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelFileError(f"the disk became full while downloading {wanted}; make room and try again") from None
        reason = error.strerror or type(error).__name__
        raise ModelFileError(f"cannot download {wanted}: {reason}; try again") from None


def _status(wanted: HubName, status: int) -> str:
    if status in (401, 403):
        return f"the Hub refuses {wanted} to this token ({status}); log in again with `hf auth login`"
    if status == 429:
        return f"the Hub asks for patience with {wanted} (429); try again in a few minutes"
    return f"the Hub answered {status} for {wanted}; try again later"
