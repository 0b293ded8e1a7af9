"""Where a server listens: several addresses, a Unix socket, and HTTPS."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import pytest

from everwarm.errors import EverwarmError
from everwarm.gateway.server import _listening
from everwarm.gateway.settings import ServerSettings
from support.fork_server import fork_server
from support.server import listening, run_cli, serving

HELLO = {"prompt": "Hello", "n_predict": 1}


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def test_a_unix_socket_beside_an_address(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with serving("--host", f"127.0.0.1,{path}") as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        connection = UnixConnection(path)
        connection.request("POST", "/completion", json.dumps(HELLO), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()
        assert server.ask("/completion", HELLO)["stop"] is True
    assert not path.exists()


def test_a_socket_that_nobody_listens_on_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    settings = ServerSettings(host=str(path))
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.listen()
    with pytest.raises(EverwarmError, match="cannot listen"), _listening(settings):
        pass
    left.close()
    with _listening(settings) as (sock,):
        assert sock.getsockname() == str(path)
    path.write_text("a file")
    with pytest.raises(EverwarmError, match="cannot listen"), _listening(settings):
        pass
    assert path.read_text() == "a file"


def test_an_address_that_cannot_be_had_closes_the_others(tmp_path: Path) -> None:
    settings = ServerSettings(host=str(tmp_path / "a.sock"), more_hosts=(str(tmp_path / "none" / "b.sock"),))
    with pytest.raises(EverwarmError, match=r"b\.sock"), _listening(settings):
        pass
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    made += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    return key, cert


def test_https_and_nothing_else_with_a_certificate(certificate: tuple[Path, Path]) -> None:
    key, cert = certificate
    flags = ("--ssl-key-file", str(key), "--ssl-cert-file", str(cert), "--port", "0", "--disk-cache", "0", "-t", "1")
    with listening(fork_server().start("serve", "--demo", *flags), "https") as server:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.port, context=ssl.create_default_context(cafile=cert)
        )
        connection.request("POST", "/completion", json.dumps(HELLO), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            server.get("/health")


def test_a_certificate_that_cannot_be_used_is_one_sentence(certificate: tuple[Path, Path]) -> None:
    key, cert = certificate
    for flags in ((str(cert), str(cert)), (str(key), str(key.parent / "none"))):
        done = run_cli("serve", "--demo", "--port", "0", "--ssl-key-file", flags[0], "--ssl-cert-file", flags[1])
        assert done.returncode == 1 and "the certificate and its key cannot be used" in done.stderr
        assert "Traceback" not in done.stderr
    done = run_cli("serve", "--demo", "--ssl-key-file", str(key))
    assert done.returncode == 1 and "both --ssl-key-file and --ssl-cert-file" in done.stderr
