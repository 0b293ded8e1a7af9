"""Authentication and authorization: keys, roles, namespaces, and one table with the role of every route.

A caller is a ``Principal``, found by its key. Its prompts are cached in namespaces of its own, one for each ``cache_salt``.
The middleware finds the principal, every route checks its role, and the cache API checks what the caller may see. Knows
no engine; reads one file, the key file.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from everwarm.config import require
from everwarm.errors import BadRequest, Forbidden

if TYPE_CHECKING:  # the command line reads key files and needs no HTTP
    from starlette.requests import Request
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send

log = logging.getLogger("everwarm.gateway")

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 4096
MIN_KEY, MAX_KEY = 16, 512  # characters of a key in the key file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAMESPACE = re.compile(r"[0-9a-f]{1,32}")


class Role(enum.IntEnum):
    """Each role includes the rights of the roles before it."""

    PUBLIC = 0
    USER = 1  # reads and changes its own namespaces
    ADMIN = 2  # reads and changes everything


# Every route, by method and path as the application has them; HEAD has the role of GET. A test fails on a route that is not
# here. New routes that change more than the caller's namespace (downloads, removing models, adapters, server properties)
# belong to admins.
_PUBLIC = ("GET /", "GET /page/{name}", "GET /health", "GET /v1/health", "GET /ready")
_USER = (
    "GET /metrics",  # numbers of the whole server, no text
    "POST /v1/chat/completions",
    "POST /chat/completions",
    "GET /v1/chat/completions",  # those of its namespace that were stored
    "GET /v1/chat/completions/{id}",
    "POST /v1/chat/completions/{id}",
    "DELETE /v1/chat/completions/{id}",
    "GET /v1/chat/completions/{id}/messages",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "POST /v1/responses/compact",
    "POST /responses",
    "GET /v1/responses/{id}",
    "DELETE /v1/responses/{id}",
    "GET /v1/responses/{id}/input_items",
    "POST /v1/responses/{id}/cancel",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /v1/models/{id:path}",
    "GET /models",  # ?reload= needs an admin
    "POST /v1/chat/completions/input_tokens",
    "POST /chat/completions/input_tokens",
    "POST /completion",
    "POST /completions",
    "POST /infill",
    "POST /tokenize",
    "POST /detokenize",
    "POST /apply-template",
    "POST /render",
    "GET /props",
    *(f"{method} {path}" for method in ("GET", "POST") for path in ("/tools", "/mcp", "/cors-proxy")),  # not offered
    *(f"{method} {path}" for method in ("GET", "POST") for path in ("/predict", "/v1/systemone")),  # nor these
    "GET /lora-adapters",  # names of files; their folders only for an admin
    "GET /slots",  # of other namespaces only whether a slot is busy
    "POST /slots/{id}",  # its own conversations and files
    "POST /api/chat",  # unloading by keep_alive needs an admin
    "POST /api/generate",
    "GET /api/tags",
    "POST /api/show",
    "GET /api/ps",
    "GET /api/version",
    "POST /api/embed",
    "POST /api/embeddings",
    "POST /v1/embeddings",
    "POST /embeddings",
    "POST /embedding",
    "POST /v1/rerank",
    "POST /rerank",
    "POST /reranking",
    "POST /v1/reranking",
    "GET /cache",
    "DELETE /cache",  # its own namespace; for an admin, all namespaces
    "POST /cache/plan",
    "POST /cache/prefetch",
    "GET /cache/tree",
    "GET /cache/requests",
    "GET /cache/events",
    "GET /cache/volatile",
    "DELETE /cache/nodes/{id}",
    "POST /cache/nodes/{id}/pin",  # within the quota
    "POST /cache/nodes/{id}/unpin",
)
_ADMIN = (
    "POST /lora-adapters",
    "POST /props",
    "POST /models/load",
    "POST /models/unload",
    "POST /api/pull",
    "POST /api/push",
    "POST /api/create",
    "POST /api/copy",
    "POST /api/blobs/{digest}",
    "HEAD /api/blobs/{digest}",
    "DELETE /api/delete",
    "DELETE /v1/models/{id:path}",
)
ROLES = {route: role for role, routes in enumerate((_PUBLIC, _USER, _ADMIN)) for route in routes}
OPEN_PATHS = frozenset(route.removeprefix("GET ") for route in _PUBLIC if "{" not in route)
PAGE = "/page/"  # static files without data


def role_of(method: str, path: str) -> Role:
    """The role that a route needs; ``KeyError`` if the table does not have the route."""
    found = ROLES.get(f"{method} {path}")
    if found is None and method == "HEAD":
        found = ROLES.get(f"GET {path}")
    if found is None:
        raise KeyError(f"{method} {path} has no role: add it to a table in gateway.access.auth")
    return Role(found)


def with_roles(routes: Iterable[Route]) -> list[Route]:
    """The same routes, each with a check of its role."""
    return [_with_role(route) for route in routes]


def _with_role(route: Route) -> Route:
    roles = {method: role_of(method, route.path) for method in route.methods or ()}
    handler = route.app

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        principal: Principal = scope["state"]["principal"]
        if principal.role < roles.get(scope["method"], Role.PUBLIC):  # an unknown method gets 405 from the handler
            raise admin_only(f"{scope['method']} {scope['path']}")
        await handler(scope, receive, send)

    route.app = checked
    return route


def admin_only(what: str) -> Forbidden:
    message = f"{what[:200]} needs an admin key of this server (--admin-key, or a key file)"
    return Forbidden(message, "admin_required")


# principals


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. The names of its namespaces are derived from ``origin``."""

    role: Role
    origin: str = field(repr=False)

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN

    def namespace(self, salt: str | None) -> str:
        """The namespace of this origin and salt; other principals cannot reuse or see what is in it."""
        return hashlib.sha256(f"{self.origin}:{salt or ''}".encode()).hexdigest()[:32]


