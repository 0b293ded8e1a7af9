"""Tiny models instead of those that llama-server's tests download: the same kind, the same way to be used, other words."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.bert import write_bert  # noqa: E402
from support.changed_gguf import write_changed  # noqa: E402
from support.lora import write_lora  # noqa: E402
from support.models import EMBEDDED, tiny_model, tiny_vision  # noqa: E402

FOLDER = ROOT / "build" / "compat" / "models"
N_VOCAB, N_CONTROL = 2048, 12  # of the embedded model


class StandIn(NamedTuple):
    model: Path
    projector: Path | None = None


def stand_in(repository: str, file: str | None) -> StandIn:
    """The tiny model for one that can be downloaded; ``SystemExit`` if there is none."""
    kind = repository if file is None or repository not in _BY_FILE else file.split("/")[0]
    if kind not in _MODELS:
        raise SystemExit(f"no stand-in for the model {repository} {file or ''}")
    return _MODELS[kind]()


def downloaded(url: str) -> str:
    """The tiny file for one that a test downloads by its address."""
    name = url.rsplit("/", 1)[-1]
    if name == "moe_shakespeare15M.gguf":
        return str(_once("adapter.gguf", lambda path: write_lora(path, "llama")))
    if name == "stories15M-q4_0.gguf":
        return str(_text_model())
    raise FileNotFoundError(f"no stand-in for {url}")


def _once(name: str, write: Callable[[Path], object]) -> Path:
    """Written under another name first: two tests may begin at once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / name
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        write(unfinished)
        unfinished.rename(path)
    return path


def _text_model(*, fills_in: bool = False) -> Path:
    """A tiny llama with the vocabulary of the embedded model: one token per byte would make every prompt too long. It
    writes no control tokens, so replies are as long as they may be."""
    weights = tiny_model("llama", n_vocab=N_VOCAB)
    name = "fills-in-2.gguf" if fills_in else "text-2.gguf"
    return _once(name, lambda path: write_changed(path, weights, EMBEDDED, fills_in=fills_in, n_silent=N_CONTROL))


_BY_FILE = ("ggml-org/models",)
_MODELS: dict[str, Callable[[], StandIn]] = {
    "ggml-org/test-model-stories260K": lambda: StandIn(_text_model()),
    "ggml-org/test-model-stories260K-infill": lambda: StandIn(_text_model(fills_in=True)),
    "ggml-org/stories15M_MOE": lambda: StandIn(_text_model()),
    "ggml-org/tinygemma3-GGUF:Q8_0": lambda: StandIn(*tiny_vision("gemma3")),
    "tinyllamas": lambda: StandIn(_text_model()),
    "bert-bge-small": lambda: StandIn(_once("embeds.gguf", lambda path: write_bert(path, n_ctx=512))),
    "jina-reranker-v1-tiny-en": lambda: StandIn(
        _once("ranks.gguf", lambda path: write_bert(path, ranks=True, n_ctx=512))
    ),
}
