"""Counters for /metrics: llama-server's names where it has them, ``everwarm_`` for ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from everwarm.engine import messages as m

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# from the engine's own counts: name there → (type, name here, help)
_ENGINE: Mapping[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str]] = {
    "n_avoidable": (CounterMetricFamily, "everwarm_tokens_read_again", "Prompt tokens read although known before"),
    "n_full_rereads": (CounterMetricFamily, "everwarm_full_rereads", "Prompts read from the start although known"),
    "n_suspended": (CounterMetricFamily, "everwarm_suspensions", "Requests moved to RAM because the context was full"),
    "n_prewarms": (CounterMetricFamily, "everwarm_prewarms", "Turns read as the next request will show them, on idle"),
    "n_prewarms_used": (CounterMetricFamily, "everwarm_prewarms_used", "Those a request went on from"),
    "n_prewarms_interrupted": (CounterMetricFamily, "everwarm_prewarms_interrupted", "Times one had to give way"),
    "n_prewarm_tokens": (CounterMetricFamily, "everwarm_prewarm_tokens", "Tokens read on idle"),
    "n_created": (CounterMetricFamily, "everwarm_checkpoints_created", "Checkpoints taken"),
    "n_restored": (CounterMetricFamily, "everwarm_checkpoints_restored", "Checkpoints restored"),
    "n_dropped": (CounterMetricFamily, "everwarm_checkpoints_dropped", "Checkpoints given up"),
    "n_quarantined": (CounterMetricFamily, "everwarm_quarantines", "Entries libllama refused"),
    "ram_bytes": (GaugeMetricFamily, "everwarm_ram_bytes", "Bytes of states and segments in RAM"),
    "ram_budget_bytes": (GaugeMetricFamily, "everwarm_ram_budget_bytes", "Most bytes they may take"),
    "ram_arena_bytes": (GaugeMetricFamily, "everwarm_ram_arena_bytes", "Bytes that would outlive the engine"),
    "ram_n_waiting": (GaugeMetricFamily, "everwarm_ram_waiting", "Objects that would not outlive the engine yet"),
    "ram_n_outside": (CounterMetricFamily, "everwarm_ram_outside", "Objects for which the arena had no room"),
    "ram_n_adopted": (GaugeMetricFamily, "everwarm_ram_adopted", "Objects found in the memory of the last engine"),
    "ram_n_unsound": (CounterMetricFamily, "everwarm_ram_unsound", "Objects found there whose bytes had changed"),
    "ram_pinned_bytes": (GaugeMetricFamily, "everwarm_ram_pinned_bytes", "Bytes a GPU copies at the bus's speed"),
    "n_parked": (GaugeMetricFamily, "everwarm_parked_checkpoints", "Checkpoints on the device"),
    "disk_bytes": (GaugeMetricFamily, "everwarm_disk_bytes", "Bytes of states and segments on disk"),
    "disk_budget_bytes": (GaugeMetricFamily, "everwarm_disk_budget_bytes", "Most bytes they may take"),
    "disk_is_degraded": (GaugeMetricFamily, "everwarm_disk_degraded", "1 while the disk refuses something"),
    "disk_n_written": (CounterMetricFamily, "everwarm_disk_objects_written", "Objects made durable"),
    "disk_n_bytes_written": (CounterMetricFamily, "everwarm_disk_bytes_written", "Their bytes"),
    "disk_n_brought": (CounterMetricFamily, "everwarm_disk_restores", "Prompts that were continued from disk"),
    "disk_n_damaged": (CounterMetricFamily, "everwarm_disk_damaged", "Objects that did not verify and were dropped"),
    "disk_n_failures": (CounterMetricFamily, "everwarm_disk_failures", "Refusals of the file system"),
    "n_cells_used": (GaugeMetricFamily, "everwarm_kv_cells_used", "KV cells in use"),
}


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._prompt = self._counter("llamacpp:prompt_tokens", "Prompt tokens processed, excluding cached ones")
        self._cached = self._counter("llamacpp:prompt_tokens_cached", "Prompt tokens reused from the cache")
        self._prompt_s = self._counter("llamacpp:prompt_seconds", "Time spent on prompts, restores included")
        self._written = self._counter("llamacpp:tokens_predicted", "Reply tokens")
        self._written_s = self._counter("llamacpp:tokens_predicted_seconds", "Time spent on replies")
        self._requests = Counter("everwarm_requests", "Requests by how they ended", ["finish"], registry=self.registry)
        self._first = Histogram(
            "everwarm_time_to_first_token_seconds", "Queue to first token", buckets=_SECONDS, registry=self.registry
        )
        self._restore = Histogram(
            "everwarm_restore_seconds", "Restoring state", buckets=_SECONDS, registry=self.registry
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def finished(self, done: m.Done) -> None:
        self._prompt.inc(done.n_prompt - done.n_cached)
        self._cached.inc(done.n_cached)
        self._prompt_s.inc(done.restore_s + done.prefill_s)
        self._written.inc(done.n_reply)
        self._written_s.inc(done.decode_s)
        self._requests.labels(done.finish).inc()
        self._first.observe(done.queue_s + done.restore_s + done.prefill_s)
        self._restore.observe(done.restore_s)

    def render(self, engine: Mapping[str, Any], gauges: Mapping[str, tuple[str, float]]) -> bytes:
        """The counters here, the engine's own, and gauges of the moment."""
        moment = CollectorRegistry()
        moment.register(_Moment(engine, gauges))
        return generate_latest(self.registry) + generate_latest(moment)


class _Moment(Collector):
    def __init__(self, engine: Mapping[str, Any], gauges: Mapping[str, tuple[str, float]]) -> None:
        self._engine = engine
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        for key, (kind, name, text) in _ENGINE.items():
            if key in self._engine:
                yield kind(name, text, value=self._engine[key])
        for name, (text, value) in self._gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
