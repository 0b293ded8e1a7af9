"""What an engine learns from the folder of its model: the speed of earlier engines, unless it knows better."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everwarm.config import ContextOptions, ModelOptions
from everwarm.engine.stats import Speed
from everwarm.engine.tiers.lower_tiers import ModelFolder
from everwarm.state.store.folder_meta import FolderAbout, folder_name, read_about, write_about

PRINT, GUESS = "a fingerprint", 1e-3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / folder_name(PRINT)
    place.mkdir()
    return place


def context() -> Any:
    model = SimpleNamespace(path=Path("model.gguf"), options=ModelOptions(), description="tiny")
    return SimpleNamespace(model=model, options=ContextOptions(n_ctx=64))


def test_the_speed_of_an_earlier_engine_replaces_a_guess(folder):
    write_about(folder, FolderAbout(fingerprint=PRINT, seconds_per_token=0.5))
    new = Speed(GUESS)
    ModelFolder(folder, PRINT, context(), new)
    assert new.seconds_per_token == 0.5


def test_what_was_measured_while_the_folder_opened_stays_and_is_written(folder):
    write_about(folder, FolderAbout(fingerprint=PRINT, seconds_per_token=0.5))
    new = Speed(GUESS)
    new.learn(100, 25.0)
    ModelFolder(folder, PRINT, context(), new).renew()
    about = read_about(folder)
    assert new.seconds_per_token == 0.25 and about is not None and about.seconds_per_token == 0.25


def test_a_guess_is_not_written(folder):
    ModelFolder(folder, PRINT, context(), Speed(GUESS)).renew()
    about = read_about(folder)
    assert about is not None and about.seconds_per_token is None
