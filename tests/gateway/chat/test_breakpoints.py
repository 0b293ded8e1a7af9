"""Breakpoints: where clients say that a prefix ends which they will use again."""

import copy
from typing import Any

import pytest

from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.state.policy import MAX_BREAKPOINTS
from support.conversations import SOURCES, TEMPLATES, TOOLS
from support.server import GUARD, serving, words

HELLO = {"role": "user", "content": "Hello!"}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
EXACT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("mark", [EPHEMERAL, EXACT], ids=["anthropic", "openai"])
def test_a_breakpoint_is_the_exact_end_of_its_part(name, mark):
    messages = [
        {"role": "system", "content": [part("Rules.", **mark), part("More.")]},
        user(part("One."), part("Two.", **mark), part("Three.")),
        {"role": "assistant", "content": "Yes."},
        user(part("Four.", **mark)),
    ]
    prepared = TEMPLATES[name].conversation(messages)
    for at, end in zip(prepared.hints.breakpoints, ("Rules.", "Two.", "Four."), strict=True):
        assert prepared.text[:at].endswith(end)


@pytest.mark.parametrize("name", SOURCES)
def test_a_breakpoint_is_never_seen_by_the_template(name):
    plain = [{"role": "system", "content": [part("Rules.")]}, user(part("One."), part("Two."))]
    marked = copy.deepcopy(plain)
    marked[0] |= EPHEMERAL
    marked[1]["content"][0] |= EXACT
    tools = [tool | EPHEMERAL for tool in TOOLS]
    tools[0] = tool_with(EPHEMERAL)
    before = copy.deepcopy((marked, tools))
    prepared = TEMPLATES[name].conversation(marked, tools=tools)
    assert (
        prepared.text
        == TEMPLATES[name].conversation(plain, tools=TOOLS).text
        == TEMPLATES[name].render(marked, tools=tools)
    )
    assert len(prepared.hints.breakpoints) == (2 if name == "chatml" else 4)  # which shows no tools
    assert (marked, tools) == before


def tool_with(mark: dict[str, Any]) -> dict[str, Any]:
    return {**TOOLS[0], "function": {**TOOLS[0]["function"], **mark}}


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "chatml"])
def test_a_breakpoint_after_a_tool_is_what_prompts_with_other_later_tools_share(name):
    template = TEMPLATES[name]
    (at,) = template.conversation([HELLO], tools=[TOOLS[0] | EPHEMERAL, TOOLS[1]]).hints.breakpoints
    other = {"type": "function", "function": {**TOOLS[1]["function"], "name": "zoom"}}
    text = template.render([HELLO], tools=TOOLS)
    assert '"look"' in text[:at] or "<name>look" in text[:at]
    for tools in ([TOOLS[0]], [TOOLS[0], other], [*TOOLS, other]):
        assert template.render([HELLO], tools=tools).startswith(text[:at])
    assert not template.render([HELLO], tools=[TOOLS[1]]).startswith(text[:at])


def test_white_space_that_a_template_trims_does_not_lead_a_breakpoint_astray():
    messages = [user(part("One.\n\n", **EPHEMERAL), part("\n Two. \n", **EPHEMERAL))]
    prepared = TEMPLATES["qwen35"].conversation(messages)
    ends = [prepared.text[:at] for at in prepared.hints.breakpoints]
    assert ends[0].endswith("One.\n\n") and ends[1].endswith("Two.") and len(ends) == 2


def test_of_many_breakpoints_the_last_ones_count():
    messages = [user(*(part(f"{i}.", **EPHEMERAL) for i in range(40)))]
    prepared = TEMPLATES["chatml"].conversation(messages)
    assert len(prepared.hints.breakpoints) == MAX_BREAKPOINTS and prepared.text[
        : prepared.hints.breakpoints[-1]
    ].endswith("39.")


@pytest.mark.parametrize("mark", [None, False, {}, 0, ""])
def test_a_mark_that_says_nothing_is_no_breakpoint(mark):
    prepared = TEMPLATES["chatml"].conversation([user(part("One.", cache_control=mark), part("Two."))])
    assert prepared.hints.breakpoints == () and "cache_control" not in prepared.text


def test_a_message_may_be_marked_as_a_whole():
    prepared = TEMPLATES["chatml"].conversation([{"role": "user", "content": "One.", **EPHEMERAL}, HELLO])
    assert [prepared.text[:at][-4:] for at in prepared.hints.breakpoints] == ["One."]


def test_a_template_that_reads_no_content_has_no_breakpoints():
    assert ChatTemplate("x").conversation([user(part("One.", **EPHEMERAL))]).hints.breakpoints == ()


# end to end

LONG = words(500, seed=1)


def ask(server: Any, *parts: Any) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were read."""
    body = {"messages": [user(*parts)], "max_tokens": 1, "temperature": 0}
    timings = server.ask("/v1/chat/completions", body)["timings"]
    return timings["cache_n"] + timings["prompt_n"], timings["prompt_n"]


@pytest.mark.parametrize("marked", [True, False])
def test_what_lies_before_a_breakpoint_inside_a_message_is_not_read_again(marked):
    mark = EPHEMERAL if marked else {}
    with serving("--checkpoint-every", "0") as server:
        ask(server, part(LONG, **mark), part(words(120, seed=2)))
        n_after = server.n_tokens(words(120, seed=3))
        _, n_read = ask(server, part(LONG), part(words(120, seed=3)))
        if marked:
            assert n_read <= n_after + GUARD + 8  # and what asks for the reply
        else:
            assert n_read > n_after + GUARD + 8  # without it the whole message is read again
