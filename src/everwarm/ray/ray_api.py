"""Ray, as far as it is used here, and the only place that imports it.

Without its types: they are not those that its decorators make, and nobody needs Ray to check the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

ray: Any = import_module("ray")
serve: Any = import_module("ray.serve")
RequestRouter: Any = import_module("ray.serve.request_router").RequestRouter
Died: Any = import_module("ray.exceptions").RayActorError  # also: cannot be reached just now

_config: Any = import_module("ray.serve.config")
AutoscalingConfig, AutoscalingPolicy = _config.AutoscalingConfig, _config.AutoscalingPolicy
HTTPOptions, ProxyLocation, RequestRouterConfig = (
    _config.HTTPOptions,
    _config.ProxyLocation,
    _config.RequestRouterConfig,
)
