"""``everwarm explain``: why the second of two requests is not answered from the cache as a whole.

Parses, compares and prints. Loads a vocabulary, never weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from everwarm.config import require
from everwarm.demo import EMBEDDED_MODEL
from everwarm.state.params import CheckpointParams


def explain(
    first: Path,
    second: Path,
    *,
    model: Annotated[Path | None, Parameter(name=["--model", "-m"])] = None,
    demo: bool = False,
    url: str | None = None,
    api_key: str | None = None,
    model_name: str | None = None,
    checkpoint_every: int | None = None,
    max_checkpoints: int = 32,
    json: Annotated[bool, Parameter(name="--json", negative=(), help="print JSON instead of text")] = False,
) -> None:
    """Say what a server that has read the first request reads again of the second, and why.

    Both files hold a request body: OpenAI chat completions (`messages`) or completions (`prompt`). They are rendered with
    the model's own template and compared token by token. Only a vocabulary is loaded.

    Parameters
    ----------
    first
        The request that was answered before.
    second
        The one that was slower than it should have been.
    model
        The GGUF file whose template and vocabulary to use.
    demo
        Use the embedded everwarm-tiny.
    url
        Use a running server's model instead, such as http://127.0.0.1:8080.
    api_key
        The running server's.
    model_name
        Which of the running server's models.
    checkpoint_every, max_checkpoints
        As `serve` has them.
    """
    # loading libllama takes a moment; --help should not
    from everwarm.cli.explain_output import facts, show, source_for
    from everwarm.gateway.explain.explain import explained, read_file

    require((model is not None) + demo + (url is not None) == 1, "give --model with a GGUF file, --demo, or --url")
    params = CheckpointParams(max_checkpoints, checkpoint_every)
    asked = read_file(first), read_file(second)
    with source_for(EMBEDDED_MODEL if demo else model, url, api_key, model_name, params) as source:
        found = explained(*asked, source)
    if json:
        print(msgspec.json.format(msgspec.json.encode(facts(found, source.name))).decode())
    else:
        show(Console(highlight=False), found)
