"""Which calls nobody waits for: as clients send them, as a header marks them, and what is not among them."""

import asyncio
from typing import Any

import pytest
from tests.support.gateway import FakeGateway

from everwarm.gateway.openai.schema import ChatBody, CompletionBody
from everwarm.gateway.serving.background import HEADER, background_kind


def chat(*texts: str, **more: Any) -> ChatBody:
    """Messages of a system and a user, or of a user alone."""
    roles = ("system", "user") if len(texts) == 2 else ("user",)
    return ChatBody(messages=[{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)], **more)


OPENCODE = "You are a title generator. You output ONLY a thread title. Nothing else.\n\n<task>\nGenerate a brief title"
TITLE = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n### Guidelines:\n…"
TAGS = "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history, along with 1-3 more"
NEXT = "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user might naturally ask next"
QUERIES = "### Task:\nAnalyze the chat history to determine the necessity of generating search queries, in the given"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("title", chat(OPENCODE, "Generate a title for this conversation:\nfix the tests")),
        ("title", chat(TITLE, max_tokens=1000)),
        ("tags", chat(TAGS)),
        ("follow-ups", chat(NEXT)),
        ("title", chat("Please write a 5-10 word title for the following conversation:\n\nfix the tests")),
        ("title", chat("Write the session a title in lower case.", "fix the tests", max_tokens=60)),
        ("summary", chat("Your task is to create a one-line summary.", "…", max_completion_tokens=100)),
        ("title", ChatBody(messages=[{"role": "user", "content": [{"type": "text", "text": TITLE}]}])),
        (None, chat("You are a coding agent.", "Generate a title for this conversation", max_tokens=60)),
        (None, chat("Write a title for my novel", max_tokens=60)),
        (None, chat("You write titles. Create a title.", "a novel")),
        (None, chat("Create a title.", "a novel", max_tokens=-1)),
        (None, chat(QUERIES)),
        (None, chat(OPENCODE, "a", tools=[{"type": "function", "function": {"name": "f"}}])),
        (None, chat(OPENCODE, "a", deterministic=True)),
        (None, ChatBody(messages=[{"role": "system", "content": OPENCODE}, *({"role": "user", "content": "a"},) * 9])),
        (None, ChatBody(messages=[{"role": "user", "content": None}])),
        (None, CompletionBody(prompt=OPENCODE)),
    ],
)
def test_calls_are_recognised_by_their_form(kind, body):
    assert background_kind({}, body) == kind


@pytest.mark.parametrize(("value", "kind"), [("1", "marked"), ("true", "marked"), ("0", None), ("false", None)])
def test_a_header_decides_alone(value, kind):
    for body in (chat(OPENCODE, "a"), chat("hello"), CompletionBody(prompt="hello")):
        assert background_kind({HEADER: value}, body) == kind


@pytest.mark.parametrize("is_background", [True, False])
def test_the_answer_says_so_and_the_engine_gets_a_priority(is_background):
    gateway = FakeGateway()
    body = {"messages": [{"role": "user", "content": TITLE if is_background else "hello"}]}
    answer = asyncio.run(gateway.post("/v1/chat/completions", body))
    cache = answer.json()["timings"]["cache"]
    assert cache.get("background") == ("title" if is_background else None)
    (submit,) = gateway.supervisor.submits
    assert submit.priority == int(is_background)
