"""A small HTTP client of a running server, for the command line. Sends and receives JSON; does not know what it means."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from everwarm.errors import BadRequest, EverwarmError
from everwarm.types import Json

MAX_ANSWER = 64 << 20


@dataclass(frozen=True, slots=True)
class Client:
    url: str
    api_key: str | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"{self.url[:200]!r} is not a server's address; give one like http://127.0.0.1:8080")

    def get(self, path: str, **query: str | int | None) -> Any:
        """The answer; ``EverwarmError`` with the server's message if it refuses."""
        text = "&".join(f"{name}={quote(str(value))}" for name, value in query.items() if value is not None)
        return self._request("GET", f"{path}{'?' * bool(text)}{text}", None)

    def post(self, path: str, body: Json) -> Any:
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: Json | None) -> Any:
        where = urlsplit(self.url)
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        base = where.path.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = kind(where.netloc, timeout=self.timeout_s)
        try:
            connection.request(method, f"{base}{path}", None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read(MAX_ANSWER))
        except (OSError, http.client.HTTPException) as error:
            raise EverwarmError(f"no answer from {self.url}: {error}") from None
        except ValueError:
            raise EverwarmError(f"{self.url} answers, but not like an Everwarm server") from None
        finally:
            connection.close()
        if response.status != 200:
            raise EverwarmError(_message(answer, response.status))
        return answer


def _message(answer: Any, status: int) -> str:
    try:
        return str(answer["error"]["message"])
    except (KeyError, TypeError):
        return f"the server answered {status}"
