"""Files that somebody touches, overwrites, replaces or cuts short while they are in use."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from everwarm.config import ContextOptions
from everwarm.errors import ModelChanged, ModelFileError, WeightsTouched
from everwarm.llama.batch import Feed
from everwarm.llama.context import Context
from everwarm.llama.lib import Lib
from everwarm.llama.model import Model
from everwarm.llama.system import model_files
from everwarm.llama.system.model_files import FileWatch, file_digest, file_identity, open_file_digest
from support.models import tiny_model

CONTENT, OTHER = b"a" * 100_000, b"b" * 100_000


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"]
    for path in found:
        path.write_bytes(CONTENT)
    return found


@pytest.fixture
def heard() -> list[str]:
    """What was said when the files were touched and are the same."""
    return []


@pytest.fixture
def files(paths: list[Path], heard: list[str]) -> Iterator[FileWatch]:
    with FileWatch(paths, lambda: heard.append("the same")) as watch:
        assert [watch.digest(path) for path in paths] == [file_digest(path) for path in paths]
        yield watch


def overwrite(path: Path, data: bytes, *, keep_time: bool = False) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    if keep_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_files_that_nobody_touches_are_right(files: FileWatch) -> None:
    before = files.before_use()
    assert files.look() == before and files.may_be_used and files.is_right() and not files.is_changed


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("keep_time", [False, True])
def test_a_part_that_is_overwritten_is_changed_for_good(files, paths, part: int, keep_time: bool) -> None:
    before = files.before_use()
    overwrite(paths[part], OTHER, keep_time=keep_time)
    assert files.look() != before
    assert not files.is_right() and files.is_changed and not files.may_be_used
    overwrite(paths[part], CONTENT, keep_time=keep_time)
    assert not files.is_right() and paths[part].name in files.reason


def test_a_byte_in_the_middle_is_enough(files: FileWatch, paths: list[Path]) -> None:
    with paths[1].open("r+b") as file:
        file.seek(50_000)
        file.write(b"!")
    assert not files.is_right()


def test_overwritten_and_put_back_between_two_looks_spoils_what_ran_meanwhile_only(files, paths) -> None:
    before = files.before_use()
    overwrite(paths[0], OTHER)
    overwrite(paths[0], CONTENT)
    assert files.look() != before, "what was computed between these looks is not used"
    assert files.is_right() and not files.is_changed, "and from here on it is what it was"
    assert files.before_use() == files.look()


@pytest.mark.parametrize("how", ["touch", "chmod", "link", "replace", "remove"])
def test_what_leaves_the_bytes_alone_changes_nothing(files, paths, tmp_path, heard, how: str) -> None:
    digest, before = files.digest(paths[0]), files.before_use()
    match how:
        case "touch":
            os.utime(paths[0])
        case "chmod":
            paths[0].chmod(0o600)
        case "link":
            os.link(paths[0], tmp_path / "another name")
        case "replace":
            (tmp_path / "new").write_bytes(OTHER)
            (tmp_path / "new").replace(paths[0])
        case "remove":
            paths[0].unlink()
    assert files.look() != before, "this test could not fail"
    assert files.is_right() and heard == ["the same"]
    assert files.digest(paths[0]) == digest, "it is the file that was opened, whatever its name leads to"
    if how in ("touch", "chmod", "link"):
        assert files.identity(paths[0]) == file_identity(paths[0])
    if how == "replace":
        assert files.identity(paths[0]) != file_identity(paths[0]) and file_digest(paths[0]) != digest


@pytest.mark.parametrize("size", [0, 50_000, 100_001])
def test_another_size_needs_no_reading(files, paths, monkeypatch, size: int) -> None:
    monkeypatch.setattr(model_files, "read_digest", None)
    os.truncate(paths[1], size)
    files.look()
    assert files.is_changed and not files.is_right() and "another size" in files.reason


class Slow:
    """Reading that waits to be let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.go_on, self.n_reads = threading.Event(), threading.Event(), 0
        self._read = model_files.read_digest
        monkeypatch.setattr(model_files, "read_digest", self)

    def __call__(self, fd: int) -> str:
        self.n_reads += 1
        self.has_begun.set()
        assert self.go_on.wait(30)
        return self._read(fd)


def test_until_it_is_known_a_written_file_is_not_used_and_a_renamed_one_is(files, paths, monkeypatch) -> None:
    slow = Slow(monkeypatch)
    os.link(paths[0], paths[0].with_name("another name"))
    files.look()
    assert files.may_be_used and not files.is_changed
    os.utime(paths[0])
    files.look()
    assert not files.may_be_used and not files.is_changed
    slow.go_on.set()
    assert files.is_right() and files.may_be_used


def test_used_in_doubt_and_touched_again_is_changed(files, paths, monkeypatch) -> None:
    """What ran after the first time may have seen anything: the second time hides what the first had done."""
    slow = Slow(monkeypatch)
    overwrite(paths[0], OTHER, keep_time=True)
    files.look()
    assert files.may_be_used
    files.before_use()
    overwrite(paths[0], CONTENT, keep_time=True)
    files.look()
    assert files.is_changed
    slow.go_on.set()
    assert not files.is_right()


def test_touched_while_it_is_read_again_it_is_read_once_more(files, paths, monkeypatch) -> None:
    slow = Slow(monkeypatch)
    os.utime(paths[0])
    files.look()
    assert slow.has_begun.wait(30)
    os.utime(paths[1])
    slow.go_on.set()
    assert files.is_right() and slow.n_reads == 4


def test_without_a_digest_to_compare_with_any_touch_is_a_change(paths: list[Path]) -> None:
    with FileWatch(paths) as watch:
        os.utime(paths[0])
        assert not watch.is_right() and "not known" in watch.reason
    for path in paths:
        file_digest(path)
    with FileWatch(paths) as watch:  # its digest is remembered from an earlier process
        os.utime(paths[0])
        assert watch.is_right()


