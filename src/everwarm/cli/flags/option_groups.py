"""The headings under which ``--help`` lists the flags of ``serve``. The rarely needed ones appear with ``--help-all``."""

from __future__ import annotations

import sys

from cyclopts import Group

HELP_ALL = "--help-all"
_SHOWS_ALL = HELP_ALL in sys.argv

NETWORK = Group("Network", sort_key=0)
MODELS = Group("Many models", sort_key=1)
MEMORY = Group("Context and memory", sort_key=2)
COMPUTE = Group("Compute", sort_key=3)
CHECKPOINTS = Group("Checkpoints", sort_key=4)
DEFAULTS = Group("Defaults of requests", sort_key=5, show=_SHOWS_ALL)
PLACEMENT = Group("Where weights lie", sort_key=6, show=_SHOWS_ALL)
ROPE = Group("RoPE and YaRN", sort_key=7, show=_SHOWS_ALL)
