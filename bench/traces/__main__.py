"""``python -m bench.traces --help``."""

from bench.traces.command import main

main()
