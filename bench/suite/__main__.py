"""``python -m bench.suite --help``."""

from bench.suite.command import main

main()
