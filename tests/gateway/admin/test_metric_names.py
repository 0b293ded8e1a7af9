"""What dashboards and alerts ask for is what a server says, and what it says is well formed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from support.server import Server, serving, until, words

DEPLOY = Path(__file__).parents[3] / "deploy"
NAME = re.compile(r"\b(?:everwarm_|llamacpp:)[a-z0-9_]+")
SUFFIXES = {"counter": ("_total", "_created"), "histogram": ("_bucket", "_count", "_sum", "_created"), "gauge": ("",)}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Iterator[str]:
    with serving("--disk-cache", "64MiB", "--state-dir", str(tmp_path_factory.mktemp("states"))) as server:
        yield said_by(server)


def said_by(server: Server) -> str:
    """After a prompt was read, read again and written to disk."""
    for _ in range(2):
        server.ask("/completion", {"prompt": words(60, 1), "n_predict": 4, "temperature": 0})
    until(lambda: "everwarm_disk_bytes " in metrics(server), "the disk is there")
    return metrics(server)


def metrics(server: Server) -> str:
    return server.get("/metrics").data.decode()


def samples(text: str) -> set[str]:
    """Names as queries spell them."""
    return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}


def dashboard_queries() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "everwarm.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return found + [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def unknown(queries: list[str], text: str) -> set[str]:
    return {name for query in queries for name in NAME.findall(query)} - samples(text)


def test_the_dashboard_asks_only_for_what_there_is(text):
    queries = dashboard_queries()
    assert len(queries) > 15 and all(NAME.search(query) for query in queries)
    assert unknown(queries, text) == set()
    assert unknown(["rate(everwarm_no_such_thing_total[5m])"], text) == {"everwarm_no_such_thing_total"}


def test_alerts_ask_only_for_what_there_is_and_say_what_is_wrong(text):
    rules = alert_rules()
    assert rules and unknown([rule["expr"] for rule in rules], text) == set()
    assert all(rule["alert"].startswith("Everwarm") and rule["annotations"]["summary"] for rule in rules)


def test_every_metric_has_a_type_a_help_and_a_name_that_fits(text):
    families = list(text_string_to_metric_families(text))
    assert len(families) == len({family.name for family in families}) > 30
    for family in families:
        assert family.documentation and family.type in SUFFIXES, family.name
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            assert suffix in SUFFIXES[family.type], sample.name
    for kind, most in (("counter", "_total"), ("histogram", "_seconds")):
        named = set(re.findall(rf"^# TYPE (\S+) {kind}$", text, re.MULTILINE)) - {
            "llamacpp:n_tokens_max"
        }  # llama-server's
        assert named and all(name.endswith(most) for name in named), named
    gauges = re.findall(r"^# TYPE (\S+) gauge$", text, re.MULTILINE)
    ours = [name for name in gauges if not name.endswith("_created")]
    assert ours and not any(name.endswith("_total") for name in ours)


def test_restores_and_losses_are_told_by_where_and_why(text):
    assert {f'everwarm_restore_seconds_count{{tier="{tier}"}}' for tier in ("device", "ram", "disk")} <= labelled(text)
    causes = ("ram_budget", "thinning", "capacity", "disk_budget")
    assert {f'everwarm_evictions_total{{cause="{cause}"}}' for cause in causes} <= labelled(text)
    assert {f'everwarm_tier_bytes{{tier="{tier}"}}' for tier in ("ram", "disk")} <= labelled(text)


def labelled(text: str) -> set[str]:
    return {line.rsplit(" ", 1)[0] for line in text.splitlines() if "{" in line}
