"""The stable point with real templates: those in the source archive of the libllama wheel, fetched by `make templates`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everwarm.errors import BadRequest
from everwarm.gateway.chat import stable_points
from everwarm.gateway.chat.chat_template import ChatTemplate
from support.conversations import TOOLS, Message

FOLDER = Path(__file__).parents[3] / "build" / "templates"
PATHS = sorted(FOLDER.glob("*.jinja"))

pytestmark = pytest.mark.skipif(not PATHS, reason="no templates in build/templates: run `make templates`")

CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"key": "é", "n": 2}'}}
ASKED = [{"role": "user", "content": " What is it?\n"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "That.\n", "reasoning_content": "Hm.\nWell."}]
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": '{"found": "🦉"}'}
TALKS: tuple[list[Message], ...] = (
    ASKED,
    [{"role": "system", "content": "Be brief. "}, *ASKED],
    [{"role": "system", "content": "Be brief."}, *ANSWERED, *ASKED],
    [*ASKED, CALLED, RESULT],
    [*ANSWERED, *ASKED, {**CALLED, "reasoning_content": "Look."}, RESULT, {**CALLED, "content": "Again."}, RESULT],
)
KWARGS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True, "thinking": True})
SAID = {"role": "assistant", "content": "Nothing, \n really."}
CALLS = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
THOUGHT = {"reasoning_content": "\nWhy?\n"}
MORE = {"role": "user", "content": "Zebras, then"}
NEXTS = {False: ([SAID, MORE], [SAID | THOUGHT, MORE]), True: ([CALLS, RESULT], [CALLS | THOUGHT, RESULT])}


def asked(template: ChatTemplate) -> Iterator[tuple[Any, list[Message], dict[str, Any]]]:
    """Every prompt that a template does not refuse."""
    for messages in TALKS:
        for kwargs in KWARGS:
            for tools in (None, TOOLS):
                given = {"tools": tools, **kwargs}
                try:
                    yield template.conversation(messages, **given), messages, given
                except BadRequest:
                    continue


def follow_ups(template: ChatTemplate, messages: list[Message], given: dict[str, Any]) -> Iterator[str]:
    for after in (*NEXTS[False], *(NEXTS[True] if given["tools"] else ())):
        try:
            yield template.render([*messages, *after], **given)
        except BadRequest:
            continue


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_next_turn_begins_with_everything_up_to_the_stable_point(path):
    template = ChatTemplate(path.read_text(), bos="<s>", eos="</s>")
    for now, messages, given in asked(template):
        texts = list(follow_ups(template, messages, given))
        assert (now.hints.stable is not None) >= bool(texts)
        for text in texts:
            assert text.startswith(now.text[: now.hints.stable])
            assert min(stable_points.common_prefix(now.text, text), now.hints.boundaries[-1]) in now.hints.stables


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_next_turn_begins_with_the_text_after_a_reply(path):
    template = ChatTemplate(path.read_text(), bos="<s>", eos="</s>")
    for _, messages, given in asked(template):
        for reply in (SAID | THOUGHT, CALLS | THOUGHT) if given["tools"] else (SAID | THOUGHT,):
            begins = template.after_reply(messages, reply, **given)
            for sent in (reply, {k: v for k, v in reply.items() if k != "reasoning_content"}):
                following = RESULT if "tool_calls" in reply else MORE
                try:
                    text = template.render([*messages, sent, following], **given)
                except BadRequest:
                    continue
                assert begins is not None and text.startswith(begins)


def test_nearly_all_templates_take_conversations_and_keep_them():
    kept = {}
    for path in PATHS:
        found = list(asked(ChatTemplate(path.read_text(), bos="<s>", eos="</s>")))
        kept[path.stem] = [
            now.hints.stable == now.hints.boundaries[-1] for now, messages, given in found if messages is TALKS[0]
        ]
    n_rendered = sum(bool(found) for found in kept.values())
    n_whole = sum(bool(found) and all(found) for found in kept.values())
    assert n_rendered >= 0.9 * len(PATHS) and n_whole >= 0.8 * len(PATHS), kept
