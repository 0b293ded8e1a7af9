"""The documentation is true as far as a program can tell: written from the code, whole, and without dead links."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everwarm.cli.app import app
from everwarm.cli.flags.llama_flags import declared
from everwarm.cli.flags.serve_options import ServeOptions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
MACHINE_PATH = re.compile(r"(?<![\w.~])/(root|home|work|tmp|opt|mnt|Users)/\w")
REPO_PATH = re.compile(r"`((?:src|tests|bench|docs|deploy|tools)/[\w./-]*)`")
TEST_NAME = re.compile(r"`(test_\w+\.py)`")
MADE_UP = "cohere"  # the new dialect of docs/contributing/first-change.md
COMMAND = re.compile(r"^everwarm (\w+)(.*)$", re.MULTILINE)


def pages() -> list[Path]:
    return sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """As MkDocs and GitHub make them from headings."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def dead_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = page if not file else page.parent / file
        if not found.exists() or (anchor and anchor not in anchors(found.read_text())):
            yield target


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert list(dead_links(page)) == []


def test_dead_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Over there\n\n```\n# not a heading\n```\n")
    good = "[b](b.md) [t](b.md#over-there) [here](#home) [far](https://example.com/x.md)\n\n```\n[code](none.md)\n```\n"
    page = tmp_path / "a.md"
    page.write_text(f"# Home\n\n{good}")
    assert list(dead_links(page)) == []
    page.write_text(f"# Home\n\n{good} [x](c.md) [y](b.md#not-a-heading) [z](#gone)\n")
    assert list(dead_links(page)) == ["c.md", "b.md#not-a-heading", "#gone"]


def missing_files(text: str, root: Path) -> list[str]:
    """Files of the project that a text names in backticks, by their path or as ``test_x.py``, and that are not there."""
    paths = [path for path in REPO_PATH.findall(text) if not (root / path).exists()]
    tests = {path.name for path in (root / "tests").rglob("test_*.py")}
    return paths + [name for name in TEST_NAME.findall(text) if name not in tests]


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    if page.name != "log.md":  # which tells of the past
        assert [path for path in missing_files(page.read_text(), ROOT) if MADE_UP not in path] == []


def test_files_that_are_not_there_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").touch()
    text = "`tests/test_a.py`, `test_a.py`, `tests/`, `src/gone.py`, `test_gone.py`, tests/not_quoted.py"
    assert missing_files(text, tmp_path) == ["src/gone.py", "test_gone.py"]


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_no_page_names_a_machine_path(page: Path) -> None:
    assert not MACHINE_PATH.search(page.read_text())


def test_machine_paths_are_noticed() -> None:
    assert MACHINE_PATH.search("in /mnt/models") and MACHINE_PATH.search("`/tmp/x`")
    assert not MACHINE_PATH.search("/var/cache, ~/.cache, a/home/b and https://example.com/work")


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"\S+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} == listed, "mkdocs.yml lists other pages"


def test_every_flag_of_serve_is_documented() -> None:
    written = (DOCS / "reference" / "flags.md").read_text()
    flags = [name for name in declared(ServeOptions) if name.startswith("--")]
    assert len(flags) > 30
    assert [name for name in flags if f"`{name}`" not in written] == []


def unknown_flags(text: str) -> list[str]:
    """Flags in command lines that the command does not have."""
    found = []
    for command, rest in COMMAND.findall(text):
        part = app[command]
        words = rest.split("#")[0].split()
        if command in ("backend", "cache") and words:
            part, words = part[words[0]], words[1:]
        known = {"--help"} | {name for argument in part.assemble_argument_collection() for name in argument.names}
        found += [flag for flag in re.findall(r"--[\w-]+", " ".join(words)) if flag not in known]
    return found


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_command_lines_use_flags_that_exist(page: Path) -> None:
    assert unknown_flags(page.read_text()) == []


def test_flags_that_do_not_exist_are_noticed() -> None:
    assert unknown_flags("everwarm serve m.gguf --ctx-size 1 --ctx-sise 2   # --not-this\n") == ["--ctx-sise"]
    assert unknown_flags("everwarm cache prune --keep 1GiB --hold 2\n") == ["--hold"]


def generate(docs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(docs / "generate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_written_from_the_code_is_up_to_date() -> None:
    checked = generate(DOCS, "--check")
    assert (checked.returncode, checked.stderr) == (0, "")


def test_pages_that_fall_behind_are_named_and_written_anew(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs)
    page = docs / "reference" / "flags.md"
    page.write_text(page.read_text().replace("16384", "4096"))
    checked = generate(docs, "--check")
    assert checked.returncode == 1 and "docs/reference/flags.md is out of date" in checked.stderr
    assert generate(docs).stdout == "docs/reference/flags.md\n"
    assert page.read_text() == (DOCS / "reference" / "flags.md").read_text()
