"""Every model a server can offer, as values: from a folder, a TOML file, one GGUF file or the Hugging Face Hub.

Looks at files and settings and lists the models; loads nothing and keeps nothing. ``discover`` is cheap enough to be called
again and again: headers that have not changed are not read a second time. A fault of one model is reported with that model;
a fault of the configuration is a ``BadRequest``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from everwarm.config import EMBEDDING_ARCHITECTURES, cache_directory, require
from everwarm.engine.settings import EngineSettings
from everwarm.errors import BadRequest, ModelFileError
from everwarm.router.catalog import gguf_files, hub
from everwarm.router.catalog.gguf_files import LATEST, ModelFile, UnusableFile
from everwarm.router.catalog.gguf_header import GgufHeader, read_header
from everwarm.router.catalog.memory_estimate import loaded_bytes
from everwarm.router.catalog.models_file import (
    INI,
    ModelTable,
    below,
    did_you_mean,
    place,
    read_models_file,
    speaking_of,
)

MAX_TEMPLATE_BYTES = 1 << 20

Source = Literal["directory", "config", "hub", "file"]
Resolve = Callable[[str], hub.HubModel]

from_cache: Resolve = partial(hub.resolve, offline=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model as it would be served. Two that are equal are the same model in the same settings."""

    id: str
    path: Path  # what libllama opens: the only or the first part
    settings: EngineSettings
    n_bytes: int  # about what it takes when it is loaded
    source: Source
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    mmproj: Path | None = None
    template: str | None = None  # the text of a chat template instead of the file's own
    pinned: bool = False
    load_on_start: bool = False
    ttl_s: float = 0.0
    changed_ns: int = 0  # when its files last did


@dataclass(frozen=True, slots=True)
class Catalog:
    """``default`` serves requests for an unknown name. ``None`` for a limit: it was not given."""

    specs: Mapping[str, ModelSpec] = field(default_factory=dict)
    broken: tuple[UnusableFile, ...] = ()
    default: str | None = None
    models_max: int | None = None
    memory_limit: int | None = None
    notes: tuple[str, ...] = ()

    def find(self, name: str | None) -> ModelSpec | None:
        """By id, by alias, else the default; a model that is there and broken is never replaced by another.

        Without a name: the default, or the only one there is.
        """
        if name is None and self.default is None:
            return next(iter(self.specs.values())) if len(self.specs) == 1 else None
        found = None if name is None else self.named(name)
        if found is None and self.default is not None and self.find_broken(name) is None:
            return self.named(self.default)
        return found

    def find_broken(self, name: str | None) -> UnusableFile | None:
        wanted = set() if name is None else {name, name.removesuffix(LATEST)}
        return next((model for model in self.broken if wanted & {model.id, *model.aliases}), None)

    def named(self, name: str) -> ModelSpec | None:
        """By id or alias. ``name:latest`` is ``name``, unless a model is called just that; a model of the Hub may be called
        as it was downloaded, with ``hf:`` or the Hub's host before it, and without its quant if it is there in one."""
        for wanted in dict.fromkeys((name, name.removesuffix(LATEST), hub.without_prefix(name).removesuffix(LATEST))):
            found = self.specs.get(wanted) or next((s for s in self.specs.values() if wanted in s.aliases), None)
            if found is not None:
                return found
        versions = [s for s in self.specs.values() if s.source == "hub" and s.id.startswith(f"{wanted}:")]
        return versions[0] if len(versions) == 1 else None


def makes_embeddings(header: GgufHeader) -> bool:
    """Whether a model writes no text: its vectors are all it has."""
    is_causal = header.values.get(f"{header.architecture}.attention.causal")
    return header.architecture in EMBEDDING_ARCHITECTURES or is_causal is False


def projector_beside(path: Path) -> Path | None:
    beside = (path.with_name(name) for name in (f"mmproj-{path.name}", f"{path.stem}.mmproj.gguf"))
    return next((file for file in beside if file.is_file()), None)


