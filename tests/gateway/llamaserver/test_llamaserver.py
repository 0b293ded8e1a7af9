"""llama-server's dialect: what it answers, and that its numbers add up."""

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.server import GUARD, Server, serving, words

PROMPT = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MESSAGES = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def complete(server: Server, prompt: Any = PROMPT, **more: Any) -> dict[str, Any]:
    answer = server.ask("/completion", {"prompt": prompt, "temperature": 0, "n_predict": 16} | more)
    adds_up(answer)
    return dict(answer)


def stream(server: Server, prompt: Any = PROMPT, **more: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompt, "temperature": 0, "n_predict": 16, "stream": True} | more
    reply = server.post("/completion", body)
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    adds_up(reply.events[-1])
    return reply.events


def adds_up(answer: dict[str, Any]) -> None:
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
    assert timings["predicted_n"] == answer["tokens_predicted"]
    assert answer["tokens_cached"] == timings["cache_n"]
    assert all(value >= 0 for value in timings.values() if isinstance(value, int | float))


# completion


def test_a_completion_says_what_it_wrote_and_why_it_ended(server):
    answer = complete(server)
    assert "Everwarm Tiny" in answer["content"] and answer["stop"] is True
    assert answer["stop_type"] == "eos" and answer["stopping_word"] == "" and answer["tokens"] == []
    assert answer["tokens_evaluated"] == server.n_tokens(PROMPT) and answer["id_slot"] in (0, 1)
    assert complete(server, n_predict=3)["stop_type"] == "limit"
    stopped = complete(server, stop=["Tiny"])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "Tiny")


def test_a_stop_string_at_the_very_end_of_the_length_still_counts_as_one(server):
    limited = complete(server, n_predict=3, return_tokens=True)
    last = server.ask("/detokenize", {"tokens": limited["tokens"][-1:]})["content"]
    stopped = server.ask("/completion", {"prompt": PROMPT, "temperature": 0, "n_predict": 3, "stop": [last]})
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", last)
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 3, "stop": [last]}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    assert server.ask("/v1/chat/completions", body)["choices"][0]["finish_reason"] == "stop"


def test_a_streamed_completion_is_the_same_in_pieces(server):
    whole = complete(server, return_tokens=True)
    chunks = stream(server)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [c["tokens_predicted"] for c in chunks] == sorted(c["tokens_predicted"] for c in chunks)


def test_progress_of_reading_is_told_when_asked_for(server):
    prompt = words(600, 1)
    chunks = stream(server, prompt, return_progress=True, n_predict=2)
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    total = server.n_tokens(prompt)
    assert len(told) >= 3 and told[0]["processed"] == 0 and all(p["total"] == total and p["cache"] == 0 for p in told)
    assert [p["processed"] for p in told] == sorted(p["processed"] for p in told)
    assert told[-1]["processed"] <= total
    assert not any("prompt_progress" in chunk for chunk in stream(server, words(600, 2), n_predict=2))


def test_tokens_can_be_the_prompt_and_come_back(server):
    tokens = server.ask("/tokenize", {"content": PROMPT})["tokens"]
    answer = complete(server, tokens, return_tokens=True)
    assert answer["content"] == complete(server)["content"] and len(answer["tokens"]) == answer["tokens_predicted"]
    assert server.ask("/detokenize", {"tokens": answer["tokens"]})["content"] == answer["content"]


def test_probabilities_come_with_ids_and_alternatives(server):
    answer = complete(server, n_probs=4, return_tokens=True)
    probs = answer["completion_probabilities"]
    assert [prob["id"] for prob in probs] == answer["tokens"]
    assert all(len(prob["top_logprobs"]) == 4 and prob["logprob"] <= 0 for prob in probs)
    streamed = [prob for chunk in stream(server, n_probs=4) for prob in chunk.get("completion_probabilities", [])]
    assert [prob["id"] for prob in streamed] == answer["tokens"]


