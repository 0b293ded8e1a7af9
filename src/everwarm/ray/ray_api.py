"""What is used of Ray, and the only module that imports it.

Untyped: Ray's decorators return other types than they declare, and this way the type check needs no Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

ray: Any = import_module("ray")
serve: Any = import_module("ray.serve")
RequestRouter: Any = import_module("ray.serve.request_router").RequestRouter
Died: Any = import_module("ray.exceptions").RayActorError  # also: cannot be reached just now

_config: Any = import_module("ray.serve.config")
AutoscalingConfig = _config.AutoscalingConfig
AutoscalingPolicy = _config.AutoscalingPolicy
HTTPOptions = _config.HTTPOptions
ProxyLocation = _config.ProxyLocation
RequestRouterConfig = _config.RequestRouterConfig
