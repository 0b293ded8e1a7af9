"""Which kept states an engine may use: every parameter and what was decided about it."""

from __future__ import annotations

from collections.abc import Mapping

from everwarm.engine import fingerprint
from everwarm.engine.fingerprint import ParameterRow
from generating.markdown import code, table, written_by

SECTIONS: tuple[tuple[str, Mapping[str, ParameterRow]], ...] = (
    ("What is no parameter", fingerprint.OTHERS),
    ("How the model is opened (`llama_model_params`)", fingerprint.MODEL_PARAMS),
    ("How a context is opened (`llama_context_params`)", fingerprint.CONTEXT_PARAMS),
    ("How a projector is opened (`mtmd_context_params`)", fingerprint.MEDIA_PARAMS),
    ("Settings of an engine", fingerprint.CONTEXT_OPTIONS | fingerprint.MODEL_OPTIONS | fingerprint.ENGINE_SETTINGS),
    ("The environment, by pattern; the first that fits decides", fingerprint.ENVIRONMENT),
)


def page() -> str:
    return "\n".join(
        [
            written_by("src/everwarm/engine/fingerprint.py"),
            "# What states depend on\n",
            "States are kept under a fingerprint, and no engine is offered those of another ([RAM and disk](../store.md#whose-states)). "
            "Of every parameter that libllama and libmtmd have it is decided what it does to them:\n",
            "- **in the fingerprint**: another value finds nothing.\n"
            "- **last bits**: the same sums in another order or by other kernels. A state is another *reading* of the same tokens: usable, "
            "and `everwarm cache verify` knows in which ways engines of a folder opened the model.\n"
            "- **harmless**: no number depends on it.\n"
            "- **fixed**: it cannot be set.\n",
            *(part for title, rows in SECTIONS for part in (f"## {title}\n", _rows(rows))),
        ]
    )


def _rows(rows: Mapping[str, ParameterRow]) -> str:
    return table(["name", "decision", "why"], [[code(name), row.decision, row.why] for name, row in rows.items()])
