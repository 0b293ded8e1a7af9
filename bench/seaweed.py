"""A real S3 server (SeaweedFS) as a context manager, with its files in a folder of the caller's."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUCKET = "states"
ACCESS, SECRET = "everwarm-test", "everwarm-test-secret"
PATIENCE_S = 60.0


@dataclass(frozen=True)
class S3:
    endpoint: str
    access: str = ACCESS
    secret: str = SECRET

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/fleet"

    @property
    def environment(self) -> dict[str, str]:
        named = {"AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_REGION": "us-east-1"}
        return named | {"AWS_ENDPOINT_URL": self.endpoint}


def weed() -> Path:
    """The program, as its package installs it beside Python."""
    beside = Path(sys.executable).with_name("weed")
    found = beside if beside.exists() else shutil.which("weed")
    assert found, "weed is not installed; `make test-scale` installs it"
    return Path(found)


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[S3]:
    """Answers when this gives it."""
    data = folder / "data"
    data.mkdir(parents=True)
    config = folder / "s3.json"
    credentials = [{"accessKey": ACCESS, "secretKey": SECRET}]
    identity = {"name": "test", "credentials": credentials, "actions": ["Admin", "Read", "List", "Tagging", "Write"]}
    config.write_text(json.dumps({"identities": [identity]}))
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    names += ("s3.port", "s3.port.grpc")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [str(weed()), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}", "-filer", "-s3"]
    command += [f"-s3.config={config}", "-volume.max=8", "-master.volumeSizeLimitMB=512", "-master.telemetry=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    with (folder / "weed.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            s3 = S3(f"http://127.0.0.1:{ports['s3.port']}")
            make_bucket(s3, process, folder / "weed.log")
            yield s3
        finally:
            process.kill()  # its files are not needed any more
            process.wait()


def make_bucket(s3: S3, process: subprocess.Popen[bytes], log: Path) -> None:
    """As soon as it can."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    keys = {"aws_access_key_id": s3.access, "aws_secret_access_key": s3.secret, "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=s3.endpoint, config=Config(retries={"max_attempts": 1}), **keys)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="hello", Body=b"x")
            client.close()
            return
        except (BotoCoreError, ClientError, OSError):
            assert process.poll() is None, f"the store ended: {log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"the store did not start: {log.read_text()[-2000:]}"
            time.sleep(0.1)


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """For this process and those it starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
