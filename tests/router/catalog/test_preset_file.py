"""llama-server's INI file of presets becomes the tables of a models file."""

import pytest

from everwarm.engine.settings import EngineSettings
from everwarm.errors import BadRequest
from everwarm.router.catalog.catalog import discover
from everwarm.router.catalog.models_file import models_of
from support.models import tiny_model

WHOLE = """
version = 1

; for all
[*]
c = 2048
n-gpu-layers = 8
[custom]
model = models/a.gguf
c = 1024
np = 2
jinja = true
LLAMA_ARG_CACHE_RAM = 64
alias = one, two
load-on-startup = on
sleep-idle-seconds = 30
[ggml-org/some-model:Q8_0]
ngl = auto
fa = on
"""


def test_sections_are_models_and_keys_are_flags():
    found = models_of(WHOLE, "my.ini", "/models")["models"]
    assert found == {
        "custom": {
            "ctx-size": 1024,
            "n-gpu-layers": 8,
            "path": "/models/models/a.gguf",
            "slots": 2,
            "cache-ram": 64,
            "alias": ("one", "two"),
            "load-on-start": True,
            "ttl": 30.0,
        },
        "ggml-org/some-model:Q8_0": {
            "ctx-size": 2048,
            "n-gpu-layers": -1,
            "flash-attn": "on",
            "hf": "ggml-org/some-model:Q8_0",
        },
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\ntemp = 0.5", r"\[a\] has 'temp', which holds for all models here: give --temp on the command line"),
        ("[a]\nc = many", r"\[a\] c is 'many'; give a whole number"),
        ("[a]\nload-on-startup = perhaps", "give true or false"),
        ("[a\nc = 1", "is not valid INI"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_place(text, words):
    with pytest.raises(BadRequest, match=words):
        models_of(text, "my.ini", "/")


def test_a_server_reads_it_like_its_own_file(tmp_path):
    file = tmp_path / "presets.ini"
    file.write_text(f"[*]\nctx-size = 512\n[tiny]\nmodel = {tiny_model('llama')}\nparallel = 3\n")
    (spec,) = discover(file, EngineSettings()).specs.values()
    assert (spec.id, spec.settings.n_ctx, spec.settings.n_slots, spec.source) == ("tiny", 512, 3, "config")
    file.write_text("[tiny]\nmodel = nothing.gguf\n")
    assert [model.id for model in discover(file, EngineSettings()).broken] == ["tiny"]
