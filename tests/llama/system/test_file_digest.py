"""The digest of a model file is the file's, and is remembered only as long as the file is the same."""

import json
import os
from pathlib import Path

import blake3
import pytest

from everwarm.llama.system.model_files import file_digest

CONTENT = bytes(range(256)) * 400


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "everwarm" / "digests.json"


def lie_in(memory: Path, lie: object) -> None:
    """Make the memory say something else, to see whether it is believed."""
    known = json.loads(memory.read_text())
    memory.write_text(json.dumps(dict.fromkeys(known, lie)))


RIGHT = blake3.blake3(CONTENT).hexdigest()
LIE = "f" * 64


def test_the_digest_is_blake3_of_the_whole_file(model: Path, memory: Path) -> None:
    assert file_digest(model, memory) == RIGHT


def test_an_unchanged_file_is_not_read_again(model: Path, memory: Path) -> None:
    file_digest(model, memory)
    lie_in(memory, LIE)
    assert file_digest(model, memory) == LIE


def test_another_time_means_reading_again(model: Path, memory: Path) -> None:
    file_digest(model, memory)
    lie_in(memory, LIE)
    stat = model.stat()
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert file_digest(model, memory) == RIGHT


def test_another_inode_means_reading_again(model: Path, memory: Path, tmp_path: Path) -> None:
    file_digest(model, memory)
    lie_in(memory, LIE)
    stat, replacement = model.stat(), tmp_path / "new"
    replacement.write_bytes(CONTENT[::-1])
    os.utime(replacement, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    replacement.replace(model)
    assert file_digest(model, memory) == blake3.blake3(CONTENT[::-1]).hexdigest()


def test_another_size_means_reading_again(model: Path, memory: Path) -> None:
    file_digest(model, memory)
    lie_in(memory, LIE)
    stat = model.stat()
    with model.open("ab") as file:
        file.write(b"!")
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_digest(model, memory) == blake3.blake3(CONTENT + b"!").hexdigest()


def test_another_path_means_reading_again(model: Path, memory: Path, tmp_path: Path) -> None:
    file_digest(model, memory)
    lie_in(memory, LIE)
    other = tmp_path / "other.gguf"
    os.link(model, other)
    assert file_digest(other, memory) == RIGHT


@pytest.mark.parametrize("damage", ["", "{", "null", "[1, 2]", '"text"', "\x00\x01", '{"a": {"b": 1}}'])
def test_a_damaged_memory_is_forgotten_and_written_anew(damage: str, model: Path, memory: Path) -> None:
    file_digest(model, memory)
    memory.write_text(damage)
    assert file_digest(model, memory) == RIGHT
    lie_in(memory, LIE)
    assert file_digest(model, memory) == LIE, "the memory was not written anew"


def test_bytes_that_are_no_text_are_forgotten_too(model: Path, memory: Path) -> None:
    file_digest(model, memory)
    memory.write_bytes(b"\xff\xfe\xfd")
    assert file_digest(model, memory) == RIGHT


@pytest.mark.parametrize("lie", [None, 7, [], "", "abc", LIE + "f", {"x": LIE}])
def test_a_remembered_value_that_is_no_digest_is_not_believed(lie: object, model: Path, memory: Path) -> None:
    file_digest(model, memory)
    lie_in(memory, lie)
    assert file_digest(model, memory) == RIGHT


def test_a_memory_that_cannot_be_written_costs_only_time(model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    for _ in range(2):
        assert file_digest(model, blocked / "digests.json") == RIGHT


def test_old_entries_give_way_to_new_ones(model: Path, memory: Path) -> None:
    memory.parent.mkdir(parents=True)
    memory.write_text(json.dumps({f"old {i}": LIE for i in range(1000)}))
    assert file_digest(model, memory) == RIGHT
    kept = list(json.loads(memory.read_text()))
    assert len(kept) == 256
    assert kept[0] == "old 745"
    assert "model.gguf" in kept[-1]


def test_nothing_is_left_lying_beside_the_memory(model: Path, memory: Path) -> None:
    file_digest(model, memory)
    assert [path.name for path in memory.parent.iterdir()] == ["digests.json"]


def test_a_symbolic_link_is_the_file_it_points_to(model: Path, memory: Path, tmp_path: Path) -> None:
    file_digest(model, memory)
    lie_in(memory, LIE)
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert file_digest(link, memory) == LIE


def test_the_memory_lies_in_the_users_cache(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    file_digest(model)
    assert (tmp_path / "xdg" / "everwarm" / "digests.json").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file_digest(model)
    assert (tmp_path / "home" / ".cache" / "everwarm" / "digests.json").exists()
