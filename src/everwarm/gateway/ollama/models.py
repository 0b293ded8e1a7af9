"""Models as Ollama's clients know them: listed, described, and made of others.

What is told about a model comes from the header of its file, read on a thread beside the event loop; no model is loaded.

A derived model is a name, a system text, options and first messages over a model that is served. Derived models hold for
Ollama's dialect only, and lie in one file of the state directory; without one they end with the server. No file of a model
is copied: what a derived model reads is cached with the model that it is made of.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from everwarm.errors import BadRequest, EverwarmError, ModelFileError, NotFound, NotSupported
from everwarm.gateway.ollama.schema import NamedBody, OllamaBody, OllamaChat, OllamaGenerate, OllamaMessage
from everwarm.gateway.openai.schema import Name
from everwarm.gateway.parsing.reasoning import detect_reasoning
from everwarm.gateway.parsing.tool_parser import detect_tools
from everwarm.router.catalog.catalog import ModelSpec
from everwarm.router.catalog.gguf_files import LATEST, ModelFile, one_file, quant_of, tagged
from everwarm.router.catalog.gguf_header import read_text
from everwarm.router.plan import Phase
from everwarm.router.pool import Pool, Served
from everwarm.state.store.files import Files, make_folder
from everwarm.types import Json

log = logging.getLogger("everwarm.gateway")

_STAYS = datetime.datetime(2999, 1, 1, tzinfo=datetime.UTC)
IN_MEMORY: tuple[Phase, ...] = ("loading", "ready", "draining")
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_FILE_TYPES: Mapping[int, str] = {  # llama.cpp's numbers
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip


def listed(all_served: Sequence[Served]) -> list[Json]:
    return [_entry(served.spec, _file(served.spec)) for served in all_served]


def derived_entries(models: Sequence[Json], names: Mapping[str, DerivedModel]) -> list[Json]:
    """The entries of models that are made of others."""
    known = {model["name"]: model for model in models}
    found = ((tagged(name), one, known.get(tagged(one.base))) for name, one in names.items())
    return [
        {**entry, "name": name, "model": name, "details": {**entry["details"], "parent_model": one.base}}
        for name, one, entry in found
        if entry is not None
    ]


def _file(spec: ModelSpec) -> ModelFile | None:
    """The model's file; None if it was removed since."""
    try:
        return one_file(spec.path)
    except ModelFileError:
        return None


def _entry(spec: ModelSpec, file: ModelFile | None) -> Json:
    name = tagged(spec.id)
    n_bytes = file.n_bytes if file else 0
    changed_ns = file.changed_ns if file else 0
    return {
        "name": name,
        "model": name,
        "modified_at": _date(changed_ns),
        "size": n_bytes,
        "digest": hashlib.sha256(f"{spec.id}:{n_bytes}:{changed_ns}".encode()).hexdigest(),
        "details": _details(spec, file),
    }


def presence(served: Served) -> Json:
    """What the list of models in memory has beyond the list of models."""
    info = served.supervisor.info
    settings = served.spec.settings
    return {
        "expires_at": _STAYS.isoformat(),
        "size_vram": 0 if settings.model.n_gpu_layers == 0 or info is None else info.size_bytes,
        "context_length": 0 if info is None else info.n_ctx,
    }


def _details(spec: ModelSpec, file: ModelFile | None) -> Json:
    header = file.header if file else None
    family = header.architecture if header else ""
    label = header.text("general.size_label") if header else None
    number = header.values.get("general.file_type") if header else None
    named = _FILE_TYPES.get(number, "unknown") if isinstance(number, int) else "unknown"
    is_whole = header is not None and header.values.get("split.count") in (None, 0, 1)
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": size_text(header.n_params) if header and is_whole else label or "",
        "quantization_level": quant_of(spec.path.stem) or named,
    }


