"""Every mutable thing has one owner: only ``engine.slots`` assigns the fields of slots and spares."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from everwarm.engine.slots import Slot

ENGINE = Path(__file__).parents[2] / "src" / "everwarm" / "engine"
OWNER = ENGINE / "slots.py"
A_SLOT = re.compile(r"(.*\.)?(slot|other|oldest|youngest|reader)|.*slots\[.*\]")  # how code names one


def assigned_fields(path: Path) -> list[str]:
    """Assignments to a field of a slot, as ``slot.field``."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_stored and node.attr in Slot.__slots__ and A_SLOT.fullmatch(owner := ast.unparse(node.value)):
            found.append(f"{owner}.{node.attr}")
    return found


def others() -> list[Path]:
    return [path for path in ENGINE.rglob("*.py") if path != OWNER]


def test_only_their_owner_assigns_the_fields_of_slots() -> None:
    assert {path.name: fields for path in others() if (fields := assigned_fields(path))} == {}


def test_only_their_owner_takes_and_releases_spares() -> None:
    assert [path.name for path in others() if re.search(r"\.parked = |\bspares\[", path.read_text())] == []


def test_assignments_are_noticed(tmp_path: Path) -> None:
    module = tmp_path / "bad.py"
    module.write_text("slot.n_fed += 1\nself.slots[0].request = None\nslot.node, x = y\nslot.seat(1)\nthing.node = 3\n")
    assert sorted(assigned_fields(module)) == ["self.slots[0].request", "slot.n_fed", "slot.node"]
