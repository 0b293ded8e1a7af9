"""``python -m bench.scaling``."""

from bench.scaling.report import run

run()
