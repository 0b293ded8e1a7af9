"""OpenTelemetry: a span for each request and a child for each of its phases. Its packages are an extra, imported only when
traces are enabled; errors of a collector never affect a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from everwarm import __version__
from everwarm.errors import EverwarmError
from everwarm.gateway.admin.request_log import RequestLog, RequestRecord

PATH = "/v1/traces"


def send_traces(endpoint: str, request_log: RequestLog) -> Callable[[], None]:
    """Sends every request that ends to this collector (OTLP over HTTP), in batches, from a separate thread. Returns a
    function that sends the rest and stops the thread."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise EverwarmError("traces need more packages: pip install 'everwarm[otel]'") from None
    url = endpoint if endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
    about = {"service.name": "everwarm", "service.version": __version__}
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    tracer = provider.get_tracer("everwarm", __version__)
    request_log.ended.append(partial(_export, tracer))
    return provider.shutdown


def _export(tracer: Any, row: RequestRecord) -> None:
    from opentelemetry.trace import Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = row.caller.traceparent
    above = TraceContextTextMapPropagator().extract({"traceparent": parent}) if parent else None
    at = int(row.at * 1e9)
    span = tracer.start_span(row.caller.path, above, start_time=at, attributes=attributes(row))
    inside = set_span_in_context(span)
    for name, seconds in row.phases():
        child = tracer.start_span(name, inside, start_time=at)
        at += int(seconds * 1e9)
        child.end(at)
    if row.status == "failed":
        span.set_status(Status(StatusCode.ERROR, row.error_code))  # the error's text may quote the request
    span.end(at)


def attributes(row: RequestRecord) -> dict[str, str | int]:
    """The attributes of a span; no text of the request."""
    found: dict[str, str | int] = {
        "gen_ai.request.model": row.caller.model,
        "gen_ai.usage.input_tokens": row.n_prompt,
        "gen_ai.usage.output_tokens": row.n_reply,
        "everwarm.request_id": row.id,
        "everwarm.status": row.status,
        "everwarm.cached_tokens": row.n_cached,
        "everwarm.read_tokens": row.n_read,
    }
    if row.slot is not None:
        found["everwarm.slot"] = row.slot
    return found if row.done is None else found | {"everwarm.reason": row.done.why.reason}