def test_without_the_cache_everything_is_read_again(server):
    prompt = f"<|im_start|>system\n{words(200, 3)}<|im_end|>\n{PROMPT}"
    first, again = complete(server, prompt), complete(server, prompt)
    cold = complete(server, prompt, cache_prompt=False)
    assert first["timings"]["cache_n"] == cold["timings"]["cache_n"] == 0
    assert again["timings"]["prompt_n"] <= GUARD
    assert first["content"] == again["content"] == cold["content"]


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_can_be_chosen(server, slot):
    assert complete(server, words(50, 4 + slot), id_slot=slot)["id_slot"] == slot


def test_a_slot_that_does_not_exist_is_refused(server):
    reply = server.post("/completion", {"prompt": PROMPT, "id_slot": 2})
    assert reply.status == 400 and "slots 0 to 1" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [[1], {}], {"prompt_string": 1}, [-1], [99999], [1 << 31], [1 << 40], ["a"] * 129, [[1], 2]],
)
def test_a_prompt_that_cannot_be_used_is_refused(server, prompt):
    assert server.post("/completion", {"prompt": prompt, "n_predict": 1}).status == 400
    assert complete(server)


def test_several_prompts_get_a_list_of_replies_in_their_order(server):
    tokens = server.ask("/tokenize", {"content": PROMPT})["tokens"]
    body = {"prompt": [tokens, PROMPT, {"prompt_string": PROMPT}], "temperature": 0, "n_predict": 4}
    answers = server.ask("/completion", body)
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert {answer["content"] for answer in answers} == {complete(server, n_predict=4)["content"]}
    assert [answer.get("prompt") for answer in answers] == [None, PROMPT, PROMPT]
    assert len(server.ask("/completion", body | {"prompt": PROMPT, "n": 2})) == 2
    assert server.post("/completion", body | {"stream": True}).status == 400


def test_texts_among_tokens_are_one_prompt(server):
    tokens = server.ask("/tokenize", {"content": PROMPT})["tokens"]
    cut = "<|im_start|>user\nWho are"
    rest = server.ask("/tokenize", {"content": PROMPT.removeprefix(cut)})["tokens"]
    mixed = complete(server, [*server.ask("/tokenize", {"content": "<|im_start|>"})["tokens"], "user\nWho are", *rest])
    assert mixed["tokens_evaluated"] == len(tokens) and mixed["content"] == complete(server)["content"]


def test_a_completion_repeats_how_it_was_made(server):
    answer = complete(server, n_predict=3, seed=7, top_k=5, stop=["x"])
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["top_k"], settings["stop"]) == (3, 7, 5, ["x"])
    assert answer["prompt"] == PROMPT and answer["has_new_line"] is False and answer["truncated"] is False
    assert stream(server, n_predict=3, top_k=5)[-1]["generation_settings"]["top_k"] == 5
    assert server.get("/props").json["default_generation_settings"]["params"]["top_k"] == 40


def test_only_the_fields_that_are_asked_for_come(server):
    fields = ["content", "generation_settings/n_predict", "prompt", "no/such"]
    answer = server.ask("/completion", {"prompt": PROMPT, "n_predict": 2, "response_fields": fields})
    assert set(answer) == set(fields[:3]) and answer["generation_settings/n_predict"] == 2


def test_a_prompt_that_is_too_long_is_refused_with_its_size(server):
    error = server.post("/completion", {"prompt": words(5000, 1)}).json["error"]
    assert error["n_ctx"] == 4096 and error["type"] == "exceed_context_size_error" and error["n_prompt_tokens"] > 4096


@pytest.mark.parametrize(
    "message",
    [{}, {"role": 1, "content": "a"}, {"role": "user", "content": 1}, {"role": "user"}, {"role": "assistant"}],
)
def test_a_message_that_cannot_be_shown_is_refused(server, message):
    for messages in ([message], [*MESSAGES, message]):
        assert server.post("/apply-template", {"messages": messages}).status == 400


