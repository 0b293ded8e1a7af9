"""The routes of a server and the fields of their bodies, from the application itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.routing import Route

from everwarm.gateway.access.auth import OPEN_PATHS, role_of
from everwarm.gateway.access.middleware import Guard
from everwarm.gateway.app import build_gateway
from everwarm.gateway.ollama.schema import OPTIONS
from everwarm.gateway.openai.schema import Body
from everwarm.gateway.settings import ServerSettings
from generating.markdown import code, table, written_by
from generating.types import type_text
from generating.words import DIALECTS, FIELDS, ROUTES


@dataclass(frozen=True)
class Wire:
    method: str
    path: str
    module: str
    handler: str
    bodies: tuple[type[msgspec.Struct], ...]
    role: str


def wires() -> list[Wire]:
    """All routes, in the order in which they are looked at."""
    guard = build_gateway(None, ServerSettings()).app  # type: ignore[arg-type]
    assert isinstance(guard, Guard)
    found = []
    for route in guard.app.routes:  # type: ignore[attr-defined]
        assert isinstance(route, Route)
        for method in sorted((route.methods or set()) - ({"HEAD"} if "GET" in (route.methods or ()) else set())):
            handler = route.endpoint
            module = handler.__module__.removeprefix("everwarm.gateway.")
            role, bodies = role_of(method, route.path).name.lower(), tuple(_bodies(handler))
            found.append(Wire(method, _path(route.path), module, handler.__name__, bodies, role))
    return found


def _path(path: str) -> str:
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: found[1].upper(), path)


def _bodies(handler: Any) -> Iterable[type[msgspec.Struct]]:
    """The bodies that a handler names in its source."""
    known = getattr(handler, "__func__", handler).__globals__  # a method or a function
    for name in dict.fromkeys(re.findall(r"\b[A-Z]\w+\b", inspect.getsource(handler))):
        kind = known.get(name)
        if (
            isinstance(kind, type)
            and issubclass(kind, msgspec.Struct)
            and kind.__module__.endswith(("schema", "embeddings"))
        ):
            yield kind


def page() -> str:
    found = wires()
    by_dialect: dict[str, list[Wire]] = {name: [] for name in DIALECTS}
    for wire in found:
        by_dialect.setdefault(_dialect(wire.module), []).append(wire)
    parts = [
        written_by("the routes and bodies of src/everwarm/gateway"),
        "# Routes and fields\n",
        "Every route of the server, and every field that it looks at. Other fields change nothing and are named in "
        "the header `x-everwarm-ignored`. A value of the wrong type or out of "
        "bounds is a 400 that names the field. `POST` needs `Content-Type: application/json`. With `--api-key` everything needs the key "
        f"but {', '.join(code(path) for path in sorted(OPEN_PATHS))}. Who may call depends on the [role](../operating.md#keys-and-roles): "
        "users reach what is of their own namespace.\n",
    ]
    shown: dict[type, str] = {}
    for dialect, wired in by_dialect.items():
        if not wired:
            continue
        parts += [f"## {dialect}\n", f"{DIALECTS.get(dialect, '')}\n"]
        parts.append(table(["route", "", "role", "body"], [_row(wire, wired) for wire in wired]))
        for kind in dict.fromkeys(kind for wire in wired for kind in wire.bodies):
            if kind not in shown:
                shown[kind] = kind.__name__
                parts.append(_fields(kind))
    return "\n".join(parts)


def _dialect(module: str) -> str:
    return _SECTIONS.get(module) or _SECTIONS.get(module.partition(".")[0], module)


_SECTIONS = {
    "openai": "OpenAI",
    "responses": "OpenAI responses",
    "anthropic": "Anthropic",
    "ollama": "Ollama",
    "llamaserver": "llama-server",
    "embeddings": "Embeddings",
    "admin.models": "Models",
    "admin.cache_api": "Cache",
    "admin.cache_plan": "Planning",
    "admin.status": "Status",
    "admin.web_ui": "home",
}


def _row(wire: Wire, wired: list[Wire]) -> list[str]:
    bodies = ", ".join(f"[{kind.__name__}](#{kind.__name__.lower()})" for kind in wire.bodies)
    twin = next((w for w in wired if (w.handler, w.method) == (wire.handler, wire.method)), wire)
    same = f"the same as {code(twin.path)}" if twin.path != wire.path and wire.handler not in _REFUSALS else ""
    return [
        code(f"{wire.method} {wire.path}"),
        same or ROUTES.get(f"{wire.method} {wire.path}", _REFUSED.get(wire.handler, "")),
        wire.role,
        bodies,
    ]


_REFUSED = {"refuse": "501: not there", "refuse_embedding": "501: not there"}
_REFUSALS = frozenset(_REFUSED)


def _fields(kind: type[msgspec.Struct]) -> str:
    fields = msgspec.structs.fields(kind)
    inherited = {f.name for f in msgspec.structs.fields(Body)} if issubclass(kind, Body) else set()
    own = [field for field in fields if field.name not in inherited]
    parts = [f"### {kind.__name__}\n"]
    if kind.__name__ == "ChatBody":
        parts.append(table(_HEAD, [_field(field) for field in own]))
        parts.append("#### Common fields\n\nOf chats, completions and responses alike.\n")
        parts.append(table(_HEAD, [_field(field) for field in fields if field.name in inherited]))
        return "\n".join(parts)
    if inherited:
        parts.append("And the [common fields](#common-fields).\n")
    parts.append(table(_HEAD, [_field(field, kind.__name__) for field in own]))
    if kind.__name__ == "OllamaChat":
        names = ", ".join(code(name) for name in OPTIONS)
        parts.append(f"Of `options` these are heeded: {names}. Others change nothing.\n")
    return "\n".join(parts)


_HEAD = ["field", "value", "meaning"]


def _field(field: msgspec.structs.FieldInfo, of: str = "") -> list[str]:
    must = " **must be given**" if field.required else ""
    meaning = FIELDS.get(f"{of}.{field.name}") or FIELDS.get(field.name, "")
    return [code(field.encode_name) + must, type_text(field.type), meaning]


def words_for_nothing() -> list[str]:
    """Sentences about routes and fields that are not there any more."""
    found = wires()
    routes = {f"{wire.method} {wire.path}" for wire in found}
    kinds = {kind for wire in found for kind in wire.bodies}
    fields = {name for kind in kinds for name in kind.__struct_fields__}
    fields |= {f"{kind.__name__}.{name}" for kind in kinds for name in kind.__struct_fields__}
    return sorted((ROUTES.keys() - routes) | (FIELDS.keys() - fields))
