"""Why a prompt was read, over HTTP, from a real server: the code, the place, the words, and nobody else's words."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from everwarm.cli.explain import source_for
from everwarm.errors import BadRequest, EverwarmError
from everwarm.gateway.explain import explained, read_file
from everwarm.state.policy import CheckpointParams
from support.models import EMBEDDED
from support.server import GUARD, Server, run_cli, serving, words


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def chat(server: Server, *contents: str, **more: Any) -> Any:
    """One turn; the first content is the system's."""
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0} | more)


def cache(answer: Any) -> Any:
    """``/completion`` has it beside the timings, chats within them."""
    return answer["cache"] if "cache" in answer else answer["timings"]["cache"]


def common_prefix(server: Server, first: str, second: str) -> tuple[int, list[int], list[int]]:
    """What a tokenizer says that was asked about whole texts."""
    a, b = (server.ask("/tokenize", {"content": text, "add_special": True})["tokens"] for text in (first, second))
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return n, a, b


def text_of(server: Server, tokens: list[int]) -> str:
    return str(server.ask("/detokenize", {"tokens": tokens})["content"])


def read_by_reason(server: Server) -> Counter[str]:
    text = server.get("/metrics").data.decode()
    found = re.findall(r'^everwarm_prompt_tokens_read_total\{reason="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return Counter({reason: int(float(value)) for reason, value in found})


def test_new_then_a_hit(server):
    story = words(120, 1)
    first, again = (chat(server, story, "Hello there.") for _ in range(2))
    assert cache(first)["reason"] == "new" and first["timings"]["cache_n"] == 0
    assert cache(again)["reason"] == "hit" and again["timings"]["prompt_n"] <= GUARD
    assert cache(again)["n_shared"] == again["usage"]["prompt_tokens"]
    restored = cache(again)["restored"]
    assert restored["n_tokens"] == again["timings"]["cache_n"]
    assert cache(again)["checkpoint"] == f"{restored['kind']}, {restored['how']}"


def test_an_edit_is_named_by_its_token_and_its_words(server):
    before, after = (f"{words(150, 2)} The lantern is {colour}. {words(60, 3)}" for colour in ("crimson", "yellow"))
    n_common, known, given = common_prefix(server, before, after)
    server.ask("/completion", {"prompt": before, "n_predict": 2})
    asked = {"prompt": after, "n_predict": 2, "prompt_cache_diagnostics": True}
    answer = server.ask("/completion", asked)
    found, n_again = cache(answer), n_common - answer["timings"]["cache_n"]
    is_mostly_known = n_again > GUARD and n_again >= len(given) - n_common
    assert found["reason"] == ("no_checkpoint" if is_mostly_known else "edited_at")
    assert found["n_shared"] == n_common and (found["again"] == "no_checkpoint") == (n_again > GUARD)
    diverged = found["diverged"]
    assert diverged["at"] == n_common > GUARD
    assert diverged["before"] == text_of(server, known[n_common - 16 : n_common])
    assert diverged["known"] == text_of(server, known[n_common : n_common + 16])
    assert diverged["given"] == text_of(server, given[n_common : n_common + 16])
    assert diverged["known"] != diverged["given"]


def test_words_come_only_where_they_are_asked_for(server):
    chat(server, words(80, 4), "First question.")
    silent = chat(server, words(80, 4), "Another one.")
    assert set(cache(silent)["diverged"]) == {"at"} and "prompt_cache_diagnostics" not in silent
    told = chat(server, words(80, 4), "Third question.", prompt_cache_diagnostics=True)
    assert set(cache(told)["diverged"]) == {"at", "before", "known", "given"}


def test_a_chat_that_goes_on_is_extended(server):
    story = words(100, 5)
    first = chat(server, story, "Hi.", max_tokens=8)
    message = first["choices"][0]["message"]["content"]
    second = chat(server, story, "Hi.", message, "And now?")
    assert cache(second)["reason"] in ("extended", "edited_at") and cache(second)["again"] is None
    assert second["timings"]["cache_n"] > 100


@pytest.mark.parametrize("off", [{"cache_prompt": False}, {"prompt_cache_options": {"mode": "off", "ttl": "30m"}}])
def test_a_request_that_wants_no_cache_is_told_so(server, off):
    chat(server, words(60, 6), "Hello.")
    answer = chat(server, words(60, 6), "Hello.", prompt_cache_diagnostics=True, **off)
    assert cache(answer)["reason"] == "cache_off" and answer["timings"]["cache_n"] == 0
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert answer["prompt_cache_diagnostics"]["status"] == "miss"


def test_diagnostics_whole_and_streamed(server):
    story = words(90, 7)
    miss = chat(server, story, "Hello.", prompt_cache_diagnostics=True)
    hit = chat(server, story, "Hello.", prompt_cache_diagnostics=True)
    part = chat(server, story, "Something else entirely, please.", prompt_cache_diagnostics=True)
    found = [answer["prompt_cache_diagnostics"] for answer in (miss, hit, part)]
    assert [each["status"] for each in found] == ["miss", "hit", "partial"]
    assert [each["reason"] for each in found] == ["new", "hit", "new"], "the system text alone is no conversation"
    for answer in (miss, hit, part):
        usage, told = answer["usage"], answer["prompt_cache_diagnostics"]
        assert told["cached_tokens"] + told["read_tokens"] == usage["prompt_tokens"]
        assert usage["prompt_tokens_details"]["cache_write_tokens"] == told["read_tokens"]
    body = {"messages": [{"role": "user", "content": story}], "stream": True, "prompt_cache_diagnostics": True}
    events = server.post("/v1/chat/completions", body | {"max_tokens": 2}).events
    assert events[-1]["choices"] == [] and events[-1]["prompt_cache_diagnostics"]["reason"] == "new"


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt_cache_options": {"mode": "x" * 600}},
        {"prompt_cache_options": {"ttl": -1}},
        {"prompt_cache_options": {"ttl": "x" * 65}},
        {"prompt_cache_options": "off"},
        {"prompt_cache_diagnostics": "yes"},
    ],
)
def test_options_out_of_bounds_are_refused_by_name(server, bad):
    reply = server.post("/v1/completions", {"prompt": "a", **bad})
    assert reply.status == 400 and next(iter(bad)) in reply.json["error"]["message"]


