"""Fetching images from other servers: off by default, and never from where the sender could not go."""

import asyncio
import base64
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from everwarm.errors import BadRequest
from everwarm.gateway.images.image_download import ImageDownloader, is_public, read_address
from everwarm.gateway.images.image_loader import ImageLimits, ImageLoader
from support.image_files import png

IMAGE = png([[1, 2, 3]])
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Site:
    """A server on this machine that answers as it is told, and the fetcher that is allowed to reach it."""

    def __init__(self, port: int, asked: list[bytes]) -> None:
        self.port = port
        self.asked = asked
        self.looked_up: list[str] = []
        self.addresses = ["127.0.0.1"]

    async def resolve(self, host: str, _port: int) -> list[str]:
        self.looked_up.append(host)
        return self.addresses

    def fetcher(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        may_connect: Callable[[str], bool] = "127.0.0.1".__eq__,
        **policy: Any,
    ) -> ImageDownloader:
        settings = {"allowed_hosts": (f"img.example.com:{self.port}",), "https_only": False, "timeout_s": 5.0} | policy
        return ImageDownloader(**settings, resolve=self.resolve, may_connect=may_connect, tls=tls)

    def url(self, path: str = "/a.png", scheme: str = "http") -> str:
        return f"{scheme}://img.example.com:{self.port}{path}"


