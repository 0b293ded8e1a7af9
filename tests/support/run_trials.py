"""Run every trial and print the outcomes as JSON.

One process opens the models and forks per trial: a crash costs one trial, and a trial costs milliseconds.
"""

import json
import sys

from support import trials_blobs, trials_calls
from support.steps import KINDS
from support.trials import ARCHS_OF, TRIALS, expect_crashes, model, outcome

MODULES = (trials_blobs, trials_calls)  # importing them registers their trials


def main() -> None:
    expect_crashes()
    for arch in KINDS:
        model(arch)
    found = {f"{name} {arch}": outcome(TRIALS[name], arch) for name in TRIALS for arch in ARCHS_OF[name]}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