def only(
    path: Path,
    settings: EngineSettings,
    id: str,
    *,
    mmproj: Path | None = None,
    aliases: tuple[str, ...] = (),
    tags: tuple[str, ...] = (),
    template: str | None = None,
    ttl_s: float = 0.0,
) -> Catalog:
    """One model that is loaded at the start and is served under any name. It stays, unless it has a time to live: then it
    sleeps until the next request. Its faults show when it is loaded."""
    spec = ModelSpec(
        id=id,
        path=path,
        settings=settings,
        n_bytes=0,
        source="file",
        mmproj=mmproj,
        aliases=aliases,
        tags=tags,
        template=template,
        ttl_s=ttl_s,
        pinned=ttl_s == 0.0,
        load_on_start=True,
    )
    return Catalog({id: spec}, default=id)


def discover(
    source: str | Path,
    defaults: EngineSettings,
    *,
    default: str | None = None,
    resolve: Resolve = from_cache,
    state_dir: str | None = None,
) -> Catalog:
    """What there is in a folder, a ``.toml``, a GGUF file, ``hf:owner/repo[:quant]``, or with ``hf:`` in the Hub's cache.

    ``resolve`` finds models of the Hub; by default only those in its local cache. ``state_dir``: the folder for the states
    of models that have a disk cache of their own while the server has none.
    """
    found = _found(source, defaults, resolve, state_dir or str(cache_directory() / "states"))
    catalog = found if default is None else replace(found, default=default)
    known = {name for spec in catalog.specs.values() for name in (spec.id, *spec.aliases)}
    known |= {name for model in catalog.broken for name in (model.id, *model.aliases)}
    if catalog.default is not None and catalog.default not in known:
        raise BadRequest(
            f"the default model {catalog.default!r} does not exist; {did_you_mean(catalog.default, known)}"
        )
    return catalog


def _found(source: str | Path, defaults: EngineSettings, resolve: Resolve, state_dir: str) -> Catalog:
    if isinstance(source, str) and source.startswith(hub.PREFIX):
        return _from_hub(source, defaults, resolve)
    path = Path(source).expanduser()
    if path.is_dir():
        listing = gguf_files.scan(path)
        found = [*_of_directory(listing.models, defaults), *listing.broken]
        return Catalog(_usable(found), _unusable(found), notes=listing.notes)
    require(path.exists(), f"{path} does not exist; give a folder, a .toml file, a GGUF file or hf:owner/repo")
    if path.suffix.lower() in (".toml", INI):
        return _Configured(path, defaults, resolve, state_dir).catalog()
    spec = _spec(gguf_files.one_file(path), defaults, "file")
    return Catalog({spec.id: spec}, default=spec.id)


def _from_hub(source: str, defaults: EngineSettings, resolve: Resolve) -> Catalog:
    if source == hub.PREFIX:
        found = [_tried(m.id, m.path, partial(_hub_spec, m, defaults)) for m in hub.cached_models()]
        return Catalog(_usable(found), _unusable(found))
    spec = _hub_spec(resolve(source), defaults)
    return Catalog({spec.id: spec}, default=spec.id)


def _hub_spec(model: hub.HubModel, defaults: EngineSettings) -> ModelSpec:
    return _spec(_hub_file(model), defaults, "hub")


def _hub_file(model: hub.HubModel) -> ModelFile:
    return replace(gguf_files.one_file(model.path), id=model.id, mmproj=model.mmproj)


def _spec(file: ModelFile, settings: EngineSettings, source: Source) -> ModelSpec:
    if settings.embedding is None and makes_embeddings(file.header):
        settings = replace(settings, embedding="auto")
    beside = [Path(adapter) for adapter, _ in settings.model.lora] + ([file.mmproj] if file.mmproj else [])
    n_bytes = loaded_bytes(file.header, file.n_bytes, settings) + sum(map(gguf_files.size_bytes, beside))
    return ModelSpec(
        id=file.id,
        path=file.path,
        settings=settings,
        n_bytes=n_bytes,
        source=source,
        mmproj=file.mmproj,
        changed_ns=file.changed_ns,
    )


def _tried(
    id: str, path: Path, spec: Callable[[], ModelSpec], aliases: tuple[str, ...] = ()
) -> ModelSpec | UnusableFile:
    """The model, or why there is none."""
    try:
        return spec()
    except ModelFileError as error:
        return UnusableFile(id, path, str(error), aliases)


def _of_directory(files: Iterable[ModelFile], settings: EngineSettings) -> list[ModelSpec | UnusableFile]:
    return [_tried(file.id, file.path, partial(_spec, file, settings, "directory")) for file in files]


