"""Counters for /metrics: llama-server's names where it has them, our own with the prefix ``everwarm_``; and the lag of the
event loop, which shows that something delays every request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from everwarm.engine.process import messages as m

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_RESTORE_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_LAG_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1, 3)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# the engine's counters: its name → (type, metric name, help)
_ENGINE: Mapping[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str]] = {
    "n_avoidable": (CounterMetricFamily, "everwarm_tokens_read_again", "Prompt tokens read again although known"),
    "n_full_rereads": (CounterMetricFamily, "everwarm_full_rereads", "Known prompts read again from the start"),
    "n_suspended": (CounterMetricFamily, "everwarm_suspensions", "Requests moved to RAM because the context was full"),
    "n_turns": (
        CounterMetricFamily,
        "everwarm_turns",
        "Times a deterministic request and the others gave way to each other",
    ),
    "n_stalls": (
        CounterMetricFamily,
        "everwarm_stalls",
        "Times the scheduler made no progress although requests waited: a bug in Everwarm",
    ),
    "n_prewarms": (CounterMetricFamily, "everwarm_prewarms", "Turns read in idle time for the next request"),
    "n_prewarms_used": (CounterMetricFamily, "everwarm_prewarms_used", "Prewarmed turns that a request continued from"),
    "n_prewarms_interrupted": (
        CounterMetricFamily,
        "everwarm_prewarms_interrupted",
        "Times a prewarm gave way to a request",
    ),
    "n_prewarm_tokens": (CounterMetricFamily, "everwarm_prewarm_tokens", "Tokens read by prewarming"),
    "n_created": (CounterMetricFamily, "everwarm_checkpoints_created", "Checkpoints taken"),
    "n_restored": (CounterMetricFamily, "everwarm_checkpoints_restored", "Checkpoints restored"),
    "n_dropped": (CounterMetricFamily, "everwarm_checkpoints_dropped", "Checkpoints dropped"),
    "n_quarantined": (CounterMetricFamily, "everwarm_quarantines", "Entries that libllama refused"),
    "ram_bytes": (GaugeMetricFamily, "everwarm_ram_bytes", "Bytes of states and segments in RAM"),
    "ram_budget_bytes": (GaugeMetricFamily, "everwarm_ram_budget_bytes", "Most bytes they may take"),
    "ram_arena_bytes": (GaugeMetricFamily, "everwarm_ram_arena_bytes", "Bytes that would outlive the engine"),
    "ram_n_waiting": (GaugeMetricFamily, "everwarm_ram_waiting", "Objects that would not outlive the engine yet"),
    "ram_n_outside": (CounterMetricFamily, "everwarm_ram_outside", "Objects that did not fit into the arena"),
    "ram_n_adopted": (GaugeMetricFamily, "everwarm_ram_adopted", "Objects adopted from the arena of the last engine"),
    "ram_n_unsound": (CounterMetricFamily, "everwarm_ram_unsound", "Objects in that arena whose bytes had changed"),
    "ram_pinned_bytes": (GaugeMetricFamily, "everwarm_ram_pinned_bytes", "Bytes in pinned memory"),
    "n_parked": (GaugeMetricFamily, "everwarm_parked_checkpoints", "Checkpoints on the device"),
    "disk_bytes": (GaugeMetricFamily, "everwarm_disk_bytes", "Bytes of states and segments on disk"),
    "disk_budget_bytes": (GaugeMetricFamily, "everwarm_disk_budget_bytes", "Most bytes they may take"),
    "disk_is_degraded": (GaugeMetricFamily, "everwarm_disk_degraded", "1 while the disk tier fails"),
    "disk_lag_s": (
        GaugeMetricFamily,
        "everwarm_disk_lag_seconds",
        "Seconds since the end of the oldest turn that is not on disk yet",
    ),
    "disk_n_written": (CounterMetricFamily, "everwarm_disk_objects_written", "Objects made durable"),
    "disk_n_bytes_written": (CounterMetricFamily, "everwarm_disk_bytes_written", "Their bytes"),
    "disk_n_brought": (CounterMetricFamily, "everwarm_disk_restores", "Prompts that were continued from disk"),
    "disk_n_damaged": (CounterMetricFamily, "everwarm_disk_damaged", "Objects that did not verify and were dropped"),
    "disk_n_failures": (CounterMetricFamily, "everwarm_disk_failures", "Errors of the file system"),
    "remote_n_hits": (CounterMetricFamily, "everwarm_remote_hits", "Prompts that were continued from the remote store"),
    "remote_n_misses": (CounterMetricFamily, "everwarm_remote_misses", "Prompts that the remote store did not have"),
    "remote_n_bytes_read": (CounterMetricFamily, "everwarm_remote_bytes_read", "Bytes read from it"),
    "remote_n_bytes_written": (CounterMetricFamily, "everwarm_remote_bytes_written", "Bytes written to it"),
    "remote_n_failures": (CounterMetricFamily, "everwarm_remote_failures", "Requests to it that failed"),
    "remote_n_refused": (CounterMetricFamily, "everwarm_remote_refused", "Objects in it that did not verify"),
    "remote_n_given_up": (CounterMetricFamily, "everwarm_remote_writes_given_up", "Turns that were not written to it"),
    "remote_bytes_waiting": (GaugeMetricFamily, "everwarm_remote_bytes_waiting", "Bytes that wait to be written to it"),
    "remote_breaker_is_open": (
        GaugeMetricFamily,
        "everwarm_remote_breaker_open",
        "1 while the remote store is not used",
    ),
    "n_cells_used": (GaugeMetricFamily, "everwarm_kv_cells_used", "KV cells in use"),
    "n_cells": (GaugeMetricFamily, "everwarm_kv_cells", "KV cells in total"),
    "n_decodes": (CounterMetricFamily, "llamacpp:n_decode", "Calls of llama_decode"),
    "n_drafted": (CounterMetricFamily, "everwarm_draft_tokens", "Reply tokens that were guessed and verified"),
    "n_draft_accepted": (CounterMetricFamily, "everwarm_draft_tokens_accepted", "Those of them that were right"),
    "n_verified": (CounterMetricFamily, "everwarm_drafts_verified", "Drafts that were verified, each in one decode"),
}
# metric name → (help, label, the engine's counter for each value of the label)
_LABELLED: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "everwarm_tier_bytes": ("Bytes of states and segments", "tier", {"ram": "ram_bytes", "disk": "disk_bytes"}),
    "everwarm_tier_budget_bytes": (
        "Most bytes they may take",
        "tier",
        {"ram": "ram_budget_bytes", "disk": "disk_budget_bytes"},
    ),
    "everwarm_tier_states": ("Checkpoints", "tier", {"device": "n_parked", "ram": "ram_n_states"}),
}
# how a request continued from its checkpoint → the tier of that checkpoint
_TIERS = {
    "in place": "device",
    "unparked": "device",
    "shared": "device",
    "from ram": "ram",
    "from disk": "disk",
    "from remote": "remote",
}


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._prompt = self._counter("llamacpp:prompt_tokens", "Prompt tokens processed, excluding cached ones")
        self._cached = self._counter("llamacpp:prompt_tokens_cached", "Prompt tokens reused from the cache")
        name = "everwarm_prompt_tokens_read"
        text = "Prompt tokens read, by the reason of their request"
        self._read = Counter(name, text, ["reason"], registry=self.registry)
        self._prompt_s = self._counter("llamacpp:prompt_seconds", "Time spent on prompts, restores included")
        self._written = self._counter("llamacpp:tokens_predicted", "Reply tokens")
        self._written_s = self._counter("llamacpp:tokens_predicted_seconds", "Time spent on replies")
        self._requests = Counter("everwarm_requests", "Requests by how they ended", ["finish"], registry=self.registry)
        self._noise = Counter(
            "everwarm_noise_lines_removed", "Lines of system text left out, by rule", ["rule"], registry=self.registry
        )
        self._first = Histogram(
            "everwarm_time_to_first_token_seconds", "Queue to first token", buckets=_SECONDS, registry=self.registry
        )
        self._restore = Histogram(
            "everwarm_restore_seconds",
            "Time to restore a checkpoint, by its tier",
            ["tier"],
            buckets=_RESTORE_SECONDS,
            registry=self.registry,
        )
        for tier in ("device", "ram", "disk", "remote"):
            self._restore.labels(tier)  # shown from the start
        self._keep = Histogram(
            "everwarm_keep_seconds",
            "How long last frames waited until their turn was kept",
            buckets=_RESTORE_SECONDS,
            registry=self.registry,
        )
        name = "everwarm_turns_kept"
        text = "Finished turns by where they were when their last frame left"
        self._kept = Counter(name, text, ["where"], registry=self.registry)
        for where in ("ram", "disk", "none"):
            self._kept.labels(where)
        self._lag = Histogram(
            "everwarm_loop_lag_seconds",
            "Lag of the gateway's event loop, measured ten times a second",
            buckets=_LAG_SECONDS,
            registry=self.registry,
        )
        self._queries = self._counter("everwarm_prefix_cache_queries", "Prompt tokens looked up in the cache")
        self._hits = self._counter("everwarm_prefix_cache_hits", "Prompt tokens found in the cache")
        self._n_read = self._n_written = self._n_longest = 0
        self._read_s = self._write_s = 0.0

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def finished(self, done: m.Done) -> None:
        self._prompt.inc(done.n_prompt - done.n_cached)
        self._read.labels(done.why.reason).inc(done.n_prompt - done.n_cached)
        self._cached.inc(done.n_cached)
        self._prompt_s.inc(done.restore_s + done.prefill_s)
        self._written.inc(done.n_reply)
        self._written_s.inc(done.decode_s)
        self._requests.labels(done.finish).inc()
        self._first.observe(done.queue_s + done.restore_s + done.prefill_s)
        if done.checkpoint is not None:
            self._restore.labels(_TIERS.get(done.checkpoint.rpartition(", ")[2], "ram")).observe(done.restore_s)
        self._keep.observe(done.keep_s)
        self._kept.labels(done.kept).inc()
        self._queries.inc(done.n_prompt)
        self._hits.inc(done.n_cached)
        self._n_read += done.n_prompt - done.n_cached
        self._n_written += done.n_reply
        self._read_s += done.restore_s + done.prefill_s
        self._write_s += done.decode_s
        self._n_longest = max(self._n_longest, done.n_prompt + done.n_reply)

    def embedded(self, n_tokens: int) -> None:
        """Texts became vectors."""
        self._prompt.inc(n_tokens)

    def removed_noise(self, rule: str, n_lines: int = 1) -> None:
        self._noise.labels(rule).inc(n_lines)

    def lagged(self, late_s: float) -> None:
        self._lag.observe(late_s)

    def take_speeds(self) -> dict[str, tuple[str, float]]:
        """llama-server's averages, over what ended since they were last taken."""
        read = self._n_read / self._read_s if self._read_s else 0.0
        written = self._n_written / self._write_s if self._write_s else 0.0
        self._n_read = self._n_written = 0
        self._read_s = self._write_s = 0.0
        return {
            "llamacpp:prompt_tokens_seconds": ("Prompt tokens per second since the last scrape", read),
            "llamacpp:predicted_tokens_seconds": ("Reply tokens per second since the last scrape", written),
        }

    def render(
        self,
        engine: Mapping[str, Any],
        gauges: Mapping[str, tuple[str, float]],
        counters: Mapping[str, tuple[str, float | dict[str, float]]],
    ) -> bytes:
        """The gateway's counters, the engine's, and the given gauges and counters."""
        moment = CollectorRegistry()
        moment.register(_Sample(engine, {**self.take_speeds(), **gauges}, counters))
        return generate_latest(self.registry) + generate_latest(moment) + self._longest()

    def _longest(self) -> bytes:
        """llama-server calls it a counter, without the ending that counters have."""
        name = "llamacpp:n_tokens_max"
        text = "Tokens of the longest prompt with its reply"
        return f"# HELP {name} {text}\n# TYPE {name} counter\n{name} {float(self._n_longest)}\n".encode()


