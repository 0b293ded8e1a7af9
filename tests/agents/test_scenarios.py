"""What people and agents do to a conversation, over HTTP on the embedded model: how much that was known is read again.

Regret is counted per request: tokens that this namespace had read or written before, less those that came from the cache.
At most the guard tokens, with two exceptions: where a prompt leaves what is known inside a message for the first time there
is no checkpoint, and at most their spacing is read again; and far back in a long conversation they have been thinned out.
``pytest -s`` shows the table.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from support.loops import FUNCTION
from support.server import GUARD, Server, serving, until, words
from support.shown import Shown

SPACING = 410  # tokens between checkpoints inside a long message of this model
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
CITIES = ("Rome", "Oslo", "Paris", "Berlin")
DAYS = ("Monday, 3 May", "Tuesday, 4 May", "Friday, 7 May", "Sunday, 9 May")

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    scenario: str
    request: str
    n_prompt: int
    n_cached: int
    regret: int
    bound: int
    why: str

    def __str__(self) -> str:
        counts = f"{self.n_prompt:7} {self.n_cached:7} {self.n_prompt - self.n_cached:6} {self.regret:7} {self.bound:6}"
        return f"{self.scenario:18} {self.request:22} {counts}  {self.why}"


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    print(f"\n{'scenario':18} {'request':22}  prompt  cached   read  regret  bound  why")
    print("\n".join(map(str, rows)))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(n_ctx=8192) as server:
        yield server


class Scene:
    """One scenario in a namespace of its own."""

    def __init__(self, server: Server, name: str, rows: list[Row]) -> None:
        self.server, self.name, self._rows = server, name, rows
        self._shown = Shown()

    def body(self, messages: Messages, *, think: bool = False, **more: Any) -> dict[str, Any]:
        template = {"chat_template_kwargs": {"enable_thinking": think}}
        return {"messages": messages, "temperature": 0, "max_tokens": 24, "cache_salt": self.name, **template, **more}

    def say(self, request: str, messages: Messages, *, bound: int = GUARD, **more: Any) -> dict[str, Any]:
        """The reply's message. Here requests come one after the other, so what was shown is known exactly."""
        body = self.body(messages, **more)
        n_known = self.show(body)
        return self.measured(request, self.server.ask("/v1/chat/completions", body), n_known, bound=bound)

    def show(self, body: dict[str, Any]) -> int:
        """How much of the prompt was shown before."""
        text = self.server.rendered(body["messages"], tools=body.get("tools"), **_template(body))
        prompt = [int(token) for token in self.server.ask("/tokenize", {"content": text})["tokens"]]
        n_known = self._shown.n_known(prompt)
        self._shown.add(prompt)
        return n_known

    def measured(self, request: str, answer: Any, n_known: int = 0, *, bound: int = GUARD) -> dict[str, Any]:
        timings, cache = answer["timings"], answer["timings"]["cache"]
        n_prompt, n_cached = answer["usage"]["prompt_tokens"], timings["cache_n"]
        assert timings["prompt_n"] == n_prompt - n_cached
        assert cache["n_shared"] >= n_known, "the server must not know less than what it was shown"
        why = cache["reason"] + (f" ({cache['again']})" if cache["again"] else "")
        row = Row(self.name, request, n_prompt, n_cached, max(0, cache["n_shared"] - n_cached), bound, why)
        self._rows.append(row)
        assert row.regret <= bound, f"{row} {cache}"
        message = answer["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None}

    def talk(self, n_turns: int, n_words: int = 60) -> Messages:
        """A conversation that was held, up to its last answer."""
        messages = [SYSTEM]
        for turn in range(n_turns):
            messages = [*messages, user(words(n_words, 100 * turn + len(self.name)))]
            messages = [*messages, self.say(f"turn {turn + 1}", messages)]
        return messages

    @property
    def n_read(self) -> int:
        return sum(row.n_prompt - row.n_cached for row in self._rows if row.scenario == self.name)


def _template(body: dict[str, Any]) -> dict[str, Any]:
    return {"chat_template_kwargs": body["chat_template_kwargs"]}


@pytest.fixture
def scene(request, server, rows) -> Scene:
    return Scene(server, request.node.name.removeprefix("test_"), rows)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def called(scene: Scene, messages: Messages, result: str, **more: Any) -> Messages:
    """The call that the last question leads to, its result, and the answer."""
    call = scene.say(f"call {len(messages)}", messages, tools=[FUNCTION], max_tokens=120, **more)
    given = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": result}
    messages = [*messages, call, given]
    return [*messages, scene.say(f"answer {len(messages)}", messages, tools=[FUNCTION], max_tokens=120, **more)]


def test_append(scene):
    scene.talk(6)


def test_thinking_stripped(scene):
    messages = [SYSTEM]
    for a, b in ((3, 4), (7, 8), (2, 9), (5, 6)):
        messages = [*messages, user(f"{words(40, a)} What is {a} + {b}?")]
        output = scene.say(f"{a} + {b}", messages, think=True, max_tokens=160)
        assert output["reasoning_content"]
        messages = [*messages, without_thoughts(output)]


def test_thinking_kept(scene):
    """Inside a loop of tools the client sends the thinking back, and the template shows it."""
    messages = [SYSTEM]
    for city in CITIES:
        messages = called(scene, [*messages, user(f"What is the weather in {city}?")], "sunny", think=True)
        assert messages[-1]["reasoning_content"] and messages[-3]["reasoning_content"]


def test_thinking_dropped(scene):
    """Long thoughts before a call are shown until the next question, and after that everything has moved."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    thoughts = {"role": "assistant", "content": "", "reasoning_content": words(200, 1), "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": f"sunny. {words(80, 2)}"}
    messages = [SYSTEM, user("What is the weather in Rome?"), thoughts, result]
    messages = [*messages, scene.say("shown", messages, tools=[FUNCTION], think=True, max_tokens=120)]
    for question in ("Who are you?", "What is 3 + 4?", "What is the capital of France?"):
        scene.say(question[:22], [*messages, user(question)], tools=[FUNCTION], think=True)


def test_identical(scene):
    messages = [*scene.talk(2), user("Who are you?")]
    first, *others = (scene.say(f"time {n}", messages) for n in (1, 2, 3))
    assert others == [first, first]


def test_regenerate(scene):
    messages = scene.talk(4)
    for n in (8, 6, 4):
        scene.say(f"reply {n} again", messages[:n], temperature=0.9, seed=n)
    scene.say("the last again", messages[:-1], temperature=0.9, seed=1)


def test_edit_message_k(scene):
    messages = scene.talk(4, n_words=240)
    for k in (7, 5, 1):
        edited = [*messages[:k], user("What is the capital of France?")]
        scene.say(f"message {k}, as a whole", edited)
        text = messages[k]["content"].split(" ")
        text[len(text) // 2] = "lantern"
        scene.say(f"message {k}, inside", [*messages[:k], user(" ".join(text))], bound=SPACING)
        text[len(text) // 2] = "kettle"
        scene.say(f"message {k}, there again", [*messages[:k], user(" ".join(text))])


def test_edit_far_back(scene):
    """A path keeps 32 checkpoints, closer together towards its end: the further back, the wider the holes. Here at most
    an eighth of what came after."""
    messages = scene.talk(24, n_words=20)
    n_each = 1500 // len(messages)  # tokens of a message
    for k in (41, 31, 21, 11, 3):
        bound = GUARD + (len(messages) - k) * n_each // 8
        scene.say(f"message {k}", [*messages[:k], user("What is the capital of France?")], bound=bound)


def test_prune_tool_outputs(scene):
    messages = [SYSTEM]
    for i, city in enumerate(CITIES):
        messages = called(scene, [*messages, user(f"What is the weather in {city}?")], f"sunny. {words(160, i)}")
    results = [i for i, message in enumerate(messages) if message["role"] == "tool"]
    pruned = [m | {"content": "[removed]"} if i in results[:-1] else m for i, m in enumerate(messages)]
    messages = called(scene, [*pruned, user("What is the weather in Vienna?")], "rain")
    called(scene, [*messages, user("What is the weather in Athens?")], "fog")


def test_compaction(scene):
    messages = scene.talk(4)
    summary = user(f"This is what was said so far: {words(60, 77)}")
    compact = [SYSTEM, summary, user("Go on.")]
    output = scene.say("after it", compact)
    scene.say("the next turn", [*compact, output, user("Who are you?")])
    scene.say("the old one again", [*messages, user("Who are you?")])


def test_fan_out_of_8(scene):
    """All at once, and nobody has read what they share: one of them reads it."""
    shared = [{"role": "system", "content": words(400, 5)}]
    n_shared = scene.server.n_tokens(scene.server.rendered(shared, add_generation_prompt=False))
    bodies = [scene.body([*shared, user(f"Number {i}: what is {i} + {i}?")], max_tokens=4) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: scene.server.ask("/v1/chat/completions", body), bodies))
    for i, answer in enumerate(answers):
        scene.measured(f"branch {i + 1}", answer)
    n_own = sum(answer["usage"]["prompt_tokens"] - n_shared for answer in answers)
    assert n_shared <= scene.n_read <= n_shared + n_own + 8 * GUARD < 2 * n_shared


def test_interleave_6_on_2(scene):
    talks = [[SYSTEM, user(words(60, 1000 + i))] for i in range(6)]
    for turn in range(3):
        for i, messages in enumerate(talks):
            output = scene.say(f"turn {turn + 1} of {i + 1}", messages, max_tokens=8)
            messages += [output, user(f"And what is {i} + {turn}?")]


def test_volatile_date(scene):
    """What stands before the date can be shared, and from the second change on it is."""
    before, after = words(300, 8), words(300, 9)
    for n, day in enumerate(DAYS):
        messages = [{"role": "system", "content": f"{before}\nToday is {day}.\n{after}"}, user("Who are you?")]
        output = scene.say(day, messages, bound=SPACING if n == 1 else GUARD)
        scene.say("the next turn", [*messages, output, user("Hello!")])


def test_cancel_and_retry(scene):
    messages = [*scene.talk(1), user(f"{words(200, 6)} Tell me a story.")]
    leave(scene, scene.body(messages, max_tokens=200, ignore_eos=True), n_bytes=400)
    scene.say("after half a reply", messages)
    unread = [*messages, user(words(900, 7))]
    leave(scene, scene.body(unread), n_bytes=0)
    output = scene.say("after half a reading", unread)
    scene.say("the next turn", [*unread, output, user("Hello!")])


def test_regret_would_be_seen(server):
    """The control: what is bounded above is counted, and grows where nothing is kept."""
    scene = Scene(server, "control", [])
    messages = [*scene.talk(2), user("Who are you?")]
    scene.say("warm", messages)
    with pytest.raises(AssertionError, match="cache_off"):
        scene.say("cold", messages, cache_prompt=False)
    with pytest.raises(AssertionError, match="must not know less"):
        scene.say("somebody else's", messages, cache_salt="other")


def leave(scene: Scene, body: dict[str, Any], *, n_bytes: int) -> None:
    """Asks, and goes away after so much of the reply, or as soon as the prompt is being read."""
    server = scene.server
    with contextlib.closing(server.connect()) as connection:
        data = json.dumps(body | {"stream": True}).encode()
        connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
        if n_bytes:
            assert connection.getresponse().read(n_bytes)
        else:
            until(lambda: not server.is_idle(), "it is being read")
    until(server.is_idle, "nobody is served")
