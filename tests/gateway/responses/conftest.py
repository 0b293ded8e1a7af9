"""A server, and OpenAI's client of it."""

from support.openai_client import client, server

__all__ = ["client", "server"]
