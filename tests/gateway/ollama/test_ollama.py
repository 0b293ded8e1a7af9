"""Ollama's dialect, with its real client and the embedded model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everwarm.errors import BadRequest
from everwarm.gateway.ollama.models import capabilities, size_text
from everwarm.gateway.ollama.schema import OllamaChat, OllamaGenerate, OllamaMessage, messages_of
from everwarm.gateway.openai.schema import ChatBody, CompletionBody, read
from support.changed_gguf import write_changed
from support.fuzz import FUZZ, TEXT, Json, bodies
from support.image_files import data_url
from support.models import EMBEDDED, tiny_vision
from support.server import Server, serving, serving_models, until

NAME = "everwarm-tiny"
GREEDY = {"temperature": 0, "num_predict": 200}
SUM = [{"role": "user", "content": "What is 7 + 8?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--request-timeout", "60") as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as client:
        yield client


def chat(client: ollama.Client, messages: list[Any], *, stream: bool = False, **more: Any) -> ollama.ChatResponse:
    """The reply; of a stream, what its lines add up to."""
    asked = {"model": NAME, "messages": messages, "options": GREEDY, **more}
    if not stream:
        return client.chat(**asked)
    parts = list(client.chat(**asked, stream=True))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    whole = parts[-1]
    whole.message.content = "".join(part.message.content or "" for part in parts)
    whole.message.thinking = "".join(part.message.thinking or "" for part in parts) or None
    whole.message.tool_calls = [call for part in parts for call in part.message.tool_calls or ()] or None
    return whole


def refusal(call: Any, *args: Any, **named: Any) -> ollama.ResponseError:
    with pytest.raises(ollama.ResponseError) as caught:
        list(call(*args, **named))  # of a stream, until its end
    return caught.value


# replies


def test_a_reply_is_the_same_whole_and_in_lines(server, client):
    whole = chat(client, SUM)
    assert "15" in whole.message.content and "sum" in whole.message.thinking
    assert (whole.done, whole.done_reason, whole.model, whole.message.role) == (True, "stop", NAME, "assistant")
    assert whole.prompt_eval_count == server.n_tokens(server.rendered(SUM)) and whole.eval_count > 4
    spent = (whole.load_duration, whole.prompt_eval_duration, whole.eval_duration)
    assert all(ns >= 0 for ns in spent) and 0 < sum(spent) <= whole.total_duration < 60e9
    assert chat(client, SUM, stream=True).message == whole.message
    other = chat(client, [{"role": "user", "content": "What is 2 + 3?"}], stream=True)
    assert other.message != whole.message


def test_lines_come_as_ollama_sends_them_and_unless_told_otherwise(server):
    reply = server.post("/api/chat", {"model": NAME, "messages": SUM, "options": GREEDY})
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.data.splitlines()]
    assert len(lines) > 2 and all(line["created_at"].endswith("Z") and line["model"] == NAME for line in lines)
    assert lines[-1]["message"] == {"role": "assistant", "content": ""} and "done_reason" not in lines[0]


def test_thinking_can_be_left_out(client):
    without = chat(client, SUM, think=False)
    assert "15" in without.message.content and without.message.thinking is None
    assert chat(client, SUM, think="high").message.thinking


def test_a_reply_ends_where_it_is_told_to(client):
    cut = chat(client, SUM, options={"temperature": 0, "num_predict": 3})
    assert (cut.done_reason, cut.eval_count) == ("length", 3)
    output = chat(client, SUM, think=False).message.content
    stopped = chat(client, SUM, think=False, options={**GREEDY, "stop": [output[-3:]]})
    assert stopped.message.content == output[:-3] and stopped.done_reason == "stop"


def test_seeds_and_the_other_options_are_heeded(client):
    tale = [{"role": "user", "content": "Tell me a short story."}]
    options = {"temperature": 1.5, "top_k": 50, "top_p": 0.99, "min_p": 0.0, "num_predict": 24, "num_ctx": 1 << 20}
    options |= {"repeat_penalty": 1.1, "repeat_last_n": 32, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    a, b, c = (chat(client, tale, options={**options, "seed": seed}).message for seed in (7, 7, 8))
    texts = [f"{message.thinking or ''}{message.content}" for message in (a, b, c)]
    # beside what is read ahead last bits differ, so a late token may be another
    assert texts[0][:24] == texts[1][:24] and texts[2] not in texts[:2]


def test_generate_writes_with_the_template_and_without(server, client):
    asked: dict[str, Any] = {"model": NAME, "prompt": "What is 7 + 8?", "options": GREEDY}
    output = client.generate(**asked, system="You are a helpful assistant.", think=False)
    assert "15" in output.response and not output.thinking and output.context is None
    parts = list(client.generate(**asked, stream=True))
    assert "15" in "".join(part.response for part in parts) and any(part.thinking for part in parts)
    prompt = server.rendered(SUM, chat_template_kwargs={"enable_thinking": False})
    raw = client.generate(**asked | {"prompt": prompt}, raw=True)
    assert "15" in raw.response and raw.prompt_eval_count == server.n_tokens(prompt)
    raw_parts = list(client.generate(**asked | {"prompt": prompt}, raw=True, stream=True))
    assert "".join(part.response for part in raw_parts) == raw.response and raw_parts[-1].done_reason == "stop"


# tools


def test_calls_and_results_find_each_other_without_ids():
    calls = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("f", "g", "f")]
    results = [("g", "2"), (None, "1"), ("f", "3"), ("h", "?")]
    output = [{"role": "assistant", "tool_calls": calls}]
    output += [{"role": "tool", "content": content, "tool_name": name} for name, content in results]
    messages = messages_of(read(json.dumps({"messages": output}).encode(), OllamaChat).messages)
    (f1, g, f2) = messages[0]["tool_calls"]
    assert len({f1["id"], g["id"], f2["id"]}) == 3 and f1["function"]["arguments"] == '{"n": 1}'
    assert [m.get("tool_call_id") for m in messages[1:]] == [g["id"], f1["id"], f2["id"], None]
    assert [m["name"] for m in messages[1:]] == ["g", "f", "f", "h"]
    assert messages_of([OllamaMessage("user", "x")]) == [{"role": "user", "content": "x"}]


# models


def test_models_are_listed_with_their_tag_and_answer_to_it(server, client):
    (listed,) = client.list().models
    assert listed.model == f"{NAME}:latest" and listed.size > 7e6 and listed.modified_at is not None
    assert (listed.details.family, listed.details.parameter_size) == ("qwen35", "8.4M")
    assert listed.details.quantization_level == "Q8_0" and len(listed.digest) == 64
    assert client.chat(model=listed.model, messages=SUM, options=GREEDY).model == listed.model
    (loaded,) = client.ps().models
    assert loaded.model == listed.model and loaded.context_length == 4096
    assert server.get("/api/version").json["version"]


def test_a_model_says_what_it_can_do(client):
    shown = client.show(NAME)
    assert shown.capabilities == ["completion", "tools", "thinking"] and "<tool_call>" in shown.template
    assert shown.modelinfo["general.architecture"] == "qwen35" and shown.modelinfo["qwen35.context_length"] == 32768
    assert shown.modelinfo["general.parameter_count"] == 8_354_096 and shown.details.format == "gguf"
    assert capabilities("{{ messages }}", sees=True) == ["completion", "vision"]
    assert [size_text(n) for n in (12, 7_369_648, 3_000_000_000)] == ["12", "7.4M", "3B"]


def test_nothing_asked_is_an_order_to_load_or_unload(server, client):
    assert client.chat(model=NAME, messages=[]).done_reason == "load"
    assert client.generate(model=NAME, prompt="", keep_alive=0).done_reason == "unload"
    until(lambda: server.status_of(NAME) == "unloaded", "the model is asleep")
    assert client.ps().models == [] and client.list().models and client.show(NAME).template
    (only,) = client.generate(model=NAME, prompt="", stream=True)
    assert (only.done, only.done_reason, server.status_of(NAME)) == (True, "load", "loaded")
    assert "15" in chat(client, SUM, stream=True, keep_alive="0s").message.content
    until(lambda: server.status_of(NAME) == "unloaded", "the model is asleep")
    assert "15" in chat(client, SUM, keep_alive="5m").message.content and server.status_of(NAME) == "loaded"


# filling in the middle


def test_the_middle_is_filled_in_as_llama_server_would(tmp_path):
    above, line, below = "import os\n\n\ndef main(path: str) -> None:\n", "    print(", ")\n"
    asked = {"model": "fills-in", "prompt": above + line, "options": {"temperature": 0, "num_predict": 8}}
    model = write_changed(tmp_path / "fills-in.gguf", EMBEDDED, fills_in=True)
    with serving(model=model) as server, ollama.Client(server.url) as client:
        body = {"input_prefix": above, "prompt": line, "input_suffix": below, "n_predict": 8, "temperature": 0}
        wanted = server.ask("/infill", body)
        whole = client.generate(**asked, suffix=below)
        assert whole.response == wanted["content"] and whole.prompt_eval_count == wanted["tokens_evaluated"]
        parts = list(client.generate(**asked, suffix=below, stream=True))
        assert "".join(part.response for part in parts) == whole.response and parts[-1].done_reason == "length"
        first = client.generate(**{**asked, "prompt": ""}, suffix=below)
        assert first.done_reason == "length", "a cursor at the beginning of a file is no question for the model alone"
        assert client.generate(**asked).prompt_eval_count != whole.prompt_eval_count, "without it, a chat"
        for wrong in ({"system": "Be brief."}, {"format": "json"}, {"context": [1]}):
            error = refusal(client.generate, **asked, suffix=below, **wrong)
            assert error.status_code == 400 and next(iter(wrong)) in error.error


# refusals


def test_errors_come_in_ollamas_shape(server, client):
    image = base64.b64encode(b"\x89PNG").decode()
    seen = [{"role": "user", "content": "What is this?", "images": [image]}]
    for stream in (False, True):
        error = refusal(client.chat, NAME, seen, stream=stream)
        assert error.status_code == 400 and "reads text only" in error.error
    asked = {"model": NAME, "prompt": "a"}
    for wrong in ({"suffix": "b"}, {"context": [1, 2]}, {"template": "{{ .Prompt }}"}):
        error = refusal(client.generate, **asked, **wrong)
        assert error.status_code == 400 and next(iter(wrong)) in error.error
    assert "top_p" in refusal(client.generate, **asked, options={"top_p": 7}).error
    for option, value in (("seed", "seven"), ("num_predict", 1.5), ("stop", 3)):
        body = {"model": NAME, "prompt": "a", "options": {option: value}}
        assert (server.post("/api/generate", body).status, option) == (400, option)
    assert "keep_alive" in refusal(client.generate, **asked, keep_alive="soon").error
    assert "holds 4096" in refusal(client.generate, NAME, "a 1 " * 4096, stream=True).error
    assert refusal(client.embed, NAME, "text").status_code == 501
    assert refusal(client.pull, NAME).status_code == 501 and refusal(client.delete, NAME).status_code == 501
    assert server.get("/api/nothing").json == {"error": "this server has no route /api/nothing"}
    assert isinstance(server.post("/api/chat", b"{").json["error"], str)
    assert isinstance(server.call("POST", "/api/chat", {}, Content_Type="text/plain").json["error"], str)
    assert isinstance(server.get("/v1/nothing").json["error"], dict)


def test_a_model_that_sees_is_shown_images_and_the_others_are_found_by_name(tmp_path):
    model, mmproj = tiny_vision("qwen35")
    for name, file in (("seeing.gguf", model), ("mmproj-seeing.gguf", mmproj), ("blind.gguf", EMBEDDED)):
        (tmp_path / name).symlink_to(file)
    image = data_url(1).partition(",")[2]
    asked = {"prompt": "What is this?", "options": {"temperature": 0, "num_predict": 4}}
    with serving_models(tmp_path) as server, ollama.Client(server.url) as client:
        assert {listed.model for listed in client.list().models} == {"seeing:latest", "blind:latest"}
        assert client.ps().models == []
        assert (
            "vision" in client.show("seeing").capabilities and "vision" not in client.show("blind:latest").capabilities
        )
        n_seen = client.generate("seeing:latest", images=[image], **asked).prompt_eval_count
        assert n_seen > client.generate("seeing", **asked).prompt_eval_count + 10
        assert "reads text only" in refusal(client.generate, "blind", images=[image], **asked).error
        error = refusal(client.generate, "nobody", **asked, stream=True)
        assert error.status_code == 404 and "there is no model 'nobody'" in error.error


# bodies of every kind


@pytest.mark.parametrize("kind", [OllamaChat, OllamaGenerate])
def test_any_json_is_understood_or_refused(kind):
    @settings(FUZZ, max_examples=200)
    @given(body=bodies(kind) | Json | st.dictionaries(st.sampled_from(["messages", "options"]), Json))
    def fuzz(body: Any) -> None:
        try:
            output = read(json.dumps(body).encode(), kind)
            assert isinstance(output.unloads, bool) and isinstance(output.ignored, list)
            if not output.only_loads:
                assert isinstance(output.as_chat(), ChatBody)
            if kind is OllamaGenerate:
                assert isinstance(output.as_completion(), CompletionBody)
        except BadRequest as error:
            assert str(error)  # noqa: PT017 - either is fine, but nothing else

    fuzz()


@pytest.mark.parametrize(("path", "kind"), [("/api/chat", OllamaChat), ("/api/generate", OllamaGenerate)])
def test_no_body_is_an_accident(server, path, kind):
    @settings(FUZZ, max_examples=40)
    @given(body=bodies(kind), text=TEXT)
    def fuzz(body: Any, text: str) -> None:
        if isinstance(body, dict):
            body = body | {"model": NAME, "options": {"num_predict": 2}, "keep_alive": text or None}
        reply = server.post(path, body)
        assert reply.status in (200, 400), f"{reply.status} {reply.data!r}"
        assert reply.status == 200 or isinstance(reply.json["error"], str)

    fuzz()
