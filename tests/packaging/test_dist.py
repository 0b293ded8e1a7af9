"""What `make dist` makes: a wheel and a source archive with everything that is needed to run, and nothing else.

In a campaign the wheel is also installed into a clean environment of every interpreter that is found, and asked something.
"""

import email.message
import email.parser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import everwarm
from support.campaign import CAMPAIGN
from support.interpreters import OLDEST, supported_interpreters

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "everwarm"
MODEL = "everwarm/demo/everwarm-tiny.gguf"


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing of an earlier build is taken for source."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def files_of_the_package() -> set[str]:
    """What git would have: the sources, and the data that the package reads when it runs."""
    kept = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"everwarm/{path.relative_to(SOURCE).as_posix()}" for path in kept}


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert packed == files_of_the_package()
        assert archive.read(MODEL) == (SOURCE / "demo" / "everwarm-tiny.gguf").read_bytes()


def test_the_wheel_fits_every_platform_and_names_its_command(wheel):
    assert wheel.name == f"everwarm-{everwarm.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "everwarm = everwarm.cli.app:main" in archive.read(name).decode()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_the_source_archive_has_what_a_wheel_is_built_from(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    wanted = {f"src/{name}" for name in files_of_the_package()} | {"pyproject.toml", "README.md", "LICENSE"}
    assert wanted <= packed


def test_the_versions_of_python_are_those_that_the_workflows_run(metadata):
    declared = re.findall(r":: (3\.\d+)$", "\n".join(metadata.get_all("Classifier") or ()), re.MULTILINE)
    assert metadata["Requires-Python"] == f">=3.{OLDEST}" == f">={declared[0]}"
    for name in ("test.yml", "release.yml"):
        listed = re.search(r"python-version: \[(.*)\]", (ROOT / ".github" / "workflows" / name).read_text())
        assert listed is not None and re.findall(r"3\.\d+", listed[1]) == declared, name


def test_every_dependency_is_in_the_lock(metadata):
    locked = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    needed = [re.match(r"[\w.-]+", text) for text in metadata.get_all("Requires-Dist") or () if "extra ==" not in text]
    assert len(needed) > 10
    assert [found[0] for found in needed if found is not None and found[0] not in locked] == []


def test_every_extra_is_documented(metadata):
    page = (ROOT / "docs" / "install.md").read_text()
    assert [name for name in metadata.get_all("Provides-Extra") or () if f"`{name}`" not in page] == []


@pytest.mark.skipif(not CAMPAIGN, reason="downloads all dependencies for each interpreter; EVERWARM_CAMPAIGN=1")
@pytest.mark.parametrize("python", supported_interpreters() if CAMPAIGN else ["python3"])
def test_the_wheel_answers_in_a_clean_environment(python, wheel, tmp_path):
    environment = tmp_path / "venv"
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    install = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, check=True)
    command = str(environment / "bin" / "everwarm")
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert version.stdout.strip() == everwarm.__version__
    asked = subprocess.run(
        [command, "chat", "--demo", "--temperature", "0"],
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert asked.returncode == 0 and "Paris" in asked.stdout and "reused 0, read" in asked.stdout, asked