def test_a_file_that_changed_before_its_digest_was_known_has_none(paths: list[Path]) -> None:
    with FileWatch(paths) as watch:
        overwrite(paths[0], OTHER)
        with pytest.raises(ModelFileError, match="was changed while it was open"):
            watch.digest(paths[0])


def test_what_is_digested_while_it_changes_is_not_remembered(paths, tmp_path, monkeypatch) -> None:
    read = model_files.read_digest

    def changing(fd: int) -> str:
        overwrite(paths[0], OTHER)
        return read(fd)

    key = file_identity(paths[0])
    monkeypatch.setattr(model_files, "read_digest", changing)
    fd = os.open(paths[0], os.O_RDONLY)
    open_file_digest(fd, paths[0].resolve())
    os.close(fd)
    assert model_files.remembered(key) is None and model_files.remembered(file_identity(paths[0])) is None


def test_a_file_that_was_written_just_now_is_waited_for(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one tick of the file system's clock another write would leave no trace."""
    slept: list[float] = []
    monkeypatch.setattr(model_files.time, "sleep", slept.append)
    now = paths[0].stat().st_ctime_ns
    fd = os.open(paths[0], os.O_RDONLY)
    for later_ns in (0, 10_000_000, 2_000_000_000, -5_000_000):
        monkeypatch.setattr(model_files.time, "time_ns", lambda ns=now + later_ns: ns)
        model_files.wait_settled(fd)
    os.close(fd)
    assert len(slept) == 2 and slept[0] > slept[1] > 0


@pytest.mark.parametrize("is_put_back", [False, True])
def test_a_file_that_changes_while_it_is_opened_is_opened_again(files, paths, is_put_back: bool) -> None:
    """Parts of it may have been copied meanwhile: that it is right afterwards proves nothing about those."""
    files.require_same_names()
    overwrite(paths[1], OTHER)
    if is_put_back:
        overwrite(paths[1], CONTENT)
    with pytest.raises(ModelChanged, match="was changed while it was opened"):
        files.require_same_names()


def test_names_that_lead_elsewhere_after_opening_are_noticed(paths: list[Path], tmp_path: Path) -> None:
    with FileWatch(paths) as watch:
        watch.require_same_names()
        (tmp_path / "new").write_bytes(CONTENT)
        (tmp_path / "new").replace(paths[0])
        with pytest.raises(ModelChanged, match="was changed while it was opened"):
            watch.require_same_names()
        paths[0].unlink()
        with pytest.raises(ModelChanged, match="taken away"):
            watch.require_same_names()


def test_whoever_still_writes_is_waited_for_and_not_for_ever(files, paths, monkeypatch) -> None:
    clock = [0.0]
    n_writes = [0]

    def tick(seconds: float) -> None:
        clock[0] += seconds
        if n_writes[0] < 20:
            n_writes[0] += 1
            paths[0].write_bytes(b"x" * n_writes[0])

    monkeypatch.setattr(model_files, "time", SimpleNamespace(sleep=tick, monotonic=lambda: clock[0]))
    files.wait_still(60)
    assert n_writes[0] == 20 and clock[0] == pytest.approx(20 * model_files.STILL_STEP_S + model_files.STILL_S, abs=0.2)
    n_writes[0] = -10_000
    files.wait_still(3)
    assert clock[0] < 6


def test_closed_it_is_asked_nothing_more(paths: list[Path]) -> None:
    watch = FileWatch(paths)
    before = watch.look()
    watch.close()
    overwrite(paths[0], OTHER)
    assert watch.look() == before
    with pytest.raises(FileNotFoundError):
        FileWatch([*paths, paths[0].with_name("none")])


# with libllama


class Touching:
    """libllama, and somebody who writes to the model's file during every step."""

    def __init__(self, lib: Lib, path: Path) -> None:
        self._lib, self._path = lib, path

    def __getattr__(self, name: str) -> object:
        return getattr(self._lib, name)

    def decode(self, *arguments: object) -> int:
        os.utime(self._path)
        return int(self._lib.decode(*arguments))


def test_a_step_during_which_the_weights_were_touched_gives_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_model("qwen35"), path)
    tokens = np.arange(8, dtype=np.int32)
    with Model(path) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1, n_threads_batch=1)) as context:
        assert model.fingerprint
        context.decode([Feed(0, tokens, context.end(0), wants_logits=True)])
        right = context.logits(0).copy()
        context.drop(0)
        context._lib = Touching(model.lib, path)
        with pytest.raises(WeightsTouched):
            context.decode([Feed(0, tokens, context.end(0), wants_logits=True)])
        assert context.end(0).n_tokens == 0 and context.cells.used == 0
        context._lib = model.lib
        assert model.files.is_right()
        context.decode([Feed(0, tokens, context.end(0), wants_logits=True)])
        assert np.array_equal(context.logits(0), right)


def test_new_weights_are_seen_at_once_by_whoever_has_the_old_ones_mapped(tmp_path: Path) -> None:
    """The negative control of it all: without a watch the numbers would simply be others'."""
    path, tokens = tmp_path / "model.gguf", np.arange(8, dtype=np.int32)
    shutil.copyfile(tiny_model("llama"), path)

    def logits(context: Context) -> np.ndarray:
        context.drop(0)
        context.decode([Feed(0, tokens, context.end(0), wants_logits=True)])
        return context.logits(0).copy()

    with Model(path) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1, n_threads_batch=1)) as context:
        before = logits(context)
        overwrite(path, tiny_model("llama", seed=1).read_bytes())
        assert not model.files.is_right()
        assert not np.array_equal(logits(context), before)
