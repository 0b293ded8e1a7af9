"""Says an archive's name and version, as it says them itself, without building anything."""

from __future__ import annotations

import re
from pathlib import Path


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:  # noqa: ARG001
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:  # noqa: ARG001
    about = Path("PKG-INFO").read_text()
    name, version = (re.search(rf"^{key}: (\S+)$", about, re.MULTILINE)[1] for key in ("Name", "Version"))
    folder = Path(metadata_directory, f"{name}-{version}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder.name
