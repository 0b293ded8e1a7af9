"""Every public name is used, no two classes or modules share one, and every folder names its modules."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from support.source_tree import Package, complaints, repeated_classes, repeated_modules, unnamed_modules, unused_names

ROOT = Path(__file__).parents[2]
MakePackage = Callable[[dict[str, str]], Package]

# Names that nothing in src, bench or docs mentions, and why they are there.
USED_ELSEWHERE = {
    "cli.tiny.tiny": "cli.app registers the commands of some modules by their name",
    **{
        f"cli.models.{name}": "cli.app registers the commands of some modules by their name"
        for name in ("list_models", "show_loaded")
    },
    "cli.help_page.LineFormatter.render_usage": "cyclopts calls it",
    "ray.replica.Replica.check_health": "Ray Serve calls it",
    "ray.replica.Replica.forward": "the ingress calls it by name, through Ray",
    "ray.replica.Replica.record_autoscaling_stats": "Ray Serve calls it",
    "ray.replica.Replica.record_routing_stats": "Ray Serve calls it",
    "router.supervise.engine_process.Listener.data_received": "asyncio calls it",
    **{
        f"state.policy.CheckpointParams.with_{field}": "for use as a library: docs/checkpoints.md"
        for field in ("every_n_tokens", "max_checkpoints", "min_gap", "min_tokens")
    },
    "gateway.images.image_loader.ImageLoader.child_pids": "tests kill decoders",
}
# The same idea in several folders: the dialects are built alike, and each process has its settings.
SHARED_MODULE_NAMES = {
    "app": "cli.app reads the command line, gateway.app builds the ASGI application",
    "encode": "one per dialect: replies as JSON",
    "explain": "the command and what it does",
    "routes": "one per dialect: paths and their handlers",
    "schema": "one per dialect: request bodies",
    "models": "cli.models has the commands, gateway.admin.models the routes, gateway.ollama.models what its clients know",
    "prewarm": "the gateway offers the next turn, the engine reads it in idle time",
    "settings": "one per process",
}
SHARED_CLASS_NAMES: dict[str, str] = {}


def trees_outside_of_src() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for folder in ("bench", "docs") for path in (ROOT / folder).rglob("*.py")]


def test_every_public_name_is_used(everwarm: Package) -> None:
    assert complaints(unused_names(everwarm, trees_outside_of_src()), USED_ELSEWHERE) == []


def test_unused_names_are_noticed(make_package: MakePackage) -> None:
    made = make_package(
        {
            "a.py": """
                import app, foreign
                from made.b import used, imported_only
                UNUSED = 1
                ENTRY = "made.b:Entered"
                def recursive(): recursive()
                @app.command
                def registered(): used(ENTRY)
                class Unused: ...
                class Child(foreign.Base):
                    def overridden(self): ...
            """,
            "b.py": """
                from made.a import Child
                def used(_): Child()
                def imported_only(): ...
                def _private(): ...
                class Entered:
                    field: int = 0
                    def called(self): ...
                    def uncalled(self): self.called()
                    @property
                    def unread(self): ...
            """,
        }
    )
    expected = ["a.UNUSED", "a.Unused", "a.recursive", "b.Entered.uncalled", "b.Entered.unread", "b.imported_only"]
    assert unused_names(made) == expected
    assert (
        unused_names(made, [ast.parse("import made.a\nmade.a.recursive(made.a.UNUSED)")])
        == expected[1:2] + expected[3:]
    )


def test_no_class_name_is_used_twice(everwarm: Package) -> None:
    assert complaints(repeated_classes(everwarm), SHARED_CLASS_NAMES) == []


def test_no_module_name_is_used_twice(everwarm: Package) -> None:
    assert complaints(repeated_modules(everwarm), SHARED_MODULE_NAMES) == []


def test_names_that_are_used_twice_are_noticed(make_package: MakePackage) -> None:
    made = make_package(
        {"a/x.py": "class One: ...", "b/x.py": "class One: ...\nclass _Own: ...", "b/y.py": "class _Own: ..."}
    )
    assert repeated_classes(made) == {"One": ["a.x", "b.x"]}
    assert repeated_modules(made) == {"x": ["a.x", "b.x"]}


def test_every_folder_names_its_modules(everwarm: Package) -> None:
    assert unnamed_modules(everwarm) == []


def test_modules_that_their_folder_does_not_name_are_noticed(make_package: MakePackage) -> None:
    made = make_package({"a/__init__.py": '"""``b`` is this, ``cc`` that."""', "a/b.py": "", "a/c.py": ""})
    assert unnamed_modules(made) == ["a.c"]
