"""More clients than the server takes: how long they wait, and whether Retry-After was the truth. On the embedded model."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.server import Server, everwarm

SIZE = ("--slots", "2", "--threads", "2", "--ctx-size", "4096", "--max-requests", "4")
N_CLIENTS, N_TOKENS = 16, 200
MOST_TRIES = 50


@dataclass(slots=True)
class Client:
    """What one that obeys Retry-After saw."""

    retry_after_s: list[int] = field(default_factory=list)
    waited_s: float = 0.0  # from the first refusal to the place
    answer_s: float = 0.0  # from the first try to the whole answer


def run() -> None:
    print("### What overload does\n")
    print(
        f"{N_CLIENTS} clients at once, 2 slots, 4 requests at most, replies of {N_TOKENS} tokens; each obeys Retry-After.\n"
    )
    with everwarm("--demo", *SIZE) as server:
        alone_s = _alone(server)
        began = time.monotonic()
        with ThreadPoolExecutor(N_CLIENTS) as pool:
            clients = list(pool.map(lambda i: _obey(server, i), range(N_CLIENTS)))
        total_s = time.monotonic() - began
        _print(clients, alone_s, total_s)
        _print_beside_deterministic(server)


def _print(clients: list[Client], alone_s: float, total_s: float) -> None:
    refused = [client for client in clients if client.retry_after_s]
    retry_after = [c.retry_after_s[0] for c in refused]
    waited = [c.waited_s for c in refused]
    at_once = sum(len(c.retry_after_s) == 1 for c in refused)
    answers = sorted(c.answer_s for c in clients)
    print("| | |\n|---|---|")
    print(f"| one request alone | {alone_s:.1f} s |")
    print(f"| refused at first, with 429 | {len(refused)} of {len(clients)} |")
    print(f"| Retry-After, median / most | {statistics.median(retry_after):.0f} / {max(retry_after)} s |")
    print(f"| they waited for a place, median / most | {statistics.median(waited):.1f} / {max(waited):.1f} s |")
    print(f"| had a place when they came back | {at_once} of {len(refused)} |")
    print(f"| tries per client, on average | {sum(1 + len(c.retry_after_s) for c in clients) / len(clients):.1f} |")
    print(f"| whole answer, median / most | {answers[len(answers) // 2]:.1f} / {answers[-1]:.1f} s |")
    print(f"| all answered after | {total_s:.1f} s |")


def _print_beside_deterministic(server: Server) -> None:
    """A long reply that runs alone: how long another request waits beside it."""
    long = {"prompt": "Once upon a time", "n_predict": 3000, "deterministic": True}
    thread = threading.Thread(target=_post, args=(server, long))
    thread.start()
    time.sleep(0.5)
    waits = []
    while thread.is_alive() and len(waits) < 5:
        began = time.monotonic()
        _post(server, {"prompt": f"{len(waits)}: hello", "n_predict": 1})
        waits.append(time.monotonic() - began)
    if waits:
        name = "a short one beside a long deterministic one, median / most"
        print(f"| {name} | {statistics.median(waits):.1f} / {max(waits):.1f} s |")
    thread.join()


def _alone(server: Server) -> float:
    """Seconds of a lone request, the fastest of a few; from them the server knows what replies are like."""
    seconds = []
    for i in range(3):
        began = time.monotonic()
        _post(server, {"prompt": f"{i} Long ago", "n_predict": N_TOKENS})
        seconds.append(time.monotonic() - began)
    time.sleep(1)  # it says so with its next sign of life
    return min(seconds)


def _obey(server: Server, i: int) -> Client:
    client, began, refused_at = Client(), time.monotonic(), None
    for _ in range(MOST_TRIES):
        tried_at = time.monotonic()
        status, retry_after = _post(server, {"prompt": f"{i} Once upon a time", "n_predict": N_TOKENS})
        if status == 200:
            client.waited_s = 0.0 if refused_at is None else tried_at - refused_at
            client.answer_s = time.monotonic() - began
            return client
        refused_at = tried_at if refused_at is None else refused_at
        client.retry_after_s.append(retry_after)
        time.sleep(retry_after)
    raise RuntimeError(f"client {i} was refused {MOST_TRIES} times")


def _post(server: Server, body: dict[str, Any]) -> tuple[int, int]:
    connection = http.client.HTTPConnection(server.host, timeout=300)
    body = {"temperature": 0, "ignore_eos": True, **body}
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, int(response.headers.get("retry-after", 0))
