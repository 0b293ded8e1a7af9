"""One S3 server for all tests here, and the key that their fleet shares."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.seaweed import S3, environment, seaweed

from support.server import key_file

if importlib.util.find_spec("moto") is None:
    collect_ignore_glob = ["test_*.py"]  # `make test-scale` installs what they need


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as store, environment(store.environment):
        yield store


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path)
