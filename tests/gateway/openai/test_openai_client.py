"""The official OpenAI client against a real server: the everyday calls, and what is read of their prompts."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from support.server import GUARD, Server, serving, until, words

MODEL = "everwarm-tiny"
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
SECRET = {"role": "user", "content": "My secret code is 48213."}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
NO_THINKING = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}

Messages = list[dict[str, Any]]
_seeds = itertools.count(1000)

# the same reply again is drafted from the first one, and a step of several rows may decide a near tie otherwise
UNDRAFTED: dict[str, Any] = {"extra_body": {"speculative.n_max": 0}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client: openai.OpenAI, messages: Messages, **more: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **(GREEDY | NO_THINKING | more))


def text_of(completion: Any) -> str:
    return str(completion.choices[0].message.content)


def n_cached(completion: Any) -> int:
    return int(completion.usage.prompt_tokens_details.cached_tokens)


def n_processed(completion: Any) -> int:
    return int(completion.usage.prompt_tokens) - n_cached(completion)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def fresh(n_words: int = 120) -> Messages:
    """A conversation nobody has had before."""
    return [SYSTEM, user(words(n_words, next(_seeds)))]


# the everyday calls


def test_a_chat_answers_and_accounts_for_itself(client):
    answer = chat(client, [SYSTEM, user("Who are you?")])
    assert "Everwarm Tiny" in text_of(answer)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.role == "assistant"
    assert answer.model == MODEL and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_a_whole_answer_and_ends_with_usage(client):
    messages = [SYSTEM, user("Who are you?")]
    whole = chat(client, messages)
    options = GREEDY | NO_THINKING | {"stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of(whole)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1]) and len({c.id for c in chunks}) == 1


def test_a_stream_without_the_option_carries_no_usage(client):
    chunks = list(client.chat.completions.create(model=MODEL, messages=[user("Hello!")], stream=True, **GREEDY))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_thinking_is_on_by_default_and_can_be_switched_off(client):
    thinking = client.chat.completions.create(model=MODEL, messages=[user("Who are you?")], temperature=0)
    assert thinking.choices[0].message.reasoning_content
    assert not getattr(chat(client, [user("Who are you?")]).choices[0].message, "reasoning_content", None)


def test_models_are_listed_and_can_be_read(client):
    (model,) = client.models.list().data
    assert model.id == MODEL and model.object == "model" and model.owned_by == "everwarm"


def test_the_completions_endpoint_writes_on(client):
    alone = GREEDY | UNDRAFTED
    answer = client.completions.create(model=MODEL, prompt="Once upon a time there was", **alone)
    assert answer.object == "text_completion" and answer.choices[0].text and answer.usage.completion_tokens > 0
    echoed = client.completions.create(model=MODEL, prompt="Once upon a time there was", echo=True, **alone)
    assert echoed.choices[0].text == "Once upon a time there was" + answer.choices[0].text
    chunks = client.completions.create(model=MODEL, prompt="Once upon a time there was", stream=True, **alone)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_a_completion_of_tokens_is_that_of_their_text(client, server):
    text = "Once upon a time there was"
    tokens = server.ask("/tokenize", {"content": text})["tokens"]
    options = GREEDY | UNDRAFTED | {"max_tokens": 12}
    ways = [text, tokens, [text], [tokens]]
    answers = {client.completions.create(model=MODEL, prompt=way, **options).choices[0].text for way in ways}
    assert len(answers) == 1


# what is read


def test_every_turn_of_a_conversation_reads_only_what_is_new(client, server):
    messages = fresh()
    messages[-1]["content"] += " My secret code is 48213."
    before = 0
    for question in ("Hello!", "What is 3 + 4?", "What is my secret code?"):
        answer = chat(client, messages)
        if before:
            assert n_processed(answer) <= answer.usage.prompt_tokens - before + GUARD
        before = server.n_tokens(server.rendered(messages, add_generation_prompt=False))
        before = min(before, answer.usage.prompt_tokens)
        messages = [*messages, assistant(text_of(answer)), user(question)]
    assert "48213" in text_of(chat(client, messages))


# options


def test_two_choices_share_one_reading(client):
    answer = chat(client, fresh(), n=2, temperature=0.9, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens > 1
    chunks = client.chat.completions.create(model=MODEL, messages=fresh(), n=2, stream=True, **GREEDY)
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}


@pytest.mark.parametrize("stop", ["Tiny", ["nothing like it", "Tiny"], ["y, a"]])
def test_stop_strings_end_the_answer_before_them(client, stop):
    messages = [SYSTEM, user("Who are you?")]
    whole = text_of(chat(client, messages))
    (met,) = [s for s in ([stop] if isinstance(stop, str) else stop) if s in whole]
    cut = chat(client, messages, stop=stop)
    assert text_of(cut) == whole.partition(met)[0] and cut.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(
        model=MODEL, messages=messages, stop=stop, stream=True, **GREEDY, **NO_THINKING
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.partition(met)[0]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("n", [1, 5])
def test_the_length_of_an_answer_can_be_limited(client, name, n):
    answer = client.chat.completions.create(model=MODEL, messages=[user("Who are you?")], temperature=0, **{name: n})
    assert answer.usage.completion_tokens == n and answer.choices[0].finish_reason == "length"


def test_the_same_seed_gives_the_same_answer_and_others_differ(client):
    """Alone in the context: beside others the last bits of a float may differ, and a hot pick with them."""

    def write(seed: int) -> str:
        story = [user("Write a short story about a dragon.")]
        extra = {"extra_body": NO_THINKING["extra_body"] | {"deterministic": True}}
        return text_of(chat(client, story, temperature=1.5, max_tokens=40, seed=seed, **extra))

    assert write(11) == write(11)
    assert len({write(seed) for seed in range(4)}) > 1


def test_logprobs_are_those_of_the_tokens_said(client):
    answer = chat(client, [user("Who are you?")], logprobs=True, top_logprobs=3)
    listed = answer.choices[0].logprobs.content
    assert "".join(prob.token for prob in listed) == text_of(answer)
    assert len(listed) == answer.usage.completion_tokens
    for prob in listed:
        assert len(prob.top_logprobs) == 3 and prob.logprob <= 0
        assert prob.top_logprobs[0].token == prob.token and prob.top_logprobs[0].logprob == prob.logprob
        assert bytes(prob.bytes).decode() == prob.token


def test_streamed_logprobs_are_the_same(client):
    messages = [user("Who are you?")]
    whole = chat(client, messages, logprobs=True).choices[0].logprobs.content
    options = GREEDY | NO_THINKING | {"logprobs": True, "stream": True}
    chunks = client.chat.completions.create(model=MODEL, messages=messages, **options)
    streamed = [prob for c in chunks if c.choices[0].logprobs for prob in c.choices[0].logprobs.content]
    assert [prob.token for prob in streamed] == [prob.token for prob in whole]


def test_completions_carry_the_older_logprobs(client):
    answer = client.completions.create(model=MODEL, prompt="The day after Monday is", logprobs=2, **GREEDY)
    probs = answer.choices[0].logprobs
    assert "".join(probs.tokens) == answer.choices[0].text and len(probs.top_logprobs[0]) == 2
    assert len(probs.text_offset) == len(probs.token_logprobs) == len(probs.tokens)


def test_a_banned_token_is_not_said(client):
    messages = [user("Who are you?")]
    first = chat(client, messages, logprobs=True).choices[0].logprobs.content[0]
    banned = first.model_extra["id"]
    other = chat(client, messages, logit_bias={str(banned): -100}, logprobs=True).choices[0].logprobs.content
    assert all(prob.model_extra["id"] != banned for prob in other)


# errors


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 2},
        {"n": 0},
        {"n": 1000},
        {"max_tokens": -5},
        {"messages": [{"role": "user", "content": "x"}], "stop": ["x"] * 100},
        {"logit_bias": {"": 1}},
        {"logit_bias": {"99999999": 1}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_is_a_bad_request_that_says_what_is_wrong(client, wrong, stream):
    body = {"model": MODEL, "messages": [user("Hello!")], "stream": stream} | wrong
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**body)
    assert error.value.code == "invalid_request_error" and error.value.type == "invalid_request_error"
    assert len(error.value.body["message"]) > 10 and error.value.request_id.startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_never_fits_is_refused_with_its_own_code(client, stream):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, [user("a b " * 6000)], stream=stream)
    assert error.value.code == "exceed_context_size_error"
    assert error.value.body["n_ctx"] == 4096 and error.value.body["n_prompt_tokens"] > 4096


def test_an_unknown_path_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")


def test_unknown_fields_are_ignored(client):
    more = {"prompt_cache_options": {"mode": "auto"}, "service_tier": "flex", "future": [1, {"a": None}]}
    extra = {"chat_template_kwargs": {"enable_thinking": False}} | more
    assert text_of(chat(client, [user("Hello!")], extra_body=extra, user="someone", store=False))


# many at once


def test_sixteen_asynchronous_calls_are_all_answered_alike(server):
    async def ask_all() -> Sequence[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            calls = [
                client.chat.completions.create(model=MODEL, messages=[user("What is 3 + 4?")], **GREEDY, **NO_THINKING)
                for _ in range(16)
            ]
            return await asyncio.gather(*calls)

    answers = asyncio.run(asyncio.wait_for(ask_all(), 60))
    assert {text_of(answer) for answer in answers} == {"3 + 4 = 7."}


def test_an_asynchronous_stream_can_be_left(server):
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=[user("Hello!")], stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    until(server.is_idle, "the slot is free")
