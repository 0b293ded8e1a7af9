"""Downloads images from other servers; off unless hosts are allowed. Knows as much HTTP as that needs; no images.

A request must not make this server reach what the client cannot (SSRF). So: only hosts that are allowed by name, one strict
parser for the URL, no redirects, no proxies, and a connection to exactly the address that was resolved and found public.
Every failure is a ``BadRequest`` that reveals nothing about internal networks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httptools

from everwarm.config import require
from everwarm.errors import BadRequest

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_PORTS = {"http": 80, "https": 443}
_MAX_URL = 8192
_MAX_HEADERS = 64 << 10  # bytes before the body
_READ_BYTES = 64 << 10
_N_ADDRESSES = 3  # that are tried
_N_RESOLVING = 4
_INSTEAD = "send the image itself, as data:image/png;base64,…"

_HOST = r"(?P<host>[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?|\[[0-9a-f:.]{2,45}\])"
_PORT = r"(?::(?P<port>[0-9]{1,5}))?"
_CHARS = r"[\w.~%!$&'()*+,;=:@/-]"
_URL = re.compile(
    rf"(?P<scheme>https?)://{_HOST}{_PORT}(?P<path>/{_CHARS}*)?(?P<query>\?(?:{_CHARS}|\?)*)?(?:#[!-~]*)?",
    re.ASCII | re.IGNORECASE,
)
_NAME = re.compile(rf"{_HOST}{_PORT}", re.ASCII)

# Everything that is not a host on the public internet (IANA's special-purpose registries), and one cloud's internal server.
_INNER = ["0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"]
_INNER += ["192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"]
_INNER += ["224.0.0.0/3", "168.63.129.16/32"]
# Outside of this are mapped, translated (NAT64), unique local, link-local and multicast addresses; inside are protocol
# assignments with Teredo and ORCHID, documentation, 6to4, the old test network, and documentation again.
_OUTER_V6 = ipaddress.IPv6Network("2000::/3")
_INNER_V6 = ["2001::/23", "2001:db8::/32", "2002::/16", "3ffe::/16", "3fff::/20"]
_NOT_PUBLIC = [*map(ipaddress.ip_network, _INNER), *map(ipaddress.ip_network, _INNER_V6)]


def is_public(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and (ip.scope_id is not None or ip not in _OUTER_V6):
        return False
    return not any(ip in network for network in _NOT_PUBLIC)  # false for a network of the other IP version


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL; nothing parses the text again."""

    scheme: str
    host: str  # lower case, without brackets
    port: int
    target: str  # path and query

    @property
    def authority(self) -> str:
        """As in a ``Host`` header."""
        return self._bracketed if self.port == _PORTS[self.scheme] else self.with_port

    @property
    def with_port(self) -> str:
        return f"{self._bracketed}:{self.port}"

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def read_address(url: str) -> Address:
    found = _URL.fullmatch(url) if len(url) <= _MAX_URL else None
    port = int(found["port"]) if found is not None and found["port"] else None
    if found is None or port == 0 or (port or 0) >= 1 << 16 or not _is_host(found["host"].lower()):
        raise BadRequest(
            f"{url[:60]!r} cannot be fetched: give a plain http(s) address without user, spaces or special characters, "
            f"its host in ASCII; or {_INSTEAD}"
        )
    scheme = found["scheme"].lower()
    target = (found["path"] or "/") + (found["query"] or "")
    return Address(scheme, found["host"].lower().strip("[]"), port or _PORTS[scheme], target)


def _is_host(host: str) -> bool:
    """A name whose last label has a letter, or an IP address in canonical form: nothing that some parser takes for another
    address (decimal, octal, hexadecimal, shortened)."""
    if host.startswith("[") or re.fullmatch(r"[0-9.]+", host):
        try:
            return str(ipaddress.ip_address(host.strip("[]"))) == host.strip("[]")
        except ValueError:
            return False
    labels = host.split(".")
    if not all(0 < len(label) < 64 and label[0] != "-" and label[-1] != "-" for label in labels):
        return False
    return re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]) is None


