"""What real clients do that no specification says, against a real server with the embedded model."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import anthropic
import ollama
import pytest

from everwarm.demo.tiny import TinySpec, write_tiny
from everwarm.gateway.anthropic.schema import client_function
from support.loops import FUNCTION
from support.server import Server, serving, words

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


# Anthropic


def test_the_tool_runner_sends_the_whole_conversation_again(server):
    """It sends only what is new with ``thread``, unless it is told that this is not supported."""
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        asked.append(city)
        return "sunny"

    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="any",
            max_tokens=100,
            tools=[get_weather],
            messages=[{"role": "user", "content": "What is the weather in Rome?"}],
            extra_body={"temperature": 0},
        )
        answer = runner.until_done()
    assert asked == ["Rome"] and "sunny" in answer.content[-1].text
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "thread": {"type": "continue"}}
    reply = server.post("/v1/messages", body)
    assert reply.status == 400
    assert reply.json["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert server.post("/v1/messages", body | {"thread": None}).status == 200


@pytest.mark.parametrize(
    ("tool", "fields"),
    [
        ({"type": "bash_20250124", "name": "bash"}, ("command", "restart")),
        ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}, ("old_str", "insert_line")),
        ({"type": "memory_20250818", "name": "memory"}, ("file_text", "new_path")),
    ],
)
def test_typed_tools_of_the_client_are_offered(server, tool, fields):
    body = {"messages": [{"role": "user", "content": "Hi"}], "model": "any", "tools": [tool]}
    plain = server.ask("/v1/messages/count_tokens", body | {"tools": []})["input_tokens"]
    assert server.ask("/v1/messages/count_tokens", body)["input_tokens"] > plain + 20
    function = client_function(tool["type"], tool["name"])
    assert function is not None and set(fields) <= function["parameters"]["properties"].keys()
    unknown = server.post("/v1/messages/count_tokens", body | {"tools": [{"type": "computer_20250124", "name": "c"}]})
    assert unknown.status == 400


# OpenAI


def test_the_role_comes_with_the_first_token(server):
    body = {"messages": [{"role": "user", "content": f"{words(300, 1)} Hi!"}], "stream": True, "max_tokens": 4, **QUIET}
    events = server.post("/v1/chat/completions", body | {"return_progress": True}).events
    kinds = ["progress" if "prompt_progress" in event else "chunk" for event in events]
    n_progress = kinds.index("chunk")
    assert n_progress and "progress" not in kinds[n_progress:], "the prompt was read before the first chunk"
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": None} and deltas[1].get("content")
    assert sum("role" in delta for delta in deltas) == 1
    silent = server.post("/v1/chat/completions", body | {"max_tokens": 0}).events
    assert silent[0]["choices"][0]["delta"]["role"] == "assistant"


def test_several_prompts_are_several_choices(client, server):
    prompts = ["One two three", f"Four five {words(40, 2)}"]
    together = client.completions.create(model="any", prompt=prompts, max_tokens=6, temperature=0, n=2, echo=True)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    for i, prompt in enumerate(prompts):
        alone = client.completions.create(model="any", prompt=prompt, max_tokens=6, temperature=0)
        texts = {choice.text for choice in together.choices[2 * i : 2 * i + 2]}
        assert texts == {prompt + alone.choices[0].text}
    n_prompt = sum(server.n_tokens(prompt) for prompt in prompts)
    assert together.usage.prompt_tokens == n_prompt and 4 <= together.usage.completion_tokens <= 24
    streamed: dict[int, str] = {}
    for chunk in client.completions.create(model="any", prompt=prompts, max_tokens=6, temperature=0, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [prompt + streamed[i] for i, prompt in enumerate(prompts)] == [together.choices[2 * i].text for i in (0, 1)]
    tokens = [server.ask("/tokenize", {"content": prompt})["tokens"] for prompt in prompts]
    of_tokens = client.completions.create(model="any", prompt=tokens, max_tokens=6, temperature=0)
    assert [choice.text for choice in of_tokens.choices] == [streamed[0], streamed[1]]


@pytest.mark.parametrize("prompt", [["a"] * 200, ["a", 5], ["a", ["b"]], [["a"]]])
def test_prompts_that_cannot_be_used_are_refused(server, prompt):
    assert server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).status == 400


def test_input_tokens_are_counted(client):
    tool = {"type": "function", **FUNCTION["function"]}
    given: Any = {"input": "What is the weather in Rome?", "instructions": "Be brief.", "tools": [tool]}
    counted = client.responses.input_tokens.count(model="any", **given)
    answer = client.responses.create(model="any", max_output_tokens=16, **given)
    assert counted.object == "response.input_tokens" and counted.input_tokens == answer.usage.input_tokens > 20


def test_a_conversation_is_compacted_and_continued(client, server):
    items: list[Any] = [
        {"role": "user", "content": f"My code is 4711. {words(100, 4)}"},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "Is it 4711?"},
    ]
    client.responses.create(model="any", input=items, max_output_tokens=8, reasoning={"effort": "none"})
    found = client.responses.compact(model="any", input=items, extra_body={"reasoning": {"effort": "none"}})
    *kept, compaction = found.output
    assert [item.type for item in kept] == ["message", "message"] and compaction.type == "compaction"
    assert found.usage.input_tokens_details.cached_tokens > 150, "the conversation is not read again"
    output = [item.model_dump(exclude_none=True, warnings=False) for item in found.output]
    more = [*output, {"role": "user", "content": "And now?"}]
    answer = client.responses.create(model="any", input=more, max_output_tokens=8)
    assert answer.status in ("completed", "incomplete")
    foreign = {"type": "compaction", "encrypted_content": "AAAA"}
    assert server.post("/v1/responses", {"input": [foreign], "max_output_tokens": 1}).status == 400


# Ollama


def test_a_body_without_a_type_is_taken_unless_a_page_sent_it(server):
    """As litellm's providers of Ollama send it."""
    body = json.dumps(
        {"model": "everwarm-tiny", "prompt": "Hi", "stream": False, "options": {"num_predict": 1}}
    ).encode()
    assert _raw_post(server, "/api/generate", body) == 200
    assert _raw_post(server, "/api/generate", body, "Origin", f"http://127.0.0.1:{server.port}") == 415
    assert _raw_post(server, "/api/generate", body, "Content-Type", "text/plain") == 415


