"""Open each model file named on the command line in a fork and print what came of it: `python -m support.open_models`."""

import json
import sys
from pathlib import Path

from everwarm.llama.model import Model
from support.trials import expect_crashes, outcome


def try_to_open(path: str) -> str:
    with Model(Path(path)) as model:
        return f"opened {model.description}"


def main() -> None:
    expect_crashes()
    json.dump({path: outcome(try_to_open, path) for path in sys.argv[1:]}, sys.stdout)


if __name__ == "__main__":
    main()
