"""The clients of OpenAI, Anthropic and Ollama, with the real packages: every call that this server answers, and a clear
refusal for every other."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from pydantic import BaseModel

from support.bert import write_bert
from support.models import EMBEDDED
from support.server import Server, serving_models

MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]
SCHEMA: Any = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}]


class Answer(BaseModel):
    yes: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(EMBEDDED, folder / "tiny.gguf")
    write_bert(folder / "bert.gguf")
    with serving_models(folder, "--models-max", "2") as server:
        yield server


def refusal(kind: type[Exception], call: Callable[[], Any]) -> Any:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def test_openais_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        walk_openai(client)


def walk_openai(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=40)
    assert whole.choices[0].finish_reason == "stop" and whole.system_fingerprint
    *_, last = client.chat.completions.create(
        **asked, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage and last.usage.completion_tokens == 4
    with client.chat.completions.stream(**asked, max_tokens=40) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole.choices[0].message.content
    parsed = client.chat.completions.parse(**asked, max_tokens=60, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    called = client.chat.completions.create(**asked, max_tokens=90, tools=TOOLS, tool_choice="required")
    assert called.choices[0].finish_reason in ("tool_calls", "length")
    two = client.chat.completions.create(**asked, max_tokens=2, n=2, logprobs=True, top_logprobs=2)
    assert len(two.choices) == 2 and two.choices[1].logprobs
    assert client.chat.completions.with_raw_response.create(**asked, max_tokens=1).headers["x-request-id"]
    texts = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2, logprobs=1, echo=True)
    assert [choice.text[0] for choice in texts.choices] == ["a", "b"]
    assert list(client.completions.create(model="tiny", prompt="a", max_tokens=2, stream=True))
    assert len(client.embeddings.create(model="bert", input=["a river"]).data[0].embedding) == 32
    assert {model.id for model in client.models.list()} == {"tiny", "bert"}
    assert client.models.retrieve("tiny").id == "tiny"
    assert "501" in str(refusal(openai.InternalServerError, lambda: client.models.delete("tiny")))
    for path in ("/conversations", "/files", "/moderations"):
        error = refusal(openai.NotFoundError, lambda path=path: client.get(path, cast_to=object))
        assert "no route" in str(error)


def test_openais_client_of_stored_chats(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        walk_stored_chats(client)


def walk_stored_chats(client: openai.OpenAI) -> None:
    chats = client.chat.completions
    asked: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    not_kept = chats.create(**asked)
    first = chats.create(**asked, store=True, metadata={"of": "a test", "no": "1"})
    *_, last = chats.create(**asked, store=True, metadata={"of": "a test", "no": "2"}, stream=True)
    with chats.stream(**asked, store=True) as stream:
        streamed = stream.get_final_completion()
    assert chats.retrieve(first.id).choices[0].message.content == first.choices[0].message.content
    assert chats.retrieve(last.id).choices == chats.retrieve(first.id).choices
    assert [kept.id for kept in chats.list()] == [first.id, last.id, streamed.id]
    assert next(iter(chats.list(limit=1, order="desc"))).id == streamed.id
    assert [kept.id for kept in chats.list(metadata={"no": "2"})] == [last.id]
    assert [message.content for message in chats.messages.list(first.id)] == ["Who are you?"]
    assert chats.update(first.id, metadata={"no": "3"}).metadata == {"no": "3"}
    assert chats.retrieve(first.id).metadata == {"no": "3"}
    assert chats.delete(first.id).deleted
    others = client.with_options(default_query={"cache_salt": "another"})
    for gone in (first.id, not_kept.id, "resp_1"):
        refusal(openai.NotFoundError, lambda gone=gone: chats.retrieve(gone))
    refusal(openai.NotFoundError, lambda: others.chat.completions.retrieve(last.id))
    refusal(openai.NotFoundError, lambda: client.responses.retrieve(last.id))
    refusal(
        openai.NotFoundError, lambda: client.responses.create(model="tiny", input="a", previous_response_id=last.id)
    )


def test_openais_client_of_responses(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        walk_responses(client)


def walk_responses(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Who are you?", "temperature": 0, "max_output_tokens": 60}
    first = client.responses.create(**asked)
    assert first.status == "completed" and first.output_text
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == first.output_text
    assert isinstance(client.responses.parse(**asked, text_format=Answer).output_parsed, Answer)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    more = client.responses.create(**asked | {"input": "And now?"}, previous_response_id=first.id)
    assert more.previous_response_id == first.id
    assert [item.type for item in client.responses.input_items.list(first.id)] == ["message"]
    assert client.responses.input_tokens.count(model="tiny", input="Who are you?").input_tokens > 3
    assert client.responses.compact(model="tiny", input="Who are you?").output
    assert "is over" in str(refusal(openai.BadRequestError, lambda: client.responses.cancel(first.id)))
    client.responses.delete(first.id)
    refusal(openai.NotFoundError, lambda: client.responses.retrieve(first.id))
    assert client.responses.create(**asked, background=True).status == "queued"


def test_anthropics_client(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        walk_anthropic(client)


def walk_anthropic(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked, max_tokens=40)
    assert whole.stop_reason == "end_turn" and whole.content[0].type == "text"
    with client.messages.stream(**asked, max_tokens=40) as stream:
        assert stream.get_final_text() == whole.content[0].text
    assert [event.type for event in client.messages.create(**asked, max_tokens=4, stream=True)][-1] == "message_stop"
    assert client.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens > 3
    assert isinstance(client.messages.parse(**asked, max_tokens=60, output_format=Answer).parsed_output, Answer)
    tools: Any = [{"name": "look", "input_schema": SCHEMA}]
    assert client.messages.create(**asked, max_tokens=90, tools=tools, tool_choice={"type": "any"}).content
    thinks: Any = {"type": "enabled", "budget_tokens": 1024}
    thought, *_ = client.messages.create(**asked, max_tokens=2000, thinking=thinks).content
    assert thought.type == "thinking" and thought.thinking
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert client.messages.create(**asked, max_tokens=2, system=system).usage.output_tokens == 2
    assert {model.id for model in client.models.list()} == {"tiny", "bert"}
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.beta.messages.create(**asked, max_tokens=2).usage.output_tokens == 2
    assert client.beta.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens > 3
    assert {model.id for model in client.beta.models.list()} == {"tiny", "bert"}
    assert client.beta.messages.tool_runner(**asked, max_tokens=40, tools=[look]).until_done().stop_reason
    assert "batches" in str(refusal(anthropic.NotFoundError, client.messages.batches.list))


@anthropic.beta_tool
def look(at: str) -> str:
    """Look at something."""
    return f"{at}: a stone"


def test_ollamas_client(server: Server) -> None:
    with ollama.Client(host=server.url) as client:
        walk_ollama(client)


def walk_ollama(client: ollama.Client) -> None:
    asked: Any = {"options": {"temperature": 0, "num_predict": 40}}
    whole = client.chat("tiny", messages=MESSAGES, **asked)
    assert whole.done_reason == "stop" and whole.message.content
    pieces = [part.message.content or "" for part in client.chat("tiny", messages=MESSAGES, stream=True, **asked)]
    assert "".join(pieces) == whole.message.content
    assert client.chat("tiny", messages=MESSAGES, think=True, **asked).message.thinking
    form: Any = Answer.model_json_schema()
    assert Answer.model_validate_json(
        client.chat("tiny", messages=MESSAGES, format=form, **asked).message.content or ""
    )
    assert client.chat("tiny", messages=MESSAGES, tools=TOOLS, **asked).done
    reported = client.generate("tiny", "Who are you?", think=False, **asked)
    assert reported.response and list(client.generate("tiny", "Who are you?", stream=True, **asked))
    assert client.generate("tiny", "Who", raw=True, **asked).eval_count
    assert client.generate("tiny", "And now?", context=reported.context, **asked).done
    assert len(client.embed("bert", ["a river", "a stone"]).embeddings) == 2
    assert len(client.embeddings("bert", "a river").embedding) == 32
    assert {model.model for model in client.list().models} == {"tiny:latest", "bert:latest"}
    assert client.show("tiny").modelinfo and client.ps().models
    walk_derived_models(client)
    changes: list[Callable[[], Any]] = [  # pull and delete: where the server allows them; see test_pull
        lambda: client.pull("nothing"),
        lambda: client.push("a/b"),
        lambda: client.create("new", from_="tiny", files={"a.gguf": "sha256:0"}),
        lambda: client.create_blob(EMBEDDED),
        lambda: client.delete("tiny"),
    ]
    for change in changes:
        assert refusal(ollama.ResponseError, change).status_code == 501
    assert "uploads none" in refusal(ollama.ResponseError, lambda: client.push("a/b")).error


def walk_derived_models(client: ollama.Client) -> None:
    made = client.create(
        "pirate", from_="tiny", system="You are a pirate.", parameters={"temperature": 0, "num_predict": 9}
    )
    assert made.status == "success"
    client.copy("pirate", "second")
    assert {model.model for model in client.list().models} >= {"pirate:latest", "second:latest"}
    shown = client.show("second")
    assert "You are a pirate." in (shown.modelfile or "") and "num_predict 9" in (shown.parameters or "")
    reported = client.chat("second", messages=MESSAGES)
    system: Any = [{"role": "system", "content": "You are a pirate."}, *MESSAGES]
    same = client.chat("tiny", messages=system, options={"temperature": 0, "num_predict": 9})
    assert reported.message.content == same.message.content and reported.model == "second"
    assert reported.prompt_eval_count == same.prompt_eval_count and reported.eval_count == same.eval_count
    assert client.chat("second", messages=system).prompt_eval_count == same.prompt_eval_count  # its own counts
    told = client.generate("pirate", "Who are you?", options={"num_predict": 2})
    assert told.eval_count == 2
    assert refusal(ollama.ResponseError, lambda: client.create("tiny", from_="tiny")).status_code == 400
    assert refusal(ollama.ResponseError, lambda: client.copy("nothing", "a")).status_code == 404
    bad: Any = {"temperature": "hot"}
    assert refusal(ollama.ResponseError, lambda: client.create("bad", from_="tiny", parameters=bad)).status_code == 400
    for name in ("pirate", "second"):
        assert client.delete(name).status == "success"
    assert {model.model for model in client.list().models} == {"tiny:latest", "bert:latest"}
