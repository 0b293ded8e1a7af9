"""The prompts of llama-server for every template and shape, recorded as digests for the tests, and compared with ours.

Run it as ``python -m bench.compat.prompts`` after ``make templates``; it takes about three minutes.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import multiprocessing
import multiprocessing.connection
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from bench.measure import EMBEDDED  # noqa: E402
from support.prompt_digests import RECORDED, TEMPLATES, Recorded, digest, our_prompt  # noqa: E402
from support.prompt_exceptions import exception  # noqa: E402
from support.prompt_shapes import SHAPES  # noqa: E402


def main() -> None:
    today = datetime.date.today()
    digests, n_same, differing = {}, 0, []
    for path in sorted(TEMPLATES.glob("*.jinja")):
        with llama_server(path.read_text()) as host:
            bos, eos = _special_tokens(host)
            theirs = {shape: _applied(host, body) for shape, body in SHAPES.items()}
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


@contextlib.contextmanager
def llama_server(template: str) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(template, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv().split("//")[1].rstrip("/")
    finally:
        ours.send("stop")
        process.join(10)
        process.kill()


def _serve(template: str, pipe: multiprocessing.connection.Connection) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(EMBEDDED)
    params.n_ctx, params.n_parallel, params.port, params.verbosity = 512, 1, 0, -1
    params.cpuparams.n_threads, params.warmup = 1, False
    params.use_jinja, params.chat_template = True, template
    server = xllamacpp.Server(params)
    pipe.send(server.listening_address)
    pipe.recv()


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
