"""The settings of a server besides those of its engines. Frozen, checked once."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from pathlib import Path

from everwarm.config import require
from everwarm.gateway.access.auth import Access, Key, check_keys
from everwarm.gateway.access.origins import check_origin
from everwarm.gateway.openai.schema import RequestDefaults
from everwarm.gateway.parsing.output_parser import ThinkingTags, ToolFormat
from everwarm.gateway.rewrite.rules import Rules
from everwarm.logs import LogFormat

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = "127.0.0.1"  # an address, a name, or the path of a Unix socket that ends in .sock
    more_hosts: tuple[str, ...] = ()  # others to listen on
    port: int = 8080
    reuse_port: bool = False
    ssl_key_file: str | None = None  # PEM; with a certificate, only HTTPS is spoken
    ssl_cert_file: str | None = None
    api_key: str | None = None
    more_api_keys: tuple[str, ...] = ()  # each with a namespace of its own
    admin_key: str | None = (
        None  # needed to change or read more than the caller's own namespace; None: there is no admin key
    )
    keys: tuple[Key, ...] = ()  # the keys of the key file, each bound to a namespace
    key_file: str | None = None  # read again on SIGHUP
    pin_quota: float = 0.1  # the largest share of RAM that the pins of one namespace may hold; admins may exceed it
    allowed_hosts: tuple[str, ...] = ()  # names of this server in the Host header, besides loopback and ``host``
    max_body_bytes: int = 32 << 20
    max_requests: int = 256  # running and waiting
    max_waiting_tokens: int = 4_000_000  # prompt tokens of all of them, estimated until they are tokenized
    max_connections: int = 1024  # open at once, idle ones included
    client_timeout_s: float = 30.0  # how long a client may pause in sending its body or reading its answer
    request_timeout_s: float = 0.0  # 0: none
    grace_s: float = 10.0
    picture_hosts: tuple[str, ...] = ()  # whose images may be fetched by address; none: images come with the request
    tool_format: ToolFormat = "auto"  # how models write tool calls; auto: as their templates define it
    thinking_tags: ThinkingTags = "auto"
    otel_endpoint: str | None = None  # the OpenTelemetry collector; None: no traces
    prewarm: bool = True  # read in idle time what the next turn will begin with
    workspace: str | None = (
        None  # the folder whose files are read ahead when a tool call names them; None: no files are
    )
    canonicalise: bool = True  # remove known noise at the head of system text
    rewrite: Rules = ()  # of the operator, for lines of system text that clients change without need
    cache_text: bool = False  # whether the cache API shows text of cached prompts
    slot_save_path: str | None = None  # the folder of slot files; None: no slot actions on files
    trust_slot_files: bool = False  # restore slot files without a companion; an admin vouches for their model
    state_dir: str | None = None  # the folder of stored responses and remembered replies; None: in memory only
    log_format: LogFormat | None = None  # None: from the environment
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    embd_normalize: int = 2  # how vectors are scaled: 2 euclidean, -1 not at all; see ``gateway.embeddings``
    strict: bool = False  # refuse bodies with unknown fields instead of naming those in a header
    web_ui: bool = True
    allow_pull: bool = False  # whether admins may download and delete models of the Hub
    shows_slots: bool = True  # GET /slots
    shows_metrics: bool = True  # GET /metrics
    cors_origins: tuple[str, ...] = ()  # pages that may call this server besides those of this machine; "*": any

    def __post_init__(self) -> None:
        require(0 <= self.port < 1 << 16, f"port is {self.port}; give 0 (any free one) to {(1 << 16) - 1}")
        require(-1 <= self.embd_normalize <= 64, f"embd_normalize is {self.embd_normalize}; give -1 to 64")
        require(self.max_body_bytes >= 1024, f"max_body_bytes is {self.max_body_bytes}; give at least 1024")
        require(self.max_requests >= 1, f"max_requests is {self.max_requests}; give at least 1")
        require(self.max_waiting_tokens >= 1, f"max_waiting_tokens is {self.max_waiting_tokens}; give at least 1")
        require(self.request_timeout_s >= 0, f"request_timeout_s is {self.request_timeout_s}; give 0 (none) or more")
        require(self.max_connections >= 8, f"max_connections is {self.max_connections}; give at least 8")
        require(self.client_timeout_s > 0, f"client_timeout_s is {self.client_timeout_s}; give more than 0")
        require(self.grace_s >= 0, f"grace_s is {self.grace_s}; give 0 or more")
        require(0.0 <= self.pin_quota <= 1.0, f"pin_quota is {self.pin_quota}; give a share from 0 to 1")
        self._check_workspace()
        check_keys(self.api_keys, self.admin_key, self.keys)
        for host in self.hosts:
            require(bool(host), "the address to listen on is empty; give one like 127.0.0.1")
            require(
                self.api_key is not None or bool(self.keys) or is_loopback(host) or is_unix_socket(host),
                f"{host} can be reached from other machines: give --api-key, or bind to 127.0.0.1",
            )
        require(
            (self.ssl_key_file is None) == (self.ssl_cert_file is None),
            "HTTPS needs both --ssl-key-file and --ssl-cert-file",
        )
        for origin in self.cors_origins:
            check_origin(origin)

    def _check_workspace(self) -> None:
        folder = self.workspace
        require(folder is None or Path(folder).is_dir(), f"workspace is {folder}; give a folder that exists")
        require(
            folder is None or not self.cache_text,
            "workspace is given beside cache_text, which would show text of its files; give only one",
        )
        require(
            folder is None or not self.keys or self.api_key is not None,
            "workspace is for callers with the API key, and there is none; give --api-key beside the key file",
        )

    def access(self) -> Access:
        return Access(self.api_keys, self.admin_key, self.keys, self.key_file)

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host, *self.more_hosts)

    @property
    def api_keys(self) -> tuple[str, ...]:
        return (*(() if self.api_key is None else (self.api_key,)), *self.more_api_keys)

    @property
    def is_open_to_others(self) -> bool:
        """Whether other machines can reach it."""
        return not all(is_loopback(host) or is_unix_socket(host) for host in self.hosts)

    @property
    def host_names(self) -> frozenset[str]:
        """Allowed values of the Host header; for one that is open to others, any of its addresses besides."""
        machine = socket.gethostname()
        own = (machine, f"{machine}.local") if self.is_open_to_others else ()
        return frozenset(name.lower() for name in (*LOOPBACK_NAMES, *self.hosts, *self.allowed_hosts, *own))


def is_unix_socket(host: str) -> bool:
    return host.endswith(".sock")


def is_loopback(host: str) -> bool:
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
