"""What Ollama's clients are told about models: the list, the details of one, and which are in memory. Reads headers of
files, on a thread beside the event loop; loads no model."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from everwarm.errors import ModelFileError
from everwarm.gateway.ollama.derived_models import DerivedModel
from everwarm.gateway.parsing.reasoning import detect_reasoning
from everwarm.gateway.parsing.tool_parser import detect_tools
from everwarm.router.catalog.catalog import ModelSpec
from everwarm.router.catalog.gguf_files import ModelFile, one_file, quant_of, tagged
from everwarm.router.catalog.gguf_header import read_text
from everwarm.router.plan import Phase
from everwarm.router.pool import Standing
from everwarm.types import Json

_STAYS = datetime.datetime(2999, 1, 1, tzinfo=datetime.UTC)
IN_MEMORY = (Phase.LOADING, Phase.READY, Phase.DRAINING)
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_FILE_TYPES: Mapping[int, str] = {  # llama.cpp's numbers
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip


def listed(standings: Sequence[Standing]) -> list[Json]:
    return [_entry(standing.spec, _file(standing.spec)) for standing in standings]


def derived(models: Sequence[Json], names: Mapping[str, DerivedModel]) -> list[Json]:
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


def presence(standing: Standing) -> Json:
    """What the list of models in memory has beyond the list of models."""
    info = standing.supervisor.info
    settings = standing.spec.settings
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


def details(spec: ModelSpec, sees: bool) -> Json:
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
        "model_info": {key: _plain(value) for key, value in about.items()},
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


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _date(ns: int) -> str:
    seconds = min(max(0, ns // 10**9), _STAYS.timestamp())
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