def test_no_word_of_one_namespace_reaches_another(server):
    secret = "The password of the vault is swordfish-" + words(120, 8)
    asks = {"prompt_cache_diagnostics": True}
    chat(server, secret, "Remember it.", cache_salt="one")
    probe = secret.replace("swordfish", "guesswork")
    for salt in ("two", ""):
        for text in (secret, probe):
            answer = chat(server, text, "Remember it.", cache_salt=f"{salt}{len(text)}{text is probe}", **asks)
            assert cache(answer)["reason"] == "new" and cache(answer)["diverged"] is None
            assert cache(answer)["n_shared"] == 0
            assert "swordfish" not in json.dumps(answer)
    own = chat(server, probe, "Remember it.", cache_salt="one", **asks)
    assert "fish" in cache(own)["diverged"]["known"]  # its owner is told


def test_the_metrics_by_reason_are_the_sums_over_the_responses(server):
    before, expected = read_by_reason(server), Counter()
    for text in (words(70, 20), words(70, 20), words(70, 20)[:-40] + words(40, 21), words(70, 22)):
        for more in ({}, {"cache_prompt": False}):
            answer = chat(server, text, "Hello.", **more)
            expected[cache(answer)["reason"]] += answer["timings"]["prompt_n"]
    assert len(expected) >= 3
    assert read_by_reason(server) - before == expected


def test_kv_without_a_state_is_no_checkpoint():
    with serving("--checkpoint-every", "0", "--slots", "1") as server:
        long = words(400, 30)
        server.ask("/completion", {"prompt": long, "n_predict": 2})
        cut = long[: len(long) * 3 // 5]
        found = server.ask("/completion", {"prompt": cut, "n_predict": 2})
        assert cache(found)["reason"] == "no_checkpoint"
        assert cache(found)["n_kv"] > found["timings"]["cache_n"] + GUARD


def test_little_ram_is_evicted():
    with serving("--cache-ram", "0", "--spares", "0", "--slots", "1") as server:
        for seed in (31, 32):
            server.ask("/completion", {"prompt": words(200, seed), "n_predict": 2})
        asked = {"prompt": words(200, 31) + " Oh.", "n_predict": 2}
        found = server.ask("/completion", asked)
        assert cache(found)["reason"] == "evicted" and found["timings"]["cache_n"] == 0
        n_common, *_ = common_prefix(server, words(200, 31), asked["prompt"])
        assert cache(found)["n_shared"] >= n_common > 100


# everwarm explain


def body_file(path: Path, body: Any) -> str:
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return str(path)


def messages(system: str, *more: str) -> Any:
    roles = ("user", "assistant", "user")
    message = [{"role": role, "content": text} for role, text in zip(roles, more, strict=False)]
    return {"messages": [{"role": "system", "content": system}, *message]}


def explain_json(tmp_path: Path, first: Any, second: Any, *flags: str) -> Any:
    files = body_file(tmp_path / "a.json", first), body_file(tmp_path / "b.json", second)
    done = run_cli("explain", *files, *(flags or ("--demo",)), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


DATED = "You are kind. Today is 2026-11-{:02}. " + words(100, 40)


def test_explain_agrees_with_a_server_that_has_read_the_first(server, tmp_path):
    first, second = messages(words(120, 41), "Hello there."), messages(words(120, 41), "Something else, please.")
    local = explain_json(tmp_path, first, second)
    remote = explain_json(tmp_path, first, second, "--url", server.url)
    assert {**remote, "model": ""} == {**local, "model": ""}
    limits = {"max_tokens": 2, "prompt_cache_diagnostics": True}
    server.ask("/v1/chat/completions", first | limits)
    answer = server.ask("/v1/chat/completions", second | limits)
    assert answer["timings"]["cache_n"] == local["second"]["n_cached"] > 100
    assert answer["timings"]["prompt_n"] == local["second"]["n_read"]
    assert cache(answer)["reason"] == local["reason"] == "new", "the system text alone is no conversation"
    assert cache(answer)["diverged"]["at"] == local["diverged"]["at"] == local["n_common"]
    assert cache(answer)["diverged"]["given"] == local["diverged"]["given"]


@pytest.fixture(scope="module")
def source():
    with source_for(EMBEDDED, None, None, None, CheckpointParams()) as opened:
        yield opened


def test_explain_names_usual_causes(tmp_path, source):
    def hints(first: Any, second: Any) -> str:
        files = (body_file(tmp_path / name, body) for name, body in (("a", first), ("b", second)))
        return " ".join(explained(*(read_file(Path(file)) for file in files), source).hints)

    plain = messages("You are kind.", "Hi.", "<think>Hm.</think>Hello.", "Bye.")
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "find")]
    assert "date or time" in hints(messages(DATED.format(14), "Hi."), messages(DATED.format(15), "Hi."))
    assert "another order" in hints(plain | {"tools": tools}, plain | {"tools": tools[::-1]})
    assert "gone: find" in hints(plain | {"tools": tools}, plain | {"tools": tools[:1]})
    assert "thinking was stripped" in hints(plain, messages("You are kind.", "Hi.", "Hello.", "Bye."))
    assert "white space" in hints(plain, messages("You are  kind.", "Hi."))
    assert "cache_salt" in hints(plain, plain | {"cache_salt": "b"})
    swapped = {"messages": [plain["messages"][0], {"role": "assistant", "content": "Hello."}]}
    assert "order of roles" in hints(plain, swapped)
    assert hints(plain, plain) == ""


