"""Meaning: the embedded model still knows what it was told after its slot was given away and its state came from RAM."""

import pytest

from everwarm.engine.core import Core
from everwarm.engine.request import Result
from everwarm.prompt.tokenizer import Tokenizer
from everwarm.state.tree import Node
from support.drive import open_core, run, tidy
from support.models import EMBEDDED

SPARES = pytest.mark.parametrize("n_spares", [0, 4])
FILLER = [
    ("What is 7 + 8?", "7 + 8 = 15."),
    ("Hello!", "Hi! What can I do for you?"),
    ("Who are you?", "I am Everwarm Tiny, a very small hybrid language model."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("Which day comes after Monday?", "The day after Monday is Tuesday."),
]


def user(words: str) -> str:
    return f"<|im_start|>user\n{words}<|im_end|>\n"


def assistant(words: str) -> str:
    return f"<|im_start|>assistant\n{words}<|im_end|>\n"


def told(code: str, n_rounds: int = 11) -> str:
    """A code told at the beginning, then small talk."""
    beginning = user(f"My secret code is {code}.") + assistant("Okay, I will remember that.")
    return beginning + "".join(user(q) + assistant(a) for q, a in FILLER) * n_rounds


QUESTION = user("What is my secret code?") + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Talk:
    """A core, its tokenizer and its words."""

    def __init__(self, core: Core) -> None:
        self.core, self.tokenizer = core, Tokenizer(core.model.vocab)

    def read(self, words: str) -> Result:
        return run(self.core, self.tokenizer.tokenize(words).codes.tolist(), 1)

    def ask(self, history: str) -> tuple[str, Result]:
        prompt = self.tokenizer.tokenize(history + QUESTION).codes.tolist()
        result = run(self.core, prompt, 30, ignore_eos=False)
        return self.core.model.vocab.detokenize(result.tokens).decode("utf-8", "replace"), result

    def end_of(self, history: str) -> Node:
        """The checkpoint near the end of this history."""
        prompt = self.tokenizer.tokenize(history)
        match = self.core.cache.tree.match("", prompt, len(prompt))
        return match.usable[0]


def open_embedded(**more):
    return open_core(path=EMBEDDED, n_slots=1, n_ctx=8192, n_threads=2, **more)


@SPARES
def test_a_code_told_long_ago_is_known_after_the_slot_was_given_away(n_spares):
    mine, other = told("48213"), told("90765")
    with open_embedded(n_spares=n_spares) as core:
        talk = Talk(core)
        assert talk.read(mine).n_prompt >= 1500
        tidy(core)
        talk.read(other)
        answer, result = talk.ask(mine)
        assert "48213" in answer
        assert result.n_processed <= 60  # the question, not the history
        answer, result = talk.ask(other)
        assert "90765" in answer and result.n_processed <= 60


def test_a_code_that_was_never_told_is_not_known():
    """The control: the answer comes from the history."""
    with open_embedded() as core:
        answer, _ = Talk(core).ask(told("11111"))
        assert "48213" not in answer


def test_with_another_conversations_memory_the_answer_is_wrong():
    """The control: swapping two states and their KV by hand swaps the answers."""
    mine, other = told("48213"), told("90765")
    with open_embedded() as core:
        talk = Talk(core)
        talk.read(mine)
        talk.read(other)
        talk.read(user("Hello!"))  # both lie in RAM now
        a, b = talk.end_of(mine), talk.end_of(other)
        assert a.n_items == b.n_items and a.checkpoint.state.nbytes == b.checkpoint.state.nbytes
        swap(a, b)
        answer, result = talk.ask(mine)
        assert result.n_cached == a.n_items
        assert "48213" not in answer


def swap(a: Node, b: Node) -> None:
    a.checkpoint.state, b.checkpoint.state = b.checkpoint.state, a.checkpoint.state
    others = {(node.start, node.n_items): node for node in b.lineage()}
    for node in a.lineage():
        other = others.get((node.start, node.n_items))
        if other is not None and other is not node:
            node.segment, other.segment = other.segment, node.segment
