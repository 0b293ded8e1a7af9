"""Open each projector file named, look at an image or hear a sound with it in a fork, and print what came of it.

`python -m support.open_projectors ARCH FILE...`, ARCH "sounds" for a projector of sounds, or with `--unchecked` in front
to see what libmtmd makes of it alone.
"""

import json
import resource
import sys
from functools import partial
from pathlib import Path

from everwarm.llama.media import media_model, projector_file
from everwarm.llama.media.media_model import MediaModel
from everwarm.llama.model import Model
from support.models import tiny_audio, tiny_vision
from support.sounds import encoded, samples
from support.trials import expect_crashes, outcome
from support.vision import make_image

SIZE = (96, 64)


def projector_of(arch: str) -> tuple[Path, Path]:
    return tiny_audio("qwen35") if arch == "sounds" else tiny_vision(arch)


def look(model: Model, path: str) -> str:
    with MediaModel(Path(path), model, n_threads=1, use_gpu=False) as opened:
        if opened.sample_rate:
            return f"heard {encoded(opened, samples(1).tobytes()).shape.n_tokens} cells"
        shape = opened.shape(*SIZE)
        found = opened.encode(make_image(*SIZE), *SIZE)
        assert found.shape == shape
        return f"saw {shape.n_tokens} cells"


def main() -> None:
    expect_crashes()
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    arguments = sys.argv[1:]
    if arguments[0] == "--unchecked":
        arguments = arguments[1:]
        projector_file.check = lambda file: None
        media_model.Projector = lambda path, size_of: type("Any", (), {"style": ""})
    arch, *paths = arguments
    with Model(projector_of(arch)[0]) as model:
        json.dump({path: outcome(partial(look, model), path) for path in paths}, sys.stdout)


if __name__ == "__main__":
    main()
