"""``everwarm explain``: why the second of two requests is not answered from the cache as a whole.

Parses, compares and prints. Loads a vocabulary, never weights.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from everwarm.config import require
from everwarm.demo import EMBEDDED_MODEL
from everwarm.engine.process.messages import Reason
from everwarm.engine.settings import EngineSettings
from everwarm.errors import BadRequest
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.client import Client
from everwarm.gateway.explain import Difference, PromptSource, explained, read_file, source_of
from everwarm.gateway.rewrite.rules import read_rules
from everwarm.llama.model import Model
from everwarm.prompt.tokenizer import Tokenizer
from everwarm.router.catalog.gguf_header import read_header
from everwarm.router.catalog.memory_estimate import shape_of
from everwarm.state.policy import CheckpointParams, Spacing

_MOST_SHOWN = 12


def explain(
    first: Path | None = None,
    second: Path | None = None,
    *,
    session: Annotated[bool, Parameter(negative=())] = False,
    model: Annotated[Path | None, Parameter(name=["--model", "-m"])] = None,
    demo: bool = False,
    url: str | None = None,
    api_key: str | None = None,
    model_name: str | None = None,
    rewrite: Path | None = None,
    checkpoint_every: int | None = None,
    max_checkpoints: int = 32,
    json: Annotated[bool, Parameter(name="--json", negative=(), help="print JSON instead of text")] = False,
) -> None:
    """Tell what a server that has read the first request reads again of the second, and why.

    Both files hold a request body: OpenAI chat completions (`messages`) or completions (`prompt`). They are rendered with
    the model's own template and compared token by token. Only a vocabulary is loaded.

    With `--session` no files: a running server tells which lines of system text its clients change without need, what that
    cost, and the rule for `serve --rewrite` that would cure it.

    Parameters
    ----------
    first
        The request that was answered before.
    second
        The request that was slower than expected.
    session
        What the clients of the server at --url change, instead of two files.
    model
        The GGUF file whose template and vocabulary to use.
    demo
        Use the embedded everwarm-tiny.
    url
        Use a running server's model instead, such as http://127.0.0.1:8080.
    api_key, model_name
        The running server's API key, and which of its models to use.
    rewrite, checkpoint_every, max_checkpoints
        As for `serve`.
    """
    if session:
        return _explain_session(url, api_key, has_files=first is not None, as_json=json)
    require((model is not None) + demo + (url is not None) == 1, "give --model with a GGUF file, --demo, or --url")
    params = CheckpointParams(max_checkpoints, checkpoint_every)
    with source_for(EMBEDDED_MODEL if demo else model, url, api_key, model_name, params) as source:
        rules = () if rewrite is None else read_rules(rewrite)
        return _explain_files(first, second, replace(source, rules=rules), as_json=json)


def _explain_files(first: Path | None, second: Path | None, source: PromptSource, *, as_json: bool) -> None:
    if first is None or second is None:
        raise BadRequest("give two files with request bodies, or --session with --url")
    found = explained(read_file(first), read_file(second), source)
    if as_json:
        print(_json(facts(found, source.name)))
    else:
        show(Console(highlight=False), found)


def _explain_session(url: str | None, api_key: str | None, *, has_files: bool, as_json: bool) -> None:
    if url is None or has_files:
        raise BadRequest("--session asks a running server: give --url, and no files")
    lines = Client(url, api_key).get("/cache/volatile")["lines"]
    if as_json:
        print(_json(lines))
    else:
        show_volatile(Console(highlight=False), lines)


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


@contextlib.contextmanager
def source_for(
    path: Path | None, url: str | None, api_key: str | None, name: str | None, params: CheckpointParams
) -> Iterator[PromptSource]:
    if path is None:
        yield source_of(url or "", api_key, name)
        return
    with Model(path, vocab_only=True) as opened:
        vocab = opened.vocab
        bos, eos = (b"" if token is None else vocab.piece(token) for token in (vocab.bos, vocab.eos))
        words = bos.decode("utf-8", "replace"), eos.decode("utf-8", "replace")
        text = opened.chat_template
        template = None if text is None else ChatTemplate(text, bos=words[0], eos=words[1])
        spacing = _spacing(path, params)
        yield PromptSource(path.name, Tokenizer(vocab), vocab.detokenize, template, vocab.adds_bos, spacing)


def _spacing(path: Path, params: CheckpointParams) -> Spacing | None:
    """Of the model's checkpoints, None if it needs none: from the header alone, as the router estimates it."""
    shape = shape_of(read_header(path), path.stat().st_size, EngineSettings())
    if shape.state_bytes == 0 and shape.n_window == 0:
        return None
    return params.fitted(
        state_bytes=shape.state_bytes, kv_bytes_per_token=shape.kv_bytes_per_token, window=shape.n_window > 0
    )


