"""The TOML file that ``serve --models`` takes, or llama-server's INI file: checked key by key, every mistake in one
sentence that names it.

In the INI file of model presets (``--models-preset``) a section is a model, and its keys are flags without dashes, also in
their short form or as a variable; ``[*]`` holds for all of them. It becomes the tables of a TOML file; what the server
decides for all models at once is refused with the flag that says it.

Knows keys and settings. Does not look at model files: what a table points to may come and go while the server runs.
"""

from __future__ import annotations

import configparser
import contextlib
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec

from everwarm.config import (
    CacheType,
    FlashAttention,
    Pooling,
    parse_bytes,
    parse_duration,
    parse_mib,
    parse_scaled,
    require,
)
from everwarm.engine.settings import EngineSettings, StoreSettings
from everwarm.errors import BadRequest

EVERY = "*"
_TRUE = ("on", "enabled", "true", "1")
_FALSE = ("off", "disabled", "false", "0")
# llama-server's key → ours, of a models file
_TEXTS = {
    "model": "path",
    "m": "path",
    "hf-repo": "hf",
    "hf": "hf",
    "hfr": "hf",
    "mmproj": "mmproj",
    "mm": "mmproj",
    "chat-template-file": "template",
    "cache-type-k": "cache-type-k",
    "ctk": "cache-type-k",
    "cache-type-v": "cache-type-v",
    "ctv": "cache-type-v",
    "flash-attn": "flash-attn",
    "fa": "flash-attn",
    "pooling": "pooling",
}
MAX_NUMBER = 1 << 53
_NUMBERS = {
    "ctx-size": "ctx-size",
    "c": "ctx-size",
    "parallel": "slots",
    "np": "slots",
    "n-parallel": "slots",
    "batch-size": "batch-size",
    "b": "batch-size",
    "batch": "batch-size",
    "ubatch-size": "ubatch-size",
    "ub": "ubatch-size",
    "ubatch": "ubatch-size",
    "threads": "threads",
    "t": "threads",
    "n-gpu-layers": "n-gpu-layers",
    "gpu-layers": "n-gpu-layers",
    "ngl": "n-gpu-layers",
    "ctx-checkpoints": "max-checkpoints",
    "swa-checkpoints": "max-checkpoints",
    "ctxcp": "max-checkpoints",
    "cache-ram": "cache-ram",
    "cram": "cache-ram",
    "sleep-idle-seconds": "ttl",
}
_SWITCHES = {"load-on-startup": "load-on-start"}
_LISTS = {"lora": "lora", "alias": "alias", "a": "alias"}
_PATHS = ("path", "mmproj", "template", "lora")
_HOLD = (
    "jinja",
    "stop-timeout",
    "dedup-cache-models",
    "no-mmap",
    "version",
    "cont-batching",
    "cb",
    "swa-full",
    "metrics",
)
MAX_FILE_BYTES = 1 << 20
INI = ".ini"  # the end of a name of llama-server's presets
MAX_NAME_CHARACTERS = 256
MAX_TTL_S = 10 * 365 * 86400.0

Text = Annotated[str, msgspec.Meta(min_length=1)]
Size = Annotated[int, msgspec.Meta(ge=0)] | str
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
_SHOWN = 60
_WORDS = {  # msgspec's names of types, and the ones shown to the user
    r"\bint\b": "a whole number",
    r"\bfloat\b": "a number",
    r"\bstr\b": "a text",
    r"\bbool\b": "true or false",
    r"\barray\b": "a list",
    r"\bobject\b": "a table",
    r" \| ": " or ",
    r"of length >= 1": "that is not empty",
    r">= ": "of at least ",
    r"<= ": "of at most ",
    "`": "",
}
_KEYS = {
    "n_ctx": "ctx-size",
    "n_slots": "slots",
    "n_batch": "batch-size",
    "n_ubatch": "ubatch-size",
    "n_threads": "threads",
    "max_checkpoints": "max-checkpoints",
    "every_n_tokens": "checkpoint-every",
    "min_tokens": "checkpoint-min-tokens",
    "min_gap": "checkpoint-min-gap",
    "disk_bytes": "disk-cache",
    "namespace_share": "namespace-share",
}


def models_of(text: str, name: str, folder: str) -> dict[str, Any]:
    """The content of a models file. ``folder``: what paths in it are relative to, as llama-server takes them."""
    parser = configparser.RawConfigParser(
        default_section="", strict=False, delimiters=("=",), comment_prefixes=(";", "#")
    )
    try:
        parser.read_string(f"[{_HEAD}]\n{text}")
    except configparser.Error as error:
        raise BadRequest(f"{name} is not valid INI: {' '.join(str(error).split())[:200]}") from None
    shared = _table(dict(parser[EVERY]), f"{name}: [{EVERY}]", folder) if parser.has_section(EVERY) else {}
    models = [section for section in parser.sections() if section not in (_HEAD, EVERY)]
    tables = {model: {**shared, **_table(dict(parser[model]), f"{name}: [{model}]", folder)} for model in models}
    for model, table in tables.items():
        if "path" not in table and "hf" not in table:
            table["hf"] = model
    return {"models": tables}


