"""Templates in the style of model families, conversations as clients have them, by chance, and how they may go on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from everwarm.gateway.chat.chat_template import ChatTemplate

Message = dict[str, Any]

FOLDER = Path(__file__).parent / "templates"
SOURCES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
TEMPLATES = {name: ChatTemplate(source, bos="<s>") for name, source in SOURCES.items()}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name in ("look", "count")
]

texts = st.one_of(
    st.sampled_from(
        ["", " ", "\n", "Yes.", " two  spaces ", "line\nline\n\n", "naïve 🦉 見る", '{"a": "<b>"}', "x" * 40]
    ),
    st.text(alphabet="ab \n\t.é漢<>\"'\\{}", max_size=30),
)
spoken = texts.map(lambda text: f"q{text}")  # a question is never empty
thoughts = st.none() | texts


@st.composite
def calls(draw: st.DrawFn) -> list[Message]:
    found = []
    for i in range(draw(st.integers(1, 2))):
        arguments = draw(st.dictionaries(st.sampled_from(["key", "n", "é"]), texts | st.integers(0, 9), max_size=2))
        function = {"name": draw(st.sampled_from(["look", "count"])), "arguments": json.dumps(arguments)}
        found.append({"id": f"call{i:05}", "type": "function", "function": function})
    return found


@st.composite
def replies(draw: st.DrawFn) -> Message:
    """As the server gives them."""
    thought = draw(thoughts)
    return {"role": "assistant", "content": draw(texts)} | ({"reasoning_content": thought} if thought else {})


@st.composite
def calling(draw: st.DrawFn) -> Message:
    reply = draw(replies()) | {"tool_calls": draw(calls())}
    return reply | ({} if reply["content"] else {"content": draw(st.sampled_from(["", None]))})


def results(reply: Message, message: Sequence[str]) -> list[Message]:
    answered = zip(reply["tool_calls"], message, strict=False)
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in answered]


@st.composite
def steps(draw: st.DrawFn) -> list[Message]:
    reply = draw(calling())
    return [reply, *results(reply, draw(st.lists(texts, min_size=2, max_size=2)))]


@dataclass(frozen=True)
class Talk:
    messages: list[Message]
    tools: list[Message] | None


@st.composite
def talks(draw: st.DrawFn, max_turns: int = 3) -> Talk:
    """One that waits for a reply: it ends with a question or with the results of a call."""
    tools = draw(st.none() | st.just(TOOLS))
    messages = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    n_turns = draw(st.integers(1, max_turns))
    for i in range(n_turns):
        messages.append({"role": "user", "content": draw(spoken)})
        for _ in range(draw(st.integers(0, 2)) if tools else 0):
            messages += draw(steps())
        if i < n_turns - 1:
            messages.append(draw(replies()))
    return Talk(messages, tools)


@st.composite
def nexts(draw: st.DrawFn, talk: Talk) -> list[list[Message]]:
    """How it may really go on, in every way that is likely: the words are anybody's guess."""
    reply = draw(replies())
    silent = {k: v for k, v in reply.items() if k != "reasoning_content"}
    user = {"role": "user", "content": draw(spoken)}
    found = [[reply, user], [silent, user]]
    if talk.tools:
        call = draw(calling())
        quiet = {k: v for k, v in call.items() if k != "reasoning_content"}
        answered = results(call, draw(st.lists(texts, min_size=2, max_size=2)))
        found += [[call, *answered], [quiet, *answered]]
    return [[*talk.messages, *after] for after in found]
