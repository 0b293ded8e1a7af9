"""Tiny projectors: the same spec gives the same bytes, and a model without one is what it was before."""

import hashlib
from pathlib import Path

import pytest
from gguf import GGUFReader

from everwarm.demo.tiny import TinySpec, projector_path, write_tiny, write_tiny_projector
from everwarm.demo.tiny.plans import N_BASE_TOKENS

ARCHS = ("qwen35", "gemma3")


def spec(arch: str, **other: object) -> TinySpec:
    return TinySpec(arch=arch, n_layers=4, width=64, **({"vision": True} | other))


def tokens(path: Path) -> list[str]:
    found = GGUFReader(path).get_field("tokenizer.ggml.tokens")
    assert found is not None
    return list(found.contents())


@pytest.mark.parametrize("arch", ARCHS)
def test_the_same_spec_gives_the_same_bytes_and_another_seed_others(arch: str, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    sizes = [write_tiny_projector(path, spec(arch, seed=seed)) for path, seed in zip(paths, (0, 0, 1), strict=True)]
    a, b, c = (path.read_bytes() for path in paths)
    assert a == b and a != c and sizes == [len(a), len(b), len(c)]


@pytest.mark.parametrize(("arch", "digest"), [("qwen35", "362d1e36062d1a25"), ("gemma3", "edf829e4a66ccb3e")])
def test_a_known_spec_has_known_bytes(arch: str, digest: str, tmp_path: Path) -> None:
    """Fails when the files of an existing spec change, which would silently invalidate stored states."""
    write_tiny_projector(tmp_path / "mmproj", spec(arch))
    assert hashlib.blake2b((tmp_path / "mmproj").read_bytes(), digest_size=8).hexdigest() == digest


def test_a_qwen35_that_sees_is_the_one_that_does_not(tmp_path: Path) -> None:
    """Its tokens for images have been among the base tokens all along."""
    write_tiny(tmp_path / "seeing", spec("qwen35"))
    write_tiny(tmp_path / "blind", spec("qwen35", vision=False))
    assert (tmp_path / "seeing").read_bytes() == (tmp_path / "blind").read_bytes()


def test_a_gemma3_that_sees_has_two_tokens_more(tmp_path: Path) -> None:
    write_tiny(tmp_path / "seeing", spec("gemma3"))
    write_tiny(tmp_path / "blind", spec("gemma3", vision=False))
    blind, seeing = tokens(tmp_path / "blind"), tokens(tmp_path / "seeing")
    assert len(blind) == N_BASE_TOKENS and seeing == [*blind, "<start_of_image>", "<end_of_image>"]


def test_unused_tokens_come_behind_the_markers(tmp_path: Path) -> None:
    write_tiny(tmp_path / "seeing", spec("gemma3", n_vocab=N_BASE_TOKENS + 4))
    assert tokens(tmp_path / "seeing")[-4:] == ["<start_of_image>", "<end_of_image>", "<|unused_0|>", "<|unused_1|>"]


@pytest.mark.parametrize("arch", ARCHS)
def test_what_comes_out_is_as_wide_as_the_model(arch: str, tmp_path: Path) -> None:
    write_tiny_projector(tmp_path / "mmproj", TinySpec(arch=arch, n_layers=4, width=192, vision=True))
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in GGUFReader(tmp_path / "mmproj").tensors}
    assert 192 in shapes.get("mm.2.weight", ()) + shapes.get("mm.input_projection.weight", ())


def test_a_projector_lies_beside_its_model(tmp_path: Path) -> None:
    assert projector_path(tmp_path / "m.gguf") == tmp_path / "mmproj-m.gguf"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mmproj").write_bytes(b"old")
    monkeypatch.setattr("everwarm.demo.tiny.write.draw", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_tiny_projector(tmp_path / "mmproj", spec("qwen35"))
    assert [file.name for file in tmp_path.iterdir()] == ["mmproj"] and (tmp_path / "mmproj").read_bytes() == b"old"


def test_a_model_without_tokens_for_images_gets_no_projector(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a spec with vision=True"):
        write_tiny_projector(tmp_path / "mmproj", spec("qwen35", vision=False))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"arch": "llama", "vision": True}, "no projector is known for llama; known: qwen35, gemma3"),
        ({"arch": "gemma3", "vision": True, "n_vocab": 265}, "n_vocab is 265; it must be at least 266"),
    ],
)
def test_a_bad_spec_says_what_would_be_right(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinySpec(**wrong)
