"""The TOML file that describes a cluster: models with their replicas, engine flags, the remote store, and who may call.

Everything is checked here, once, on the machine that deploys; replicas get frozen values. Paths of models and keys are as
they are on the machines where replicas run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from everwarm.config import cache_directory, require
from everwarm.demo import EMBEDDED_MODEL
from everwarm.engine.settings import EngineSettings, RemoteSettings, RestorePolicy
from everwarm.gateway.access.auth import read_key_file
from everwarm.gateway.settings import ServerSettings
from everwarm.router.catalog.catalog import ModelSpec
from everwarm.router.catalog.gguf_files import LATEST
from everwarm.router.catalog.models_file import (
    ModelTable,
    Text,
    below,
    convert,
    did_you_mean,
    parsed,
    place,
    speaking_of,
)

EMBEDDED = "demo:"  # instead of a path: the embedded model

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1 << 20)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]


class RemoteTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[remote]``: the store that all replicas share. Without it a conversation dies with its replica."""

    url: Text
    key: Text | None = None
    endpoint: Text | None = None
    policy: RestorePolicy = "auto"
    wait: Seconds = 0.25


class ServerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[server]``: where clients come in."""

    host: Text = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 8000
    api_key_file: Text | None = None
    admin_key_file: Text | None = None
    key_file: Text | None = None  # many keys; read when the cluster is deployed
    pin_quota: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    allowed_hosts: tuple[Text, ...] = ()
    ingresses: Count = 1
    grace: Seconds = 10.0
    prewarm: bool = True
    max_keys: Annotated[int, msgspec.Meta(ge=16, le=1 << 20)] = 4096
    stats_every: Annotated[float, msgspec.Meta(ge=0.1, le=600)] = 1.0


class ReplicasTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[models.NAME.replicas]``: how many, on what, and when there are more. ``count``, or ``least`` and ``most``."""

    count: Count | None = None
    least: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] | None = None
    most: Count | None = None
    cpus: Amount = 1.0
    gpus: Amount = 0.0
    resources: dict[str, Amount] = {}
    waiting_tokens: Count = 16384
    upscale_delay: Seconds = 10.0
    downscale_delay: Seconds = 300.0
    put_away: Seconds = 60.0


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    default: Text | None = None
    server: ServerTable = ServerTable()
    remote: RemoteTable | None = None
    engine: dict[str, Any] = {}
    models: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """``models`` are as every replica of them opens them; ``replicas`` has a table for each."""

    models: tuple[ModelSpec, ...]
    replicas: Mapping[str, ReplicasTable]
    server: ServerSettings
    default: str | None = None
    n_ingresses: int = 1
    max_keys: int = 4096
    stats_every_s: float = 1.0

    def find(self, name: str | None) -> ModelSpec | None:
        """By id or alias; the only model, and the default, answer to every name."""
        wanted = () if name is None else (name, name.removesuffix(LATEST))
        for model in self.models:
            if {model.id, *model.aliases} & set(wanted):
                return model
        if len(self.models) == 1:
            return self.models[0]
        return next((model for model in self.models if model.id == self.default), None)


DEMO: Mapping[str, dict[str, Any]] = {"everwarm-tiny": {"path": EMBEDDED}}


def read_cluster(path: Path | None) -> ClusterSettings:
    """Raises ``BadRequest`` with the place of a fault in the file. None: the embedded model, one replica."""
    if path is None:
        return _cluster(ClusterFile(models=dict(DEMO)), Path("demo"))
    return _cluster(convert(parsed(path), ClusterFile, f"{path.name}:"), path)


def _cluster(file: ClusterFile, path: Path) -> ClusterSettings:
    require(bool(file.models), f"{path.name}: there are no models; give [models.NAME] with a path")
    common = convert(file.engine, ModelTable, f"{path.name}: [engine]")
    with speaking_of(f"{path.name}: [engine]"):
        engine = replace(_settings(common, EngineSettings(), path), remote=_remote(file.remote, path))
    replicas: dict[str, ReplicasTable] = {}
    models = []
    for name, fields in file.models.items():
        replicas[name] = convert(fields.get("replicas", {}), ReplicasTable, f"{place(path, name)} replicas:")
        models.append(_model(path, name, fields, replicas[name], engine))
    named = [name for model in models for name in (model.id, *model.aliases)]
    twice = next((name for name in named if named.count(name) > 1), None)
    require(twice is None, f"{path.name}: {twice!r} is the name of two models")
    if file.default is not None:
        require(file.default in named, f"{path.name}: default is {file.default!r}; {did_you_mean(file.default, named)}")
    server = file.server
    default = next((m.id for m in models if file.default in (m.id, *m.aliases)), None)
    with speaking_of(f"{path.name}: [server]"):
        settings = _server(server, path)
        return ClusterSettings(
            tuple(models), replicas, settings, default, server.ingresses, server.max_keys, server.stats_every
        )


def _model(
    path: Path, name: str, fields: dict[str, Any], replicas: ReplicasTable, defaults: EngineSettings
) -> ModelSpec:
    where = place(path, name)
    table = convert({key: value for key, value in fields.items() if key != "replicas"}, ModelTable, where)
    with speaking_of(where):
        require(table.hf is None, "has hf; replicas open a path that every machine has")
        require(table.path is not None, f"has no path; give the GGUF file, or {EMBEDDED!r} for the embedded model")
        require(
            replicas.count is None or replicas.least is replicas.most is None, "replicas: give count, or least and most"
        )
        low = replicas.least or 1
        high = replicas.most or replicas.least or 1
        require(low <= high, f"replicas: least is {low} and most is {high}; give least up to most")
        given = table.path or ""
        file = EMBEDDED_MODEL if given == EMBEDDED else below(path.parent, given)
        template = None if table.template is None else below(path.parent, table.template).read_text()
        engine = _settings(table, defaults, path)
        mmproj = table.mmproj and str(below(path.parent, table.mmproj))
        return ModelSpec(
            id=name,
            path=Path(file),
            settings=replace(engine, mmproj=mmproj or engine.mmproj),
            n_bytes=0,
            source="file",
            aliases=table.aliases,
            template=template,
            pinned=True,
            load_on_start=True,
        )


def _settings(table: ModelTable, defaults: EngineSettings, path: Path) -> EngineSettings:
    return table.settings(defaults, path.parent, str(cache_directory() / "states"))


def _remote(table: RemoteTable | None, path: Path) -> RemoteSettings | None:
    if table is None:
        return None
    with speaking_of(f"{path.name}: [remote]"):
        key = None if table.key is None else str(below(path.parent, table.key))
        return RemoteSettings(table.url, key, table.endpoint, table.policy, table.wait)


def _server(table: ServerTable, path: Path) -> ServerSettings:
    def secret(name: str | None) -> str | None:
        return None if name is None else below(path.parent, name).read_text().strip()

    keys = () if table.key_file is None else read_key_file(str(below(path.parent, table.key_file)))
    return ServerSettings(
        host=table.host,
        port=table.port,
        api_key=secret(table.api_key_file),
        admin_key=secret(table.admin_key_file),
        keys=keys,
        pin_quota=table.pin_quota,
        allowed_hosts=table.allowed_hosts,
        grace_s=table.grace,
        prewarm=table.prewarm,
    )
