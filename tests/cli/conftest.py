"""The command line without a process of its own."""

import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from everwarm.cli import app

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def here(monkeypatch, capsys) -> Run:
    """The command line in this very process: for what needs no server and no environment."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["everwarm", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        message = capsys.readouterr()
        return CompletedProcess(arguments, int(ended.value.code or 0), message.out, message.err)

    return run
