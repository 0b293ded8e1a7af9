"""The container's files: what is copied is sent to the builder, and what is installed is what was tested."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "deploy/requirements.lock"
FILES = ["deploy/Dockerfile", "deploy/ray/Dockerfile"]


def pinned(path: Path) -> dict[str, str]:
    """Versions by name, of what is installed on Linux."""
    found = re.findall(r"^([\w.-]+)==([^\s;\\]+)([^\\\n]*)", path.read_text(), re.MULTILINE)
    return {name: version for name, version, condition in found if "win32'" not in condition or "!=" in condition}


def test_an_image_has_the_versions_that_are_tested_and_no_tools_of_development():
    image, tested = pinned(LOCK), pinned(ROOT / "requirements.lock")
    assert image.items() < tested.items()
    assert {"xllamacpp", "starlette", "numpy", "obstore", "setuptools"} <= image.keys()
    assert not {"pytest", "mypy", "playwright", "openai"} & image.keys()


@pytest.mark.parametrize("name", FILES)
def test_the_builder_gets_every_file_that_is_copied(name):
    rules = (ROOT / ".dockerignore").read_text().split()
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    lines = [line.split()[1:-1] for line in (ROOT / name).read_text().splitlines() if line.startswith("COPY")]
    copied = {source for line in lines for source in line}
    assert rules[0] == "*" and len(copied) > 3
    assert copied <= sent and all((ROOT / source).exists() for source in copied)
