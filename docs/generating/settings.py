"""The settings that a program gives an engine or a server: fields, types, defaults, and the comment beside each."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import tokenize
from io import StringIO
from typing import Any

from everwarm.config import ModelOptions, Sampling
from everwarm.engine.settings import EngineSettings, StoreSettings
from everwarm.gateway.settings import ServerSettings
from everwarm.state.policy import CheckpointParams
from generating.markdown import code, prose, table, written_by
from generating.words import FIELDS

_SHOWN = (
    (EngineSettings, "everwarm.engine.settings"),
    (CheckpointParams, "everwarm.state.policy"),
    (StoreSettings, "everwarm.engine.settings"),
    (ModelOptions, "everwarm.config"),
    (Sampling, "everwarm.config"),
    (ServerSettings, "everwarm.gateway.settings"),
)
_PLAIN = {  # what no comment says, because the flag of the same meaning does
    "n_slots": "requests at once",
    "n_ctx": "tokens of context, shared by all slots",
    "n_batch": "tokens per decode call",
    "n_ubatch": "tokens per step",
    "n_threads": "CPU threads",
    "cache_type_k": "KV keys",
    "cache_type_v": "KV values",
    "model": "how the weights are opened, below",
    "checkpoints": "where checkpoints are taken and how many are kept, below",
    "directory": "where; must be given",
    "disk_bytes": "how much of the disk",
    "max_checkpoints": "kept on one path; 0: off",
    "every_n_tokens": "spacing inside long messages; 0 or less: only near the end of a prompt",
    "min_tokens": "none before this many tokens",
    "min_gap": "none closer than this to the one before",
    "api_key": "required from clients",
    "admin_key": "needed for what changes or shows more than the caller's namespace",
    "host": "address to listen on",
    "port": "0: any free one",
    "max_body_bytes": "the largest request",
    "flash_attention": "`auto`, `on` or `off`",
    "restore_policy": "`auto` or `always`",
    "thinking_tags": "how models mark their thinking",
    "penalty_last_n": "how far back penalties look",
    "grace_s": "seconds to finish what runs after SIGTERM",
}


def page() -> str:
    parts = [
        written_by("the dataclasses it names"),
        "# Settings in Python\n",
        "What `everwarm serve` makes of its [flags](flags.md), and what a program gives `Engine`. All are frozen dataclasses, checked "
        "when they are made: a value that cannot be used is a `BadRequest` with a sentence that says what would be right.\n",
        "```python\n"
        "from everwarm.engine.engine import Engine\n"
        "from everwarm.engine.settings import EngineSettings\n\n"
        'with Engine("model.gguf", EngineSettings(n_slots=2, n_ctx=32768)) as engine:\n'
        '    print(engine.submit("Once upon a time", max_tokens=32).result())\n'
        "```\n",
    ]
    for kind, module in _SHOWN:
        parts.append(f"## `{kind.__name__}`\n")
        text = prose((inspect.getdoc(kind) or "").split("\n\n")[0])
        is_written = text and not text.startswith(f"{kind.__name__}(")
        parts.append(f"From `{module}`." + (f" {text}" if is_written else "") + "\n")
        comments = comments_of(kind)
        rows = [[code(f.name), _type(f), _default(f), comments.get(f.name, "")] for f in dataclasses.fields(kind)]
        parts.append(table(["field", "type", "default", "meaning"], rows))
    return "\n".join(parts)


def comments_of(kind: type) -> dict[str, str]:
    """What stands beside each field in the source."""
    source = inspect.getsource(kind)
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    by_line = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            found[name] = prose(by_line.get(node.end_lineno or 0, _PLAIN.get(name) or FIELDS.get(name, "")))
    return found


def _type(field: dataclasses.Field[Any]) -> str:
    return " or ".join(map(code, str(field.type).split(" | ")))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return "" if field.default is None else code(_number(field.default))
    if field.default_factory is dataclasses.MISSING:
        return "must be given"
    if field.default_factory.__name__ == "default_threads":
        return "the CPUs the process may use"
    made = field.default_factory()
    return code(f"{type(made).__name__}()" if dataclasses.is_dataclass(made) else str(made))


def _number(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 30} << 30" if value % (1 << 30) == 0 else f"{value >> 20} << 20"
    return repr(value)
