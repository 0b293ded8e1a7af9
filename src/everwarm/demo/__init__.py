"""The embedded default model, tiny models of real architectures, and the guided tour."""

from pathlib import Path

EMBEDDED_MODEL = Path(__file__).parent / "everwarm-tiny.gguf"
