"""The source of libllama: an archive that is pinned by its SHA-256, fetched by pip from where this machine's pip gets its
packages, and unpacked.

``python -m everwarm.backend.source_archive FOLDER`` fetches it; it needs the standard library alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from everwarm.errors import EverwarmError

PACKAGE = "xllamacpp"
VERSION = "2026.10.11549"
SHA256 = "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b"
NAME = f"{PACKAGE}-{VERSION}.tar.gz"
_SOURCE = f"{PACKAGE}-{VERSION}/thirdparty/llama.cpp/"
_MAX_BYTES = 2 << 30  # unpacked; it has about 150 MB
# pip asks an archive for its name before it keeps it, and would compile this one to know. In place of its build tool this
# answers from PKG-INFO.
_BUILD_META = r"""
import pathlib, re
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    about = pathlib.Path("PKG-INFO").read_text()
    name, version = (re.search(rf"^{key}: (\S+)$", about, re.MULTILINE)[1] for key in ("Name", "Version"))
    folder = pathlib.Path(metadata_directory, f"{name}-{version}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder.name
"""


def fetch(folder: Path) -> Path:
    """The archive in ``folder``: downloaded, or only checked if it is there already."""
    archive = folder / NAME
    if archive.is_file():
        require_digest(archive)
        return archive
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as name:
        _download(Path(name))
        arrived = Path(name) / NAME
        require_digest(arrived)
        arrived.replace(archive)
    return archive


def _download(folder: Path) -> None:
    stand_in = folder / "stand-in" / "setuptools"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    (stand_in / "build_meta.py").write_text(_BUILD_META)
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder), "-r", str(wanted)]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(stand_in.parent.resolve())},  # pip goes to other folders
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise EverwarmError(
            f"pip could not fetch {NAME} ({last_line(done.stderr)}); check the network, or give the file of another "
            "machine with --archive"
        )


def last_line(output: str) -> str:
    """The last line that a failed program printed: usually its error. Pure."""
    return (output.strip().splitlines() or ["no message"])[-1]


def require_digest(archive: Path) -> None:
    try:
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EverwarmError(f"{archive} cannot be read: {error.strerror}") from None
    if found != SHA256:
        raise EverwarmError(
            f"{archive} is not {NAME} (its SHA-256 is {found[:12]}…, not {SHA256[:12]}…); remove it and try again"
        )


def unpack(archive: Path, folder: Path) -> Path:
    """llama.cpp out of a checked archive. Returns its folder; what was unpacked there before is replaced."""
    require_digest(archive)
    shutil.rmtree(folder, ignore_errors=True)
    n_bytes = 0
    with tarfile.open(archive) as files:
        for member in files:
            n_bytes += member.size
            if n_bytes > _MAX_BYTES:
                raise EverwarmError(f"{archive.name} unpacks to more than {_MAX_BYTES >> 30} GiB")
            if member.name.startswith(_SOURCE):
                files.extract(member, folder, filter="data")
    return folder / _SOURCE


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