def _raw_post(server: Server, path: str, body: bytes, *header: str) -> int:
    connection = server.connect()
    try:
        connection.putrequest("POST", path)
        if header:
            connection.putheader(*header)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        return connection.getresponse().status
    finally:
        connection.close()


def test_ollamas_logprobs(server):
    with contextlib.closing(ollama.Client(server.url)) as client:
        compare_logprobs(client)


def compare_logprobs(client: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 5}
    asked: Any = {"model": "everwarm-tiny", "messages": [{"role": "user", "content": "Hi"}], "think": False}
    whole = client.chat(**asked, options=options, logprobs=True, top_logprobs=2)
    assert len(whole.logprobs) == 5 and all(len(each.top_logprobs) == 2 for each in whole.logprobs)
    assert "".join(each.token for each in whole.logprobs).startswith(whole.message.content[:3])
    lines = list(client.chat(**asked, options=options, logprobs=True, stream=True))
    streamed = [each.logprob for line in lines for each in line.logprobs or ()]
    assert streamed == pytest.approx([each.logprob for each in whole.logprobs], abs=1e-3)
    assert client.chat(**asked, options=options).logprobs is None
    raw = client.generate(model="everwarm-tiny", prompt="One two", raw=True, options=options, logprobs=True)
    assert len(raw.logprobs) == 5


def test_a_context_beyond_what_the_model_was_trained_on_is_announced_as_what_it_is(tmp_path):
    path = tmp_path / "short.gguf"
    write_tiny(path, TinySpec("qwen35", width=64, n_layers=4, context_length=1024))
    with serving(model=path, n_ctx=2048) as short:
        (row,) = short.get("/v1/models").json["data"]
        assert row["max_input_tokens"] == row["max_tokens"] == 1024
        assert "the model was trained on 1024 tokens" in short.log
