"""Imports point down: between folders in the named directions, and nowhere in a circle.

Every import counts: at the top of a module, in a function, under TYPE_CHECKING. A cycle means that a type lies in the
wrong module.
"""

from __future__ import annotations

from collections.abc import Callable

from support.source_tree import (
    Package,
    complaints,
    cycles,
    forbidden_imports,
    imported_roots,
    imports_between,
    modules_reaching,
)

MakePackage = Callable[[dict[str, str]], Package]

# Each folder may import itself and what is named here. ``cli`` may import everything.
BASE = {"types", "errors", "config", "logs", "lru", "memory_limits", "confined_process", "sound_files"}
FOLDERS = {
    "types": set[str](),
    "errors": set[str](),
    "logs": set[str](),
    "lru": set[str](),
    "memory_limits": set[str](),
    "confined_process": set[str](),
    "sound_files": set[str](),
    "config": {"errors", "types"},
    "backend": BASE,
    "prompt": BASE,
    "state": BASE | {"prompt"},
    "simulate": BASE | {"prompt", "state", "router"},
    "llama": BASE | {"backend", "prompt"},
    "engine": BASE | {"prompt", "state", "llama"},
    "gateway": BASE | {"prompt", "state", "engine", "router"},
    "router": BASE | {"prompt", "state", "engine"},
    "demo": BASE | {"prompt", "state", "llama", "engine", "gateway", "router"},
    "ray": BASE | {"prompt", "state", "engine", "gateway", "router", "demo"},
}

# The engine is another process: what the gateway and the router know of it are its messages and its settings.
OF_THE_ENGINE = {
    "engine.process.messages",
    "engine.settings",
}
OUTSIDE = BASE | {"prompt", "state"}
INSIDE = {
    "gateway.parsing": BASE | {"gateway.constraints.json_schema"},
    "gateway.constraints": BASE | {"gateway.parsing", "gateway.openai.schema"},
    "gateway.images": BASE,
    "gateway.http": BASE | OF_THE_ENGINE | {"gateway.access"},
    "gateway": OUTSIDE | OF_THE_ENGINE | {"router"},
    "router": OUTSIDE | OF_THE_ENGINE,
    "router.supervise": OUTSIDE | OF_THE_ENGINE | {"router.catalog"},
    "engine.process.messages": BASE | {"engine.settings"},
}
# Every dialect is translated into OpenAI's chat body and uses some of its JSON. They share nothing else.
DIALECTS = ("gateway.openai", "gateway.responses", "gateway.anthropic", "gateway.ollama", "gateway.llamaserver")
SHARED_BY_DIALECTS = ("gateway.openai.schema", "gateway.openai.encode")
# Of ``engine.process``, the rest of the engine knows the messages and how tokens become text.
IN_THE_PROCESS = ("engine.process.worker", "engine.process.request_handler", "engine.process.preparation")
# Folders side by side that know nothing of each other, or only in the other direction.
NEVER = {
    "state.store": ("state.remote", "state.tools"),
    "state.remote": ("state.tools",),
    "llama.constraints": ("llama.media",),
    "llama.media": ("llama.constraints",),
    "engine.core": (*IN_THE_PROCESS, "engine.verify", "engine.build"),
    "engine.cache": ("engine.core", *IN_THE_PROCESS, "engine.verify", "engine.slotfile"),
    "engine.lifecycle": ("engine.core", *IN_THE_PROCESS, "engine.verify", "engine.build"),
    "engine.tiers": ("engine.core", "engine.process", "engine.inspect", "engine.verify", "engine.slotfile"),
    "engine.process": ("engine.verify",),
    "router.catalog": ("router.supervise", "router.pool", "router.plan"),
}


def test_no_module_imports_itself_through_others(everwarm: Package) -> None:
    assert cycles(everwarm) == []


def test_cycles_are_noticed_in_functions_and_for_types_alone(make_package: MakePackage) -> None:
    made = make_package(
        {
            "a.py": "from made.folder import b",
            "folder/b.py": "def later():\n    import made.c",
            "c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.a import Thing",
            "d.py": "from made.a import Thing",
        }
    )
    assert cycles(made) == [{"a", "folder.b", "c"}]


