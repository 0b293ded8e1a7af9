"""For the control in ``test_acknowledged``: an engine that would keep turns when it is idle, and is killed before that."""

from everwarm.engine.core import Core


def keep_late(core: Core) -> None:
    core.cache.offload = None
    Core.tidy = lambda _core: False  # type: ignore[method-assign]
