"""A Python package as syntax trees, and what its shape can be asked: imports, cycles, purity, names.

Reads files once (``read``); everything after that is computed from the trees. Knows nothing of Everwarm in particular:
``tests/structure`` states the rules, and tries each on a made-up package that breaks it.

``cd tests && python -m support.source_tree ../src/everwarm`` prints how large and how tangled a package is.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef

# Modules that reach a clock, a disk, a network, a process, a log, a thread or chance.
IMPURE_MODULES = frozenset(
    {
        "asyncio",
        "ctypes",
        "httpx",
        "io",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "secrets",
        "shutil",
        "signal",
        "socket",
        "sqlite3",
        "starlette",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "urllib.request",
        "uuid",
    }
)
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval"})
PURITY = re.compile(r"\bPure\b(?! ASGI)")  # as a sentence of its own; "pure ASGI" is a kind of middleware
ENTRY_POINT = re.compile(r"[\w.]+:\w+")
# Decorators that change how a function is called. Any other may register it somewhere, which is a use.
PLAIN_DECORATORS = frozenset(
    {
        "abstractmethod",
        "asynccontextmanager",
        "cache",
        "cached_property",
        "classmethod",
        "contextmanager",
        "dataclass",
        "final",
        "lru_cache",
        "override",
        "property",
        "runtime_checkable",
        "setter",
        "staticmethod",
        "total_ordering",
        "wraps",
    }
)
# Foreign bases that call no public method of a class by name.
INERT_BASES = frozenset(
    {
        "ABC",
        "BaseException",
        "Enum",
        "Exception",
        "ExceptionGroup",
        "Generic",
        "IntEnum",
        "NamedTuple",
        "OSError",
        "Protocol",
        "RuntimeError",
        "StrEnum",
        "Struct",
        "TypedDict",
        "ValueError",
        "object",
    }
)


@dataclass(frozen=True)
class Module:
    name: str  # dotted, without the package's own name: "gateway.http.sse"; a folder's __init__ has the folder's name
    path: Path
    tree: ast.Module

    @property
    def is_folder(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def folder(self) -> str:
        return self.name if self.is_folder else self.name.rpartition(".")[0]

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""


@dataclass(frozen=True)
class Package:
    name: str
    modules: Mapping[str, Module]

    def imports(self, module: Module) -> set[str]:
        """The package's own modules that this one imports: at its top, in functions and under TYPE_CHECKING."""
        return {found for name in imported(module) if (found := self._own(name)) is not None} - {module.name}

    def _own(self, name: str) -> str | None:
        """The deepest module that an imported name leads to: ``package.a.b.Class`` is in ``a.b``."""
        if name != self.name and not name.startswith(f"{self.name}."):
            return None
        inner = name.removeprefix(self.name).removeprefix(".")
        while inner not in self.modules and inner:
            inner = inner.rpartition(".")[0]
        return inner


def read(root: Path) -> Package:
    """The package whose folder this is."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, ast.parse(path.read_text()))
    return Package(root.name, modules)


def unnamed_modules(package: Package) -> list[str]:
    """Modules that the docstring of their folder does not name."""
    inside = [module for module in package.modules.values() if not module.is_folder and module.name != "__main__"]
    return [each.name for each in inside if f"``{each.path.stem}``" not in package.modules[each.folder].docstring]


def imported(module: Module) -> Iterator[str]:
    """Every imported name, dotted and absolute: ``from a import b`` is ``a.b``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_roots(module: Module) -> set[str]:
    return {name.split(".")[0] for name in imported(module)}


def complaints(found: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """What breaks a rule and is not on its list of exceptions, and what is on the list without need: a list must shrink."""
    new = [f"{name} breaks the rule" for name in sorted(set(found) - set(allowed))]
    return new + [f"{name} needs no exception any more" for name in sorted(set(allowed) - set(found))]


def modules_reaching(package: Package, folder: str) -> set[str]:
    """Modules that import something of this folder, directly or through others."""
    edges = {name: package.imports(module) for name, module in package.modules.items()}
    return {name for name in edges if any(folder in _ancestors(found) for found in _reachable(name, edges))}


def cycles(package: Package) -> list[frozenset[str]]:
    """Groups of modules each of which imports all others of its group, directly or not."""
    edges = {name: package.imports(module) for name, module in package.modules.items()}
    reach = {name: _reachable(name, edges) for name in edges}
    groups = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in edges if name in reach[name]
    }
    return sorted(groups, key=sorted)


def _reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += edges[name]
    return found


def forbidden_imports(package: Package, allowed: Mapping[str, set[str]]) -> list[str]:
    """``importer -> imported`` for each import that leaves a folder towards one that is not allowed.

    The rule of a module is the one of the longest folder (or module) in ``allowed`` that holds it. What it allows is
    itself, the package's own ``__init__``, and all folders named there with everything in them. A module without a rule
    may import everything.
    """
    found = []
    for module in package.modules.values():
        rule = next((folder for folder in _ancestors(module.name) if folder in allowed), None)
        if rule is not None:
            good = allowed[rule] | {rule}
            bad = [name for name in package.imports(module) if name and not good.intersection(_ancestors(name))]
            found += [f"{module.name} -> {name}" for name in sorted(bad)]
    return sorted(found)


def imports_between(package: Package, importing: str, imported_from: str) -> list[str]:
    """``importer -> imported`` for each import from one folder (or module) to another."""
    return [
        f"{module.name} -> {name}"
        for module in package.modules.values()
        if importing in _ancestors(module.name)
        for name in sorted(package.imports(module))
        if imported_from in _ancestors(name)
    ]


