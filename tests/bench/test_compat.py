"""llama-server's own tests: a few of them run here, and those that Everwarm does not pass are named with a reason."""

from pathlib import Path

import pytest
from bench.compat.suite import FOLDER, explained, run

PAGE = Path(__file__).parents[2] / "docs" / "dialects" / "llama-server.md"
FILES = ("test_tokenize", "test_ignore_eos", "test_infill")
NEED_THE_REAL_MODEL = {"test_tokenize::test_tokenize_with_bos"}  # they fail on llama-server, too, with the stand-ins


@pytest.mark.skipif(
    not (FOLDER / ".fetched").exists(),
    reason="llama-server's tests are not here: `make build/compat/.fetched` gets them",
)
def test_a_few_of_llama_servers_own_tests_pass() -> None:
    found = run("everwarm", [f"unit/{file}.py" for file in FILES], [], n_workers=0, record="short")
    failed = {name for name, outcome in found.items() if outcome == "failed"}
    assert sum(outcome == "passed" for outcome in found.values()) >= 11, found
    assert failed <= explained().keys() | NEED_THE_REAL_MODEL


def test_the_page_names_every_test_that_does_not_pass() -> None:
    text = PAGE.read_text()
    for name, why in explained().items():
        assert f"`{name}`" in text, f"{name} is not on the page"
        assert why in text, f"the reason of {name} is not on the page"
