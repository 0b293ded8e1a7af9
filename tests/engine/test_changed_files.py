"""A file of the model is written to while it is served: nothing wrong is kept, and nothing right is lost."""

from __future__ import annotations

import os
import queue
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from everwarm.config import ModelOptions
from everwarm.engine.core import Core
from everwarm.engine.process import messages as m
from everwarm.engine.slotfile.slot_commands import SlotCommands
from everwarm.errors import ModelChanged
from everwarm.llama.system.model_files import FileWatch
from everwarm.state.store.arena_file import memory_file
from support.drive import AtOnce, check, drain, open_core, run, submit, text
from support.image_cores import ask, make_image, seeing_core
from support.kept_cores import kept_core, put_away, sharing
from support.lora import WIDTH, write_lora
from support.models import tiny_model, tiny_vision

PROMPT, NEXT = text(1, 300), text(2, 20)
OLD, NEW = ({"arch": "llama", "seed": seed} for seed in (0, 1))


@pytest.fixture
def live(tmp_path: Path) -> Path:
    path = tmp_path / "live.gguf"
    shutil.copyfile(tiny_model(**OLD), path)
    return path


@pytest.fixture
def blind_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no step looked at the files: then they must be looked at before anything leaves the process."""
    monkeypatch.setattr(Core, "_may_compute", lambda _: True)


def overwrite(path: Path, spec: dict) -> None:
    data = tiny_model(**spec).read_bytes()
    assert len(data) == path.stat().st_size
    with path.open("r+b") as file:
        file.write(data)


def cold(spec: dict, prompt: list[int]) -> tuple[int, ...]:
    with open_core(path=tiny_model(**spec)) as core:
        return run(core, prompt, max_tokens=16).tokens


def refuses(core: Core, prompt: list[int]) -> None:
    submit(core, prompt)
    with pytest.raises(ModelChanged, match=r"live\.gguf was changed while it was in use"):
        drain(core)


def objects(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "states").rglob("*.ew")}


def test_overwritten_and_put_back_gives_what_a_cold_reading_gives(tmp_path: Path, live: Path) -> None:
    prompt = [*PROMPT, *NEXT]
    with kept_core(tmp_path, path=live) as core:
        run(core, PROMPT[:200], stable=200)
        put_away(core)
        before = objects(tmp_path)
        overwrite(live, NEW)
        refuses(core, PROMPT)
        core.put_away()
        assert objects(tmp_path) == before
    with kept_core(tmp_path, path=live) as core:
        assert (found := run(core, prompt, max_tokens=16, stable=300)).n_cached == 0
        assert found.tokens == cold(NEW, prompt)
        put_away(core)
    overwrite(live, OLD)
    with kept_core(tmp_path, path=live) as core:
        found = run(core, prompt, max_tokens=16)
    assert found.n_cached == 200 and found.tokens == cold(OLD, prompt)


def test_without_a_watch_the_new_weights_would_be_kept_as_the_old_ones(tmp_path, live, monkeypatch) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(FileWatch, "_look", lambda self: self._seen)
    prompt = [*PROMPT, *NEXT]
    with kept_core(tmp_path, path=live) as core:
        overwrite(live, NEW)
        run(core, PROMPT, stable=300)
        put_away(core)
    overwrite(live, OLD)
    monkeypatch.undo()
    with kept_core(tmp_path, path=tiny_model(**OLD)) as core:
        found = run(core, prompt, max_tokens=16)
    assert found.n_cached == 300 and found.tokens != cold(OLD, prompt)


@contextmanager
def during_step(core: Core, n: int, act):
    """Something happens in the middle of the n-th decode call."""
    library, calls = core.context._lib, [0]

    class Meddling:
        def __getattr__(self, name: str) -> object:
            return getattr(library, name)

        def decode(self, *arguments: object) -> int:
            calls[0] += 1
            if calls[0] == n:
                act()
            return int(library.decode(*arguments))

    core.context._lib = Meddling()
    yield
    core.context._lib = library
    assert calls[0] >= n, "this test could not fail"


def test_overwritten_in_the_middle_of_a_prompt_nothing_of_that_step_is_seen(tmp_path: Path, live: Path) -> None:
    with kept_core(tmp_path, path=live, n_ubatch=64, n_batch=64) as core:
        with during_step(core, 3, lambda: overwrite(live, NEW)):
            refuses(core, PROMPT)
        core.put_away()
        assert objects(tmp_path) == set() and all(slot.n_fed == 0 for slot in core.slots)


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_overwritten_and_put_back_within_a_step_only_that_step_is_done_again(tmp_path, arch: str) -> None:
    live, specs = tmp_path / "live.gguf", [{"arch": arch, "seed": seed} for seed in (0, 1)]
    shutil.copyfile(tiny_model(**specs[0]), live)
    with kept_core(tmp_path, path=live, n_ubatch=64, n_batch=64) as core:
        right = run(core, PROMPT, max_tokens=16, use_cache=False).tokens

        def there_and_back() -> None:
            overwrite(live, specs[1])
            overwrite(live, specs[0])

        with during_step(core, 3, there_and_back):
            found = run(core, PROMPT, max_tokens=16, use_cache=False)
        check(core)
        assert found.tokens == right and core.counts.n_decode_failures == 1 and core.counts.n_quarantined == 0
        put_away(core)
        assert objects(tmp_path), "and from then on everything is kept again"


@pytest.mark.parametrize("how", ["touch", "replace"])
def test_only_touched_neither_disk_nor_ram_is_lost(tmp_path: Path, live: Path, how: str) -> None:
    memory = memory_file()
    try:
        with kept_core(tmp_path, path=live, memory=memory) as core:
            run(core, PROMPT, stable=300)
            if how == "touch":
                os.utime(live)
            else:
                shutil.copyfile(tiny_model(**NEW), tmp_path / "new")
                (tmp_path / "new").replace(live)
            assert run(core, [*PROMPT, *NEXT]).n_cached == 300
            put_away(core)
            assert objects(tmp_path)
        with kept_core(tmp_path, path=live, memory=memory) as core:
            found = run(core, [*PROMPT, *NEXT], max_tokens=16)
            assert (core.cache.ram.n_adopted > 0, found.n_cached > 0) == (
                (True, True) if how == "touch" else (False, False)
            )
        assert found.tokens == cold(OLD if how == "touch" else NEW, [*PROMPT, *NEXT])
    finally:
        os.close(memory)


def test_ram_that_outlives_the_engine_is_of_the_weights_that_are_there(tmp_path: Path, live: Path) -> None:
    memory = memory_file()
    try:
        for spec in (OLD, NEW, OLD):
            overwrite(live, spec)
            with open_core(path=live, memory=memory) as core:
                found = run(core, [*PROMPT, *NEXT], max_tokens=16)
                assert found.n_cached == 0 and found.tokens == cold(spec, [*PROMPT, *NEXT])
                core.put_away()
                assert core.cache.ram.stats()["ram_n_waiting"] == 0 and core.cache.ram.arena.n_used > 0
    finally:
        os.close(memory)


def test_nothing_is_left_in_ram_by_an_engine_whose_file_was_overwritten(live: Path, blind_steps: None) -> None:
    """Not even under the old name, for somebody who puts the file back with all its times."""
    memory = memory_file()
    try:
        with open_core(path=live, memory=memory) as core:
            overwrite(live, NEW)
            run(core, PROMPT)
            core.put_away()
            assert not any(
                core.cache.ram.arena.is_kept(n.segment.blob) for n in core.cache.tree.nodes() if n.segment is not None
            )
            assert any(node.segment is not None for node in core.cache.tree.nodes()), "this test could not fail"
    finally:
        os.close(memory)


def test_nothing_is_shared_by_an_engine_whose_file_was_overwritten(live: Path, blind_steps: None) -> None:
    url = "memory://changed-files"
    with sharing(url, path=live) as core:
        overwrite(live, NEW)
        run(core, PROMPT)
        core.put_away()
        assert core.cache.tiers.remote.counts.n_bytes_written == 0
    with sharing(url, path=live) as core:
        run(core, PROMPT, stable=300)
        core.put_away()
        assert core.cache.tiers.remote.counts.n_bytes_written > 0, "this test could not fail"


def test_a_slot_is_not_saved_by_an_engine_whose_file_was_overwritten(tmp_path: Path, live: Path) -> None:
    output: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    with open_core(path=live) as core:
        assert core.model.fingerprint
        run(core, PROMPT)
        overwrite(live, NEW)
        SlotCommands(core, output.put).handle(m.SlotAction(7, 0, "save", str(tmp_path / "a.bin")), AtOnce(core))
        answer = output.get(timeout=60)
    assert isinstance(answer, m.Failed) and answer.status == 503 and "was changed" in answer.message
    assert not (tmp_path / "a.bin").exists() and not list(tmp_path.glob("a.bin*"))


def test_a_projector_that_is_overwritten_ends_the_engine_too(tmp_path: Path) -> None:
    _, mmproj = tiny_vision("qwen35")
    live = tmp_path / "mmproj.gguf"
    shutil.copyfile(mmproj, live)
    with seeing_core(mmproj=live) as core:
        ask(core, [text(3, 20), make_image(1), text(4, 20)])
        assert drain(core)
        data = bytearray(live.read_bytes())
        data[-4:] = b"\0\0\0\0" if data[-4:] != b"\0\0\0\0" else b"\1\1\1\1"
        with live.open("r+b") as file:
            file.write(data)
        ask(core, [text(3, 20), make_image(2), text(4, 20)])
        with pytest.raises(ModelChanged, match=r"mmproj\.gguf"):
            drain(core)


def test_an_adapter_is_watched_like_the_model(tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora.gguf")
    with open_core(width=WIDTH, model=ModelOptions(lora=((str(lora), 1.0),))) as core:
        run(core, PROMPT[:20])
        assert lora in core.model.files.paths and core.model.fingerprint
        with lora.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\1\2\3\4")
        submit(core, PROMPT)
        with pytest.raises(ModelChanged, match=r"lora\.gguf"):
            drain(core)
