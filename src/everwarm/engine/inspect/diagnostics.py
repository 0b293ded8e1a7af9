"""Why a prompt was read, as a message to the gateway; with text where the request wants it."""

from __future__ import annotations

from everwarm.engine.inspect.read_reason import Different
from everwarm.engine.process import messages as m
from everwarm.engine.request import CheckpointUse, Result
from everwarm.llama.vocab import Vocab
from everwarm.prompt.prompt import Prompt

IMAGE = "[picture]"


def diagnostics_of(result: Result, vocab: Vocab | None) -> m.ReadReasonMessage:
    """``vocab``: None where the request wants no text."""
    why = result.why
    if why is None:  # it never started
        return m.ReadReasonMessage()
    return m.ReadReasonMessage(
        why.reason.value,
        None if why.again is None else why.again.value,
        why.n_shared,
        why.n_kv,
        why.n_checkpoint,
        None if result.checkpoint is None else _used(result.checkpoint),
        None if why.first_different is None else _diverged(why.first_different, vocab),
    )


def _used(use: CheckpointUse) -> m.Used:
    return m.Used(use.n_tokens, use.kind.value if use.kind else "end", use.how)


def _diverged(different: Different, vocab: Vocab | None) -> m.Diverged:
    if vocab is None:
        return m.Diverged(different.at)
    parts = (different.before, different.known, different.given)
    return m.Diverged(different.at, *(words(vocab, part) for part in parts))


def words(vocab: Vocab, items: Prompt) -> str:
    """The text of some items. An incomplete character at an end is replaced."""
    pieces = (IMAGE.encode() if code < 0 else vocab.piece(code) for code in items.codes.tolist())
    return b"".join(pieces).decode("utf-8", "replace")
