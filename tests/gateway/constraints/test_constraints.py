"""Replies that are forced to a form: answers in JSON, grammars, and calls of tools in every notation, by real clients."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from everwarm.demo import EMBEDDED_MODEL
from everwarm.errors import BadRequest
from everwarm.gateway.constraints.reply_constraint import chat_constraint
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.parsing.output_parser import ModelSyntax, OutputParser
from everwarm.gateway.parsing.tool_parser import kinds_of
from support.campaign import CAMPAIGN
from support.constraint_cases import SCHEMA, SCHEMAS, TOOLS, WEATHER, WORDS_OF, obeys
from support.openai_client import openai_client
from support.server import Server, serving, serving_models

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
N_SEEDS, N_CHOICES = (32, 16) if CAMPAIGN else (8, 8)

TEMPLATE = (
    "{#- %s -#}{%% for m in messages %%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%% endfor %%}"
    "<|im_start|>assistant\n"
)


def test_the_validator_sees_what_is_wrong() -> None:
    good = {"city": "Paris", "unit": "C", "hourly": True, "near": ["Rome"]}
    assert obeys(WEATHER, good)
    wrong = ({"unit": "K"}, {"days": 10}, {"days": True}, {"near": [1]}, {"city": "x" * 21}, {"new": 1}, {"hourly": 1})
    assert not any(obeys(WEATHER, good | more) for more in wrong)
    assert not obeys(WEATHER, {"city": "Paris", "unit": "C"})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(n_ctx=8192) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai_client(server) as made:
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    output = {"model": "everwarm-tiny", "messages": ASK, "max_tokens": 300, "temperature": 0}
    return client.chat.completions.create(**(output | more))


def by_schema(schema: Any, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


# answers


def test_answers_obey_the_schema_whatever_the_seed(client: openai.OpenAI) -> None:
    reply = ask(client, response_format=by_schema(SCHEMA), temperature=1.0, seed=1, n=16, extra_body=NO_THINKING)
    finished = [json.loads(choice.message.content) for choice in reply.choices if choice.finish_reason == "stop"]
    assert len(finished) >= 12 and all(obeys(SCHEMA, answer) for answer in finished)
    assert len({json.dumps(answer) for answer in finished}) > 1, "the seeds should differ"


def test_a_free_answer_obeys_nothing(client: openai.OpenAI) -> None:
    with pytest.raises(ValueError):
        json.loads(ask(client).choices[0].message.content)


def test_thinking_stays_free_and_the_answer_is_the_same_streamed(client: openai.OpenAI) -> None:
    whole = ask(client, response_format=by_schema(SCHEMA)).choices[0]
    assert whole.finish_reason == "stop" and obeys(SCHEMA, json.loads(whole.message.content))
    free = ask(client).choices[0]
    assert whole.message.reasoning_content == free.message.reasoning_content != ""
    chunks = [c.choices[0] for c in ask(client, response_format=by_schema(SCHEMA), stream=True) if c.choices]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == "stop"


def test_a_reply_that_is_cut_says_so(client: openai.OpenAI) -> None:
    cut = ask(client, response_format=by_schema(SCHEMA), max_tokens=8, extra_body=NO_THINKING).choices[0]
    assert cut.finish_reason == "length" and cut.message.content.startswith("{")


def test_every_way_to_ask_for_json(client: openai.OpenAI, server: Server) -> None:
    short = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    ways: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object", "schema": short}},
        {"response_format": {"type": "json_schema", "schema": short}},
        {"json_schema": short},
        {"grammar": 'root ::= "{" ws "\\"a\\":" ws [0-9] "}"\nws ::= " "?'},
        {"grammar": 'start: "{\\"a\\": " /[0-9]/ "}"'},
    ]
    for way in ways:
        chat = {"messages": ASK, "max_tokens": 40, "temperature": 0, **NO_THINKING, **way}
        answer = server.ask("/v1/chat/completions", chat)["choices"][0]
        assert obeys(short, json.loads(answer["message"]["content"])), way
        plain = {"prompt": "Hello", "max_tokens": 40, "temperature": 0, **way}
        assert obeys(short, json.loads(server.ask("/v1/completions", plain)["choices"][0]["text"])), way
        assert obeys(short, json.loads(server.ask("/completion", plain)["content"])), way
    free = ask(client, response_format={"type": "text"}).choices[0].message.content
    assert free == ask(client).choices[0].message.content


def test_the_same_seed_gives_the_same_and_the_cache_does_not_mind(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Where is the old lamp? " * 20}]
    alone = {"deterministic": True, **NO_THINKING}
    options: dict[str, Any] = {"temperature": 1.0, "seed": 7, "messages": messages, "extra_body": alone}
    ask(client, **options)
    free = ask(client, **options)
    forced = [ask(client, response_format=by_schema(SCHEMA), **options) for _ in range(2)]
    assert forced[0].choices[0].message.content == forced[1].choices[0].message.content
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in (free, *forced)]
    assert cached[0] == cached[1] == cached[2] > 100
    other = ask(client, response_format=by_schema(SCHEMA), **(options | {"seed": 8}))
    assert other.choices[0].message.content != forced[0].choices[0].message.content


def test_probabilities_are_those_of_the_model(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 1, "extra_body": NO_THINKING}
    free = ask(client, **options).choices[0].logprobs.content[0]
    forced = ask(client, response_format=by_schema(SCHEMA), **options).choices[0].logprobs.content[0]
    shown = [[(one.token, round(one.logprob, 2)) for one in each.top_logprobs] for each in (free, forced)]
    assert shown[0] == shown[1]
    assert forced.token.startswith("{") and forced.logprob < free.logprob


# calls


@pytest.fixture(scope="module")
def notations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("notations")
    tables = []
    for name, words in WORDS_OF.items():
        (folder / f"{name}.jinja").write_text(TEMPLATE % words)
        tables.append(f'[models.{name}]\npath = "{EMBEDDED_MODEL}"\ntemplate = "{name}.jinja"\n')
    file = Path(folder / "models.toml")
    file.write_text("\n".join(tables))
    with serving_models(file, n_ctx=8192) as started:
        yield started


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


@pytest.mark.parametrize("notation", WORDS_OF)
def test_forced_calls_obey_their_schemas_in_every_notation(notations: Server, notation: str) -> None:
    with openai.OpenAI(base_url=f"{notations.url}/v1", api_key="none") as client:
        forced: dict[str, Any] = {"model": notation, "tools": TOOLS, "tool_choice": "required", "max_tokens": 120}
        replies = [ask(client, **forced)]
        replies += [
            ask(client, **forced, temperature=1.0, seed=seed, n=N_CHOICES) for seed in range(0, N_SEEDS, N_CHOICES)
        ]
        one = ask(client, **forced, temperature=1.0, seed=5, n=4, parallel_tool_calls=False)
        named = {"type": "function", "function": {"name": "note"}}
        note = ask(client, **(forced | {"tool_choice": named}), parallel_tool_calls=False)
    choices = [choice for reply in (*replies, one) for choice in reply.choices]
    finished = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert len(finished) >= 3 * len(choices) // 4
    for choice in finished:
        for name, arguments in calls_of(choice):
            assert obeys(SCHEMAS[name], arguments), (name, arguments)
    assert all(len(choice.message.tool_calls) == 1 for choice in one.choices if choice.message.tool_calls)
    assert [name for name, _ in calls_of(note.choices[0])] == ["note"]
    assert len({str(calls_of(choice)) for choice in finished}) > 5, "the seeds should differ"


def test_calls_are_forced_after_thinking_and_stream(client: openai.OpenAI) -> None:
    prompt = ask(client, tools=TOOLS).usage.prompt_tokens
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(client, **options)
    assert whole.usage.prompt_tokens == prompt, "tool_choice must not change the prompt"
    (call,) = calls_of(whole.choices[0])
    assert obeys(SCHEMAS[call[0]], call[1]) and whole.choices[0].message.reasoning_content
    deltas = [c.choices[0].delta for c in ask(client, stream=True, **options) if c.choices]
    pieces = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == call[1]


def test_a_schema_and_tools_together_leave_the_choice(client: openai.OpenAI) -> None:
    called = ask(client, tools=TOOLS, response_format=by_schema(SCHEMA)).choices[0]
    assert called.finish_reason == "tool_calls"
    options: dict[str, Any] = {"tools": TOOLS, "response_format": by_schema(SCHEMA), "tool_choice": "none"}
    answered = ask(client, **options).choices[0]
    assert obeys(SCHEMA, json.loads(answered.message.content)) and not answered.message.tool_calls


def test_only_the_first_call_is_said_where_one_is_wanted() -> None:
    reply = '<tool_call>\n{"name": "now"}\n</tool_call>\n<tool_call>\n{"name": "note"}\n</tool_call> Done.'
    for one_call, n_calls in ((True, 1), (False, 2)):
        reader = OutputParser.of(ModelSyntax("<tool_call>"), "", kinds_of(TOOLS), with_thinking=True, one_call=one_call)
        message = reader.message(reply)
        assert len(message["tool_calls"]) == n_calls and ("Done." in (message["content"] or "")) is not one_call


# what is refused


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}, "tools": TOOLS}, "get_weather, note, now"),
        ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, "allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": TOOLS}, "list of tools"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "no spaces"}}]}, "no spaces"),
        ({"tool_choice": "required", "tools": TOOLS, "grammar": 'root ::= "a"'}, "give one of them"),
        ({"response_format": {"type": "yaml"}}, "json_object"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": 7}}, "is an object"),
        ({"response_format": {"type": "json_object", "schema": False}}, "no reply at all"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "grammar and response_format"),
        ({"grammar": "digits"}, "GBNF"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_words(body: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        chat_constraint(ChatBody(messages=ASK, **body), ModelSyntax("<tool_call>"), "")


def test_a_template_without_calls_cannot_be_forced_to_one() -> None:
    with pytest.raises(BadRequest, match="no known tool call format"):
        chat_constraint(ChatBody(messages=ASK, tools=TOOLS, tool_choice="required"), ModelSyntax("{{ messages }}"), "")


def nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "wrong type": {"json_schema": {"type": "nope"}},
    "unknown word": {"response_format": by_schema({"type": "array", "uniqueItems": True})},
    "deep": {"json_schema": nested(300)},
    "refers to itself": {"json_schema": {"$ref": "#"}},
    "refers in a ring": {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "a long chain": {
        "json_schema": {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(9000)},
        }
    },
    "patterns together": {
        "json_schema": {"type": "string", "allOf": [{"pattern": f".*{'ab'[i % 2] * i}.*"} for i in range(100)]}
    },
    "multiples": {"json_schema": {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 101, 103, 107, 109)]}},
    "over a mebibyte": {"json_schema": {"enum": ["x" * (1 << 20)]}},
    "rules in a chain": {
        "grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20000)) + '\nr20000: "a"'
    },
    "brackets": {"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "no such rule": {"grammar": "root ::= nope"},
    "no such token": {"grammar": "start: <nope>"},
}
HEAVY: dict[str, dict[str, Any]] = {
    "many values": {"json_schema": {"enum": [f"value number {i}" for i in range(30_000)]}},
    "much to match": {"json_schema": {"type": "string", "pattern": "(a|b)*a(a|b){2000}"}},
    "many items": {"json_schema": {"type": "array", "minItems": 10**9}},
}


@pytest.mark.parametrize("name", [*HOSTILE, *HEAVY])
def test_hostile_forms_are_refused_or_work_and_harm_nobody(server: Server, name: str) -> None:
    engine = server.engine_pid
    body = {"messages": ASK, "max_tokens": 12, **NO_THINKING}
    server.ask("/v1/chat/completions", body)
    began = time.monotonic()
    reply = server.post("/v1/chat/completions", body | (HOSTILE | HEAVY)[name])
    took_s = time.monotonic() - began
    assert reply.status == (400 if name in HOSTILE else 200), reply.data[:400]
    assert took_s < 20.0, "a guard against hanging, not a measurement"
    if name in HOSTILE:
        assert len(reply.json["error"]["message"]) > 20
    assert server.engine_pid == engine
    assert server.post("/v1/chat/completions", body).status == 200
