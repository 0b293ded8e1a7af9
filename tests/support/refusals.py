"""A libllama that refuses: each helper makes a core's context fail some of its next calls."""

from everwarm.engine.core import Core
from everwarm.errors import DecodeFailed, StateRejected


class Refusals:
    """Wraps a method of the context so that its next calls are refused the way libllama refuses them."""

    def __init__(self, core: Core, name: str, refuse, times: int = 1, skip: int = 0) -> None:
        self.n_refused, self.n_calls = 0, 0
        original = getattr(core.context, name)

        def wrapped(*args, **kwargs):
            self.n_calls += 1
            if skip < self.n_calls and self.n_refused < times:
                self.n_refused += 1
                refuse(*args)
            return original(*args, **kwargs)

        setattr(core.context, name, wrapped)


def refuse_restores(core: Core, times: int = 1) -> Refusals:
    def refuse(seq, *_):
        core.context._stateless[seq] = True  # the KV stays, the state is gone
        raise StateRejected("injected")

    return Refusals(core, "restore", refuse, times)


def refuse_splices(core: Core, times: int = 1, skip: int = 0) -> Refusals:
    def refuse(*_):
        raise StateRejected("injected")

    return Refusals(core, "splice_segment", refuse, times, skip)


def fail_decodes(core: Core, times: int = 1, skip: int = 0) -> Refusals:
    def refuse(feeds):
        for feed in feeds:
            core.context.drop(feed.seq)
        raise DecodeFailed("injected")

    return Refusals(core, "decode", refuse, times, skip)