class _Sample(Collector):
    def __init__(
        self,
        engine: Mapping[str, Any],
        gauges: Mapping[str, tuple[str, float]],
        counters: Mapping[str, tuple[str, float | dict[str, float]]],
    ) -> None:
        self._engine = engine
        self._gauges = gauges
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        for key, (kind, name, text) in _ENGINE.items():
            if key in self._engine:
                yield kind(name, text, value=self._engine[key])
        yield from self._labelled()
        if self._engine.get("n_decodes"):
            busy = self._engine["n_fed"] / self._engine["n_decodes"]
            text = "Requests read or written per call of llama_decode, on average"
            yield GaugeMetricFamily("llamacpp:n_busy_slots_per_decode", text, value=busy)
        for name, (text, value) in self._gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, n) in self._counters.items():
            family = CounterMetricFamily(name, text, labels=["cause"] if isinstance(n, dict) else [])
            for cause, value in n.items() if isinstance(n, dict) else [(None, n)]:
                family.add_metric([] if cause is None else [cause], value)
            yield family

    def _labelled(self) -> Iterable[Metric]:
        for name, (text, label, parts) in _LABELLED.items():
            family = GaugeMetricFamily(name, text, labels=[label])
            for value, key in parts.items():
                if key in self._engine:
                    family.add_metric([value], self._engine[key])
            yield family
        gone = CounterMetricFamily(
            "everwarm_evictions", "Valid states and segments that were evicted", labels=["cause"]
        )
        for cause, n in self._engine.get("evictions", {}).items():
            gone.add_metric([cause], n)
        yield gone


INTERVAL_S = 0.1  # each look wakes this process, also between two tokens of a reply


class LoopLag:
    """A timer is set for ``INTERVAL_S`` and measures how much later it is called. Calls ``observe`` with every measured
    lag, in seconds. ``most_s``: the longest since ``forget_most``; ``most_busy_s``: the same of the part in which this
    process was computing; in the rest it waited for a processor."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self.most_s = 0.0
        self.most_busy_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._cpu = 0.0

    def forget_most(self) -> None:
        self.most_s = 0.0
        self.most_busy_s = 0.0

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        self._set_timer()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _set_timer(self) -> None:
        self._due, self._cpu = time.monotonic() + INTERVAL_S, time.process_time()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._measure)

    def _measure(self) -> None:
        late_s = max(0.0, time.monotonic() - self._due)
        busy_s = min(late_s, time.process_time() - self._cpu)
        self.most_s = max(self.most_s, late_s)
        self.most_busy_s = max(self.most_busy_s, busy_s)
        self._observe(late_s)
        self._set_timer()
