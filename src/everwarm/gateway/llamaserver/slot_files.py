"""Where a caller's slot files lie, and which of them it may restore: decided here, before an engine is asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from starlette.requests import Request

from everwarm.errors import Forbidden
from everwarm.gateway.access.auth import own_namespace, principal_of
from everwarm.gateway.settings import ServerSettings
from everwarm.state.store.slot_file import COMPANION, checked_name, namespace_folder

MAX_FILES_OF_A_USER = 64  # in each of its namespaces


def slot_file_fields(request: Request, settings: ServerSettings, filename: str, namespace: str) -> dict[str, Any]:
    """What an engine is told of a file. The directory itself belongs to callers with the server's one key, or with none
    where it has none, who give no ``cache_salt``; every other namespace has a folder in it."""
    name, directory = checked_name(filename), _directory(settings)
    is_default = namespace == own_namespace(settings.api_key)
    where = directory if is_default else directory / namespace_folder(namespace)
    if not principal_of(request).is_admin:
        _require_quota(where, name)
    return {
        "path": str(where / name),
        "owns_unbound": is_default,
        "trusts_origin": may_trust_slot_files(request, settings),
    }


def may_trust_slot_files(request: Request, settings: ServerSettings) -> bool:
    """Whether the caller's word is enough for a file without a companion. It takes the start flag, and an admin."""
    return settings.trust_slot_files and principal_of(request).is_admin


def _require_quota(folder: Path, name: str) -> None:
    """Nothing removes slot files but whoever owns the disk, so a user has a number of them and no more."""
    if not (folder / name).exists() and folder.is_dir():
        n_files = sum(not entry.name.endswith(COMPANION) for entry in os.scandir(folder) if entry.is_file())
        if n_files >= MAX_FILES_OF_A_USER:
            message = f"there are {n_files} slot files of yours; save over one of them, or ask an admin to remove some"
            raise Forbidden(403, "quota_exceeded", message)


def _directory(settings: ServerSettings) -> Path:
    if settings.slot_save_path is None:
        message = "this server does not save slots to files; start it with --slot-save-path"
        raise Forbidden(501, "not_supported_error", message)
    return Path(settings.slot_save_path)