def _ancestors(name: str) -> Iterator[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def modules_per_folder(package: Package) -> Counter[str]:
    return Counter(module.folder for module in package.modules.values() if not module.is_folder)


def pure_modules(package: Package) -> list[Module]:
    """Modules whose docstring says "Pure", or that lie in a folder whose docstring says so."""
    says_so = {name for name, module in package.modules.items() if PURITY.search(module.docstring)}
    return [
        module for name, module in package.modules.items() if not module.is_folder and {name, module.folder} & says_so
    ]


def effects(module: Module) -> set[str]:
    """What a pure module must not have: the imports and calls with effects."""
    reached = {name for name in imported(module) if IMPURE_MODULES.intersection(_ancestors(name))}
    calls = (node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    return reached | {func.id for func in calls if isinstance(func, ast.Name) and func.id in IMPURE_CALLS}


def repeated_classes(package: Package) -> dict[str, list[str]]:
    """Public classes that have the same name, with the modules they are in."""
    places = defaultdict(list)
    for module in package.modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def repeated_modules(package: Package) -> dict[str, list[str]]:
    """File names that stand in more than one folder."""
    places = defaultdict(list)
    for module in package.modules.values():
        if not module.is_folder:
            places[module.name.rpartition(".")[2]].append(module.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def unused_names(package: Package, others: Iterable[ast.Module] = ()) -> list[str]:
    """Public functions, classes, constants and methods that neither the package nor ``others`` mention.

    A mention is any use of the identifier outside its own definition, whatever object it belongs to: Python cannot
    tell more without running. Not judged: methods of classes that extend a foreign class, which may call them, and
    functions with a decorator that may register them.
    """
    trees = [module.tree for module in package.modules.values()]
    mentions = Counter(name for tree in [*trees, *others] for name in _mentions(tree))
    foreign = _foreign_classes(trees)
    return sorted(
        f"{module.name}.{qualified}"
        for module in package.modules.values()
        for qualified, name, own in _public_names(module.tree, foreign)
        if mentions[name] <= own
    )


def _foreign_classes(trees: Iterable[ast.Module]) -> set[str]:
    """Classes with a base that the package does not define, but for those that call no method of theirs."""
    bases = {
        node.name: {_last_name(base) for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    own = bases.keys() | INERT_BASES
    return {name for name, found in bases.items() if found - own}


def _last_name(node: ast.expr) -> str:
    """``c`` of ``a.b.c``, ``c[T]`` and ``c(...)``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.id if isinstance(node, ast.Name) else ""


def _public_names(tree: ast.Module, foreign: set[str]) -> Iterator[tuple[str, str, int]]:
    """Qualified name, bare name, and how often the definition itself mentions the name."""
    for node in tree.body:
        if isinstance(node, Definition):
            yield from _definition(node, node.name)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in foreign:
            for inner in node.body:
                if isinstance(inner, Function):
                    yield from _definition(inner, f"{node.name}.{inner.name}")
        for target in _assigned(node):
            if not target.startswith("_"):
                yield target, target, 0


def _definition(node: Definition, qualified: str) -> Iterator[tuple[str, str, int]]:
    is_plain = all(_last_name(decorator) in PLAIN_DECORATORS for decorator in node.decorator_list)
    if is_plain and not node.name.startswith("_"):
        yield qualified, node.name, sum(name == node.name for name in _mentions(node))


def _assigned(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _mentions(tree: ast.AST) -> Iterator[str]:
    """Identifiers that are used, not defined: names and attributes that are read, and ``Name`` in "module:Name".

    An import alone is no use, and neither is a name in ``__all__``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ENTRY_POINT.fullmatch(node.value):
            yield node.value.partition(":")[2]


def long_functions(module: Module, most: int) -> list[str]:
    """``name: n lines`` for each function that has more lines than that."""
    functions = (node for node in ast.walk(module.tree) if isinstance(node, Function))
    return [f"{module.name}.{node.name}: {_n_lines(node)} lines" for node in functions if _n_lines(node) > most]


def counts(package: Package) -> dict[str, int]:
    """How large and how tangled a package is, to compare two versions of it."""
    trees = [module.tree for module in package.modules.values()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = sorted(_n_lines(node) for node in nodes if isinstance(node, Function))
    ternaries = [node for node in nodes if isinstance(node, ast.IfExp)]
    groups = cycles(package)
    return {
        "folders": sum(module.is_folder for module in package.modules.values()),
        "modules": sum(not module.is_folder for module in package.modules.values()),
        "most modules in a folder": max(modules_per_folder(package).values()),
        "lines": sum(len(module.path.read_text().splitlines()) for module in package.modules.values()),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "class names used twice": len(repeated_classes(package)),
        "module names used twice": len(repeated_modules(package)),
        "functions": len(functions),
        "lines of a function, median": functions[len(functions) // 2],
        "lines of a function, p95": functions[len(functions) * 95 // 100],
        "import cycles": len(groups),
        "modules in a cycle": sum(map(len, groups)),
        "parallel assignments": sum(map(_is_parallel, nodes)),
        "ternaries": len(ternaries),
        "ternaries in ternaries": sum(any(isinstance(x, ast.IfExp) for x in _inside(node)) for node in ternaries),
    }


def _n_lines(node: Function) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def _is_parallel(node: ast.AST) -> bool:
    """``a, b = x, y``."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    return (inner for inner in ast.walk(node) if inner is not node)


if __name__ == "__main__":
    for name, n in counts(read(Path(sys.argv[1]).resolve())).items():
        print(f"{n:8,}  {name}")
