"""Traces at a real collector: a span per request under the caller's own, a child per phase, and no words of anybody."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from support.server import run_cli, serving, until

trace_service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="traces are an extra: everwarm[otel]"
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and every span it got."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            told = trace_service.ExportTraceServiceRequest.FromString(data)
            spans.extend(span for r in told.resource_spans for s in r.scope_spans for span in s.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    server.server_close()
    thread.join()


def value(span: Any, name: str) -> Any:
    (found,) = (a.value for a in span.attributes if a.key == name)
    return getattr(found, found.WhichOneof("value"))


def test_a_request_is_a_span_with_a_child_for_each_phase(collector):
    endpoint, spans = collector
    body = {"messages": [{"role": "user", "content": "Tell me of the zebra."}], "max_tokens": 4, "temperature": 0}
    with serving("--otel-endpoint", endpoint) as server:
        reply = server.post("/v1/chat/completions", body, traceparent=f"00-{TRACE}-{SPAN}-01")
        assert reply.status == 200
        assert server.post("/v1/chat/completions", body).status == 200
    until(lambda: len(spans) == 10, "stopping sends what is left")
    first, second = (span for span in spans if span.name == "/v1/chat/completions")
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, SPAN)
    assert second.trace_id.hex() != TRACE and not second.parent_span_id
    phases = [span for span in spans if span.parent_span_id == first.span_id]
    assert [span.name for span in phases] == ["queue", "restore", "prefill", "decode"]
    assert phases[0].start_time_unix_nano == first.start_time_unix_nano
    assert phases[-1].end_time_unix_nano == first.end_time_unix_nano
    usage = reply.json["usage"]
    assert value(first, "gen_ai.usage.input_tokens") == usage["prompt_tokens"]
    assert value(first, "everwarm.cached_tokens") == 0 and value(first, "everwarm.reason") == "new"
    assert value(second, "everwarm.cached_tokens") > 0 and value(second, "everwarm.reason") == "hit"
    assert not any("zebra" in str(span) for span in spans)


def test_a_collector_that_is_not_there_harms_nobody():
    with serving("--otel-endpoint", "http://127.0.0.1:1") as server:
        body = {"prompt": "a", "n_predict": 2}
        assert [server.post("/completion", body).status for _ in range(3)] == [200] * 3


def test_without_the_packages_the_start_says_what_to_install(tmp_path):
    (tmp_path / "opentelemetry.py").write_text("raise ImportError('none')\n")
    message = run_cli(
        "serve", "--demo", "--port", "0", "--otel-endpoint", "http://127.0.0.1:1", PYTHONPATH=str(tmp_path)
    )
    assert message.returncode != 0 and "everwarm[otel]" in message.stderr and "Traceback" not in message.stderr
