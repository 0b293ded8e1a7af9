"""Headers of GGUF files: what is read of them, and that nothing in one can crash us, fill the memory or take long."""

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from everwarm.demo.tiny import ARCHITECTURES
from everwarm.engine.settings import EngineSettings
from everwarm.errors import ModelFileError
from everwarm.router.catalog import gguf_header as reading
from everwarm.router.catalog.gguf_header import GgufHeader, read_header, read_text
from everwarm.router.catalog.memory_estimate import loaded_bytes
from support import ggufs
from support.ggufs import text
from support.models import EMBEDDED, tiny_model

SEED = 20261115
N_MUTANTS = 20_000 if os.environ.get("EVERWARM_CAMPAIGN") else 1500


def read(tmp_path: Path, raw: bytes) -> GgufHeader:
    path = tmp_path / f"{time.monotonic_ns()}.gguf"  # what was read is remembered by name
    path.write_bytes(raw)
    try:
        return read_header(path)
    finally:
        path.unlink()


def test_numbers_texts_and_lists_are_read(tmp_path: Path) -> None:
    values = ggufs.LLAMA | {"llama.rope.freq_base": 1e4, "llama.flags": (True, False), "llama.counts": (4, 0, 4)}
    found = read_header(ggufs.write(tmp_path / "m.gguf", values, n_tensors=3, n_bytes=200))
    assert found.architecture == "llama" and found.n_tensors == 3
    assert found.number("block_count") == 4 and found.number("counts") is None and found.number("nothing") is None
    assert (
        found.numbers("counts") == (4, 0, 4)
        and found.numbers("flags") == (1, 0)
        and found.numbers("block_count") is None
    )
    assert found.values["llama.rope.freq_base"] == 1e4


def test_a_long_text_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    template, longer = "x" * 300_000, "y" * (reading.MAX_LONG_TEXT_BYTES + 1)
    values = ggufs.LLAMA | {"tokenizer.chat_template": template, "longer": longer}
    path = ggufs.write(tmp_path / "m.gguf", values)
    assert read_text(path, "tokenizer.chat_template") == template
    assert read_text(path, "longer") is read_text(path, "nothing") is None
    with pytest.raises(ModelFileError, match=r"none\.gguf cannot be read"):
        read_text(tmp_path / "none.gguf", "longer")


def test_the_numbers_of_all_tensors_are_counted(tmp_path: Path) -> None:
    assert read_header(ggufs.write(tmp_path / "m.gguf", n_tensors=3, n_bytes=200)).n_params == 3 * 16
    assert read_header(EMBEDDED).n_params == 8_354_096


def test_a_vocabulary_is_counted_and_not_kept(tmp_path: Path) -> None:
    values = ggufs.LLAMA | {"tokenizer.ggml.tokens": [f"token {i}" * (i % 7) for i in range(20_000)], "llama.last": 1}
    found = read_header(ggufs.write(tmp_path / "m.gguf", values))
    assert found.lengths["tokenizer.ggml.tokens"] == 20_000 and "tokenizer.ggml.tokens" not in found.values
    assert found.number("last") == 1


def test_a_long_text_and_a_long_list_are_walked_over(tmp_path: Path) -> None:
    values = ggufs.LLAMA | {"tokenizer.chat_template": "x" * 300_000, "scores": (1.0,) * 5000, "llama.last": 1}
    found = read_header(ggufs.write(tmp_path / "m.gguf", values))
    assert found.number("last") == 1 and {"tokenizer.chat_template", "scores"}.isdisjoint(found.values)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_real_files_are_read(arch: str) -> None:
    found = read_header(tiny_model(arch))
    assert found.architecture == arch and found.number("block_count") == 8 and found.n_tensors > 8


def test_what_was_read_is_read_again_when_the_file_changes(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "m.gguf")
    before = read_header(path)
    assert read_header(path) is before
    ggufs.write(path, ggufs.LLAMA | {"llama.block_count": 9, "llama.more": 1})
    assert read_header(path).number("block_count") == 9


