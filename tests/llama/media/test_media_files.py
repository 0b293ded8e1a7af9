"""Projector files with something wrong in them: an error that names it, where libmtmd would end the process."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from everwarm.errors import ModelFileError
from everwarm.llama.media import projector_file
from everwarm.llama.media.projector_file import Projector
from support.gguf_mutants import MUTATIONS, File, Pair, mutants, take_apart
from support.models import tiny_audio
from support.open_projectors import projector_of
from support.trials import run_in_child

ARCHS = {"qwen35": 8, "gemma3": 8, "sounds": 3}  # how many of each of 13 kinds of damage


def size_of(number_format: int) -> tuple[int, int]:
    return {0: (1, 4), 1: (1, 2), 8: (32, 34), 26: (1, 4), 30: (1, 2)}.get(number_format, (0, 0))


def attempts(folder: Path, arch: str, n: int, *flags: str) -> dict[str, str]:
    """What looking at an image with each mutant came to, in a process of its own: libmtmd might abort."""
    made = mutants(projector_of(arch)[1], n)
    for name, data in made.items():
        (folder / name).write_bytes(data)
    found = run_in_child("support.open_projectors", *flags, arch, *(str(folder / name) for name in made))
    return {name: found[str(folder / name)] for name in made}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mutants")
    return {f"{arch} {name}": output for arch, n in ARCHS.items() for name, output in attempts(folder, arch, n).items()}


def test_no_mutant_ends_the_process(checked: dict[str, str]) -> None:
    assert len(checked) == len(MUTATIONS) * sum(ARCHS.values()) >= 200
    allowed = ("ModelFileError: ", "ModelError: ", "saw ", "heard ")
    assert {name: output for name, output in checked.items() if not output.startswith(allowed)} == {}


def test_every_refusal_is_one_line_that_names_the_file(checked: dict[str, str]) -> None:
    for name, output in checked.items():
        if output.startswith("Model"):
            assert name.split()[1] in output and "\n" not in output and len(output) < 700, output


def test_what_cannot_be_right_is_refused(checked: dict[str, str]) -> None:
    for name, output in checked.items():
        if "it_ends_too_early" in name:
            assert re.search("ends (inside|too)|is not a GGUF file", output), output


def test_unchecked_many_mutants_end_the_process(tmp_path: Path) -> None:
    """What the look beforehand is for: without it the same files kill whoever opens them."""
    found = attempts(tmp_path, "qwen35", 2, "--unchecked")
    assert sum(output.startswith("killed by") for output in found.values()) >= 5, found


# the rules, one by one


@pytest.fixture(params=ARCHS)
def file(request: pytest.FixtureRequest) -> File:
    return take_apart(projector_of(request.param)[1])


def refusal(file: File, tmp_path: Path) -> str:
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(file.whole())
    with pytest.raises(ModelFileError) as raised:
        projector_file.check(Projector(path, size_of))
    return str(raised.value)


def test_the_undamaged_files_pass(file: File, tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(file.whole())
    projector_file.check(Projector(path, size_of))


@pytest.mark.parametrize("name", ["position_embd.weight", "blk.1.attn_out.weight", "blk.0.ffn_up.weight"])
def test_a_missing_tensor_is_named(name: str, file: File, tmp_path: Path) -> None:
    name = f"{file.tensors[0].name.decode()[0]}.{name}"  # v for images, a for sounds
    without = tuple(tensor for tensor in file.tensors if tensor.name.decode() != name)
    assert len(without) == len(file.tensors) - 1
    assert f"lacks the tensor {name}" in refusal(replace(file, tensors=without), tmp_path)


@pytest.mark.parametrize(
    "name", ["a.conv1d.2.bias", "a.blk.1.attn_v.bias", "a.blk.0.ln2.weight", "mm.a.norm_mid.weight"]
)
def test_a_tensor_that_only_sounds_need_is_named(name: str, tmp_path: Path) -> None:
    file = take_apart(tiny_audio("qwen35", vision=True)[1])
    without = tuple(tensor for tensor in file.tensors if tensor.name.decode() != name)
    assert f"lacks the tensor {name}" in refusal(replace(file, tensors=without), tmp_path)


@pytest.mark.parametrize("n_stacked", [0, 7, 8, 1501, 1 << 31])
def test_frames_that_libmtmd_would_count_wrongly_are_refused(n_stacked: int, tmp_path: Path) -> None:
    """It aborts where the embeddings of a window are not as many as it said."""
    file = take_apart(projector_of("sounds")[1])
    key = b"clip.audio.projector.stack_factor"
    pairs = tuple(Pair(key, 4, n_stacked.to_bytes(4, "little")) if p.key == key else p for p in file.pairs)
    assert "frames of sound" in refusal(replace(file, pairs=pairs), tmp_path)


def test_every_key_that_libmtmd_reads_must_have_its_type(file: File, tmp_path: Path) -> None:
    for i, pair in enumerate(file.pairs):
        if pair.key.decode() in projector_file._KINDS:
            wrong = Pair(pair.key, 12, bytes(8))
            changed = replace(file, pairs=(*file.pairs[:i], wrong, *file.pairs[i + 1 :]))
            assert f"has {pair.key.decode()} as another type of value" in refusal(changed, tmp_path)


def test_the_widths_of_all_tensors_are_compared(file: File, tmp_path: Path) -> None:
    """No tensor may become longer by one row without another becoming wider. Of a projector of sounds, more positions than
    a window has harm nothing, and libmtmd compares the last matrix with the model."""
    passed = []
    for i, tensor in enumerate(file.tensors):
        *shape, last = tensor.shape
        row = len(tensor.data) // last
        changed = replace(tensor, shape=(*shape, last + 1), data=tensor.data + tensor.data[:row])
        try:
            refusal(replace(file, tensors=(*file.tensors[:i], changed, *file.tensors[i + 1 :])), tmp_path)
        except pytest.fail.Exception:
            passed.append(tensor.name.decode())
    assert set(passed) <= {"a.position_embd.weight", "mm.a.mlp.2.weight"}


def test_a_long_header_is_not_read_to_its_end(file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projector_file, "MAX_HEADER_BYTES", 1000)
    assert "has a header of more than 1000 bytes" in refusal(file, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:8] + (1 << 60).to_bytes(8, "little") + raw[16:], "claims 1152921504606846976 tensors"),
        (lambda raw: raw[:16] + (1 << 60).to_bytes(8, "little") + raw[24:], "and 1152921504606846976 keys"),
        (lambda raw: b"GGUX" + raw[4:], "is not a GGUF file"),
        (lambda raw: raw[:4] + b"\1\0\0\0" + raw[8:], "has GGUF version 1; versions 2 and 3 can be read"),
        (lambda raw: raw[:-40], "ends inside"),
        (lambda raw: b"", "is not a GGUF file"),
    ],
)
def test_a_header_that_cannot_be(change: Callable, message: str, file: File, tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(change(file.whole()))
    with pytest.raises(ModelFileError, match=message):
        Projector(path, size_of)


def test_a_message_shows_nothing_that_cannot_be_printed(file: File, tmp_path: Path) -> None:
    name = b"v.\x1b[31m\n" + b"x" * 5000
    strange = replace(file.tensors[0], name=name, shape=(0,))
    message = refusal(replace(file, tensors=(strange, *file.tensors[1:])), tmp_path)
    assert message.isprintable() and len(message) < 400
