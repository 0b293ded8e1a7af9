"""Models that clients make of others: what is stored, and what is refused."""

import stat
from types import SimpleNamespace

import pytest

from everwarm.errors import BadRequest, EverwarmError
from everwarm.gateway.ollama.models import DERIVED_FILE, CopyBody, CreateBody, DerivedModels
from everwarm.gateway.ollama.schema import OllamaMessage


class Catalog:
    """One model is served."""

    specs = ("tiny",)

    def named(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(id="tiny") if name == "tiny" else None


POOL = SimpleNamespace(catalog=Catalog())


def made(**more) -> CreateBody:
    return CreateBody(model="mine", source="tiny", **more)


def test_a_derived_model_is_there_after_a_restart_and_its_file_is_its_owners_alone(tmp_path):
    folder = tmp_path / "states"
    DerivedModels(POOL, str(folder)).create(made(system="Be brief."), "mine")
    found = DerivedModels(POOL, str(folder)).find("mine:latest")
    assert found is not None and found.base == "tiny" and found.system == "Be brief."
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / DERIVED_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"{", b'{"a": 1}', b" " * ((4 << 20) + 1)])
def test_a_file_that_cannot_be_read_is_not_replaced(tmp_path, content):
    (tmp_path / DERIVED_FILE).write_bytes(content)
    models = DerivedModels(POOL, str(tmp_path))
    assert models.names() == {}
    with pytest.raises(EverwarmError, match="cannot be used"):
        models.create(made(), "mine")
    assert (tmp_path / DERIVED_FILE).read_bytes() == content


def test_what_could_never_be_used_is_refused(tmp_path):
    models = DerivedModels(POOL, str(tmp_path))
    with pytest.raises(BadRequest, match="role 'bogus'"):
        models.create(made(messages=[OllamaMessage("bogus", "a")]), "mine")
    for name in ("", ":latest", " "):
        with pytest.raises(BadRequest, match="name is empty"):
            models.copy(CopyBody("tiny", name))
    with pytest.raises(BadRequest, match="is served here"):
        models.copy(CopyBody("tiny", "tiny"))
    assert models.names() == {}
