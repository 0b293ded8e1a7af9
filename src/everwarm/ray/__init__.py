"""Many machines: Ray places, scales and restarts replicas; the remote store keeps what they have read.

``serve run everwarm.ray:app config=FILE`` or ``everwarm serve --ray FILE``. Nothing of Ray is imported before it is needed.
"""

from __future__ import annotations

from typing import Any


def app(arguments: dict[str, Any]) -> Any:
    """What ``serve run`` builds: ``config=FILE`` names the TOML file; without one the embedded model is served."""
    from everwarm.ray.deploy import build, named

    return build(named(arguments))