@contextlib.asynccontextmanager
async def site(answer: bytes | Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    asked: list[bytes] = []
    handling: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            await (told(asked[-1], writer) if isinstance(answer, bytes) else answer(asked[-1], writer))
            writer.close()
            await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()

    async def told(_: bytes, writer: asyncio.StreamWriter) -> None:
        assert isinstance(answer, bytes)
        writer.write(answer)
        await writer.drain()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handling.add(asyncio.ensure_future(handle(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    try:
        yield Site(server.sockets[0].getsockname()[1], asked)
    finally:
        server.close()
        await asyncio.sleep(0.01)
        for task in handling:
            task.cancel()
        await asyncio.gather(*handling)


def fetched(answer: bytes | Handler, **policy: Any) -> bytes:
    async def fetch() -> bytes:
        async with site(answer) as there:
            return await there.fetcher(**policy).fetch(there.url())

    return asyncio.run(fetch())


def length(n: int) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % n


def chunked(*chunks: bytes) -> bytes:
    return b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (*chunks, b""))


# what is fetched


@pytest.mark.parametrize(
    "answer",
    [
        OK + length(len(IMAGE)) + IMAGE,
        OK + chunked(IMAGE[:10], IMAGE[10:11], IMAGE[11:]),
        OK + b"\r\n" + IMAGE,
        b"HTTP/1.0 200 OK\r\n\r\n" + IMAGE,
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK + length(len(IMAGE)) + IMAGE,
        OK + length(len(IMAGE)) + IMAGE + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmore",
        OK + b"Content-Encoding: identity\r\n" + length(len(IMAGE)) + IMAGE,
    ],
)
def test_answers_of_every_length(answer: bytes) -> None:
    assert fetched(answer) == IMAGE


def test_a_host_is_asked_by_its_name_and_looked_up_once() -> None:
    async def test() -> None:
        async with site(OK + length(1) + b"x") as there:
            await there.fetcher().fetch(there.url("/a/b.png?size=2&of=%20x#part"))
            assert there.looked_up == ["img.example.com"]
            (asked,) = there.asked
            assert asked.startswith(b"GET /a/b.png?size=2&of=%20x HTTP/1.1\r\n")
            assert b"\r\nHost: img.example.com:%d\r\n" % there.port in asked
            assert b"cookie" not in asked.lower() and b"authorization" not in asked.lower()

    asyncio.run(test())


def test_images_by_address_are_decoded_when_that_is_allowed() -> None:
    async def test() -> None:
        async with site(OK + length(len(IMAGE)) + IMAGE) as there:
            images = ImageLoader(ImageLimits(n_children=1), fetcher=there.fetcher())
            part = {"type": "image_url", "image_url": {"url": there.url()}}
            image = await images.from_part(part)
            assert image.rgb == b"\1\2\3"
            own = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
            assert await images.from_part({"type": "image_url", "image_url": own}) is image
            await images.close()

    asyncio.run(test())


def certificate(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's side, and one that believes it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    key, cert = directory / "key.pem", directory / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=img.example.com"
    names = ["-addext", "subjectAltName=DNS:img.example.com", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(cert, key)
    return server, ssl.create_default_context(cafile=str(cert))


def test_https_checks_the_name_although_it_connects_to_an_address(tmp_path: Path) -> None:
    theirs, trusting = certificate(tmp_path)
    named: list[str | None] = []
    theirs.sni_callback = lambda _sock, name, _context: named.append(name)

    async def test() -> None:
        async with site(OK + length(len(IMAGE)) + IMAGE, theirs) as there:
            url = there.url(scheme="https")
            assert await there.fetcher(tls=trusting, https_only=True).fetch(url) == IMAGE
            assert named == ["img.example.com"]
            with pytest.raises(BadRequest, match="certificate"):
                await there.fetcher().fetch(url)  # nobody vouches for it
            other = there.fetcher(tls=trusting, allowed_hosts=(f"other.example.com:{there.port}",))
            with pytest.raises(BadRequest, match="certificate"):
                await other.fetch(url.replace("img.", "other."))

    asyncio.run(test())


# what is not


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n" + length(0), "redirect"),
        (b"HTTP/1.1 307 Over There\r\nLocation: /b.png\r\n" + length(0), "redirect"),
        (b"HTTP/1.1 404 Not Found\r\n" + length(0), "answers 404"),
        (b"HTTP/1.1 206 Partial Content\r\n" + length(1) + b"x", "answers 206"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n", "answers 101"),
        (OK + b"Content-Encoding: gzip\r\n" + length(1) + b"x", "compressed"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "unsupported transfer encoding"),
        (OK + length(2001), "more than 2,000 bytes"),
        (OK + b"Content-Length: 99999999999999999999999\r\n\r\n", "not valid HTTP"),
        (OK + b"Content-Length: -1\r\n\r\n", "not valid HTTP"),
        (OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx", "not valid HTTP"),
        (OK + b"Content-Length: 5\r\n" + chunked(b"hello"), "not valid HTTP"),
        (OK + b"\r\n" + bytes(2001), "more than 2,000 bytes"),
        (OK + chunked(*[b"x"] * 2001), "more than 2,000 bytes"),
        (OK + length(10) + b"short", "ended too early"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nff\r\nshort", "ended too early"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nshort", "not valid HTTP"),
        (OK + b"X-Long: " + b"x" * 300_000 + b"\r\n\r\n", "headers are too long"),
        (b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" * 20_000, "headers are too long"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not valid HTTP"),
        (b"", "ended too early"),
        (OK, "ended too early"),
    ],
)
def test_answers_of_no_use_are_refused_with_a_sentence(answer: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        fetched(answer, max_bytes=2000)
    assert "data:image/png" in str(caught.value) and "127.0.0.1" not in str(caught.value)


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200 OK\r\n", OK + length(1000), OK + b"\r\n"])
def test_a_server_that_drips_is_left_in_time(beginning: bytes) -> None:
    async def drip(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(beginning)
        while True:
            writer.write(b"x" if beginning else b"")
            await writer.drain()
            await asyncio.sleep(0.02)

    with pytest.raises(BadRequest, match=r"longer than 0\.2 s"):
        fetched(drip, timeout_s=0.2)


def test_a_name_that_is_never_found_is_left_in_time() -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    fetcher = ImageDownloader(("img.example.com",), timeout_s=0.1, resolve=never)
    with pytest.raises(BadRequest, match="longer than"):
        asyncio.run(fetcher.fetch("https://img.example.com/"))


def test_a_server_that_cannot_be_reached() -> None:
    async def test() -> None:
        async with site(b"") as there:
            pass
        with pytest.raises(BadRequest, match="cannot be reached"):
            await there.fetcher().fetch(there.url())

    asyncio.run(test())


def test_an_inner_address_behind_an_allowed_name_is_not_connected_to() -> None:
    async def test() -> None:
        async with site(OK + length(1) + b"x") as there:
            inner = [
                "127.0.0.1",
                "::1",
                "::ffff:127.0.0.1",
                "10.0.0.1",
                "169.254.169.254",
                "64:ff9b::7f00:1",
                "fe80::1%lo",
            ]
            for there.addresses in ([], inner, *([address] for address in inner)):
                with pytest.raises(BadRequest, match="no public address"):
                    await there.fetcher(may_connect=is_public).fetch(there.url())
            assert there.asked == []

    asyncio.run(test())


def test_among_several_addresses_only_public_ones_are_tried_and_the_next_when_one_fails() -> None:
    async def test() -> None:
        async with site(OK + length(1) + b"x") as there:
            there.addresses = ["10.1.1.1", "127.0.0.9", "127.0.0.1"]
            fetcher = there.fetcher(may_connect=lambda ip: ip.startswith("127."))
            assert await fetcher.fetch(there.url()) == b"x"

    asyncio.run(test())


def test_names_are_looked_up_by_the_system() -> None:
    async def test() -> None:
        found: set[str] = set()

        def note(ip: str) -> bool:
            found.add(ip)
            return is_public(ip)

        fetcher = ImageDownloader(("localhost",), https_only=False, may_connect=note)
        with pytest.raises(BadRequest, match="no public address"):
            await fetcher.fetch("http://localhost/")
        fetcher.close()
        assert {"127.0.0.1", "::1"} & found

    asyncio.run(test())


# addresses

NOT_PUBLIC = """
0.0.0.0 10.1.2.3 100.64.0.1 100.100.100.200 127.0.0.1 127.9.9.9 168.63.129.16 169.254.169.254 172.16.0.1 172.31.255.255
192.0.0.8 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.1.1.1 240.0.0.1
255.255.255.255 :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:127.0.0.1 64:ff9b::7f00:1 64:ff9b::808:808
64:ff9b:1::a00:1 100::1 2001::1 2001:0:7f00:1:: 2001:10::1 2001:20::1 2001:db8::1 2002:7f00:1:: 2002:808:808:: 3ffe::1
3fff::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 2606:4700::1%eth0 fec0::1 ff02::1 localhost 127.1 2130706433
0x7f000001 0177.0.0.1 8.8.8.8.
"""


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "172.32.0.1", "2606:4700::1111", "2a00:1450:4001::1"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "host", "port", "target"),
    [
        ("https://img.example.com", "img.example.com", 443, "/"),
        ("HTTPS://IMG.Example.COM/A.png", "img.example.com", 443, "/A.png"),
        ("http://img.example.com:8080/a?b=c?d#e", "img.example.com", 8080, "/a?b=c?d"),
        ("https://img.example.com?x=1", "img.example.com", 443, "?x=1"),
        ("https://[2606:4700::1111]:8443/a", "2606:4700::1111", 8443, "/a"),
        ("https://93.184.216.34/a@b:c", "93.184.216.34", 443, "/a@b:c"),
        ("https://xn--bcher-kva.example/a", "xn--bcher-kva.example", 443, "/a"),
    ],
)
def test_an_address_is_read_once_for_everything(url: str, host: str, port: int, target: str) -> None:
    address = read_address(url)
    assert (address.host, address.port) == (host, port)
    assert address.target.lstrip("/") == target.lstrip("/") and address.target.startswith("/")


@pytest.mark.parametrize(
    "url",
    [
        "https://user@img.example.com/",
        "https://img.example.com@10.0.0.1/",
        "https://10.0.0.1\\@img.example.com/",
        "https://10.0.0.1#@img.example.com/",
        "https:///img.example.com/",
        "https:/img.example.com/",
        "https://img.example.com\\a",
        "https://img.example.com./a",
        "https://.img.example.com/",
        "https://img..example.com/",
        "https://-img.example.com/",
        "https://img.example.com:0/",
        "https://img.example.com:65536/",
        "https://img.example.com:/",
        "https://img.example.com:４43/",
        "https://img.example.com/a b",
        "https://img.example.com/a\r\nHost: x",
        "https://img.example.com/\x00",
        "https://img.example.com/é",
        "https://bücher.example/",
        "https://img。example.com/",
        "https://%69mg.example.com/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0x7f.1/",
        "https://127.1/",
        "https://0177.0.0.1/",
        "https://127.0.0.1./",
        "https://a.0x7f/",
        "https://[::1%25lo]/",
        "https://[::1/",
        "https://[0:0:0:0:0:0:0:1]/",
        "https://[::ffff:7f00:1]x/",
        " https://img.example.com/",
        "https://img.example.com/\n",
        "https://img.example.com/" + "a" * 9000,
        "file:///etc/passwd",
        "",
    ],
)
def test_addresses_that_anybody_could_read_otherwise_are_refused(url: str) -> None:
    allowed = ("img.example.com", "127.0.0.1", "[::1]", "10.0.0.1")
    with pytest.raises(BadRequest) as caught:
        asyncio.run(ImageDownloader(allowed, may_connect=lambda _: False).fetch(url))
    assert "cannot be fetched" in str(caught.value) or "no public address" in str(caught.value)


def test_hosts_and_ports_that_were_not_named_are_refused() -> None:
    fetcher = ImageDownloader(("img.example.com",))
    for host in (
        "example.com",
        "a.img.example.com",
        "img.example.com.evil.example",
        "img.example.com:8443",
        "127.0.0.1",
    ):
        with pytest.raises(BadRequest, match="is not allowed"):
            asyncio.run(fetcher.fetch(f"https://{host}/"))


def test_plain_http_is_refused_unless_it_is_allowed() -> None:
    with pytest.raises(BadRequest, match="https only"):
        asyncio.run(ImageDownloader(("img.example.com",)).fetch("http://img.example.com/"))


@pytest.mark.parametrize(
    "hosts",
    [(), ("",), ("*",), ("IMG.example.com",), ("https://a.example",), ("a.example/",), ("127.1",), ("a.example:0",)],
)
def test_a_policy_is_checked(hosts: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest, match="allowed for images"):
        ImageDownloader(hosts)