_HEAD = "before the first section"


def _table(given: Mapping[str, str], where: str, folder: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, text in given.items():
        flag = key.removeprefix("llama_arg_").replace("_", "-").lstrip("-")
        if flag in _HOLD:
            continue
        if flag in _NUMBERS:
            table[_NUMBERS[flag]] = _number(text, f"{where} {key}")
        elif flag in _SWITCHES:
            table[_SWITCHES[flag]] = _switch(text, f"{where} {key}")
        elif flag in _LISTS or flag in _TEXTS:
            name = _LISTS.get(flag) or _TEXTS[flag]
            parts = [part.strip() for part in text.split(",") if part.strip()] if flag in _LISTS else [text]
            parts = [_below(folder, part) for part in parts] if name in _PATHS else parts
            table[name] = tuple(parts) if flag in _LISTS else parts[0]
        else:
            raise BadRequest(f"{where} has {key!r}, which holds for all models here: give --{flag} on the command line")
    if table.get("ttl", 0) < 0:
        table["ttl"] = 0
    return {key: float(value) if key == "ttl" else value for key, value in table.items()}


def _below(folder: str, path: str) -> str:
    return path if path.startswith("/") else f"{folder}/{path}"


def _number(text: str, where: str) -> int:
    if text in ("auto", "all"):
        return -1
    try:
        number = int(text)
    except ValueError:
        raise BadRequest(f"{where} is {text[:40]!r}; give a whole number") from None
    if abs(number) > MAX_NUMBER:
        raise BadRequest(f"{where} is {text[:40]}; give at most {MAX_NUMBER}")
    return number


def _switch(text: str, where: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise BadRequest(f"{where} is {text[:40]!r}; give true or false")
    return text.lower() in _TRUE


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[models.NAME]``. What is not given is as the server's flags say."""

    path: Text | None = None
    hf: Text | None = None
    alias: Text | tuple[Text, ...] = ()
    mmproj: Text | None = None
    template: Text | None = None
    pinned: bool = False
    load_on_start: bool = False
    ttl: float | str = 0.0
    ctx_size: int | None = None
    slots: int | None = None
    batch_size: int | None = None
    ubatch_size: int | None = None
    threads: int | None = None
    n_gpu_layers: Annotated[int, msgspec.Meta(ge=-1, le=4096)] | None = None
    cache_type_k: CacheType | None = None
    cache_type_v: CacheType | None = None
    flash_attn: FlashAttention | None = None
    lora: tuple[Text, ...] | None = None
    pooling: Pooling | None = None
    max_checkpoints: int | None = None
    checkpoint_every: int | None = None
    checkpoint_min_tokens: int | None = None
    checkpoint_min_gap: int | None = None
    cache_ram: Size | None = None
    disk_cache: Size | None = None
    namespace_share: float | None = None

    @property
    def aliases(self) -> tuple[str, ...]:
        return (self.alias,) if isinstance(self.alias, str) else self.alias

    def settings(self, defaults: EngineSettings, base: Path, state_dir: str) -> EngineSettings:
        """The server's flags, and over them what this table says."""
        batch = _or(self.batch_size, defaults.n_batch)
        return replace(
            defaults,
            n_slots=_or(self.slots, defaults.n_slots),
            n_ctx=_or(self.ctx_size, defaults.n_ctx),
            n_batch=batch,
            n_ubatch=min(defaults.n_ubatch, batch) if self.ubatch_size is None else self.ubatch_size,
            n_threads=_or(self.threads, defaults.n_threads),
            cache_type_k=_or(self.cache_type_k, defaults.cache_type_k),
            cache_type_v=_or(self.cache_type_v, defaults.cache_type_v),
            flash_attention=_or(self.flash_attn, defaults.flash_attention),
            model=replace(
                defaults.model,
                n_gpu_layers=_or(self.n_gpu_layers, defaults.model.n_gpu_layers),
                lora=defaults.model.lora if self.lora is None else tuple(scaled(text, base) for text in self.lora),
            ),
            checkpoints=replace(
                defaults.checkpoints,
                max_checkpoints=_or(self.max_checkpoints, defaults.checkpoints.max_checkpoints),
                every_n_tokens=_or(self.checkpoint_every, defaults.checkpoints.every_n_tokens),
                min_tokens=_or(self.checkpoint_min_tokens, defaults.checkpoints.min_tokens),
                min_gap=_or(self.checkpoint_min_gap, defaults.checkpoints.min_gap),
            ),
            ram_bytes=defaults.ram_bytes if self.cache_ram is None else _size("cache-ram", self.cache_ram, parse_mib),
            embedding=_or(self.pooling, defaults.embedding),
            namespace_share=_or(self.namespace_share, defaults.namespace_share),
            store=self._store(defaults.store, state_dir),
        )

    def _store(self, default: StoreSettings | None, state_dir: str) -> StoreSettings | None:
        if self.disk_cache is None:
            return default
        disk_bytes = _size("disk-cache", self.disk_cache)
        if disk_bytes == 0:
            return None
        return replace(default or StoreSettings(state_dir), disk_bytes=disk_bytes)

    @property
    def ttl_s(self) -> float:
        seconds = self.ttl if isinstance(self.ttl, float) else parse_duration(self.ttl)
        require(0 <= seconds <= MAX_TTL_S, f"ttl is {self.ttl!r}; give seconds or a time like 10m, or 0 for never")
        return seconds


class ModelsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The whole file. A limit of 0 means: none. A limit that is not given is as the server's flags say."""

    default: Text | None = None
    directory: Text | None = None
    models_max: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] | None = None
    memory_limit: Size | None = None
    models: dict[str, dict[str, Any]] = {}

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_limit is None else _size("memory-limit", self.memory_limit)


def read_models_file(path: Path) -> tuple[ModelsFile, dict[str, ModelTable]]:
    """The file and its tables. Raises ``BadRequest`` for every fault in them."""
    whole = convert(parsed(path), ModelsFile, f"{path.name}:")
    with speaking_of(f"{path.name}:"):
        _ = whole.memory_bytes
    tables = {}
    for name, fields in whole.models.items():
        where = place(path, name)
        table = tables[name] = convert(fields, ModelTable, where)
        with speaking_of(where):
            _ = table.ttl_s
            for word in (name, *table.aliases):
                require(
                    _is_name(word), f"name or alias is {word!r}; give 1 to {MAX_NAME_CHARACTERS} printable characters"
                )
            require(not (table.path and table.hf), "has both path and hf; give one of them")
            require(
                bool(table.path or table.hf or whole.directory), "has no path; give path, or hf, or a directory above"
            )
    return whole, tables


def place(path: Path, name: str) -> str:
    return f"{path.name}: [models.{name}]"


@contextlib.contextmanager
def speaking_of(where: str) -> Iterator[None]:
    """Adds the place to every refusal inside, and uses the key names of the file."""
    try:
        yield
    except BadRequest as error:
        words = re.sub(r"[a-z]+(_[a-z]+)+", lambda found: _KEYS.get(found[0], found[0]), str(error))
        raise BadRequest(f"{where} {words}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"there is {', '.join(names) or 'nothing'}"


def scaled(text: str, base: Path) -> tuple[str, float]:
    """``FILE`` or ``FILE:SCALE``; a relative file is beside the configuration."""
    name, factor = parse_scaled(text)
    return str(below(base, name)), factor


def below(base: Path, name: str) -> Path:
    return base / Path(name).expanduser()


def parsed(path: Path) -> dict[str, Any]:
    is_preset = path.suffix.lower() == INI
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        require(len(raw) <= MAX_FILE_BYTES, f"{path} has more than {MAX_FILE_BYTES} bytes; give a list of models")
        return models_of(raw.decode(), path.name, str(Path.cwd())) if is_preset else tomllib.loads(raw.decode())
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{path} is not valid {'INI' if is_preset else 'TOML'}: {error}") from None


def convert(fields: object, kind: type[S], where: str) -> S:
    if not isinstance(fields, Mapping):
        raise BadRequest(f"{where} {_shown(fields)} is no table; give one")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where} {_sentence(str(error), fields, kind)}") from None


def _sentence(refusal: str, fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> str:
    known = {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
    unknown = re.match(r"Object contains unknown field `(.*)`", refusal)
    if unknown:
        return f"has an unknown key {unknown[1]!r}; {did_you_mean(unknown[1], known)}"
    complaint, _, at = refusal.partition(" - at `$.")
    key = re.split(r"[.\[`]", at)[0]
    value = fields.get(key)
    if complaint.startswith("Invalid enum value"):
        choices = get_args(get_args(get_type_hints(kind)[known[key]])[0])
        return f"{key} is {value!r}; give one of {', '.join(choices)}"
    wanted = complaint.removeprefix("Expected ").partition(", got ")[0].replace(" | null", "")
    for name, words in _WORDS.items():
        wanted = re.sub(name, words, wanted)
    return f"{key} is {_shown(value)}; give {wanted}{' for each entry' if '[' in at else ''}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if len(repr(value)) <= _SHOWN else f"{repr(value)[:_SHOWN]}…"


def _size(key: str, value: int | str, parse: Callable[[str], int] = parse_bytes) -> int:
    try:
        return parse(str(value))
    except BadRequest as error:
        raise BadRequest(f"{key}: {error}") from None


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= MAX_NAME_CHARACTERS and text.isprintable() and text == text.strip()


def _or(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value
