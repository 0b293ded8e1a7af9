"""Sounds over HTTP, with the real client: heard once, remembered through turns, a crash and a restart."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.image_files import data_url
from support.models import tiny_audio, tiny_vision
from support.server import GUARD, Server, serving, until
from support.sounds import audio_part, samples, wav


def told(text: str, *parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts, {"type": "text", "text": "?"}]}


def say(server: Server, messages: list[dict[str, Any]], **more: Any) -> Any:
    return server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 6, "temperature": 0, **more})


def read(answer: Any) -> tuple[int, int]:
    """Prompt tokens, and how many of them were read now."""
    return answer["usage"]["prompt_tokens"], answer["timings"]["prompt_n"]


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


TALK = [told("Listen", audio_part(1)), {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
NEW = 60  # a reply, a short question, and what the template puts around them
IMAGE = {"type": "image_url", "image_url": {"url": data_url(1)}}
BELL = base64.b64encode(wav(samples(1))).decode()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model, mmproj = tiny_audio("qwen35", vision=True)
    with serving("--mmproj", str(mmproj), model=model) as server:
        yield server


def test_the_next_turn_reads_only_what_is_new(server):
    first, _ = read(say(server, TALK[:1]))
    text_only, _ = read(say(server, [told("Listen")]))
    assert first > text_only + 10, "the sound counts in the usage"
    n_prompt, n_read = read(say(server, TALK))
    assert n_read <= n_prompt - first + GUARD <= NEW + GUARD
    assert read(say(server, TALK))[1] <= GUARD, "the same again"
    _, n_read = read(say(server, [told("Listen", audio_part(2)), *TALK[1:]]))
    assert n_read > 40, "another sound is another conversation from there on"
    assert read(say(server, [told("Both", audio_part(1), IMAGE)]))[0] > first


def test_the_real_client_sends_sounds_in_chats_and_responses(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        whole = client.chat.completions.create(model="any", messages=TALK, max_tokens=6, temperature=0)
        chunks = client.chat.completions.create(model="any", messages=TALK, max_tokens=6, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        content = [{"type": "input_text", "text": "Listen"}, audio_part(1)]
        made = client.responses.create(model="any", input=[{"role": "user", "content": content}], max_output_tokens=16)
        assert made.usage.input_tokens > 15
        with pytest.raises(openai.BadRequestError, match="no sound of a known kind"):
            client.chat.completions.create(
                model="any", messages=[told("x", {"type": "input_audio", "input_audio": {"data": "aGVsbG8="}})]
            )


def test_what_the_model_can_do_is_shown(server):
    assert server.get("/props").json["modalities"] == {"vision": True, "audio": True, "video": False}
    listed = server.get("/v1/models").json
    assert "multimodal" in listed["models"][0]["capabilities"]
    assert listed["data"][0]["architecture"]["input_modalities"] == ["text", "image", "audio"]


def test_a_completion_may_have_sounds_in_its_prompt(server):
    """llama-server's form, whose files say themselves what they are."""
    image = data_url(1).partition(",")[2]

    def complete(*data: str) -> Any:
        prompt = {"prompt_string": "Hear <__media__> and see <__media__>!", "multimodal_data": list(data)}
        return server.post("/completion", {"prompt": prompt, "n_predict": 4, "temperature": 0, "n_probs": 1})

    first, other = complete(BELL, image).json, complete(BELL, BELL).json
    assert first["tokens_evaluated"] > other["tokens_evaluated"] > 30
    assert first["completion_probabilities"] != other["completion_probabilities"]
    assert complete(BELL, base64.b64encode(wav(samples(1))[:30]).decode()).status == 400


def test_every_bad_sound_is_a_400_and_the_server_goes_on(server):
    too_short = base64.b64encode(wav(samples(1, 0.01))).decode()
    for sound in (None, "x", {}, {"data": ""}, {"data": "!!"}, {"data": 7}, {"data": too_short}, {"url": "file:///x"}):
        body = {"messages": [told("x", {"type": "input_audio", "input_audio": sound})], "max_tokens": 2}
        assert server.post("/v1/chat/completions", body).status == 400, sound
    assert len(text_of(say(server, TALK))) > 0


@pytest.mark.parametrize(("sees", "part", "sentence"), [(False, IMAGE, "no vision"), (True, audio_part(1), "no audio")])
def test_a_model_with_one_sense_says_which_it_lacks(sees, part, sentence):
    model, mmproj = tiny_vision("qwen35") if sees else tiny_audio("qwen35")
    with serving("--mmproj", str(mmproj), model=model) as server:
        refused = server.post("/v1/chat/completions", {"messages": [told("x", part)], "max_tokens": 2})
        assert refused.status == 400 and sentence in refused.json["error"]["message"]
        assert server.get("/props").json["modalities"] == {"vision": sees, "audio": not sees, "video": False}


def test_sounds_survive_a_crash_and_a_restart(tmp_path: Path):
    model, mmproj = tiny_audio("qwen35")
    disk = ("--disk-cache", "1GiB", "--state-dir", str(tmp_path / "states"), "--restore-policy", "always")
    with serving("--mmproj", str(mmproj), *disk, model=model) as server:
        say(server, TALK[:1])
        golden = text_of(say(server, TALK, deterministic=True))
        until(server.is_idle, "its turn is kept")
        (pid,) = server.engine_pids
        os.kill(pid, signal.SIGKILL)
        until(lambda: not server.is_ready(), "the death is noticed")
        until(server.is_ready, "it is back")
        again = say(server, TALK, deterministic=True)
        assert text_of(again) == golden and read(again)[1] <= NEW + GUARD
    with serving("--mmproj", str(mmproj), *disk, model=model) as server:
        again = say(server, TALK, deterministic=True)
        assert text_of(again) == golden and read(again)[1] <= NEW + GUARD
