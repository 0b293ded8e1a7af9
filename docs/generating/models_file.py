"""The keys of the TOML file that ``serve --models`` takes."""

from __future__ import annotations

import msgspec

from everwarm.router.catalog.models_file import ModelsFile, ModelTable
from generating.markdown import code, table, written_by
from generating.types import type_text

_WHOLE = {
    "default": "the model for clients that name one that does not exist",
    "directory": "a folder beside this file; every GGUF in it is served, too",
    "models-max": "as `--models-max`",
    "memory-limit": "as `--memory-limit`",
    "models": "one table for each model, below",
}
_ONE = {
    "path": "the GGUF file; this or `hf`",
    "hf": "`owner/repo:quant` of the Hugging Face Hub",
    "alias": "other names it answers to",
    "mmproj": "its projector for images",
    "template": "a file with another chat template",
    "pinned": "never put to sleep to make room",
    "load-on-start": "loaded before the first request for it",
    "pooling": "serves it for embeddings instead of text, pooled so: `auto`, `none`, `mean`, `cls`, `last` or `rank`",
    "ttl": "idle for so long: put to sleep, with everything kept; seconds or a time like `10m`; 0: never",
}


def page() -> str:
    return "\n".join(
        [
            written_by("src/everwarm/router/catalog/models_file.py"),
            "# The file of `--models`\n",
            "[Many models](../router.md) has an example. Unknown keys are errors. Paths are relative to the file.\n",
            "## At the top\n",
            table(["key", "value", "meaning"], _rows(ModelsFile, _WHOLE)),
            "## In `[models.NAME]`\n",
            "What a table does not mention is as the server's [flags](flags.md) say.\n",
            table(["key", "value", "meaning"], _rows(ModelTable, _ONE)),
        ]
    )


def _rows(kind: type[msgspec.Struct], told: dict[str, str]) -> list[list[str]]:
    fields = msgspec.structs.fields(kind)
    names = [field.encode_name for field in fields]
    return [
        [code(f.encode_name), type_text(f.type), told.get(n, f"as `--{n}`")] for n, f in zip(names, fields, strict=True)
    ]
