"""Functions and folders stay small; every module says what it does. A file may be as long as its one idea."""

from __future__ import annotations

from collections.abc import Callable

from support.source_tree import Package, long_functions, modules_per_folder

MakePackage = Callable[[dict[str, str]], Package]

MAX_FUNCTION_LINES = 50
MAX_MODULES = 12  # without __init__


def long_ones(package: Package) -> list[str]:
    return [found for module in package.modules.values() for found in long_functions(module, MAX_FUNCTION_LINES)]


def full_folders(package: Package) -> list[str]:
    return [folder for folder, n in modules_per_folder(package).items() if n > MAX_MODULES]


def test_functions_stay_small(everwarm: Package) -> None:
    assert long_ones(everwarm) == []


def test_long_functions_are_noticed(make_package: MakePackage) -> None:
    body = "    pass\n" * 49
    made = make_package({"a.py": f"def fits():\n{body}\nclass C:\n  async def long(self):\n{body}    pass\n"})
    assert long_ones(made) == ["a.long: 51 lines"]


def test_a_folder_has_at_most_a_dozen_modules(everwarm: Package) -> None:
    assert full_folders(everwarm) == []


def test_full_folders_are_noticed(make_package: MakePackage) -> None:
    made = make_package({f"{folder}/m{i}.py": "" for folder, n in (("a", 12), ("a/b", 13)) for i in range(n)})
    assert full_folders(made) == ["a.b"]


def undocumented(package: Package) -> list[str]:
    return [name for name, module in package.modules.items() if not module.docstring]


def test_every_module_says_what_it_does(everwarm: Package) -> None:
    assert undocumented(everwarm) == []


def test_modules_without_a_docstring_are_noticed(make_package: MakePackage) -> None:
    assert undocumented(make_package({"a.py": "x = 1", "b.py": '"""Says."""'})) == ["a"]
