"""Tiny models: libllama loads and decodes every architecture, and the same spec gives the same bytes."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from everwarm.demo.tiny import ARCHITECTURES, TinySpec, plan_tiny, write_tiny

RAW = Path(__file__).with_name("_raw.py")
WIDTH = 128
HYBRIDS = ("qwen35", "jamba", "falcon-h1", "granitehybrid", "nemotron_h", "lfm2")
INTERLEAVED = tuple(arch for arch in HYBRIDS if arch != "falcon-h1")


def ask_libllama(command: str, model: Path, texts: list[str] | None = None) -> Any:
    """Run libllama in a process of its own: an abort there is a failed test here."""
    argv = [sys.executable, str(RAW), command, str(model)]
    done = subprocess.run(argv, input=json.dumps(texts), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, str], dict[str, Any]]:
    """What libllama says of each model asked for so far."""
    return {}


@pytest.fixture
def report(reports: dict[tuple[str, str], dict[str, Any]], tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    arch, dtype = request.param
    if (arch, dtype) not in reports:
        path = tmp_path / "tiny.gguf"
        write_tiny(path, TinySpec(arch=arch, width=WIDTH, dtype=dtype))
        reports[arch, dtype] = ask_libllama("probe", path)
    return reports[arch, dtype]


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes") / "tiny.gguf"
    write_tiny(path, TinySpec(arch="llama", n_layers=1, width=64, n_vocab=300))
    return path


def each(architectures: tuple[str, ...], *dtypes: str) -> pytest.MarkDecorator:
    pairs = [(arch, dtype) for arch in architectures for dtype in dtypes]
    return pytest.mark.parametrize("report", pairs, indirect=True, ids=lambda pair: "-".join(pair))


@each(ARCHITECTURES, "f32", "q8_0")
def test_decodes_to_finite_logits_that_spread(report: dict[str, Any]) -> None:
    assert report["finite"]
    assert 0.3 < report["spread"] < 3


@each(ARCHITECTURES, "f32", "q8_0")
def test_the_first_of_200_tokens_reaches_the_last_logits(report: dict[str, Any]) -> None:
    assert report["first_token_reach"] > 1e-3


@each(HYBRIDS, "f32")
def test_wrong_recurrent_or_attention_state_alone_reaches_the_logits(report: dict[str, Any]) -> None:
    assert report["recurrent_reach"] > 1e-3
    assert report["attention_reach"] > 1e-3


@each(HYBRIDS, "f32")
def test_hybrids_are_reported_as_hybrid(report: dict[str, Any]) -> None:
    assert (report["hybrid"], report["recurrent"], report["n_swa"]) == (True, False, 0)
    assert report["partial_bytes"] < report["state_bytes"]


@each(("mamba2",), "f32")
def test_mamba2_is_reported_as_recurrent(report: dict[str, Any]) -> None:
    assert (report["hybrid"], report["recurrent"], report["n_swa"]) == (False, True, 0)


@each(("gemma3",), "f32")
def test_gemma3_is_reported_with_its_window(report: dict[str, Any]) -> None:
    assert (report["hybrid"], report["recurrent"], report["n_swa"]) == (False, False, 64)


@each(("llama",), "f32")
def test_llama_is_plain_attention(report: dict[str, Any]) -> None:
    assert (report["hybrid"], report["recurrent"], report["n_swa"]) == (False, False, 0)


@each(("qwen35",), "f32")
def test_tokenizer_ends_turns_with_im_end_and_adds_no_bos(report: dict[str, Any]) -> None:
    assert (report["n_vocab"], report["eos"], report["eot"], report["add_bos"]) == (264, 258, 258, False)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_f32_model_is_its_q8_0_twin_with_the_rounding_undone(arch: str, tmp_path: Path) -> None:
    twins: list[dict[str, npt.NDArray[Any]]] = []
    for dtype in ("f32", "q8_0"):
        path = tmp_path / dtype
        write_tiny(path, TinySpec(arch=arch, n_layers=4, width=64, dtype=dtype))
        twins.append({t.name: dequantize(t.data, t.tensor_type).ravel() for t in GGUFReader(path).tensors})
    plain, quantised = twins
    assert plain.keys() == quantised.keys()
    assert all(np.array_equal(plain[name], quantised[name]) for name in plain)


def layers_with(arch: str, *names: str) -> list[int]:
    """Which layers have a tensor of one of these names."""
    held = {tensor.name for tensor in plan_tiny(TinySpec(arch=arch)).tensors}
    return [i for i in range(8) if any(f"blk.{i}.{name}.weight" in held for name in names)]


@pytest.mark.parametrize("arch", INTERLEAVED)
def test_eight_layers_interleave_attention_and_recurrence(arch: str) -> None:
    attention, recurrent = layers_with(arch, "attn_k"), layers_with(arch, "ssm_conv1d", "shortconv.conv")
    first, last = attention[0], recurrent[-1]
    assert len(attention) == 2
    assert recurrent[0] < first < last


def test_a_falcon_h1_layer_has_both_memories() -> None:
    assert layers_with("falcon-h1", "attn_k") == layers_with("falcon-h1", "ssm_conv1d") == list(range(8))


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_same_spec_gives_the_same_bytes_and_another_seed_others(arch: str, dtype: Any, tmp_path: Path) -> None:
    spec = TinySpec(arch=arch, n_layers=4, width=64, dtype=dtype)
    other = TinySpec(arch=arch, n_layers=4, width=64, dtype=dtype, seed=1)
    files = [tmp_path / name for name in ("a", "b", "c")]
    sizes = [write_tiny(path, wanted) for path, wanted in zip(files, (spec, spec, other), strict=True)]
    a, b, c = (path.read_bytes() for path in files)
    assert a == b
    assert a != c
    assert sizes == [len(a), len(b), len(c)]


def test_a_known_spec_has_known_bytes(tmp_path: Path) -> None:
    """Fails when the files of an existing spec change, which would silently invalidate stored states."""
    path = tmp_path / "tiny.gguf"
    write_tiny(path, TinySpec(n_layers=4, width=64))
    assert hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() == "acf83620ae613a05"


@pytest.mark.parametrize("width", [64, 192, 320])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_odd_widths_load(arch: str, width: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, TinySpec(arch=arch, n_layers=4, width=width, dtype="q8_0"))
    assert ask_libllama("decodes", path) is True


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"old")

    def give_up(n_done: int, n_total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tiny(path, TinySpec(n_layers=4, width=64), give_up)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]
    assert path.read_bytes() == b"old"


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_tiny(tmp_path / "tiny.gguf", TinySpec(n_layers=4, width=64), lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_unused_tokens_are_added_and_never_the_most_likely(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, TinySpec(arch="llama", n_layers=2, width=64, n_vocab=20000))
    report = ask_libllama("probe", path)
    assert report["n_vocab"] == 20000
    assert report["top"] < 264


def test_every_text_is_one_token_per_byte(byte_model: Path) -> None:
    alphabet = st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("0123456789 \t\r\n\v\f\x00\x1b\u00a0\u2028\u3000\ufeff<|>_/'sthinkunused"),
    )
    texts = [
        "",
        " " * 999,
        "\n \r\n\t" * 99,
        "it's 12345 + 678 don't WE'LL",
        "<|im_start|><|im_end|>",
        "<|vision_start|><|vision_end|><|vision_start|> <|vision_end|>",
        "<|unused_0|><|unused_7|>",
        "e\u0301\u0928\u093f\u0e19\u0e49\u0e33\U0001f468\u200d\U0001f469",
        *("".join(map(chr, range(first, first + 512))) for first in range(0, 0xD800, 512)),
    ]

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(st.text(alphabet, max_size=200))
    def collect(text: str) -> None:
        if "<think>" not in text and "</think>" not in text:
            texts.append(text)

    collect()
    assert ask_libllama("tokenize", byte_model, texts) == [list(text.encode()) for text in texts]


def test_special_tokens_are_recognised_when_asked_for_and_think_always(byte_model: Path) -> None:
    text = "<|im_start|><think>a</think><|im_end|>"
    assert ask_libllama("tokenize-special", byte_model, [text]) == [[257, 259, 97, 260, 258]]
    plain = [*b"<|im_start|>", 259, 97, 260, *b"<|im_end|>"]
    assert ask_libllama("tokenize", byte_model, [text]) == [plain]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"arch": "gpt9"}, "gpt9.*known: qwen35, qwen35moe"),
        ({"n_layers": 3}, "n_layers is 3.*between 4 and 512 for qwen35"),
        ({"arch": "llama", "n_layers": 0}, "n_layers is 0.*between 1 and 512 for llama"),
        ({"n_layers": 513}, "n_layers is 513"),
        ({"width": 100}, "width is 100.*multiple of 64"),
        ({"width": 0}, "width is 0.*multiple of 64"),
        ({"width": 1 << 20}, "width is 1048576.*to 16384"),
        ({"n_vocab": 263}, "n_vocab is 263.*at least 264"),
        ({"seed": -1}, "seed is -1"),
        ({"dtype": "q4_0"}, "q4_0.*f32, q8_0"),
        ({"context_length": 0}, "context_length is 0"),
    ],
)
def test_a_bad_spec_says_what_would_be_right(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinySpec(**wrong)
