"""Drafts under control: which are made, how long they are, and which of their tokens are right."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np

from everwarm.engine.core import Core
from everwarm.engine.speculation.draft_length import ONE_KIND, Pacing, Proposal, Record, StepShape
from everwarm.engine.speculation.model_drafter import ComputingDrafter
from everwarm.llama.batch import Feed, Tokens
from everwarm.llama.model import Model
from support.drive import open_core

ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
STORY = "Tell me a story about a blue cup."
CODE = "My secret code is 48213. Say it again and again: 48213 48213 48213"
N_COMPUTED = 3  # tokens of a draft by a head or a draft model


def drafting_core(arch: str = "qwen35", **settings) -> AbstractContextManager[Core]:
    return open_core(arch, **{"speculate": "auto"} | settings)


def tokens_of(core: Core, question: str) -> list[int]:
    """A question as the embedded model's template writes it."""
    return tokens_of_model(core.model, question).tolist()


def tokens_of_model(model: Model, question: str) -> Tokens:
    return model.vocab.tokenize(ASK.format(question), add_special=False, parse_special=True)


def draft_of(tokens: Sequence[int], confidence: float) -> Proposal:
    """A draft that was found, all of whose tokens are equally sure and of one kind."""
    n = len(tokens)
    return Proposal(np.array(tokens, np.int32), np.full(n, confidence), np.full(n, ONE_KIND), "scripted")


class EveryStep(Pacing):
    """Verifies all of every draft, whatever it costs: what happens must not depend on how fast the machine is."""

    def is_plain(self) -> bool:
        return False

    def may_look(self, n_rows: int) -> bool:  # noqa: ARG002
        return True

    def length(self, proposal: Proposal, record: Record, shape: StepShape) -> int:  # noqa: ARG002
        record.above = self.record
        return len(proposal.tokens)

    def computed_length(self, drafter: ComputingDrafter, n_most: int, record: Record, shape: StepShape) -> int:  # noqa: ARG002
        record.above = self.record
        return min(n_most, N_COMPUTED)

    def prefers_computing(self, *_about: object) -> bool:
        """What costs nothing comes first."""
        return False


class Scripted:
    """Knows what the reply to each prompt will be, and is wrong where it is told to be: ``wrong`` says, for each draft,
    after how many right tokens; more than ``n_tokens``: never."""

    def __init__(self, texts: list[list[int]], wrong: list[int], n_tokens: int, n_vocab: int = 250) -> None:
        self._texts = texts
        self._wrong = wrong
        self._n_tokens = n_tokens
        self._n_vocab = n_vocab
        self.n_made = 0

    def propose(self, history: Tokens, n: int, namespace: str) -> Proposal | None:  # noqa: ARG002
        known = next((text for text in self._texts if text[: len(history)] == history.tolist()), None)
        if known is None:
            return None
        tokens = known[len(history) : len(history) + min(n, self._n_tokens)]
        at = self._wrong[self.n_made % len(self._wrong)]
        self.n_made += 1
        if at < len(tokens):
            tokens[at] = (tokens[at] + 1) % self._n_vocab
        return draft_of(tokens, 0.9) if tokens else None

    def forget(self) -> None:
        """It is told what it knows."""


def always_draft(core: Core, *drafters: Scripted) -> Core:
    """Every step verifies whatever is proposed: by these drafters, or by those the engine has."""
    core.speculator.pacing = EveryStep()
    if drafters:
        core.speculator.drafters = list(drafters)
        core.speculator.computing = None
    return core


def recorded_drafts(core: Core) -> list[Feed]:
    """Every feed with a draft that is decoded from now on."""
    found: list[Feed] = []
    decode = core.context.decode

    def recording(feeds: list[Feed]) -> None:
        found.extend(feed for feed in feeds if feed.n_draft)
        decode(feeds)

    core.context.decode = recording
    return found
