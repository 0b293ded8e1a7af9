"""Where a caller's slot files lie, and which of them it may restore: decided here, before an engine is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request

from everwarm.errors import Forbidden
from everwarm.gateway.settings import ServerSettings
from everwarm.state.slotfile import checked_name, namespace_folder


def slot_file_fields(
    request: Request, settings: ServerSettings, filename: str, namespace: str, *, is_default: bool
) -> dict[str, Any]:
    """What an engine is told of a file. ``is_default``: the caller asks in the namespace that the directory itself belongs
    to, as it does where nobody ever gives a ``cache_salt``; every other one has a folder in it."""
    name, directory = checked_name(filename), _directory(settings)
    where = directory if is_default else directory / namespace_folder(namespace)
    trusts = may_trust_slot_files(request, settings)
    return {"path": str(where / name), "owns_unbound": is_default, "trusts_origin": trusts}


def may_trust_slot_files(request: Request, settings: ServerSettings) -> bool:
    """Whether the caller's word is enough for a file without a companion. It takes the start flag, and an admin."""
    del request  # whoever reaches this server counts as its admin, until there are roles
    return settings.trust_slot_files


def _directory(settings: ServerSettings) -> Path:
    if settings.slot_save_path is None:
        message = "this server does not save slots to files; start it with --slot-save-path"
        raise Forbidden(501, "not_supported_error", message)
    return Path(settings.slot_save_path)