def pair(key: str, kind: int, raw: bytes) -> bytes:
    return ggufs.header({}, n_tensors=0, n_values=1) + text(key) + struct.pack("<I", kind) + raw


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is empty"),
        (b"GG", "is not a GGUF file"),
        (b"<html>not found</html>", r"is not a GGUF file \(it starts with b'<htm'\)"),
        (b"GGUF", "ends inside its header, after 4 bytes"),
        (ggufs.header(version=1), "has GGUF version 1; versions 2 and 3 can be read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "has GGUF version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0), "says it has 18446744073709551615 tensors; at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "says it has 9223372036854775808 metadata keys; at most"),
        (ggufs.header({}, 0, n_values=1) + struct.pack("<Q", 2**64 - 1), "ends inside its header"),
        (ggufs.header({}, 0, n_values=1) + text("k" * 2000), "a metadata key of more than 1024 bytes"),
        (pair("key", 13, b""), "has metadata of the unknown type 13"),
        (pair("key", 8, struct.pack("<Q", 2**63)), "ends inside its header"),
        (pair("key", 9, struct.pack("<IQ", 4, 2**62)), "ends inside its header"),
        (pair("key", 9, struct.pack("<IQ", 8, 2**62)), "has lists of more than 2097152 texts"),
        (
            pair("key", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 9, 1) * 50),
            "has metadata of the unknown type 9",
        ),
        (pair("key", 9, struct.pack("<IQQ", 8, 5, 2**64 - 1)), "ends inside its header"),
        (ggufs.header({}, n_tensors=1)[:-10], "ends inside its header"),
        (ggufs.header({}, n_tensors=1), "ends too early: it has .* bytes, and a tensor begins at"),
        (
            ggufs.header({}, 0, version=3)[:8] + struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<I", 5),
            "5 dimensions",
        ),
        (ggufs.header({f"k{i}": "x" * 4000 for i in range(100)}, 0), "has more than 131072 characters and numbers"),
    ],
)
def test_what_cannot_be_a_header_is_refused_with_the_reason(tmp_path: Path, raw: bytes, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        read(tmp_path, raw)


def test_a_broken_off_copy_is_recognised(tmp_path: Path) -> None:
    whole = EMBEDDED.read_bytes()
    with pytest.raises(ModelFileError, match=r"ends too early: .*; copy or download it again"):
        read(tmp_path, whole[: len(whole) // 2])


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, make: object) -> None:
    make(tmp_path / "m.gguf")  # type: ignore[operator]
    with pytest.raises(ModelFileError, match=r"m.gguf is not a file"):
        read_header(tmp_path / "m.gguf")


@pytest.mark.parametrize("length", [0, 1 << 20], ids=["short", "long"])
def test_an_endless_vocabulary_costs_little(tmp_path: Path, length: int) -> None:
    """A file that claims to be huge and is full of nothing: the worst case for whoever walks over texts."""
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(pair("key", 9, struct.pack("<IQ", 8, reading.MAX_ELEMENTS)))
        for _ in range(300 if length else 0):
            file.write(struct.pack("<Q", length))
            file.seek(length, os.SEEK_CUR)
        file.truncate(1 << 40)
    began = time.process_time()
    if length:
        with pytest.raises(ModelFileError, match="has a header of more than 268435456 bytes"):
            read_header(path)
    else:
        assert read_header(path).lengths["key"] == reading.MAX_ELEMENTS
    assert time.process_time() - began < 5


def test_no_mutant_of_a_real_header_does_harm(tmp_path: Path) -> None:
    """Whatever the bytes are: a header or a refusal, an estimate from every header, and never much memory."""
    rng = random.Random(SEED)
    originals = [_front(tiny_model(arch)) for arch in ARCHITECTURES]
    settings, n_read = EngineSettings(), 0
    tracemalloc.start()
    for i in range(N_MUTANTS):
        try:
            found = read(tmp_path, _mutant(rng, originals[i % len(originals)]))
        except ModelFileError:
            continue
        n_read += 1
        assert loaded_bytes(found, 1000, settings) >= 1000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20 and N_MUTANTS // 20 < n_read < N_MUTANTS


def _front(path: Path) -> bytes:
    """All but the vocabulary's texts and the tensors' data: dense in numbers that matter."""
    found = read_header(path)
    kept = {key: value for key, value in found.values.items() if not key.startswith("tokenizer.")}
    raw = ggufs.header(kept | {"tokenizer.ggml.tokens": ["a", "bc", ""] * 20}, n_tensors=8)
    return raw + bytes(-len(raw) % 32) + bytes(1000)


def _mutant(rng: random.Random, raw: bytes) -> bytes:
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(out) - 8)
        match rng.randrange(5):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.randrange(256)
            case 2:
                out[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 1 << 40)))
            case 3:
                out[at : at + 4] = struct.pack("<I", rng.choice((0, 7, 8, 9, 255, 2**16, 2**31, 2**32 - 1)))
            case 4 if len(out) > 100:
                del out[at : at + rng.randrange(1, 16)]
    return bytes(out[: rng.randrange(8, len(out))] if rng.random() < 0.1 else out)
