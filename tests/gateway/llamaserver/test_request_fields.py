"""What a request may ask of its reply in llama-server's dialect: probabilities, biases, limits of time and of thinking."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from support.server import Server, metric, serving

PROMPT = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MESSAGES = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--no-kv-unified", "--spec-draft-n-max", "1", n_ctx=1024) as server:
        yield server


def complete(server: Server, **more: Any) -> dict[str, Any]:
    return dict(server.ask("/completion", {"prompt": PROMPT, "temperature": 0, "n_predict": 8} | more))


def chat(server: Server, **more: Any) -> dict[str, Any]:
    return dict(server.ask("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 40} | more))


def test_probabilities_after_sampling_are_of_what_the_samplers_left(server):
    more = {"n_probs": 5, "post_sampling_probs": True, "seed": 3, "return_tokens": True}
    drawn = complete(server, temperature=1.5, top_k=4, top_p=1.0, min_p=0.0, **more)
    assert len(drawn["completion_probabilities"]) == len(drawn["tokens"]) > 0
    for token, prob in zip(drawn["tokens"], drawn["completion_probabilities"], strict=True):
        top = {each["id"]: each["prob"] for each in prob["top_probs"]}
        assert len(top) <= 4 and token in top and prob["id"] == token and prob["prob"] == top[token]
        assert math.isclose(sum(top.values()), 1.0, rel_tol=1e-6)
    plain = complete(server, temperature=1.5, top_k=4, top_p=1.0, min_p=0.0, seed=3, return_tokens=True)
    assert plain["tokens"] == drawn["tokens"], "asking for probabilities changes nothing"
    (first, *_) = complete(server, **more)["completion_probabilities"]
    assert first["prob"] == 1.0 and [each["id"] for each in first["top_probs"]] == [first["id"]]


@pytest.mark.parametrize("as_list", [True, False])
def test_a_text_can_be_biased(server, as_list):
    word = complete(server)["content"].split()[0]
    bias: Any = [[word, False]] if as_list else {word: -100}
    banned = server.ask("/tokenize", {"content": word})["tokens"]
    tokens = complete(server, logit_bias=bias, return_tokens=True)["tokens"]
    assert tokens and not set(banned) & set(tokens)


def test_the_texts_of_biases_are_bounded(server):
    for bias in ({"": 1}, {"a" * 600: 1}, {f"{i:0400}a": 1 for i in range(100)}, {"-5": 1}):
        assert server.post("/completion", {"prompt": "a", "logit_bias": bias}).status == 400


def test_time_ends_a_reply_at_a_new_line_and_not_before(server):
    lined = complete(server, n_predict=200, t_max_predict_ms=1, grammar='root ::= "ab\\n" [a-z]*', ignore_eos=True)
    assert lined["stop_type"] == "limit" and lined["has_new_line"] and lined["tokens_predicted"] < 200
    one_line = complete(server, n_predict=30, t_max_predict_ms=1, grammar="root ::= [a-z]*", ignore_eos=True)
    assert one_line["tokens_predicted"] == 30


# thinking


def thought_of(answer: dict[str, Any]) -> tuple[str, str]:
    message = answer["choices"][0]["message"]
    return message.get("reasoning_content", ""), message["content"]


@pytest.mark.parametrize("name", ["reasoning_budget_tokens", "thinking_budget_tokens"])
def test_a_budget_ends_the_thinking(server, name):
    free, _ = thought_of(chat(server, logit_bias={"</think>": False}, max_tokens=60, ignore_eos=True))
    thought, answered = thought_of(
        chat(server, **{name: 5}, logit_bias={"</think>": False}, max_tokens=60, ignore_eos=True)
    )
    assert thought and free.startswith(thought) and len(thought) < len(free) and answered
    n_tokens = len(server.ask("/tokenize", {"content": thought})["tokens"])
    assert n_tokens <= 6


def test_a_budget_of_nothing_is_no_thinking_and_a_message_can_come_first(server):
    thought, answered = thought_of(chat(server, reasoning_budget_tokens=0))
    assert thought == "" and answered
    more = {"reasoning_budget_tokens": 3, "reasoning_budget_message": " … enough."}
    thought, _ = thought_of(chat(server, **more, logit_bias={"</think>": False}))
    assert thought.endswith(" … enough.")
    assert thought_of(chat(server, reasoning_budget_tokens=-1)) == thought_of(chat(server))


def test_a_budget_holds_before_a_schema(server):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    more = {"reasoning_budget_tokens": 3, "logit_bias": {"</think>": False}}
    thought, answered = thought_of(chat(server, json_schema=schema, **more))
    assert thought and answered.replace(" ", "").replace("\n", "") in ('{"a":true}', '{"a":false}')


# shapes


def test_a_slot_has_a_share_of_the_context_when_it_is_not_unified(server):
    assert server.get("/props").json["default_generation_settings"]["n_ctx"] == 512
    assert {slot["n_ctx"] for slot in server.get("/slots").json} == {512}
    refused = server.post("/completion", {"prompt": "word " * 600}).json["error"]
    assert (refused["code"], refused["type"], refused["n_ctx"]) == (400, "exceed_context_size_error", 512)


def test_a_verbose_chat_shows_its_prompt(server):
    assert "Who are you?" in chat(server, verbose=True, max_tokens=1)["__verbose"]["prompt"]
    assert "__verbose" not in chat(server, max_tokens=1)


@pytest.mark.parametrize("path", ["/tools", "/cors-proxy", "/predict", "/v1/systemone"])
def test_what_is_not_offered_says_what_to_do_instead(server, path):
    answer = server.get(path)
    assert answer.status == 501 and (
        "client" in answer.json["error"]["message"] or "use " in answer.json["error"]["message"]
    )


def test_properties_can_be_set_to_what_they_are(server):
    assert server.ask("/props", {}) == {"success": True}


def test_what_is_banned_is_among_the_biases(server):
    settings = complete(server, ignore_eos=True, logit_bias=[[5, -1.0], [6, False]])["generation_settings"]
    biases = {each["token"]: each["bias"] for each in settings["logit_bias"]}
    (end,) = server.ask("/tokenize", {"content": "<|im_end|>"})["tokens"]
    assert biases[5] == -1.0 and biases[6] is None and biases[end] is None
    assert complete(server)["generation_settings"]["logit_bias"] == []


def test_progress_has_timings_when_they_are_wanted(server):
    body = {"prompt": "word " * 200, "n_predict": 2, "stream": True, "return_progress": True, "timings_per_token": True}
    told = [event["timings"] for event in server.post("/completion", body).events if "prompt_progress" in event]
    assert told[0]["prompt_n"] == told[0]["prompt_ms"] == 0 and told[-1]["prompt_n"] > 100
    assert [each["prompt_ms"] for each in told] == sorted(each["prompt_ms"] for each in told)


def streamed(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """Events with and without a name."""
    lines = server.post(path, body).data.split(b"\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/completion", {"prompt": "word " * 20}),
        ("/v1/completions", {"prompt": "word " * 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 20}]}),
        ("/v1/responses", {"input": "word " * 20}),
    ],
)
def test_every_chunk_has_timings_when_they_are_wanted(server, path, asked):
    more = {"max_tokens": 60, "max_output_tokens": 60, "stream": True, "temperature": 0, "ignore_eos": True}
    plain, timed = (streamed(server, path, asked | more | {"timings_per_token": wanted}) for wanted in (False, True))
    assert sum("timings" in event for event in plain) <= 1  # only the last has them
    is_event = path == "/v1/responses"
    texts = [event for event in timed if event.get("type", "").endswith("delta") or not is_event]
    if path == "/v1/chat/completions":
        assert texts.pop(0)["choices"][0]["delta"]["role"] and "timings" not in timed[0]
    assert len(texts) > 2 and all("timings" in event for event in texts)
    told = [event["timings"] for event in timed if "timings" in event]
    assert [each["predicted_n"] for each in told] == sorted(each["predicted_n"] for each in told)
    assert told[-1]["predicted_n"] == 60 and all(each["prompt_n"] + each["cache_n"] >= 20 for each in told)


def test_a_full_context_is_shifted_only_where_the_server_allows_it():
    body = {
        "prompt": "word " * 100,
        "n_predict": 250,
        "ignore_eos": True,
        "temperature": 0,
        "n_keep": 3,
        "n_discard": 40,
    }
    with serving("--context-shift", "--keep", "5", n_ctx=256) as server:
        answer = server.ask("/completion", body)
        assert answer["tokens_predicted"] == 250 and answer["truncated"] and answer["stop_type"] == "limit"
        assert (answer["generation_settings"]["n_keep"], answer["generation_settings"]["n_discard"]) == (3, 40)
        assert answer["tokens_evaluated"] == answer["timings"]["prompt_n"] + answer["timings"]["cache_n"]
        assert server.ask("/v1/completions", body)["usage"]["completion_tokens"] == 250
    with serving(n_ctx=256) as server:
        answer = server.ask("/completion", body)
        assert answer["tokens_predicted"] + answer["tokens_evaluated"] == 256 and answer["truncated"]


def test_timings_of_completions_are_numbers_and_the_words_stand_beside_them(server):
    answer = complete(server, prompt="numbers only", n_predict=3)
    assert all(isinstance(value, int | float) and value >= 0 for value in answer["timings"].values())
    assert answer["kept"] in ("ram", "disk", "none") and answer["cache"]["reason"]
    chat = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    assert chat["timings"]["cache"]["reason"] and chat["timings"]["kept"]


def test_responses_tell_how_far_the_prompt_is_read_when_that_is_wanted(server):
    body = {"input": "another word " * 200, "max_output_tokens": 2, "stream": True}
    for wants in (True, False):
        asked = body | {"return_progress": wants, "input": f"{wants} {body['input']}"}
        events = streamed(server, "/v1/responses", asked)
        told = [event for event in events if "prompt_progress" in event]
        assert bool(told) == wants and {event["type"] for event in told} <= {"response.in_progress"}
        numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
        assert numbers == list(range(len(numbers)))


def test_speeds_are_those_since_the_last_scrape(server):
    complete(server, prompt="speed", n_predict=8)
    first, second = (server.get("/metrics").data.decode() for _ in range(2))
    assert metric(first, "llamacpp:predicted_tokens_seconds") > 0
    assert metric(second, "llamacpp:predicted_tokens_seconds") == 0
    assert metric(second, "llamacpp:tokens_predicted_total") > 0


def test_metrics_have_llama_servers_names(server):
    text = server.get("/metrics").data.decode()
    longest = complete(server)["tokens_evaluated"]
    for name in ("n_tokens_max", "n_busy_slots_per_decode", "spec_decode_num_draft_tokens_total", "n_decode_total"):
        assert f"\nllamacpp:{name} " in text
    assert metric(text, "llamacpp:n_tokens_max") >= longest
