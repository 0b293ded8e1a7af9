"""A server with room for long conversations, and OpenAI's real client of it: a failed request is not tried again.

``server`` and ``client`` are fixtures, one of each for a module of tests; a folder's ``conftest`` imports them.
"""

from collections.abc import Iterator

import openai
import pytest

from support.server import Server, serving


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(n_ctx=8192) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client