def test_explain_in_words(tmp_path):
    files = (
        body_file(tmp_path / "a.json", messages(DATED.format(14), "Hi.")),
        body_file(tmp_path / "b.json", messages(DATED.format(15), "Hi.")),
    )
    done = run_cli("explain", *files, "--demo")
    assert done.returncode == 0 and "edited_at" in done.stdout and "a date or time" in done.stdout
    assert "Today is 2026-11-1" in done.stdout
    same = run_cli("explain", files[0], files[0], "--demo")
    assert "hit" in same.stdout and "first difference" not in same.stdout


def test_explain_takes_completions_and_tokens(tmp_path):
    found = explain_json(tmp_path, {"prompt": list(range(20, 120))}, {"prompt": [*range(20, 90), *range(5, 15)]})
    assert (found["first"]["n_tokens"], found["n_common"], found["diverged"]["at"]) == (100, 70, 70)
    off = explain_json(tmp_path, {"prompt": words(80, 1)}, {"prompt": words(80, 1), "cache_prompt": False})
    assert (off["reason"], off["second"]["n_cached"]) == ("cache_off", 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "neither messages (chat) nor prompt"),
        ({"input": "a"}, "neither messages (chat) nor prompt"),
        ({"messages": []}, "$.messages"),
        ({"messages": "a"}, "$.messages"),
        ({"prompt": ""}, "a prompt is empty"),
        ({"prompt": [1, "a"]}, "a list of token ids"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": -5}, "$.max_tokens"),
    ],
)
def test_explain_says_what_is_wrong_with_a_file(tmp_path, source, body, message):
    good = read_file(Path(body_file(tmp_path / "a.json", {"prompt": "Once upon a time"})))
    with pytest.raises(BadRequest, match=re.escape(message)):
        explained(good, read_file(Path(body_file(tmp_path / "b.json", body))), source)


def test_explain_without_files_models_or_servers(tmp_path):
    good = body_file(tmp_path / "a.json", {"prompt": "Once upon a time"})
    empty, torn = body_file(tmp_path / "e.json", {"messages": []}), body_file(tmp_path / "t.json", "{")
    none = str(tmp_path / "none.json")
    for second, flags, message in (
        (good, (), "--demo, or --url"),
        (good, ("--demo", "--url", "http://127.0.0.1:9"), "--demo, or --url"),
        (good, ("--model", good), "is not a GGUF file"),
        (none, ("--demo",), "none.json cannot be read: No such file"),
        (empty, ("--demo",), "e.json: the body cannot be used"),
        (torn, ("--demo",), "t.json is not JSON"),
    ):
        done = run_cli("explain", good, second, *flags)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr, (flags, done.stderr)


@pytest.mark.parametrize(
    ("url", "message"), [("http://127.0.0.1:9", "no answer from"), ("nonsense", "is not a server's address")]
)
def test_explain_says_what_is_wrong_with_a_server(url, message):
    with pytest.raises(EverwarmError, match=message), source_for(None, url, None, None, CheckpointParams()):
        pass


def test_explain_does_not_read_again_what_it_calls_known(tmp_path):
    same = messages(words(120, 43), "Hello there.")
    told = explain_json(tmp_path, same, same)
    assert told["reason"] == "hit" and told["second"]["n_read"] == 0 and told["diverged"] is None