def _usable(found: Iterable[ModelSpec | UnusableFile]) -> dict[str, ModelSpec]:
    return {model.id: model for model in found if isinstance(model, ModelSpec)}


def _unusable(found: Iterable[ModelSpec | UnusableFile]) -> tuple[UnusableFile, ...]:
    return tuple(model for model in found if isinstance(model, UnusableFile))


class _Configured:
    """The models of a TOML file: its own tables, and what lies in the folder it names."""

    def __init__(self, path: Path, defaults: EngineSettings, resolve: Resolve, state_dir: str) -> None:
        self._path = path
        self._base = path.absolute().parent
        self._defaults = defaults
        self._resolve = resolve
        self._state_dir = state_dir
        self._file, self._tables = read_models_file(path)
        directory = self._file.directory
        self._listing = gguf_files.scan(below(self._base, directory)) if directory else gguf_files.Listing()
        self._owners: dict[str, str] = {}  # of every id and alias

    def catalog(self) -> Catalog:
        found = []
        for name, table in self._tables.items():
            self._claim(place(self._path, name), (name, *table.aliases))
            found.append(_tried(name, self._where(name, table), partial(self._spec, name, table), table.aliases))
        mentioned = {model.path.resolve() for model in found}
        models = [model for model in self._listing.models if model.path.resolve() not in mentioned]
        broken = [model for model in self._listing.broken if model.path.resolve() not in mentioned]
        for id in (*(model.id for model in models), *(model.id for model in broken)):
            self._claim(f"{id} in {self._file.directory}", (id,))
        found += [*_of_directory(models, self._defaults), *broken]
        limits = (self._file.models_max, self._file.memory_bytes)
        return Catalog(_usable(found), _unusable(found), self._file.default, *limits, self._listing.notes)

    def _claim(self, owner: str, names: tuple[str, ...]) -> None:
        for name in dict.fromkeys(names):
            if name in self._owners:
                raise BadRequest(
                    f"{self._path.name}: two models are called {name!r}, {self._owners[name]} and {owner}; "
                    "give each a name of its own"
                )
            self._owners[name] = owner

    def _spec(self, name: str, table: ModelTable) -> ModelSpec:
        with speaking_of(place(self._path, name)):
            settings = table.settings(self._defaults, self._base, self._state_dir)
            file, source = self._file_of(name, table)
        if table.mmproj is not None:
            file = replace(file, mmproj=below(self._base, table.mmproj))
            read_header(below(self._base, table.mmproj))
        return replace(
            _spec(replace(file, id=name), settings, source),
            aliases=tuple(alias for alias in dict.fromkeys(table.aliases) if alias != name),
            template=None if table.template is None else _text(below(self._base, table.template)),
            pinned=table.pinned,
            load_on_start=table.load_on_start,
            ttl_s=table.ttl_s,
        )

    def _file_of(self, name: str, table: ModelTable) -> tuple[ModelFile, Source]:
        if table.path is not None:
            return gguf_files.one_file(below(self._base, table.path)), "config"
        if table.hf is not None:
            return _hub_file(self._resolve(table.hf)), "hub"
        found = self._listed(name)
        if isinstance(found, UnusableFile):
            raise ModelFileError(found.reason)
        if found is None:
            there = did_you_mean(name, [model.id for model in self._listing.models])
            raise ModelFileError(f"there is no model {name} in {self._file.directory}; {there}")
        return found, "directory"

    def _where(self, name: str, table: ModelTable) -> Path:
        found = None if table.path or table.hf else self._listed(name)
        return below(self._base, table.path or table.hf or name) if found is None else found.path

    def _listed(self, name: str) -> ModelFile | UnusableFile | None:
        models = {model.id: model for model in self._listing.models}
        return models.get(name) or next((model for model in self._listing.broken if model.id == name), None)


def _text(path: Path) -> str:
    """A chat template."""
    if gguf_files.size_bytes(path) > MAX_TEMPLATE_BYTES:
        raise ModelFileError(f"the template {path.name} has more than {MAX_TEMPLATE_BYTES} bytes")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ModelFileError(f"the template {path.name} cannot be read: {reason}") from None
