"""OpenAI's real client of a test's server: a failed request is not tried again."""

import openai

from support.server import Server


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