def test_a_reply_is_continued_and_only_one(server):
    begun = {"role": "assistant", "content": "My name is"}
    text = server.rendered([*MESSAGES, begun])
    assert text.endswith("</think>\n\nMy name is")
    body = {"messages": [*MESSAGES, begun], "temperature": 0, "max_tokens": 8}
    answer = server.ask("/v1/chat/completions", body)["choices"][0]["message"]
    assert answer["content"] == complete(server, text, n_predict=8)["content"]
    assert server.post("/v1/chat/completions", body | {"messages": [*MESSAGES, begun, begun]}).status == 400
    assert server.post("/v1/chat/completions", body | {"continue_final_message": True}).status == 400
    calling = begun | {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    assert server.post("/v1/chat/completions", body | {"messages": [*MESSAGES, calling]}).status == 400


def test_thinking_that_stays_text_keeps_its_opening(server):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    apart = server.ask("/v1/chat/completions", body)["choices"][0]["message"]
    within = server.ask("/v1/chat/completions", body | {"reasoning_format": "none"})["choices"][0]["message"]
    assert within["content"].startswith("<think>\n" + apart["reasoning_content"]) and "reasoning_content" not in within
    off = server.ask("/v1/chat/completions", body | {"reasoning_effort": "none"})["choices"][0]["message"]
    assert "reasoning_content" not in off


def test_the_tokens_of_a_chat_can_be_counted(server):
    n_tokens = server.ask("/v1/chat/completions/input_tokens", {"messages": MESSAGES})["input_tokens"]
    assert n_tokens == server.n_tokens(server.rendered(MESSAGES))


def test_no_tokens_wanted_reads_the_prompt_and_writes_nothing(server):
    answer = complete(server, words(100, 9), n_predict=0)
    assert (answer["content"], answer["tokens_predicted"]) == ("", 0)
    assert complete(server, words(100, 9))["timings"]["prompt_n"] <= GUARD


def test_a_reply_that_fills_the_context_ends_there(server):
    prompt = words(1500, 10)
    answer = complete(server, prompt, n_predict=-1, ignore_eos=True)
    assert answer["stop_type"] == "limit" and answer["truncated"] is True
    assert answer["tokens_evaluated"] + answer["tokens_predicted"] == 4096


# text and tokens


@pytest.mark.parametrize("text", ["hello world", "naïve café, 東京 🦉", "<|im_start|>user\n", " \n\t ", "12345"])
def test_tokenizing_and_back_gives_the_same_text(server, text):
    tokens = server.ask("/tokenize", {"content": text})["tokens"]
    assert server.ask("/detokenize", {"tokens": tokens})["content"] == text


def test_pieces_are_text_or_bytes(server):
    text = "x 🦉"
    pieces = server.ask("/tokenize", {"content": text, "with_pieces": True})["tokens"]
    assert [p["id"] for p in pieces] == server.ask("/tokenize", {"content": text})["tokens"]
    joined = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert joined.decode() == text
    assert any(isinstance(p["piece"], list) for p in pieces)


def test_special_tokens_can_be_plain_text(server):
    special = server.ask("/tokenize", {"content": "<|im_end|>"})["tokens"]
    plain = server.ask("/tokenize", {"content": "<|im_end|>", "parse_special": False})["tokens"]
    assert len(special) == 1 and len(plain) > 1
    assert server.ask("/tokenize", {"content": ""}) == {"tokens": []}


@pytest.mark.parametrize("tokens", [[-1], [1 << 31], [1 << 30], [1.5], ["a"], None])
def test_tokens_that_do_not_exist_are_refused(server, tokens):
    assert server.post("/detokenize", {"tokens": tokens}).status == 400


def test_a_template_is_applied_as_a_chat_would(server):
    text = server.rendered(MESSAGES)
    assert text == "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert server.rendered(MESSAGES, chat_template_kwargs={"enable_thinking": False}) == PROMPT


def test_a_template_can_be_applied_without_its_generation_prompt(server):
    text = server.rendered(MESSAGES, add_generation_prompt=False)
    assert text == "<|im_start|>user\nWho are you?<|im_end|>\n"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param("/apply-template", "messages"),
        pytest.param("/apply-template", "tools"),
        pytest.param("/apply-template", "self"),
        ("/apply-template", "add_generation_prompt"),
        ("/apply-template", "not a name"),
        ("/v1/chat/completions", "messages"),
        ("/v1/chat/completions", "tools"),
        ("/v1/chat/completions", "add_generation_prompt"),
        pytest.param("/v1/chat/completions", "self"),
        ("/v1/chat/completions", "not a name"),
    ],
)
def test_template_variables_cannot_take_the_place_of_the_messages(server, path, name):
    body = {"messages": MESSAGES, "chat_template_kwargs": {name: 1}, "max_tokens": 1}
    assert server.post(path, body).status in (200, 400)