def test_an_exception_that_is_not_needed_is_refused() -> None:
    assert complaints({"a", "b"}, {"b", "c"}) == ["a breaks the rule", "c needs no exception any more"]


def test_imports_between_folders_point_down(everwarm: Package) -> None:
    assert {name.split(".")[0] for name in everwarm.modules} == FOLDERS.keys() | {"", "__main__", "cli"}
    assert forbidden_imports(everwarm, FOLDERS) == []


def test_imports_inside_a_folder_point_down(everwarm: Package) -> None:
    assert forbidden_imports(everwarm, INSIDE) == []


def between_dialects(package: Package) -> list[str]:
    """Imports from a dialect, or from what all of them pass through, to another dialect's own modules."""
    pairs = [(folder, dialect) for folder in (*DIALECTS, "gateway.chat") for dialect in DIALECTS if dialect != folder]
    found = [name for folder, dialect in pairs for name in imports_between(package, folder, dialect)]
    return [name for name in found if not name.endswith(SHARED_BY_DIALECTS)]


def test_dialects_do_not_know_each_other(everwarm: Package) -> None:
    assert between_dialects(everwarm) == []


def test_dialects_that_know_each_other_are_noticed(make_package: MakePackage) -> None:
    made = make_package(
        {
            "gateway/ollama/routes.py": "from made.gateway.openai import encode, routes, schema",
            "gateway/chat/stream.py": "from made.gateway.anthropic.encode import events",
            "gateway/anthropic/encode.py": "",
            "gateway/openai/routes.py": "from made.gateway.openai import encode",
            "gateway/openai/encode.py": "",
            "gateway/openai/schema.py": "",
        }
    )
    expected = ["gateway.ollama.routes -> gateway.openai.routes", "gateway.chat.stream -> gateway.anthropic.encode"]
    assert between_dialects(made) == expected


def test_folders_side_by_side_stay_apart(everwarm: Package) -> None:
    found = [
        name
        for folder, others in NEVER.items()
        for other in others
        for name in imports_between(everwarm, folder, other)
    ]
    assert found == []


def test_imports_between_two_folders_are_noticed(make_package: MakePackage) -> None:
    made = make_package(
        {"a/x.py": "from made.b.deep import y", "a/z.py": "import made.bb", "b/deep/y.py": "", "bb.py": ""}
    )
    assert imports_between(made, "a", "b") == ["a.x -> b.deep.y"]


def test_imports_that_point_up_are_noticed(make_package: MakePackage) -> None:
    made = make_package(
        {
            "low/a.py": "def f():\n    from made.high.b import g",
            "low/deep/c.py": "import made.low.a, made.low.shared, made.base.d",
            "low/shared.py": "import os",
            "high/b.py": "from made.low import a",
            "base/d.py": "",
        }
    )
    rules = {"low": {"base"}, "low.deep": {"base", "low.shared"}}
    assert forbidden_imports(made, rules) == ["low.a -> high.b", "low.deep.c -> low.a"]


def test_only_the_engine_process_can_load_libllama(everwarm: Package) -> None:
    reaching = {name.split(".")[0] for name in modules_reaching(everwarm, "llama")}
    assert reaching.isdisjoint({"gateway", "router", "state", "prompt", "simulate"})


def test_a_way_to_a_folder_through_others_is_noticed(make_package: MakePackage) -> None:
    made = make_package(
        {"c/lib.py": "", "b.py": "def f():\n    from made.c import lib", "a.py": "import made.b", "d.py": ""}
    )
    assert modules_reaching(made, "c") == {"a", "b"}


def test_only_the_llama_folder_uses_ctypes(everwarm: Package) -> None:
    users = {name.split(".")[0] for name, module in everwarm.modules.items() if "ctypes" in imported_roots(module)}
    assert users == {"llama"}


def test_nothing_is_pickled(everwarm: Package) -> None:
    for module in everwarm.modules.values():
        assert imported_roots(module).isdisjoint({"pickle", "marshal", "shelve", "dill"}), module.path
