"""Opening models: every broken file is one clear error, and an open model knows what it is."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from everwarm.config import ModelOptions
from everwarm.demo.tiny import ARCHITECTURES
from everwarm.demo.tiny.plans import CHAT_TEMPLATE
from everwarm.errors import ModelFileError
from everwarm.llama import abi
from everwarm.llama.context import Context
from everwarm.llama.model import MemoryKind, Model
from support.models import tiny_model
from support.steps import KINDS, OPTIONS, SLOT, open_context, same_bits, say, text
from support.trials import run_in_child

# files that cannot be opened


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none\.gguf: No such file or directory; give the path of a GGUF file"):
        Model(tmp_path / "none.gguf")


def test_a_directory_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="Is a directory"):
        Model(tmp_path)


def test_a_file_of_another_format_says_what_it_starts_with(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(ModelFileError, match=r"is not a GGUF file \(it starts with b'PK.*a GGUF starts with b'GGUF'"):
        Model(path)


@pytest.mark.parametrize("content", [b"", b"G", b"GGU"])
def test_an_empty_or_very_short_file_is_not_a_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="is not a GGUF file"):
        Model(path)


def with_number(data: bytes, key: str, value: int) -> bytes:
    at = data.index(key.encode() + struct.pack("<I", 4)) + len(key) + 4
    return data[:at] + struct.pack("<I", value) + data[at + 4 :]


def damaged(whole: bytes) -> dict[str, bytes]:
    """Files that begin like a GGUF and are none, by name."""
    n = len(whole)
    cut = {f"cut at {at}": whole[:at] for at in (4, 8, 16, 24, 30, 100, 1000, 5000, n // 2, n - 33, n - 1)}
    return cut | {
        "version 0": whole[:4] + struct.pack("<I", 0) + whole[8:],
        "version 99": whole[:4] + struct.pack("<I", 99) + whole[8:],
        "other byte order": whole[:4] + struct.pack(">I", 3) + whole[8:],
        "too many tensors": whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:],
        "too many keys": whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:],
        "unknown architecture": whole.replace(b"qwen35", b"qwxx35"),
        "a tensor is missing": whole.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_nurm.weight"),
        "too many layers": with_number(whole, "qwen35.block_count", 5),
        "another width": with_number(whole, "qwen35.embedding_length", 65),
        "another number of heads": with_number(whole, "qwen35.attention.head_count", 3),
        "unknown tokenizer": whole.replace(
            b"\x04\x00\x00\x00\x00\x00\x00\x00gpt2", b"\x04\x00\x00\x00\x00\x00\x00\x00gptx"
        ),
    }


REASONS = {
    "unknown architecture": "unknown model architecture: 'qwxx35'",
    "a tensor is missing": "tensor 'blk.0.attn_norm.weight' not found",
    "unknown tokenizer": "unknown tokenizer: 'gptx'",
    "too many layers": "tensor 'blk.4.attn_norm.weight' not found",
    "another width": "tensor 'token_embd.weight' has wrong shape",
}
SMALL = {"n_layers": 4, "width": 64}
NAMES = tuple(damaged(tiny_model("qwen35", **SMALL).read_bytes()))


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What opening each of them came to, in a process of its own: libllama might abort."""
    folder = tmp_path_factory.mktemp("damaged")
    paths = {name: folder / f"{name}.gguf" for name in ("whole", *NAMES)}
    whole = tiny_model("qwen35", **SMALL).read_bytes()
    for name, data in ({"whole": whole} | damaged(whole)).items():
        paths[name].write_bytes(data)
    found = run_in_child("support.open_models", *map(str, paths.values()))
    return {name: found[str(path)] for name, path in paths.items()}


def test_the_undamaged_file_opens(attempts: dict[str, str]) -> None:
    assert attempts["whole"].startswith("opened qwen35")


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_one_clear_error(name: str, attempts: dict[str, str]) -> None:
    assert attempts[name].startswith("ModelFileError: ")
    assert f"{name}.gguf cannot be loaded: " in attempts[name]
    assert REASONS.get(name, "") in attempts[name]
    assert "\n" not in attempts[name]


def test_a_broken_file_does_not_spoil_the_next(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model("qwen35", **SMALL).read_bytes()[:5000])
    for _ in range(3):
        with pytest.raises(ModelFileError):
            Model(broken)
        with Model(tiny_model("qwen35", **SMALL)) as model:
            assert model.n_layers == 4


def test_a_file_name_need_not_be_utf8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf"))
    path.write_bytes(tiny_model("qwen35", **SMALL).read_bytes())
    with Model(path) as model:
        assert model.n_layers == 4


def test_a_file_name_may_have_any_character(tmp_path: Path) -> None:
    path = tmp_path / "модель 🧊 'quoted' %s.gguf"
    path.write_bytes(tiny_model("qwen35", **SMALL).read_bytes())
    with Model(path) as model:
        assert model.n_layers == 4


