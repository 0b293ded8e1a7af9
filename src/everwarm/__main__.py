"""``python -m everwarm`` is the command line."""

from everwarm.cli.app import main

main()