def details_of(spec: ModelSpec, sees: bool) -> Json:
    file = _file(spec)
    template = spec.template or _template(spec) or ""
    values = file.header.values if file else {}
    about = {key: value for key, value in values.items() if key != "tokenizer.chat_template"}
    if file:
        about["general.parameter_count"] = min(file.header.n_params, (1 << 63) - 1)
    return {
        "modelfile": f"FROM {spec.id}\n",
        "parameters": "",
        "template": template,
        "details": _details(spec, file),
        "model_info": {key: _as_json(value) for key, value in about.items()},
        "capabilities": capabilities(template, sees=sees),
        "modified_at": _date(file.changed_ns if file else 0),
    }


def _template(spec: ModelSpec) -> str | None:
    try:
        return read_text(spec.path, "tokenizer.chat_template")
    except ModelFileError:
        return None


def capabilities(template: str, *, sees: bool) -> list[str]:
    """What a model can do, as far as we can parse its output."""
    found = {"tools": bool(detect_tools(template)), "thinking": bool(detect_reasoning(template, "")), "vision": sees}
    return ["completion", *(name for name, is_there in found.items() if is_there)]


def size_text(n_params: int) -> str:
    """``7.4M``, ``3B`` …"""
    for unit, letter in _UNITS:
        if n_params >= unit:
            return f"{n_params / unit:.1f}".removesuffix(".0") + letter
    return str(n_params)


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _date(ns: int) -> str:
    seconds = min(max(0, ns // 10**9), _STAYS.timestamp())
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


# models made of others

DERIVED_FILE = "ollama-models.json"
MAX_DERIVED = 256
ROLES = ("system", "user", "assistant", "tool")
MAX_BYTES = 4 << 20  # of the file
Text = Annotated[str, Meta(max_length=1 << 16)]
B = TypeVar("B", bound=OllamaBody)


class CreateBody(NamedBody, frozen=True, kw_only=True):
    source: Name | None = msgspec.field(name="from", default=None)
    system: Text | None = None
    parameters: dict[str, Any] | None = None
    messages: Annotated[list[OllamaMessage], Meta(max_length=64)] | None = None
    template: Text | None = None
    files: Any = None
    adapters: Any = None
    quantize: Text | None = None
    license: Any = None
    stream: bool = True


class CopyBody(msgspec.Struct, frozen=True):
    source: Name
    destination: Name


class DerivedModel(msgspec.Struct, frozen=True):
    base: Name  # a model that is served
    system: Text | None = None
    parameters: dict[str, Any] = {}
    messages: list[OllamaMessage] = []

    def applied(self, body: B) -> B:
        """The request to the model that this one is made of; what the request says itself counts."""
        changes: dict[str, Any] = {"model": self.base, "options": {**self.parameters, **(body.options or {})}}
        if isinstance(body, OllamaChat) and body.messages:
            has_system = body.messages[0].role == "system"
            system = [OllamaMessage("system", self.system)] if self.system and not has_system else []
            changes["messages"] = [*system, *self.messages, *body.messages]
        elif isinstance(body, OllamaGenerate) and not body.raw and not body.suffix:
            changes["system"] = body.system or self.system
        return msgspec.structs.replace(body, **changes)

    def shown(self, details: Json) -> Json:
        """What ``/api/show`` says of it; ``details`` are those of its base."""
        lines = [f"{key} {value}" for key, value in self.parameters.items()]
        texts = [f"FROM {self.base}", *(f"PARAMETER {text}" for text in lines)]
        more = {"system": self.system} if self.system else {}
        texts += [f'SYSTEM """{self.system}"""'] if self.system else []
        about = {**details["details"], "parent_model": self.base}
        return {
            **details,
            **more,
            "modelfile": "\n".join(texts) + "\n",
            "parameters": "\n".join(lines),
            "details": about,
        }


_decode = msgspec.json.Decoder(dict[str, DerivedModel]).decode


class DerivedModels:
    """Thread-safe. A file that cannot be read is left as it is: a warning is logged, and nothing new is stored."""

    def __init__(self, pool: Pool, directory: str | None) -> None:
        self._pool = pool
        self._path = None if directory is None else Path(directory).expanduser() / DERIVED_FILE
        self._lock = threading.Lock()
        self._known: dict[str, DerivedModel] | None = None  # None: not read yet
        self._trouble: str | None = None  # why the file cannot be used

    def find(self, name: str | None) -> DerivedModel | None:
        return None if name is None else self._models().get(_untagged(name))

    def names(self) -> dict[str, DerivedModel]:
        return dict(self._models())

    def create(self, body: CreateBody, name: str) -> None:
        if body.files or body.adapters or body.quantize or body.template:
            raise NotSupported(
                "models are made of models that are served here: give from, system, parameters and messages; files, "
                "adapters and templates are options of the server"
            )
        if body.source is None:
            raise BadRequest("from is missing; name the model that this one is made of")
        base = self.find(body.source) or DerivedModel(self._served(body.source))
        own = DerivedModel(
            base.base,
            base.system if body.system is None else body.system,
            {**base.parameters, **(body.parameters or {})},
            base.messages if body.messages is None else body.messages,
        )
        own.applied(OllamaChat(messages=[OllamaMessage("user", "a")])).as_chat()  # what cannot be used is refused now
        strange = next((message.role for message in own.messages if message.role not in ROLES), None)
        if strange is not None:
            raise BadRequest(f"a message has the role {strange[:40]!r}; give one of {', '.join(ROLES)}")
        self._put(name, own)

    def copy(self, body: CopyBody) -> None:
        self._put(body.destination, self.find(body.source) or DerivedModel(self._served(body.source)))

    def delete(self, name: str) -> bool:
        """Whether there was one."""
        with self._lock:
            known = dict(self._read())
            if known.pop(_untagged(name), None) is None:
                return False
            self._write(known)
        return True

    def _served(self, name: str) -> str:
        found = self._pool.catalog.named(name)
        if found is None:
            names = ", ".join(sorted(self._pool.catalog.specs)) or "none"
            raise NotFound(f"there is no model {name[:100]!r}; there are: {names}", "model_not_found")
        return found.id

    def _put(self, name: str, model: DerivedModel) -> None:
        if self._pool.catalog.named(name) is not None:
            raise BadRequest(f"{name[:100]} is the name of a model that is served here; choose another")
        if not _untagged(name).strip():
            raise BadRequest("the model's name is empty; give one")
        with self._lock:
            known = {**self._read(), _untagged(name): model}
            if len(known) > MAX_DERIVED:
                raise BadRequest(f"there are {MAX_DERIVED} derived models; delete one first")
            self._write(known)

    def _models(self) -> dict[str, DerivedModel]:
        with self._lock:
            return self._read()

    def _read(self) -> dict[str, DerivedModel]:
        if self._known is None:
            self._known = {}
            try:
                if self._path is not None:
                    if self._path.stat().st_size > MAX_BYTES:
                        raise OSError(f"it has more than {MAX_BYTES:,} bytes")
                    self._known = _decode(self._path.read_bytes())
            except FileNotFoundError:
                pass
            except (OSError, msgspec.MsgspecError) as error:
                self._trouble = (
                    f"{DERIVED_FILE} in the state directory cannot be used ({error}): repair it, or move it away"
                )
                log.warning("%s", self._trouble)
        return self._known

    def _write(self, known: dict[str, DerivedModel]) -> None:
        if self._trouble is not None:
            raise EverwarmError(self._trouble)
        data = msgspec.json.encode(known)
        if len(data) > MAX_BYTES:
            raise BadRequest(f"the derived models would have {len(data):,} bytes; at most {MAX_BYTES:,}")
        if self._path is not None:
            make_folder(self._path.parent, Files())
            aside = self._path.with_suffix(f".{os.getpid()}")
            aside.unlink(missing_ok=True)
            with open(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o600), "wb") as file:
                file.write(data)
            aside.replace(self._path)
        self._known = known


def _untagged(name: str) -> str:
    return name.removesuffix(LATEST)
