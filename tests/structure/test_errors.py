"""The drawn tree of errors is the tree of errors, and each has the status that the drawing says."""

import ast
import re

from everwarm import errors
from everwarm.errors import EverwarmError, HttpError
from everwarm.state.remote.bucket import StoreFault
from everwarm.state.store.disk import DirectoryTaken
from everwarm.state.store.slot_file import UnknownOrigin
from support.source_tree import Package

ELSEWHERE = (StoreFault, DirectoryTaken, UnknownOrigin)  # so that they are loaded

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


def test_the_drawing_has_every_error_with_its_parent_and_status() -> None:
    kinds = [kind for kind in all_errors() if kind.__module__.startswith("everwarm.") and kind.__name__[0] != "_"]
    assert set(ELSEWHERE) <= set(kinds)
    assert drawn() == {
        kind.__name__: (kind.__bases__[0].__name__, "any" if issubclass(kind, HttpError) else str(kind.status))
        for kind in kinds
    }


def test_every_error_is_in_the_drawing(everwarm: Package) -> None:
    """Also those of modules that this test does not load."""
    tops = [node for module in everwarm.modules.values() for node in module.tree.body]
    classes = [node for node in tops if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    names = set(drawn())
    assert [c.name for c in classes if {ast.unparse(base) for base in c.bases} & names and c.name not in names] == []
