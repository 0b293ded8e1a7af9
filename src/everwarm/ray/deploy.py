"""Makes Serve deployments from a cluster's settings; ``everwarm serve --ray`` runs them until a signal comes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from everwarm.config import require
from everwarm.errors import EverwarmError
from everwarm.ray.ingress import Ingress
from everwarm.ray.ray_api import (
    AutoscalingConfig,
    AutoscalingPolicy,
    HTTPOptions,
    ProxyLocation,
    RequestRouterConfig,
    ray,
    serve,
)
from everwarm.ray.replica import Replica
from everwarm.ray.replica_messages import ByWaitingTokens
from everwarm.ray.settings import ClusterSettings, ReplicasTable, read_cluster
from everwarm.router.catalog.catalog import ModelSpec

APP = "everwarm"
INGRESS_CPUS = 0.1
NO_ACCESS_LOG = {"enable_access_log": False}  # three lines per request, in three processes
STOP_S = 10.0  # beyond the grace and the putting away
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # this code never blocks, and a thread costs two switches more
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


def named(arguments: dict[str, Any]) -> ClusterSettings:
    """The arguments of ``serve run everwarm.ray:app``."""
    unknown = arguments.keys() - {"config"}
    require(not unknown, f"unknown argument {', '.join(sorted(unknown))}; give config=FILE")
    return read_cluster(Path(arguments["config"]) if "config" in arguments else None)


def build(settings: ClusterSettings) -> Any:
    """One deployment per model, and the ingress that knows all of them."""
    models = {model.id: _deployment(model, settings) for model in settings.models}
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=settings.n_ingresses,
        max_ongoing_requests=settings.server.max_requests * len(models),
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        logging_config=NO_ACCESS_LOG,
    )
    return ingress.bind(settings, models)


def _deployment(model: ModelSpec, settings: ClusterSettings) -> Any:
    table = settings.replicas[model.id]
    server = settings.server
    deployment = serve.deployment(
        Replica,
        name=model.id,
        max_ongoing_requests=server.max_requests,
        ray_actor_options={"num_cpus": table.cpus, "num_gpus": table.gpus, "resources": dict(table.resources)},
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=server.grace_s + table.put_away + STOP_S,
        health_check_period_s=5.0,
        logging_config=NO_ACCESS_LOG,
        request_router_config=RequestRouterConfig(
            request_router_class="everwarm.ray.routing:WarmRouter",
            request_router_kwargs={"stats_every_s": settings.stats_every_s},
            request_routing_stats_period_s=settings.stats_every_s,
        ),
        **_size(table, model.settings.n_slots),
    )
    return deployment.bind(model, server, settings.max_keys)


def _size(table: ReplicasTable, n_slots: int) -> dict[str, Any]:
    if table.least is None and table.most is None:
        return {"num_replicas": table.count or 1}
    low = 1 if table.least is None else table.least
    policy = AutoscalingPolicy(
        policy_function=ByWaitingTokens,
        policy_kwargs={"tokens_per_replica": table.waiting_tokens, "slots_per_replica": n_slots},
    )
    config = AutoscalingConfig(
        min_replicas=low,
        max_replicas=table.most or max(low, 1),
        initial_replicas=max(low, 1),
        upscale_delay_s=table.upscale_delay,
        downscale_delay_s=table.downscale_delay,
        policy=policy,
    )
    return {"autoscaling_config": config}


def quiet() -> None:
    """Turn off Ray's usage statistics and extra threads, in a cluster that is started from here."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def run(config: Path, address: str | None = None) -> int:
    """Deploy, and stay until SIGTERM or SIGINT. Joins the cluster at ``address``, or this machine's, or starts one."""
    settings = read_cluster(config)
    quiet()
    ray.init(address=address or os.environ.get("RAY_ADDRESS"), include_dashboard=False, log_to_driver=True)
    try:
        start(settings)
        print(f"http://{settings.server.host}:{settings.server.port}/v1", flush=True)
        _wait_for_signal()
        serve.shutdown()  # replicas save their caches before they end
    except RuntimeError as error:
        raise EverwarmError(f"the cluster cannot serve: {error}") from None
    finally:
        ray.shutdown()
    return 0


def start(settings: ClusterSettings) -> None:
    """Serve on a cluster that this process has joined; returns when every replica is ready."""
    host = settings.server.host
    port = settings.server.port
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=host, port=port),
        logging_config=NO_ACCESS_LOG,
    )
    serve.run(build(settings), name=APP, route_prefix="/")


def _wait_for_signal() -> None:
    stopped = threading.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stopped.set())
    stopped.wait()
