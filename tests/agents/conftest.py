"""What the tests with real agents share: a folder with a note, and a server whose model follows a script."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from support.openai_client import client, server
from support.server import Server, serving

__all__ = ["client", "scripted", "server", "work"]

Scripted = Callable[..., AbstractContextManager[Server]]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "note.txt").write_text("lantern is the word in this file\n")
    return folder


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """``scripted(script, n_ctx, *flags)``: a server that answers as the script says."""

    @contextmanager
    def serve(script: list[dict[str, str]], n_ctx: int, *flags: str) -> Iterator[Server]:
        (tmp_path / "script.json").write_text(json.dumps(script))
        monkeypatch.setenv("EVERWARM_SCRIPT", str(tmp_path / "script.json"))
        monkeypatch.setenv("EVERWARM_TEST_HOOK", "support.scripted_hook:install")
        paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        with serving(*flags, n_ctx=n_ctx) as server:
            yield server

    return serve
