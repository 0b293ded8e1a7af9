"""Finding and checking libllama: another build is refused with one sentence that says what to install."""

import ctypes.util
import importlib.util
from pathlib import Path

import pytest

from everwarm.backend import installed
from everwarm.errors import ModelError
from everwarm.llama import abi
from everwarm.llama.lib import ADVICE, Lib, lib, library_path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as raised:
        Lib(path)
    message = str(raised.value)
    assert message.endswith(ADVICE) and "\n" not in message, message
    return message


def test_the_advice_names_the_wheel_and_the_variable() -> None:
    assert abi.WHEEL in ADVICE and "EVERWARM_LIBLLAMA" in ADVICE and abi.BUILD in ADVICE


def test_another_library_lacks_the_functions() -> None:
    assert "libc.so.6 has no function llama_model_default_params" in refusal(Path("libc.so.6"))


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    assert "libllama.so cannot be loaded" in refusal(tmp_path / "libllama.so")


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF" + bytes(100)])
def test_a_file_that_is_no_library_cannot_be_loaded(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "libllama.so"
    path.write_bytes(content)
    assert "libllama.so cannot be loaded" in refusal(path)


@pytest.mark.parametrize(
    ("table", "field", "expected", "found"),
    [
        ("EXPECTED_CONTEXT_DEFAULTS", "n_batch", 1024, 2048),
        ("EXPECTED_CONTEXT_DEFAULTS", "kv_unified", True, False),
        ("EXPECTED_CONTEXT_DEFAULTS", "type_v", 8, 1),
        ("EXPECTED_MODEL_DEFAULTS", "n_gpu_layers", 999, -1),
    ],
)
def test_a_default_that_differs_shows_another_build(
    table: str, field: str, expected: object, found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(getattr(abi, table), field, expected)
    message = refusal(library_path())
    assert f"is not libllama {abi.BUILD} (its default {field} is {found}, expected {expected})" in message


def test_a_layout_that_moved_by_one_field_shows_in_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check is for: a build with one field less in the struct."""

    class Moved(ctypes.Structure):
        _fields_ = [field for field in abi.ContextParams._fields_ if field[0] != "moe_cache_size"]

    monkeypatch.setitem(abi.FUNCTIONS, "llama_context_default_params", (Moved, ()))
    assert f"is not libllama {abi.BUILD}" in refusal(library_path())


def test_a_function_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(abi.FUNCTIONS, "llama_is_gone", (None, ()))
    assert "has no function llama_is_gone" in refusal(library_path())


def test_the_variable_chooses_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERWARM_LIBLLAMA", "/somewhere/libllama.so")
    assert library_path() == Path("/somewhere/libllama.so")


def test_the_backend_in_use_comes_before_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EVERWARM_LIBLLAMA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    built = tmp_path / "everwarm" / "backends" / f"native-{abi.BUILD}"
    built.mkdir(parents=True)
    (built / "libllama.so").touch()
    assert library_path().name.startswith("xllamacpp")
    installed.use("native", abi.BUILD)
    assert library_path() == built / "libllama.so"


def test_without_the_variable_it_is_the_one_in_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EVERWARM_LIBLLAMA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert library_path().name.startswith("xllamacpp")


def test_without_either_the_advice_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EVERWARM_LIBLLAMA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="libllama was not found: install xllamacpp=="):
        library_path()


def test_the_library_is_loaded_once_and_has_every_declared_function() -> None:
    assert lib() is lib()
    for name in abi.FUNCTIONS:
        assert callable(getattr(lib(), name.removeprefix("llama_")))


def test_the_last_words_are_warnings_and_errors_only() -> None:
    library = lib()
    library.forget_log()
    assert library.last_words() == "no message"
    for level, words in ((1, b"debug"), (2, b"info"), (3, b"a warning\n"), (4, b" \xff error \n"), (5, b"more")):
        library.note_log(level, words, 0)
    assert library.all_words() == ("a warning", "\N{REPLACEMENT CHARACTER} error")
    assert library.last_words() == "\N{REPLACEMENT CHARACTER} error"
    for i in range(500):
        library.note_log(4, b"%d" % i, 0)
    assert len(library.all_words()) == 64
    library.forget_log()
