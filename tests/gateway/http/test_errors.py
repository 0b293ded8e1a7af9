"""The drawn tree of errors is the tree of errors, and each has the status that the drawing says."""

import re

from everwarm import errors
from everwarm.errors import EverwarmError, HttpError, Refused

_LINE = re.compile(r"^((?:│   |    )*)(?:├── |└── )?(\w+) +(\d{3}|any)  \S", re.MULTILINE)


def drawn() -> dict[str, tuple[str, str]]:
    """Each error's parent and status."""
    path: list[str] = []
    found = {}
    for indent, name, status in _LINE.findall(errors.__doc__ or ""):
        depth = 0 if not path else len(indent) // 4 + 1
        del path[depth:]
        found[name] = (path[-1] if path else "Exception", status)
        path.append(name)
    return found


def all_errors(kind: type[EverwarmError] = EverwarmError) -> list[type[EverwarmError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in all_errors(child))]


def test_the_drawing_has_every_error_with_its_parent_and_status():
    kinds = [kind for kind in all_errors() if kind.__module__ == errors.__name__]
    any_status = (HttpError, Refused)  # the status is an argument
    assert drawn() == {
        kind.__name__: (kind.__bases__[0].__name__, "any" if kind in any_status else str(kind.status)) for kind in kinds
    }
