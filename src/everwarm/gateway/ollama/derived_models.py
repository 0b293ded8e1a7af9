"""Models that Ollama's clients make of others: a name, a system text, options and first messages over one that is served.

They hold for Ollama's dialect only, and lie in one file of the state directory; without one they end with the server. No
file of a model is copied: what a derived model reads is cached with the model that it is made of.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from everwarm.errors import BadRequest, EverwarmError, NotFound, NotSupported
from everwarm.gateway.ollama.schema import NamedBody, OllamaBody, OllamaChat, OllamaGenerate, OllamaMessage
from everwarm.gateway.openai.schema import Name
from everwarm.router.catalog.gguf_files import LATEST
from everwarm.router.pool import Pool
from everwarm.state.store.files import Files, make_folder
from everwarm.types import Json

log = logging.getLogger("everwarm.gateway")

FILE = "ollama-models.json"
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
        self._path = None if directory is None else Path(directory).expanduser() / FILE
        self._lock = threading.Lock()
        self._known: dict[str, DerivedModel] | None = None  # None: not read yet
        self._trouble: str | None = None  # why the file cannot be used

    def find(self, name: str | None) -> DerivedModel | None:
        return None if name is None else self._models().get(_plain(name))

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
            if known.pop(_plain(name), None) is None:
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
        if not _plain(name).strip():
            raise BadRequest("the model's name is empty; give one")
        with self._lock:
            known = {**self._read(), _plain(name): model}
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
                self._trouble = f"{FILE} in the state directory cannot be used ({error}): repair it, or move it away"
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


def _plain(name: str) -> str:
    return name.removesuffix(LATEST)