# progress


def test_progress_rises_to_one(tmp_path: Path) -> None:
    seen: list[float] = []
    with Model(tiny_model("qwen35"), progress=seen.append):
        pass
    assert len(seen) > 2
    assert seen == sorted(seen)
    assert seen[0] >= 0.0 and seen[-1] == 1.0


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_what_progress_raises_comes_out_of_opening(error: BaseException, at: float) -> None:
    calls: list[float] = []

    def give_up(fraction: float) -> None:
        calls.append(fraction)
        if fraction >= at:
            raise error

    with pytest.raises(type(error)) as raised:
        Model(tiny_model("qwen35"), progress=give_up)
    assert raised.value is error
    assert sum(fraction >= at for fraction in calls) == 1, "it was asked again after it had raised"


# what an open model knows


def test_every_tiny_architecture_is_in_the_table() -> None:
    assert set(KINDS) == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_memory_kind_is_told(arch: str, open_tiny: Callable) -> None:
    model = open_tiny(arch)
    assert model.memory_kind is KINDS[arch]
    assert model.n_swa == (64 if arch == "gemma3" else 0)
    assert model.n_layers == 8
    assert model.n_ctx_train == 262144
    assert model.metadata("general.architecture") == arch
    assert model.description.startswith(arch)


def test_what_each_memory_kind_needs() -> None:
    facts = {
        kind: (kind.has_attention, kind.needs_checkpoints, kind.has_window, kind.can_share_cells) for kind in MemoryKind
    }
    assert facts == {
        MemoryKind.ATTENTION: (True, False, False, True),
        MemoryKind.RECURRENT: (False, True, False, True),
        MemoryKind.HYBRID: (True, True, False, True),
        MemoryKind.WINDOW: (True, True, True, False),
        MemoryKind.HYBRID_WINDOW: (True, True, True, False),
    }


def test_the_chat_template_is_given_whole(open_tiny: Callable, embedded_model: Model) -> None:
    assert open_tiny("llama").chat_template == CHAT_TEMPLATE
    assert "enable_thinking" in embedded_model.chat_template


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    data = tiny_model("qwen35", **SMALL).read_bytes()
    path.write_bytes(data.replace(b"tokenizer.chat_template", b"tokenizer.chat_templote"))
    with Model(path) as model:
        assert model.chat_template is None


def test_metadata_is_a_string_or_none(embedded_model: Model) -> None:
    assert embedded_model.metadata("general.name") == "Everwarm Tiny"
    assert embedded_model.metadata("qwen35.block_count") == "9"
    assert embedded_model.metadata("no.such.key") is None
    assert embedded_model.metadata("") is None


def test_the_embedded_model_is_a_small_hybrid(embedded_model: Model) -> None:
    assert embedded_model.memory_kind is MemoryKind.HYBRID
    assert embedded_model.n_params == 8_354_096
    assert 0 < embedded_model.size_bytes < 9_000_000


def test_mapped_and_read_weights_are_the_same() -> None:
    path = tiny_model("qwen35", **SMALL)
    rows = []
    for load_mode in ("mmap", "none"):
        with Model(path, ModelOptions(load_mode=load_mode)) as model, Context(model, OPTIONS) as context:
            rows.append(say(context, SLOT, text(70)))
    assert same_bits(rows[:1], rows[1:])


def test_closing_twice_is_fine_and_a_with_block_closes() -> None:
    with Model(tiny_model("qwen35", **SMALL)) as model:
        assert model.ptr
    assert model.ptr is None
    model.close()


def test_one_file_can_be_open_twice() -> None:
    path = tiny_model("qwen35", **SMALL)
    with Model(path) as one, Model(path) as two, open_context(one) as a, open_context(two) as b:
        assert same_bits([say(a, SLOT, text(70))], [say(b, SLOT, text(70))])


# fingerprint


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_fingerprint_names_content_and_build_and_not_the_path(own_cache: Path, tmp_path: Path) -> None:
    original, other = tiny_model("qwen35", **SMALL), tiny_model("qwen35", **SMALL, seed=1)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(original.read_bytes())
    with Model(original) as a, Model(copy) as b, Model(other) as c:
        assert a.fingerprint == b.fingerprint != c.fingerprint
        assert a.fingerprint.endswith(f"-{abi.BUILD}")
    assert (own_cache / "everwarm" / "digests.json").exists()


def test_one_changed_byte_of_the_weights_is_another_fingerprint(own_cache: Path, tmp_path: Path) -> None:
    data = bytearray(tiny_model("qwen35", **SMALL).read_bytes())
    path = tmp_path / "changed.gguf"
    prints = []
    for _ in range(2):
        path.write_bytes(data)
        with Model(path) as model:
            prints.append(model.fingerprint)
        data[-1000] ^= 1
    assert prints[0] != prints[1]
