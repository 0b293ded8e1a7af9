"""A module that says "Pure" in its docstring has no effects, and neither has one in a folder that says so.

Pure modules decide: values in, values out. They read no clock, no disk and no network, log nothing, start nothing and
draw no random numbers, so a test can try thousands of cases in a second.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.source_tree import Package, effects, pure_modules

MakePackage = Callable[[dict[str, str]], Package]

# The decisions that others rely on: without the claim nothing would be checked.
MUST_BE_PURE = (
    "engine.fingerprint",
    "engine.inspect.read_reason",
    "engine.scheduling.scheduler",
    "gateway.chat.stable_points",
    "gateway.constraints.reply_constraint",
    "gateway.parsing.output_parser",
    "llama.blobs",
    "llama.cells",
    "prompt.prompt",
    "router.plan",
    "router.replica_score",
    "simulate.policies",
    "state.ram_eviction",
    "state.lineage",
    "state.policy",
)
EXCEPTIONS = {
    "gateway.parsing.tool_parser": {"secrets"},  # a call that the model left without an id gets a random one
    "router.supervise.restart_policy": {"signal"},  # the names of signals
}


def test_modules_that_say_pure_have_no_effects(everwarm: Package) -> None:
    found = {module.name: effects(module) for module in pure_modules(everwarm)}
    assert {name: effect for name, effect in found.items() if effect} == EXCEPTIONS


@pytest.mark.parametrize("name", MUST_BE_PURE)
def test_modules_that_decide_say_that_they_are_pure(everwarm: Package, name: str) -> None:
    assert name in {module.name for module in pure_modules(everwarm)}


@pytest.mark.parametrize(
    ("source", "effect"),
    [
        ("import time", "time"),
        ("from os.path import exists", "os.path.exists"),
        ("def f():\n    import random", "random"),
        ("text = open('x').read()", "open"),
        ("from urllib.request import urlopen", "urllib.request.urlopen"),
    ],
)
def test_effects_are_noticed(make_package: MakePackage, source: str, effect: str) -> None:
    made = make_package({"a.py": f'"""Decides. Pure."""\n{source}'})
    (module,) = pure_modules(made)
    assert effects(module) == {effect}


def test_modules_and_folders_claim_purity_by_one_word(make_package: MakePackage) -> None:
    made = make_package(
        {
            "a.py": '"""Decides. Pure: values in, values out."""\nfrom urllib.parse import quote',
            "b.py": '"""Acts on pure decisions."""\nimport time',
            "c.py": '"""Pure ASGI middleware."""\nimport time',
            "folder/__init__.py": '"""Decisions. Pure."""',
            "folder/d.py": '"""Decides."""\nimport re',
        }
    )
    pure = pure_modules(made)
    assert {module.name for module in pure} == {"a", "folder.d"}
    assert not any(effects(module) for module in pure)