# about the server


def test_props_slots_and_health(server):
    props = server.get("/props").json
    assert props["total_slots"] == 2 and props["default_generation_settings"]["n_ctx"] == 4096
    assert props["memory_kind"] == "hybrid" and "<|im_start|>" in props["chat_template"]
    assert props["model_alias"] == "everwarm-tiny" and props["eos_token"] == "<|im_end|>"
    slots = server.get("/slots").json
    assert [slot["id"] for slot in slots] == [0, 1]
    assert not any(slot["is_processing"] or "prompt" in slot for slot in slots)
    assert server.get("/health").json == server.get("/v1/health").json
    engine = {"state": "ok", "reason": None, "restarts": 0, "attempts": 0, "retry_in_s": None}
    assert server.get("/health").json == {"status": "ok", "components": {"engine": engine}}
    ready = server.get("/ready").json
    assert ready["status"] == "ready" and ready["restarts"] == 0 and ready["reason"] is None
    assert server.get("/").json["name"] == "everwarm" and server.call("HEAD", "/").status == 200


# numbers

COUNTED = {
    "llamacpp:prompt_tokens_total": "prompt_n",
    "llamacpp:prompt_tokens_cached_total": "cache_n",
    "llamacpp:tokens_predicted_total": "predicted_n",
    "llamacpp:prompt_seconds_total": "prompt_ms",
    "llamacpp:tokens_predicted_seconds_total": "predicted_ms",
}


def counters(server: Server) -> dict[str, float]:
    """Every sample, from text that a Prometheus server would accept."""
    reply = server.get("/metrics")
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [s for family in text_string_to_metric_families(reply.data.decode()) for s in family.samples]
    return {s.name + "".join(f"/{v}" for v in s.labels.values()): s.value for s in samples}


def test_the_counters_grow_by_what_the_answers_say_of_themselves(server):
    before = counters(server)
    answers = [complete(server, words(60, 20 + i), n_predict=4 + i) for i in range(3)]
    answers += [stream(server, words(60, 20), n_predict=4)[-1], complete(server)]
    body = {"messages": MESSAGES, "max_tokens": 5}
    answers += [server.ask("/v1/chat/completions", body), server.ask("/v1/completions", {"prompt": PROMPT})]
    chunks = server.post("/v1/chat/completions", body | {"stream": True}).events
    answers += [chunk for chunk in chunks if "timings" in chunk]
    after = counters(server)
    for name, field in COUNTED.items():
        output = sum(answer["timings"][field] for answer in answers) / (1e3 if field.endswith("ms") else 1)
        assert after[name] - before[name] == pytest.approx(output, abs=1e-6), name
    ended = [after[name] - before.get(name, 0) for name in after if name.startswith("everwarm_requests_total/")]
    assert sum(ended) == len(answers) == 8


def test_the_gauges_are_quiet_when_nothing_runs(server):
    complete(server)
    now = counters(server)
    assert now["everwarm_engine_ready"] == 1 and now["everwarm_engine_restarts_total"] == 0
    assert 0 < now["everwarm_ram_bytes"] <= now["everwarm_ram_budget_bytes"] == 512 << 20
    assert now["everwarm_kv_cells_used"] <= 4096


def test_the_engine_lived_through_all_this(server):
    assert server.get("/ready").json["restarts"] == 0