def principal_of(request: Request) -> Principal:
    found: Principal = request.state.principal
    return found


def namespace_of(request: Request, salt: str | None) -> str:
    """The namespace that a request reads and writes."""
    return principal_of(request).namespace(salt)


def _of_key(key: str) -> str:
    """The origin of callers with this key; callers without a key have the empty key. Names derived from it are on disk, so
    this never changes."""
    return f"{len(key)}:{key}"


def own_namespace(api_key: str | None) -> str:
    """The namespace of callers that use the server's single key (or no key, if the server has none) and give no salt."""
    return Principal(Role.USER, _of_key(api_key or "")).namespace(None)


def _of_name(name: str) -> str:
    """The origin of callers whose key is bound to a namespace. It never equals the origin of a key."""
    return f"namespace:{len(name)}:{name}"


ANONYMOUS = Principal(Role.PUBLIC, "nobody")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the key file. Holds the SHA-256 of the key, not the key."""

    name: str
    digest: bytes = field(repr=False)
    namespace: str
    role: Role = Role.USER

    @property
    def principal(self) -> Principal:
        return Principal(self.role, _of_name(self.namespace))


class Access:
    """Maps keys to principals. Only ``reload`` changes the map."""

    def __init__(
        self, api_keys: Sequence[str], admin_key: str | None, keys: Sequence[Key] = (), key_file: str | None = None
    ) -> None:
        self._single = (api_keys, admin_key)
        self._key_file = key_file
        self._known, self._without_key = _principals(api_keys, admin_key, keys)
        if not any(each.is_admin for each in (*self._known.values(), self._without_key or ANONYMOUS)):
            log.warning('this server has no admin: give --admin-key, or a key with role = "admin"')

    def identify(self, given: Iterable[bytes]) -> Principal | None:
        """The principal of any of these keys; without a valid key, the principal of callers without a key, if there is one.
        Compares every known key, in constant time."""
        found = None
        for digest in [_digest(each) for each in given]:
            for known, principal in self._known.items():
                if hmac.compare_digest(digest, known):
                    found = principal
        return found or self._without_key

    def reload(self) -> bool:
        """Reads the key file again. An invalid file changes nothing."""
        if self._key_file is None:
            return False
        try:
            keys = read_key_file(self._key_file)
            check_keys(*self._single, keys)
        except BadRequest as error:
            log.warning("the keys stay as they were: %s", error)
            return False
        self._known, self._without_key = _principals(*self._single, keys)
        log.info("the key file was read again: %d keys", len(keys))
        return True


def _principals(
    api_keys: Sequence[str], admin_key: str | None, keys: Sequence[Key]
) -> tuple[dict[bytes, Principal], Principal | None]:
    """Principals by key digest, and the principal of callers without a key (``None``: a key is required). Without an admin
    key and a key file, every caller is an admin."""
    usual = Role.USER if admin_key is not None or keys else Role.ADMIN
    known = {key.digest: key.principal for key in keys}
    for api_key in api_keys:
        known[_digest(api_key.encode())] = Principal(usual, _of_key(api_key))
    if admin_key is not None:
        known[_digest(admin_key.encode())] = Principal(Role.ADMIN, _of_key(admin_key))
    is_open = not api_keys and not keys
    return known, Principal(usual, _of_key("")) if is_open else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def check_keys(api_keys: Sequence[str], admin_key: str | None, keys: Sequence[Key]) -> None:
    """Checks that no key is empty and that no key has two meanings."""
    require(all(api_keys), "the API key is empty; leave it out or give one")
    require(len(api_keys) <= MAX_KEYS, f"there are {len(api_keys)} API keys; give at most {MAX_KEYS}")
    require(admin_key is None or len(admin_key) >= 1, "the admin key is empty; leave it out or give one")
    require(admin_key not in api_keys, "the admin key is the API key; give another one")
    named = [(key, "--api-key") for key in api_keys] + ([] if admin_key is None else [(admin_key, "--admin-key")])
    single = {_digest(key.encode()): name for key, name in named}
    for key in keys:
        require(key.digest not in single, f"the key of {key.name!r} is also {single.get(key.digest)}; give another one")


# the key file


class _KeyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``[keys.NAME]`` table."""

    key: Annotated[str, msgspec.Meta(min_length=MIN_KEY, max_length=MAX_KEY)] | None = None
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    namespace: str | None = None
    role: Literal["user", "admin"] = "user"


