"""The metrics of /metrics, from the handler itself with a stand-in engine that has every count."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

from everwarm.gateway.admin import metrics as counted
from everwarm.gateway.admin.metrics import LoopLag, Metrics
from everwarm.gateway.admin.status import Status
from generating.markdown import code, table, written_by

_HELP = re.compile(r"^# HELP (\S+) (.*)\n# TYPE \S+ (\S+)$", re.MULTILINE)


def families() -> list[tuple[str, str, str]]:
    """Name as queries spell it, type, help."""
    return [
        (name, kind, help_text) for name, help_text, kind in _HELP.findall(_text()) if not name.endswith("_created")
    ]


def _text() -> str:
    numbers: dict[str, Any] = dict.fromkeys(counted._ENGINE, 1)
    numbers |= {key: 1 for _, _, parts in counted._LABELLED.values() for key in parts.values()} | {"n_fed": 1}

    async def ask(_question: object, **_fields: object) -> dict[str, Any]:
        return numbers

    deaths = SimpleNamespace(n_given_up=0)
    more = {"n_restarts": 0, "load": None, "deaths": deaths, "died_of": Counter()}
    supervisor = SimpleNamespace(is_ready=True, is_running=True, ask=ask, **more)
    served = SimpleNamespace(supervisor=supervisor, retry_in_s=None)
    pool = SimpleNamespace(all_served=list, catalog=SimpleNamespace(find=lambda _: served), look=lambda _: served)
    metrics = Metrics()
    request = SimpleNamespace(query_params={})
    answer = asyncio.run(Status(pool, metrics, LoopLag(metrics.lagged)).metrics(request))  # type: ignore[arg-type]
    return bytes(answer.body).decode()


def _labels() -> dict[str, str]:
    """By which label each is told apart."""
    found = dict(re.findall(r'^(\w+(?::\w+)?)\{(\w+)="', _text(), re.MULTILINE))
    return found | {
        "everwarm_prompt_tokens_read_total": "reason",
        "everwarm_requests_total": "finish",
        "everwarm_noise_lines_removed_total": "rule",
        "everwarm_evictions_total": "cause",
        "everwarm_restore_seconds": "tier",
    }


def page() -> str:
    labels = _labels()
    rows = [[code(name), kind, code(labels.get(name, "")), help_text] for name, kind, help_text in families()]
    ours, theirs = ([row for row in rows if row[0].startswith("`llamacpp") is is_theirs] for is_theirs in (False, True))
    head = ["name", "type", "by", "meaning"]
    return "\n".join(
        [
            written_by("src/everwarm/gateway/admin/metrics.py and status.py"),
            "# Metrics\n",
            "`GET /metrics` in Prometheus's text format. With several models `?model=NAME` adds the numbers of one engine. A dashboard and "
            "alerts that use these names are in `deploy/`; [operating](../operating.md#metrics-and-alerts) says what to look at.\n",
            "`everwarm_prompt_tokens_read_total` is told apart by the [reasons](reasons.md).\n",
            "## Everwarm's own\n",
            table(head, ours),
            "## As llama-server names them\n",
            table(head, theirs),
        ]
    )
