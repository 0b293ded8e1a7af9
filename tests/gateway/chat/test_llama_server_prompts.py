"""Our prompts are llama-server's, byte for byte, for every real template and every shape of request.

llama-server's are recorded as digests. A difference that is meant has a name in ``support.prompt_exceptions``.
"""

import datetime

import pytest

from support.prompt_digests import TEMPLATES, digest, our_prompt, recorded
from support.prompt_exceptions import EXCEPTIONS, exception
from support.prompt_shapes import ASK, SHAPES

PATHS = sorted(TEMPLATES.glob("*.jinja"))
pytestmark = pytest.mark.skipif(not PATHS, reason="no templates in build/templates: run `make templates`")
KNOWN = recorded()


def prompt(path, body):
    return our_prompt(path, body, bos=KNOWN.bos, eos=KNOWN.eos, today=datetime.date.fromisoformat(KNOWN.date))


def test_the_recording_is_of_these_templates_and_shapes():
    assert list(KNOWN.digests) == [path.stem for path in PATHS] and KNOWN.shapes == list(SHAPES)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_prompt_is_the_one_of_llama_server(path):
    expected = dict(zip(KNOWN.shapes, KNOWN.digests[path.stem], strict=True))
    ours = {shape: digest(prompt(path, body)) for shape, body in SHAPES.items()}
    differing = {shape for shape in SHAPES if ours[shape] != expected[shape]}
    assert differing == {shape for shape in SHAPES if exception(path.stem, shape)}


def test_a_changed_character_is_noticed():
    """The control."""
    path = PATHS[0]
    other = prompt(path, {"messages": [{**ASK, "content": ASK["content"] + "!"}]})
    assert digest(other) != KNOWN.digests[path.stem][0] == digest(prompt(path, SHAPES["question"]))


def test_exceptions_are_few():
    n_excepted = sum(exception(path.stem, shape) is not None for path in PATHS for shape in SHAPES)
    assert n_excepted < 0.03 * len(PATHS) * len(SHAPES) and all(EXCEPTIONS.values())
