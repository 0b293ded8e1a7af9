"""llama-server's INI file of model presets (``--models-preset``), as the tables of a models file. Pure.

A section is a model, and its keys are flags without dashes, also in their short form or as a variable; ``[*]`` holds for
all of them. What the server decides for all models at once is refused with the flag that says it.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from typing import Any

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
