"""``/infill``: the prompt that llama-server makes, and what a typing session reads again."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from everwarm.engine.process.messages import FillIn
from everwarm.errors import BadRequest
from everwarm.gateway.llamaserver.infill import ExtraText, InfillBody, infill_completion
from support.changed_gguf import write_changed
from support.models import EMBEDDED
from support.server import GUARD, Server, serving, words

FILL = FillIn(1, 2, 3, 4, 5, None)
GIVEN = ([10], [11], [12], range(100, 110), [13, 14], range(200, 220), [15], [16, 17])
ABOVE = "import os\n\n\ndef main(path: str) -> None:\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_changed(tmp_path_factory.mktemp("fills-in") / "fills-in.gguf", EMBEDDED, fills_in=True)
    with serving(model=model) as server:
        yield server


def fill(server: Server, above: str, line: str, below: str, **more: Any) -> dict[str, Any]:
    body = {"input_prefix": above, "prompt": line, "input_suffix": below, "n_predict": 4, "temperature": 0}
    return dict(server.ask("/infill", body | more))


def test_all_texts_together_are_bounded():
    body = InfillBody(input_prefix="x" * 600_000, input_suffix="", input_extra=[ExtraText("y" * 600_000)])
    with pytest.raises(BadRequest, match="characters around the cursor"):
        body.texts()


# the prompt


def prompt(texts: Sequence[Sequence[int]] = GIVEN, fill: FillIn = FILL, **more: Any) -> tuple[int, ...]:
    sizes = {"n_batch": 64, "n_ctx": 512, "n_predict": 8} | more
    return tuple(infill_completion(texts, fill, {}, **sizes).prompt)


def test_a_project_comes_before_the_file_of_the_cursor():
    head = (4, 10, 5, 15, 16, 17, 5, 11)
    above, below = (1, *range(100, 110), 13, 14), (2, *range(200, 212))
    assert prompt() == (*head, *above, *below, 3)
    assert prompt(suffix_first=True) == (*head, *below, *above, 3)


def test_a_model_without_tokens_for_files_gets_snippets():
    assert prompt(fill=FillIn(1, 2, 3, bos=9))[:4] == (12, 16, 17, 9)


def test_the_beginning_of_a_long_text_is_dropped_in_steps():
    longer = [([], [], [], range(1000, 1000 + n), [], []) for n in range(40, 110)]
    firsts = [prompt(texts, FillIn(1, 2, 3))[1] for texts in longer]
    assert len(set(firsts)) < 8, "every keystroke would read it all again"
    assert all(36 <= len(prompt(texts, FillIn(1, 2, 3))) - 3 <= 48 for texts in longer[8:])


def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(BadRequest, match="context 20"):
        prompt(n_ctx=20)


# a server


def test_the_middle_is_filled_in(server):
    answer = fill(server, ABOVE, "    print(", ")\n", input_extra=[{"filename": "a.py", "text": "x = 1\n"}])
    assert answer["tokens_predicted"] == 4 and answer["content"] and answer["stop_type"] == "limit"
    streamed = server.post("/infill", {"input_prefix": ABOVE, "input_suffix": ")", "n_predict": 2, "stream": True})
    assert streamed.status == 200 and streamed.events[-1]["stop"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_prefix": 5},
        {"input_suffix": None},
        {"input_extra": {}},
        {"input_extra": [{"filename": "a"}]},
        {"input_extra": [{"filename": 1, "text": "a"}]},
        {"prompt": [1]},
        {"n": 3},
        {"n": 3, "stream": True},
    ],
)
def test_what_cannot_be_filled_in_is_refused(server, wrong):
    answer = server.post("/infill", {"input_prefix": "a", "input_suffix": "b"} | wrong)
    assert answer.status == 400 and answer.json["error"]["code"] == 400


def test_a_model_that_does_not_know_how_says_so():
    with serving() as server:
        answer = server.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
        assert answer.status == 501 and "fill-in-the-middle" in answer.json["error"]["message"]


def test_typing_reads_little_again(server):
    """The text above the cursor was read before; only its line and what is below are new. A recurrent state
    exists only where it was kept, so this holds only if it was kept there."""
    above, below = words(500, 1) + "\n", words(40, 2)
    n_below = server.n_tokens(below) + GUARD
    read = []
    for typed in itertools.accumulate(("    value", " = value", " + other", ".total\n    print", "(value")):
        before, newline, line = typed.rpartition("\n")
        answer = fill(server, above + before + newline, line, below)
        read.append((answer["timings"]["prompt_n"], n_below + server.n_tokens(typed) + 2))
    assert read[0][0] > 500
    assert all(n_read <= most for n_read, most in read[1:]), read
