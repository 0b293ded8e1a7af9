"""What `everwarm cache verify` says of a state that is not clean."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from everwarm.cli.cache_output import print_report


@pytest.mark.parametrize(
    ("spread", "message"), [(None, "x\n"), (0.0, "x: the same logits\n"), (0.5, "differ by up to 0.5\n")]
)
def test_equal_logits_are_called_equal(capsys, spread, message):
    finding = SimpleNamespace(verdict="close", name="x", spread=spread, why="")
    folder = SimpleNamespace(objects=[1], broken=[], title="a model", path=Path("folder"))
    quiet = {"broken": [], "not_replayed": "", "n_left": 0, "not_put_aside": "", "wrong": []}
    print_report(Console(width=200), SimpleNamespace(folder=folder, findings=[finding], **quiet))  # type: ignore[arg-type]
    assert capsys.readouterr().out.endswith(message)