class ImageDownloader:
    """``allowed_hosts``: exact names, each with its port unless that is the default; ``timeout_s``: in total, from name
    resolution to the last byte. ``resolve``, ``may_connect`` and ``tls`` are for tests: how names are resolved, which
    addresses count as public, and which certificates are trusted."""

    def __init__(
        self,
        allowed_hosts: tuple[str, ...],
        *,
        max_bytes: int = 20 << 20,
        timeout_s: float = 10.0,
        https_only: bool = True,
        resolve: Resolve | None = None,
        may_connect: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        _check_hosts(allowed_hosts)
        require(max_bytes >= 1024, f"max_bytes of remote images is {max_bytes}; give at least 1024")
        require(timeout_s > 0, f"timeout_s of remote images is {timeout_s}; give more than 0")
        self._allowed_hosts = frozenset(allowed_hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._https_only = https_only
        self._threads = ThreadPoolExecutor(_N_RESOLVING, "everwarm-names")  # a slow name server delays only downloads
        self._resolve = resolve or self._look_up
        self._may_connect = may_connect
        self._tls = tls

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: str) -> bytes:
        address = read_address(url)
        self._check_allowed(address)
        limit_s = self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                reader, writer = await self._connected(address)
                try:
                    return await self._exchange(address, reader, writer)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            raise _failed(address, f"it took longer than {limit_s:g} s") from None
        except ssl.SSLError:
            raise _failed(address, "its certificate or encryption was not accepted") from None
        except OSError:
            raise _failed(address, "it cannot be reached") from None

    def _check_allowed(self, address: Address) -> None:
        if self._https_only and address.scheme != "https":
            raise BadRequest(f"images are fetched by https only: give an https address, or {_INSTEAD}")
        if not {address.authority, address.with_port} & self._allowed_hosts:
            raise BadRequest(f"images are not fetched from {address.authority[:80]!r}, it is not allowed: {_INSTEAD}")

    # connecting

    async def _connected(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to the first checked address of the host that answers."""
        found = [ip for ip in await self._resolve(address.host, address.port) if self._may_connect(ip)]
        if not found:
            raise _failed(address, "it has no public address")
        tls = await self._context() if address.scheme == "https" else None
        for i, ip in enumerate(found[:_N_ADDRESSES], 1):
            try:
                return await asyncio.open_connection(
                    ip, address.port, limit=_READ_BYTES, ssl=tls, server_hostname=address.host if tls else None
                )
            except OSError:
                if i == len(found[:_N_ADDRESSES]):
                    raise
        raise AssertionError("unreachable")

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _addresses, host, port)
        return list(dict.fromkeys(found))

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        return self._tls

    # the request

    async def _exchange(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(
            f"GET {address.target} HTTP/1.1\r\nHost: {address.authority}\r\nUser-Agent: everwarm\r\n"
            "Accept: image/png, image/jpeg, image/webp, image/gif\r\nAccept-Encoding: identity\r\n"
            "Connection: close\r\n\r\n".encode("ascii")
        )
        answer = _Answer(self._max_bytes)
        while not answer.is_over:
            answer.feed(await reader.read(_READ_BYTES))
        if answer.wrong is not None:
            raise _failed(address, answer.wrong)
        return bytes(answer.body)


def _check_hosts(names: tuple[str, ...]) -> None:
    require(bool(names), "no host is allowed for images: name one, or leave fetching off")
    for name in names:
        found = _NAME.fullmatch(name)
        right = (
            found is not None and _is_host(found["host"]) and (not found["port"] or 0 < int(found["port"]) < 1 << 16)
        )
        require(right, f"{name!r} cannot be allowed for images; give a name in lower case, like img.example.com")


class _Answer:
    """A server's response. ``wrong``: why it cannot be used."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._n_before_body = 0
        self._is_final = False  # the headers are there, and not those of a 1xx
        self._is_whole = False
        self.body = bytearray()
        self.wrong: str | None = None

    @property
    def is_over(self) -> bool:
        return self._is_whole or self.wrong is not None

    def feed(self, data: bytes) -> None:
        """``data`` is empty when the connection was closed."""
        if not data:
            return self._ended()
        if not self._is_final:
            self._n_before_body += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.is_over:  # data after the end does not matter
                self.wrong = "its answer is not valid HTTP"
        if not self._is_final and self._n_before_body > _MAX_HEADERS:
            self.wrong = self.wrong or "its headers are too long"

    def _ended(self) -> None:
        """Valid only for a response that did not announce its length."""
        if self._is_final and not {b"content-length", b"transfer-encoding"} & self._headers.keys():
            self._is_whole = True
        else:
            self.wrong = "its answer ended too early"

    # httptools calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_final:
            known = self._headers.get(name.lower())
            self._headers[name.lower()] = (b"" if known is None else known + b", ") + value.strip().lower()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.is_over:
            return
        if 100 <= status < 200 and status != 101:
            self._headers.clear()
        elif 300 <= status < 400:
            self.wrong = f"it answers with a redirect ({status}), and those are not followed"
        elif status != 200:
            self.wrong = f"it answers {status}"
        elif self._headers.get(b"content-encoding", b"identity") not in (b"identity", b""):
            self.wrong = "its answer is compressed, which was not requested"
        elif self._headers.get(b"transfer-encoding", b"chunked") != b"chunked":
            self.wrong = "its answer has an unsupported transfer encoding"
        elif int(self._headers.get(b"content-length", b"0")) > self._max_bytes:
            self.wrong = self._too_large
        else:
            self._is_final = True

    def on_body(self, body: bytes) -> None:
        if not self._is_final or self.is_over:
            return
        self.body += body
        if len(self.body) > self._max_bytes:
            self.wrong = self._too_large

    def on_message_complete(self) -> None:
        self._is_whole = self._is_final

    @property
    def _too_large(self) -> str:
        return f"it sends more than {self._max_bytes:,} bytes"


def _addresses(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _failed(address: Address, why: str) -> BadRequest:
    return BadRequest(f"the image cannot be fetched from {address.authority[:80]}: {why}; give another, or {_INSTEAD}")
