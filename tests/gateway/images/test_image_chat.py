"""Images over HTTP, with the real client: shown once, remembered through turns, crashes, restarts and swaps."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.image_files import data_url
from support.models import tiny_model, tiny_vision
from support.server import GUARD, Server, serving, serving_models, until


def shown(text: str, *images: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts, {"type": "text", "text": "?"}]}


def say(server: Server, messages: list[dict[str, Any]], **more: Any) -> Any:
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, **more}
    return server.ask("/v1/chat/completions", body)


def read(answer: Any) -> tuple[int, int]:
    """Prompt tokens, and how many of them were read now."""
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == answer["usage"]["prompt_tokens"]
    return answer["usage"]["prompt_tokens"], timings["prompt_n"]


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


TALK = [
    shown("Look at this", data_url(1)),
    {"role": "assistant", "content": "I see."},
    {"role": "user", "content": "What?"},
]
EDIT = [shown("See this", data_url(1)), *TALK[1:]]
NEW = 60  # a reply, a short question, and what the template puts around them


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model, mmproj = tiny_vision("qwen35")
    with serving("--mmproj", str(mmproj), model=model) as server:
        yield server


@pytest.fixture(scope="module")
def golden() -> str:
    model, mmproj = tiny_vision("qwen35")
    with serving("--mmproj", str(mmproj), model=model) as server:
        return text_of(say(server, TALK, deterministic=True))


def test_the_next_turn_reads_only_what_is_new(server):
    first, _ = read(say(server, TALK[:1]))
    text_only, _ = read(say(server, [shown("Look at this")]))
    assert first > text_only + 10, "the image counts in the usage"
    n_prompt, n_read = read(say(server, TALK))
    assert n_read <= n_prompt - first + GUARD <= NEW + GUARD
    n_prompt, n_read = read(say(server, TALK))
    assert n_read <= GUARD, "the same again"
    n_prompt, n_read = read(say(server, [shown("Look at this", data_url(2)), *TALK[1:]]))
    assert n_prompt > n_read > 60, "another image is another conversation from there on"


def test_the_real_client_shows_images_streaming_and_not(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        options = {"model": "any", "messages": TALK, "max_tokens": 6, "temperature": 0}
        whole = client.chat.completions.create(**options)
        chunks = list(client.chat.completions.create(**options, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="image"):
            client.chat.completions.create(**options | {"messages": [shown("Look", "data:image/png;base64,AAAA")]})


def test_every_kind_of_file_is_the_same_image_where_its_pixels_are(server):
    first = say(server, [shown("A form", data_url(5, form="PNG"))])
    assert read(say(server, [shown("A form", data_url(5, form="GIF"))]))[0] == read(first)[0]
    again = say(server, [shown("A form", data_url(5, form="PNG").replace("image/png", "image/jpeg"))])
    assert read(again)[1] <= GUARD, "content decides, not what it is called"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ],
)
def test_what_is_no_image_is_refused_and_says_why(server, part):
    reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
    assert reply.status == 400 and len(reply.json["error"]["message"]) > 20
    assert "Traceback" not in reply.data.decode()


def test_a_model_without_a_projector_refuses_images():
    with serving() as server:
        reply = server.post("/v1/chat/completions", {"messages": TALK, "max_tokens": 1})
        assert reply.status == 400 and "--mmproj" in reply.json["error"]["message"]
        assert server.get("/props").json["modalities"]["vision"] is False


def test_an_engine_that_died_knows_the_conversation_and_is_sent_the_pixels_it_needs(server, golden):
    before = say(server, TALK, deterministic=True)
    assert text_of(before) == golden and server.get("/props").json["modalities"]["vision"] is True
    (model,) = [m["id"] for m in server.get("/v1/models").json["data"]]
    until(lambda: server.is_settled(model), "everything is in RAM")
    (pid,) = server.engine_pids
    os.kill(pid, signal.SIGKILL)
    until(lambda: not server.is_ready(), "the death is noticed")
    until(server.is_ready, "it is back")
    again = say(server, TALK, deterministic=True)
    assert read(again)[1] <= GUARD and text_of(again) == golden
    n_prompt, n_read = read(say(server, EDIT))  # the image must be encoded again: only the gateway has its pixels
    assert n_prompt > n_read > 60


def test_a_restart_goes_on_from_disk_and_a_slot_file_brings_it_back(tmp_path: Path, golden):
    model, mmproj = tiny_vision("qwen35")
    disk = ("--disk-cache", "1GiB", "--state-dir", str(tmp_path / "states"), "--restore-policy", "always")
    flags = ("--mmproj", str(mmproj), *disk, "--slot-save-path", str(tmp_path))
    with serving(*flags, model=model) as server:
        say(server, TALK[:1], id_slot=0)
        assert server.ask("/slots/0?action=save", {"filename": "a.bin"})["n_saved"] > 40
    with serving(*flags, model=model) as server:
        n_prompt, n_read = read(answer := say(server, TALK))
        assert n_read <= NEW + GUARD and n_prompt > 60 and text_of(answer) == golden
    with serving("--mmproj", str(mmproj), "--slot-save-path", str(tmp_path), model=model) as server:
        assert server.ask("/slots/0?action=restore", {"filename": "a.bin"})["n_restored"] > 40
        assert read(say(server, TALK, id_slot=0))[1] <= NEW + GUARD


def test_a_swap_keeps_what_was_seen(tmp_path: Path, golden):
    model, mmproj = tiny_vision("qwen35")
    shutil.copy(model, tmp_path / "seer.gguf")
    shutil.copy(mmproj, tmp_path / "mmproj-seer.gguf")
    shutil.copy(tiny_model("lfm2"), tmp_path / "other.gguf")
    with serving_models(tmp_path, "--models-max", "1") as server:
        assert {m["id"] for m in server.get("/models").json["data"]} == {"seer", "other"}
        say(server, TALK[:1], model="seer")
        say(server, [{"role": "user", "content": "hello"}], model="other")
        answer = say(server, TALK, model="seer")
        assert read(answer)[1] <= NEW + GUARD and text_of(answer) == golden


def test_a_completion_may_have_pictures_in_its_prompt(server):
    """llama-server's form. The image makes a difference, and a prompt that has too few places for it is refused."""
    first, second = (data_url(i).partition(",")[2] for i in (1, 2))

    def complete(text: str, *data: str) -> Any:
        prompt = {"prompt_string": text, "multimodal_data": list(data)}
        return server.post("/completion", {"prompt": prompt, "n_predict": 4, "temperature": 0, "n_probs": 1})

    seen, other = (complete("What is <__media__> this?", data).json for data in (first, second))
    assert seen["tokens_evaluated"] > 20 and seen["tokens_predicted"] > 0
    assert seen["completion_probabilities"] != other["completion_probabilities"]
    for text, data in (("no place", [first]), ("<__media__>", [first, second]), ("<__media__>", ["!"])):
        assert complete(text, *data).status == 400