def facts(found: Difference, name: str) -> dict[str, Any]:
    is_same = found.n_common == found.n_first == found.n_second
    return {
        "model": name,
        "first": {"n_tokens": found.n_first, "kept": [{"at": cut.at, "kind": cut.kind.value} for cut in found.kept]},
        "second": {"n_tokens": found.n_second, "n_cached": found.n_resume, "n_read": found.n_read},
        "n_common": found.n_common,
        "checkpoint": None if found.resume is None else {"at": found.resume.at, "kind": found.resume.kind.value},
        "reason": found.reason.value,
        "again": None if found.again is None else found.again.value,
        "diverged": None
        if is_same
        else {"at": found.n_common, "before": found.before, "known": found.known, "given": found.given},
        "hints": found.hints,
    }


def show(console: Console, found: Difference) -> None:
    console.print(f"first     {found.n_first} tokens", _kept(found), sep="\n")
    console.print(f"second    {found.n_second} tokens, of which the first {found.n_common} are the same", style="bold")
    console.print(_continues(found))
    console.print(_reads(found))
    if found.again is not None and found.again is not found.reason:
        console.print(f"          {found.n_known_read} of them were known: {found.again.value}, {found.again.words}")
    if found.known or found.given:
        console.print()
        console.print("the first difference", style="bold")
        for label, words, style in (("first", found.known, "red"), ("second", found.given, "green")):
            line = Text(f"  {label:<8}").append(_line(found.before), "dim").append(_line(words) or "(ends)", style)
            console.print(line, soft_wrap=True)
    for hint in found.hints:
        console.print(Text("• ", "yellow").append(hint, "default"), soft_wrap=True)


def show_volatile(console: Console, lines: list[dict[str, Any]]) -> None:
    if not lines:
        console.print("no client has changed a line of its system text without need since the server started")
    for line in lines:
        times = "once" if line["n_changes"] == 1 else f"{line['n_changes']} times"
        what = f"line {line['line']} of the system text was changed {times}: {line['n_tokens']:,} tokens read"
        console.print(what, style="bold", soft_wrap=True)
        if line["before"] is not None:
            console.print(Text(f"  {_line(line['before'])}…{_line(line['after'])}", "dim"), soft_wrap=True)
        if line["rule"]:
            console.print(Text("  a rule for `everwarm serve --rewrite FILE` that would cure it:"), soft_wrap=True)
            console.print(Text(textwrap.indent(line["rule"], "    "), "green"), soft_wrap=True, end="")


def _kept(it: Difference) -> str:
    if not it.kept:
        return "          kept: its KV; this kind of model, or these settings, keep no checkpoints"
    shown = ", ".join(f"{cut.at} ({cut.kind.value})" for cut in it.kept[-_MOST_SHOWN:])
    return f"          kept: {'… ' if len(it.kept) > _MOST_SHOWN else ''}{shown}"


def _continues(it: Difference) -> str:
    if it.n_resume == 0:
        return "continues from the very beginning"
    return f"continues from {it.n_resume}" + (f" ({it.resume.kind.value})" if it.resume else "")


def _reads(it: Difference) -> str:
    if it.reason is Reason.HIT and it.n_read:
        return f"reads     {it.n_read} tokens again, from there to its end: {it.reason.value}, {it.reason.words}"
    return f"reads     {it.n_read} tokens: {it.reason.value}, {it.reason.words}"


def _line(text: str) -> str:
    """The text on one line, with a visible sign for every character that would not be seen."""
    return "".join(c if c.isprintable() else {"\n": "↵", "\t": "⇥"}.get(c, "·") for c in text)