class _KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: dict[str, dict[str, Any]] = {}


def read_key_file(path: str) -> tuple[Key, ...]:
    """The keys of a key file. Every error is a ``BadRequest`` that names the place and quotes no key."""
    text, mode = _read(Path(path).expanduser())
    try:
        tables = msgspec.convert(tomllib.loads(text), _KeysFile).keys
    except (tomllib.TOMLDecodeError, RecursionError):
        raise BadRequest(
            f'the key file {path} is not valid TOML; give tables like [keys.alice] with key = "…"'
        ) from None
    except msgspec.ValidationError as error:
        raise BadRequest(f"the key file {path}: {error}; give tables like [keys.alice]") from None
    require(1 <= len(tables) <= MAX_KEYS, f"the key file {path} has {len(tables)} keys; give 1 to {MAX_KEYS}")
    keys = tuple(_key(path, name, fields) for name, fields in tables.items())
    _check_mode(path, mode, has_secrets=any("key" in fields for fields in tables.values()))
    names: dict[bytes, str] = {}
    for key in keys:
        other = names.setdefault(key.digest, key.name)
        require(other == key.name, f"the key file {path}: {other!r} and {key.name!r} have the same key")
    return keys


def _read(path: Path) -> tuple[str, int]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"the key file {path} cannot be read: {error.strerror}") from None
    require(len(data) <= MAX_FILE_BYTES, f"the key file {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode(), mode
    except UnicodeDecodeError:
        raise BadRequest(f"the key file {path} is not UTF-8") from None


def _check_mode(path: str, mode: int, *, has_secrets: bool) -> None:
    """Write access to the file amounts to admin rights; read access to keys in it allows their use."""
    require(not mode & 0o002, f"the key file {path} is writable by all users; `chmod 600` it")
    instead = "`chmod 600` it, or give sha256 instead of key"
    require(not (has_secrets and mode & 0o004), f"the keys in {path} are readable by all users; {instead}")
    if mode & 0o070 and has_secrets:
        log.warning("the group of the key file %s can access it; `chmod 600` it", path)


def _key(path: str, name: str, fields: dict[str, Any]) -> Key:
    where = f"the key file {path}: [keys.{name[:64]}]"
    require(_NAME.fullmatch(name) is not None, f"{where} is not a valid name; give letters, digits, '.', '_' and '-'")
    try:
        table = msgspec.convert(fields, _KeyTable)
    except msgspec.ValidationError as error:  # its text names the field and what is expected, never a value
        raise BadRequest(f"{where} {error}") from None
    require((table.key is None) != (table.sha256 is None), f"{where} needs key, or sha256 of it, and not both")
    namespace = name if table.namespace is None else table.namespace
    require(_NAME.fullmatch(namespace) is not None, f"{where} has an invalid namespace; give one like team-a")
    digest = _digest(table.key.encode()) if table.key is not None else bytes.fromhex(table.sha256 or "")
    return Key(name, digest, namespace, Role.ADMIN if table.role == "admin" else Role.USER)


# what a caller may see of the cache


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which namespaces a caller sees, and of which it also sees the text. Both are prefixes of namespace names; "" matches
    all."""

    shown: str
    words: str

    def shows(self, namespace: str) -> bool:
        return namespace.startswith(self.shown)

    def shows_words(self, namespace: str) -> bool:
        return self.shows(namespace) and namespace.startswith(self.words)


def visibility_of(request: Request) -> Visibility:
    """A user sees its own namespace: that of its key and ``?cache_salt=``. An admin sees the numbers of all namespaces, but
    text only of its own, of ``?namespace=``, or with ``?all=true``."""
    principal = principal_of(request)
    query = request.query_params
    own = principal.namespace(query.get("cache_salt"))
    named = query.get("namespace") or ""
    wants_all = query.get("all", "false")
    if wants_all not in ("true", "false", "0", "1"):
        raise BadRequest(f"all is {wants_all[:20]!r}; give true or false")
    if named and _NAMESPACE.fullmatch(named) is None:
        raise BadRequest("namespace is not one that GET /cache/tree shows")
    if not principal.is_admin:
        if wants_all in ("true", "1") or not own.startswith(named):
            raise admin_only("looking into other namespaces")
        return Visibility(own, own)
    if named:
        return Visibility(named, named)
    return Visibility("", "" if wants_all in ("true", "1") else own)


def reach_of(request: Request) -> str:
    """The namespaces that an order without a node applies to: a user's own; for an admin all, or the one that it names."""
    visibility = visibility_of(request)
    return visibility.words if request.query_params.get("cache_salt") is not None else visibility.shown
