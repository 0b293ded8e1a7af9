"""Many machines: Ray places, scales and restarts replicas; the remote store keeps what they have read.

``serve run everwarm.ray:app config=FILE`` or ``everwarm serve --ray FILE``. ``settings`` reads the file, ``deploy`` makes
deployments of it. A request comes to the ``ingress``, which checks access and relays it; ``routing`` chooses the replica
that has most of its prompt; ``fan_out`` answers what takes all of them. A ``replica`` is a whole gateway with its engine
in an actor. ``replica_messages`` are what they all exchange, and say how many replicas there should be. Only ``ray_api``
imports Ray, and nothing of it before it is needed.
"""

from __future__ import annotations

from typing import Any


def app(arguments: dict[str, Any]) -> Any:
    """What ``serve run`` builds: ``config=FILE`` names the TOML file; without one the embedded model is served."""
    from everwarm.ray.deploy import build, named

    return build(named(arguments))
