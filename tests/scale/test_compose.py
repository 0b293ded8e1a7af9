"""What deploy/ray says is what the programs understand: flags, files, and a store that takes the first write."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench.seaweed import free_ports, weed
from ray.scripts.scripts import start

from everwarm.ray.settings import read_cluster
from everwarm.state.remote.bucket import Bucket, StoreFault
from support.server import until

DEPLOY = Path(__file__).parents[2] / "deploy" / "ray"
PORTS = [f"{part}.port{kind}" for part in ("master", "volume", "filer") for kind in ("", ".grpc")] + ["s3.port.grpc"]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yml").read_text())


def commands(service: dict[str, Any]) -> list[list[str]]:
    """What a service runs, each program by itself."""
    words = shlex.split(service["command"])
    inner = words[2] if words[:2] == ["bash", "-c"] else service["command"]
    return [shlex.split(part) for part in inner.split("&&")]


def unknown_flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")} - {flag for option in start.params for flag in option.opts}


def test_ray_understands_its_flags(compose: dict[str, Any]) -> None:
    services = compose["services"]
    begun = [
        words for name in ("head", "worker") for words in commands(services[name]) if words[:2] == ["ray", "start"]
    ]
    assert len(begun) == 2 and not any(map(unknown_flags, begun))
    assert unknown_flags(["ray", "start", "--haed"]) == {"--haed"}, "this test could not fail"


def test_everything_that_is_mounted_is_there_and_named_alike(compose: dict[str, Any]) -> None:
    asked = tomllib.loads((DEPLOY / "cluster.toml").read_text())
    head = compose["services"]["head"]
    given = {f"/run/secrets/{name}" for name in head["secrets"]}
    assert {asked["server"]["api-key-file"], asked["remote"]["key"]} <= given
    assert head["environment"]["RAY_AUTH_TOKEN_PATH"] in given and set(head["secrets"]) == set(compose["secrets"])
    (mounted,) = (volume.split(":")[1] for volume in head["volumes"] if volume.startswith("./cluster.toml"))
    assert commands(head)[-1][-3:] == ["serve", "--ray", mounted]
    assert compose["services"]["worker"]["deploy"]["replicas"] == asked["models"]["main"]["replicas"]["count"]


def test_everwarm_understands_the_file(tmp_path: Path) -> None:
    (tmp_path / "api.key").write_text("secret")
    config = tmp_path / "cluster.toml"
    config.write_text((DEPLOY / "cluster.toml").read_text().replace("/run/secrets/api_key", str(tmp_path / "api.key")))
    settings = read_cluster(config)
    assert settings.server.api_key == "secret" and settings.models[0].settings.remote is not None


def test_the_store_takes_the_first_write(
    compose: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started with the very flags, in another folder and on other ports; nobody makes a bucket."""
    port, *others = free_ports(1 + len(PORTS))
    environment = compose["services"]["head"]["environment"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, environment[name])
    (words,) = commands(compose["services"]["store"])
    words = [str(tmp_path) if word == "/data" else word for word in words]
    more = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={port}", "-volume.max=4", "-master.telemetry=false"]
    more += [
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *(f"-{name}={at}" for name, at in zip(PORTS, others, strict=True)),
    ]
    url = re.search(r'url = "(.+)"', (DEPLOY / "cluster.toml").read_text())
    assert url is not None
    bucket = Bucket(url[1], f"http://127.0.0.1:{port}")

    def takes_it() -> bool:
        try:
            return asyncio.run(bucket.put("hello", [b"x"], 5.0, over=True))
        except (StoreFault, TimeoutError):
            return False

    with subprocess.Popen(
        [str(weed()), *words, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(takes_it, "the store takes what is written", 60)
        finally:
            process.kill()
