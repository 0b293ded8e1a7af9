"""``python -m bench.scaling [GROUP ...]``: all groups of measurements, or those that are named."""

import sys

from bench.scaling.report import MEASURES, run

run(sys.argv[1:] or tuple(MEASURES))
