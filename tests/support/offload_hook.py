"""For the control in ``test_acknowledged``: an engine that would keep turns when it is idle, and is killed before that."""

from dataclasses import replace

from everwarm.engine.core import Core


def keep_late(core: Core) -> None:
    core.cache = replace(core.cache, offload=None)
    core.keeper.offload = None
    Core.tidy = lambda _core: False  # type: ignore[method-assign]
