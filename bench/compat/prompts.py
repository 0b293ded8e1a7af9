"""The prompts of llama-server for every template and shape, recorded as digests for the tests, and compared with ours.

Run it as ``python -m bench.compat.prompts`` after ``make templates``; it takes about three minutes.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from bench.measure import EMBEDDED  # noqa: E402
from bench.peer import PeerOptions, llama_server  # noqa: E402
from support.prompt_digests import RECORDED, TEMPLATES, Recorded, digest, our_prompt  # noqa: E402
from support.prompt_exceptions import exception  # noqa: E402
from support.prompt_shapes import SHAPES  # noqa: E402


def main() -> None:
    today = datetime.date.today()
    digests, n_same, differing = {}, 0, []
    for path in sorted(TEMPLATES.glob("*.jinja")):
        options = PeerOptions(EMBEDDED, n_ctx=512, n_parallel=1, n_threads=1, chat_template=path.read_text())
        with llama_server(options) as peer:
            bos, eos = _special_tokens(peer.host)
            theirs = {shape: _applied(peer.host, body) for shape, body in SHAPES.items()}
        digests[path.stem] = [digest(prompt) for prompt in theirs.values()]
        for shape, prompt in theirs.items():
            ours = our_prompt(path, SHAPES[shape], bos=bos, eos=eos, today=today)
            n_same += ours == prompt
            if ours != prompt:
                differing.append((path.stem, shape, exception(path.stem, shape)))
    if datetime.date.today() != today:
        raise SystemExit("midnight came in between: run it again")
    RECORDED.write_text(Recorded(today.isoformat(), bos, eos, list(SHAPES), digests).as_json())
    unexplained = [(name, shape) for name, shape, why in differing if why is None]
    print(f"{n_same} prompts are the same, {len(differing) - len(unexplained)} differ for a named reason")
    for name, shape in unexplained:
        print(f"  {name}: {shape}")
    print(f"{len(unexplained)} differ for no named reason")


def _special_tokens(host: str) -> tuple[str, str]:
    props = _asked(host, "GET", "/props")[1]
    return props["bos_token"], props["eos_token"]


def _applied(host: str, body: dict[str, Any]) -> str | None:
    status, answer = _asked(host, "POST", "/apply-template", body)
    return answer["prompt"] if status == 200 else None


def _asked(host: str, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(host, timeout=60)
    with contextlib.closing(connection):
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


if __name__ == "__main__":
    main()
