"""What a server can offer: folders, configuration and names, and that one bad file never costs another its place."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter

from everwarm.config import ModelOptions
from everwarm.engine.settings import EngineSettings, StoreSettings
from everwarm.errors import BadRequest, ModelFileError
from everwarm.llama.model import Model
from everwarm.router.catalog import gguf_files, hub
from everwarm.router.catalog.catalog import Catalog, ModelSpec, discover
from everwarm.router.catalog.gguf_files import UnusableFile, groups, projector_for, quant_of, tagged, without_quant
from everwarm.state.policy import CheckpointParams
from support import ggufs
from support.models import EMBEDDED, tiny_model

DEFAULTS = EngineSettings(n_slots=2, n_ctx=4096, n_threads=1, n_spares=0)


def put(root: Path, *names: str, n_bytes: int = 64) -> None:
    for name in names:
        ggufs.write(root / name, n_bytes=n_bytes)


def found(root: Path, **options: Any) -> Catalog:
    return discover(root, DEFAULTS, **options)


def reasons(catalog: Catalog) -> dict[str, str]:
    return {model.id: model.reason for model in catalog.broken}


# folders


def test_every_gguf_file_below_a_folder_is_a_model(tmp_path: Path) -> None:
    put(tmp_path, "a.gguf", "Big.GGUF", "deep/er/b-Q4_K_M.gguf")
    catalog = found(tmp_path)
    assert set(catalog.specs) == {"a", "Big", "b-Q4_K_M"} and catalog.broken == () and catalog.default is None
    spec = catalog.specs["b-Q4_K_M"]
    assert spec.path == tmp_path / "deep/er/b-Q4_K_M.gguf" and spec.settings is DEFAULTS and spec.source == "directory"


def test_what_is_hidden_or_unfinished_is_not_seen(tmp_path: Path) -> None:
    put(tmp_path, ".a.gguf", ".cache/b.gguf", "c.gguf.part", "d.gguf.incomplete", "e.gguf.tmp", "notes.txt")
    assert found(tmp_path) == Catalog()


def test_links_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    put(tmp_path, "elsewhere/real.gguf", "disk/other.gguf")
    models = tmp_path / "models"
    models.mkdir()
    (models / "linked.gguf").symlink_to(tmp_path / "elsewhere/real.gguf")
    (models / "disk").symlink_to(tmp_path / "disk")
    (models / "circle").symlink_to(models)
    (models / "nowhere.gguf").symlink_to(tmp_path / "gone.gguf")
    catalog = found(models)
    assert set(catalog.specs) == {"linked", "other"}
    assert reasons(catalog) == {"nowhere": "nowhere.gguf cannot be read: No such file or directory"}


def test_very_deep_folders_are_left_alone(tmp_path: Path) -> None:
    put(
        tmp_path,
        "/".join("x" * gguf_files.MAX_DEPTH) + "/seen.gguf",
        "/".join("x" * gguf_files.MAX_DEPTH) + "/y/unseen.gguf",
    )
    assert set(found(tmp_path).specs) == {"seen"}


def test_too_many_folders_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "MAX_FOLDERS", 3)
    put(tmp_path, "a.gguf", *(f"f{i}/m{i}.gguf" for i in range(9)))
    catalog = found(tmp_path)
    assert "a" in catalog.specs and "more than 3 folders; the rest was not looked at" in catalog.notes[0]


def test_a_bad_file_is_listed_with_the_reason_and_the_others_serve(tmp_path: Path) -> None:
    put(tmp_path, "good.gguf")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "page.gguf").write_text("<html>")
    (tmp_path / "short.gguf").write_bytes(EMBEDDED.read_bytes()[:200_000])
    os.mkfifo(tmp_path / "pipe.gguf")
    ggufs.write(tmp_path / "words.gguf", n_tensors=0)
    catalog = found(tmp_path)
    assert set(catalog.specs) == {"good"} and catalog.find("empty") is None
    message = reasons(catalog)
    assert message.pop("short").startswith("short.gguf ends ")
    assert message == {
        "empty": "empty.gguf is empty",
        "page": "page.gguf is not a GGUF file (it starts with b'<htm')",
        "pipe": "pipe.gguf is not a file",
        "words": "words.gguf has no tensors: it is a vocabulary, not a model",
    }


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_listed_as_broken(tmp_path: Path) -> None:
    put(tmp_path, "secret.gguf", "open.gguf")
    (tmp_path / "secret.gguf").chmod(0)
    assert reasons(found(tmp_path)) == {"secret": "secret.gguf cannot be read: Permission denied"}


def test_a_folder_that_cannot_be_listed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a.gguf", "sub/b.gguf")
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(gguf_files.os, "scandir", refusing)
    catalog = found(tmp_path)
    assert set(catalog.specs) == {"a"} and catalog.notes == ("the folder sub cannot be read: Permission denied",)


def test_a_name_that_is_not_text_is_broken(tmp_path: Path) -> None:
    put(tmp_path, "good.gguf")
    (tmp_path / os.fsdecode(b"bad\xff.gguf")).write_bytes(b"GGUF")
    catalog = found(tmp_path)
    assert set(catalog.specs) == {"good"} and reasons(catalog) == {"bad�.gguf": "its name is not UTF-8; rename it"}


def test_adapters_and_the_like_are_no_models(tmp_path: Path) -> None:
    for kind in ("adapter", "imatrix", "mmproj"):
        ggufs.write(tmp_path / f"x-{kind.replace('mm', '')}.gguf", ggufs.LLAMA | {"general.type": kind})
    ggufs.write(tmp_path / "vision.gguf", {"general.architecture": "clip"})
    ggufs.write(tmp_path / "m.gguf", ggufs.LLAMA | {"general.type": "model"})
    catalog = found(tmp_path)
    assert set(catalog.specs) == {"m"} and catalog.broken == ()
    assert "x-adapter.gguf is a LoRA adapter, not a model" in catalog.notes
    assert "vision.gguf is a projector, not a model" in catalog.notes


# parts


def test_parts_are_one_model(tmp_path: Path) -> None:
    parts = [f"big/X-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    put(tmp_path, *parts, n_bytes=1 << 20)
    put(tmp_path, "one.gguf", n_bytes=1 << 20)
    catalog = found(tmp_path)
    assert set(catalog.specs) == {"X-Q8_0", "one"} and catalog.specs["X-Q8_0"].path == tmp_path / parts[0]
    assert catalog.specs["X-Q8_0"].n_bytes - catalog.specs["one"].n_bytes == pytest.approx(2 << 20, abs=2000)


def test_missing_parts_break_that_model_only(tmp_path: Path) -> None:
    put(tmp_path, "X-00001-of-00003.gguf", "X-00003-of-00003.gguf", "Y-00002-of-00009.gguf", "good.gguf")
    catalog = found(tmp_path)
    assert set(catalog.specs) == {"good"}
    assert reasons(catalog) == {
        "X": "1 of 3 parts is missing: X-00002-of-00003.gguf",
        "Y": "8 of 9 parts are missing: Y-00001-of-00009.gguf, Y-00003-of-00009.gguf, Y-00004-of-00009.gguf and 5 more",
    }


def test_a_bad_part_breaks_its_model(tmp_path: Path) -> None:
    put(tmp_path, "X-00001-of-00002.gguf")
    (tmp_path / "X-00002-of-00002.gguf").touch()
    assert reasons(found(tmp_path)) == {"X": "X-00002-of-00002.gguf is empty"}


def test_a_part_under_another_name_is_recognised(tmp_path: Path) -> None:
    ggufs.write(tmp_path / "renamed.gguf", ggufs.LLAMA | {"split.count": 3})
    assert reasons(found(tmp_path)) == {
        "renamed": "renamed.gguf is one of 3 parts under another name; give them back theirs"
    }


# names


def test_equal_names_are_told_apart_by_their_folders_and_it_is_said(tmp_path: Path) -> None:
    put(tmp_path, "a/X.gguf", "b/X.gguf", "a/Y.gguf", "X.gguf", "Z.gguf", "Z.GGUF", "Z-00001-of-00001.gguf")
    catalog = found(tmp_path)
    assert set(catalog.specs) == {"a/X", "b/X", "Y", "X", "Z.gguf", "Z.GGUF", "Z-00001-of-00001.gguf"}
    assert catalog.specs["X"].path == tmp_path / "X.gguf" and catalog.specs["b/X"].path == tmp_path / "b/X.gguf"
    assert "3 models are called X; they are served as X, a/X, b/X" in catalog.notes


@pytest.mark.parametrize(
    ("stem", "quant", "rest"),
    [
        ("Qwen3.5-4B-Q4_K_M", "Q4_K_M", "Qwen3.5-4B"),
        ("model.i1-iq3_xxs", "IQ3_XXS", "model.i1"),
        ("gpt-oss-mxfp4", "MXFP4", "gpt-oss"),
        ("x-UD-Q2_K_XL", "UD-Q2_K_XL", "x"),
        ("x-bf16", "BF16", "x"),
        ("x_fp16", "FP16", "x"),
        ("F16", "F16", ""),
        ("Q-model", None, "Q-model"),
        ("x-Q4_K_M-imat", None, "x-Q4_K_M-imat"),
    ],
)
def test_the_quant_of_a_name(stem: str, quant: str | None, rest: str) -> None:
    assert quant_of(stem) == quant and without_quant(stem) == rest


# projectors


@pytest.mark.parametrize(
    ("model", "beside", "projector"),
    [
        ("X.gguf", ["mmproj-X.gguf", "Y.gguf"], "mmproj-X.gguf"),
        ("X.gguf", ["X.mmproj.gguf", "Y.gguf"], "X.mmproj.gguf"),
        ("X-Q4_K_M.gguf", ["mmproj-X-f16.gguf", "Y.gguf"], "mmproj-X-f16.gguf"),
        ("X-Q4_K_M.gguf", ["X.mmproj-Q8_0.gguf", "Y.gguf"], "X.mmproj-Q8_0.gguf"),
        ("X-Q4_K_M.gguf", ["mmproj-X-Q4_K_M.gguf", "mmproj-X-f16.gguf"], "mmproj-X-Q4_K_M.gguf"),
        ("X.gguf", ["mmproj.gguf"], "mmproj.gguf"),
        ("X.gguf", ["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        ("X.gguf", ["mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"], "mmproj-F16.gguf"),
        ("X-Q4_K_M.gguf", ["mmproj.gguf", "X-Q8_0.gguf"], "mmproj.gguf"),
        ("X-00001-of-00002.gguf", ["X-00002-of-00002.gguf", "mmproj-X.gguf"], "mmproj-X.gguf"),
        ("X.gguf", ["mmproj.gguf", "Y.gguf"], None),
        ("X.gguf", ["mmproj-Z.gguf", "Y.gguf"], None),
        ("X.gguf", ["sub/mmproj-X.gguf"], None),
    ],
)
def test_the_projector_of_a_model(tmp_path: Path, model: str, beside: list[str], projector: str | None) -> None:
    put(tmp_path, model, *beside)
    spec = next(spec for spec in found(tmp_path).specs.values() if spec.path.name == model)
    assert spec.mmproj == (None if projector is None else tmp_path / projector)
    assert not any("mmproj" in id for id in found(tmp_path).specs)


def test_a_projector_is_counted_and_one_without_a_model_is_said(tmp_path: Path) -> None:
    put(tmp_path, "a/X.gguf", "b/Y.gguf", "c/mmproj-Z.gguf")
    put(tmp_path, "a/mmproj-X.gguf", n_bytes=1 << 20)
    (tmp_path / "b/mmproj-Y.gguf").write_text("nonsense")
    catalog = found(tmp_path)
    assert catalog.specs["X"].n_bytes - catalog.specs["Y"].n_bytes > 1 << 20
    assert catalog.specs["Y"].mmproj is None and set(catalog.notes) == {
        "the projector c/mmproj-Z.gguf belongs to no model beside it",
        "the projector b/mmproj-Y.gguf is not a readable GGUF file",
    }


def test_names_alone_decide_about_parts_and_projectors() -> None:
    both = groups(["r/X-00001-of-00002.gguf", "r/X-00002-of-00002.gguf", "mmproj-X.gguf", "X-00005-of-00002.gguf"])
    assert [(group.folder, group.stem, group.n_parts) for group in both] == [("", "X-00005-of-00002", 1), ("r", "X", 2)]
    assert projector_for(both[1], ["mmproj-X.gguf"], is_alone=False) == "mmproj-X.gguf"


# looking again


def test_looking_again_finds_what_came_and_misses_what_went(tmp_path: Path) -> None:
    put(tmp_path, "a.gguf", "b.gguf")
    before = found(tmp_path)
    assert found(tmp_path) == before
    (tmp_path / "a.gguf").unlink()
    put(tmp_path, "c.gguf")
    after = found(tmp_path)
    assert set(after.specs) == {"b", "c"} and after.specs["b"] == before.specs["b"]
    os.utime(tmp_path / "b.gguf", ns=(1, 1))  # another file under its name
    assert found(tmp_path).specs["b"] != before.specs["b"]


def test_a_file_that_goes_while_we_look_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a.gguf", "b.gguf")
    read = gguf_files.read_header

    def vanishing(path: Path) -> Any:
        header = read(path)
        if path.name == "a.gguf":
            path.unlink()
        return header

    monkeypatch.setattr(gguf_files, "read_header", vanishing)
    catalog = found(tmp_path)
    assert set(catalog.specs) == {"b"} and "cannot be read: No such file" in reasons(catalog)["a"]


# one file


def test_one_file_is_a_catalog_that_answers_to_every_name(tmp_path: Path) -> None:
    put(tmp_path, "m.gguf", "other.gguf", "mmproj-m.gguf")
    catalog = found(tmp_path / "m.gguf")
    assert set(catalog.specs) == {"m"} and catalog.default == "m" and catalog.specs["m"].source == "file"
    assert catalog.find("gpt-4") is catalog.find(None) is catalog.specs["m"]
    assert catalog.specs["m"].mmproj == tmp_path / "mmproj-m.gguf"


def test_any_part_of_a_file_stands_for_the_whole(tmp_path: Path) -> None:
    put(tmp_path, "X-00001-of-00002.gguf", "X-00002-of-00002.gguf")
    catalog = found(tmp_path / "X-00002-of-00002.gguf")
    assert catalog.specs["X"].path.name == "X-00001-of-00002.gguf"


def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    put(tmp_path, "sha256-abcdef")
    assert set(found(tmp_path / "sha256-abcdef").specs) == {"sha256-abcdef"}


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("nonsense")
    with pytest.raises(ModelFileError, match=r"m.gguf is not a GGUF file"):
        found(tmp_path / "m.gguf")
    with pytest.raises(
        BadRequest, match=r"none does not exist; give a folder, a .toml file, a GGUF file or hf:owner/repo"
    ):
        found(tmp_path / "none")


def split(original: Path, stem: Path, *, small_first: bool) -> None:
    """The same model in parts, as the tools around libllama write them."""
    reader = GGUFReader(original)
    writer = GGUFWriter(stem, "llama", split_max_tensors=20, small_first_shard=small_first)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(stem)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("small_first", [False, True])
def test_libllama_opens_what_is_listed(tmp_path: Path, small_first: bool) -> None:
    whole = tiny_model("llama")
    split(whole, tmp_path / "X-F32.gguf", small_first=small_first)
    assert len(list(tmp_path.iterdir())) > 3
    catalog = found(tmp_path)
    spec, single = catalog.specs["X-F32"], next(iter(found(whole).specs.values()))
    assert spec.n_bytes == pytest.approx(single.n_bytes, rel=0.01)
    with Model(spec.path, spec.settings.model) as model, Model(single.path) as other:
        assert model.size_bytes == other.size_bytes < spec.n_bytes
    (tmp_path / spec.path.name.replace("00001-of", "00003-of")).unlink()
    assert "1 of " in reasons(found(tmp_path))["X-F32"]


# finding


def spec(id: str, **more: Any) -> ModelSpec:
    return ModelSpec(id=id, path=Path(id), settings=DEFAULTS, n_bytes=1, source="config", **more)


def test_the_latest_of_a_name_is_that_name_unless_a_model_is_called_so() -> None:
    a, b, exact = spec("a", aliases=("gpt-4",)), spec("b"), spec("b:latest")
    catalog = Catalog({"a": a, "b": b}, (UnusableFile("c", Path("c.gguf"), "is empty"),))
    assert catalog.find("a:latest") is catalog.find("gpt-4:latest") is a and catalog.find("a:q8") is None
    assert catalog.find("b:latest") is b and Catalog({"b": b, "b:latest": exact}).find("b:latest") is exact
    assert catalog.find_broken("c:latest") is not None and catalog.find_broken("a:latest") is None
    assert (tagged("a"), tagged("a:q8")) == ("a:latest", "a:q8")


def test_models_are_found_by_id_then_alias_then_default() -> None:
    a, b = spec("a", aliases=("gpt-4",)), spec("b")
    broken = (UnusableFile("c", Path("c"), "is empty", ("d",)),)
    catalog = Catalog({"a": a, "b": b}, broken)
    assert (catalog.find("a"), catalog.find("gpt-4"), catalog.find("b")) == (a, a, b)
    assert catalog.find("x") is catalog.find(None) is catalog.find("c") is None
    with_default = replace(catalog, default="gpt-4")
    assert with_default.find("x") is with_default.find(None) is with_default.find("") is a
    assert with_default.find("c") is with_default.find("d") is None  # it is there, so no other takes its place
    assert with_default.find_broken("d") is broken[0] and with_default.find_broken(None) is None
    assert replace(catalog, default="c").find("x") is None
    assert Catalog({"b": b}).find(None) is b and Catalog({"b": b}).find("x") is None


# configuration

Configure = Callable[..., Catalog]


@pytest.fixture
def configured(tmp_path: Path) -> Configure:
    put(tmp_path, "files/one.gguf", "files/two.gguf")

    def read(text: str | bytes, defaults: EngineSettings = DEFAULTS, **options: Any) -> Catalog:
        (tmp_path / "models.toml").write_bytes(text.encode() if isinstance(text, str) else text)
        return discover(tmp_path / "models.toml", defaults, **options)

    return read


def test_a_table_overrides_what_the_flags_say(configured: Configure, tmp_path: Path) -> None:
    put(tmp_path, "lora.gguf", "eyes.gguf")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    catalog = configured(
        """
        default = "coder"
        models-max = 2
        memory-limit = "24GiB"
        [models.one]
        path = "files/one.gguf"
        alias = ["coder", "gpt-4"]
        ctx-size = 1000
        slots = 3
        batch-size = 100
        threads = 5
        n-gpu-layers = 7
        cache-type-k = "q8_0"
        cache-type-v = "q4_0"
        flash-attn = "on"
        lora = ["lora.gguf:0.5", "lora.gguf"]
        mmproj = "eyes.gguf"
        template = "chat.jinja"
        max-checkpoints = 9
        checkpoint-every = 512
        checkpoint-min-tokens = 10
        checkpoint-min-gap = 11
        cache-ram = "1GiB"
        disk-cache = "2GiB"
        pinned = true
        load-on-start = true
        ttl = "10m"
        """,
        state_dir="/states",
    )
    adapters = ((str(tmp_path / "lora.gguf"), 0.5), (str(tmp_path / "lora.gguf"), 1.0))
    settings = replace(
        DEFAULTS,
        n_ctx=1000,
        n_slots=3,
        n_batch=100,
        n_ubatch=100,
        n_threads=5,
        cache_type_k="q8_0",
        cache_type_v="q4_0",
        flash_attention="on",
        model=ModelOptions(n_gpu_layers=7, lora=adapters),
        checkpoints=CheckpointParams(9, 512, 10, 11),
        ram_bytes=1 << 30,
        store=StoreSettings("/states", 2 << 30),
    )
    one = catalog.specs["one"]
    assert one == ModelSpec(
        id="one",
        path=tmp_path / "files/one.gguf",
        settings=settings,
        n_bytes=one.n_bytes,
        source="config",
        aliases=("coder", "gpt-4"),
        mmproj=tmp_path / "eyes.gguf",
        template="{{ messages }}",
        pinned=True,
        load_on_start=True,
        ttl_s=600.0,
        changed_ns=(tmp_path / "files/one.gguf").stat().st_mtime_ns,
    )
    assert (catalog.models_max, catalog.memory_limit, catalog.default) == (2, 24 << 30, "coder")
    assert catalog.find("claude-3") is one


def test_what_a_table_leaves_out_is_as_the_flags_say(configured: Configure) -> None:
    defaults = replace(DEFAULTS, ram_bytes=5, store=StoreSettings("/s"), model=ModelOptions(3, load_mode="none"))
    catalog = configured('[models.a]\npath = "files/one.gguf"\nalias = "a"\nttl = 90', defaults)
    assert catalog.specs["a"].settings == defaults and catalog.specs["a"].ttl_s == 90.0
    assert catalog.specs["a"].aliases == () and (catalog.models_max, catalog.memory_limit) == (None, None)
    catalog = configured('[models.a]\npath = "files/one.gguf"\ndisk-cache = 0\ncache-ram = 0', defaults)
    assert catalog.specs["a"].settings == replace(defaults, ram_bytes=0, store=None)
    catalog = configured('[models.a]\npath = "files/one.gguf"\ndisk-cache = "3MiB"', defaults)
    assert catalog.specs["a"].settings.store == StoreSettings("/s", 3 << 20)


def test_a_directory_and_tables_for_some_of_its_models(configured: Configure, tmp_path: Path) -> None:
    put(tmp_path, "files/sub/two.gguf")
    catalog = configured(
        'directory = "files"\n[models.one]\nctx-size = 512\n[models.renamed]\npath = "files/sub/two.gguf"\npinned = true'
    )
    assert set(catalog.specs) == {"one", "two", "renamed"}
    assert catalog.specs["one"].settings.n_ctx == 512 and catalog.specs["one"].source == "directory"
    assert catalog.specs["two"].settings is DEFAULTS and catalog.specs["renamed"].source == "config"


def test_the_id_of_a_folder_can_be_configured(configured: Configure, tmp_path: Path) -> None:
    put(tmp_path, "files/sub/two.gguf")
    catalog = configured('directory = "files"\n[models."sub/two"]\nslots = 7')
    assert catalog.specs["sub/two"].settings.n_slots == 7 and catalog.specs["two"].settings.n_slots == 2


def test_a_file_that_is_missing_breaks_its_model_and_no_other(configured: Configure, tmp_path: Path) -> None:
    (tmp_path / "files/bad.gguf").touch()
    (tmp_path / "long.jinja").write_bytes(b"x" * ((1 << 20) + 1))
    (tmp_path / "odd.jinja").write_bytes(b"\xff")
    catalog = configured(
        """
        directory = "files"
        default = "gone"
        [models.gone]
        path = "files/gone.gguf"
        alias = "also-gone"
        [models.bad]
        pinned = true
        [models.on]
        [models.one]
        lora = ["none.gguf"]
        [models.t1]
        path = "files/one.gguf"
        template = "none.jinja"
        [models.t2]
        path = "files/one.gguf"
        template = "long.jinja"
        [models.t3]
        path = "files/one.gguf"
        template = "odd.jinja"
        [models.m]
        path = "files/one.gguf"
        mmproj = "long.jinja"
        """
    )
    assert set(catalog.specs) == {"two"}
    assert reasons(catalog) == {
        "gone": "gone.gguf cannot be read: No such file or directory",
        "bad": "bad.gguf is empty",
        "on": "there is no model on in files; did you mean 'one'?",
        "one": "none.gguf cannot be read: No such file or directory",
        "t1": "none.jinja cannot be read: No such file or directory",
        "t2": "the template long.jinja has more than 1048576 bytes",
        "t3": "the template odd.jinja cannot be read: it is not UTF-8",
        "m": "long.jinja is not a GGUF file (it starts with b'xxxx')",
    }
    assert catalog.find("also-gone") is None and catalog.find("anything") is None


def test_models_of_the_hub_are_brought_by_whoever_is_asked(configured: Configure, tmp_path: Path) -> None:
    put(tmp_path, "cache/T-Q8_0.gguf", "cache/eyes.gguf")
    brought: list[str] = []

    def resolve(name: str) -> hub.HubModel:
        brought.append(name)
        if "none" in name:
            raise ModelFileError("there is no repository none")
        return hub.HubModel("acme/T:Q8_0", tmp_path / "cache/T-Q8_0.gguf", tmp_path / "cache/eyes.gguf")

    text = '[models.t]\nhf = "acme/T:Q8_0"\nslots = 3\n[models.n]\nhf = "acme/none"'
    catalog = configured(text, resolve=resolve)
    assert brought == ["acme/T:Q8_0", "acme/none"] and reasons(catalog) == {"n": "there is no repository none"}
    assert catalog.specs["t"].source == "hub" and catalog.specs["t"].settings.n_slots == 3
    assert catalog.specs["t"].mmproj == tmp_path / "cache/eyes.gguf"
    direct = discover("hf:acme/T:Q8_0", DEFAULTS, resolve=resolve)
    assert direct.default == "acme/T:Q8_0" and set(direct.specs) == {"acme/T:Q8_0"}
    with pytest.raises(ModelFileError, match="no repository none"):
        discover("hf:acme/none", DEFAULTS, resolve=resolve)


def test_unless_told_otherwise_only_the_cache_is_asked(
    configured: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "cache_directory", lambda: tmp_path / "hub")
    put(tmp_path, "hub/models--acme--T/snapshots/abc/T-Q8_0.gguf")
    (tmp_path / "hub/models--acme--T/snapshots/abc/T-Q2_K.gguf").touch()
    catalog = configured('[models.t]\nhf = "acme/T:q8_0"\n[models.u]\nhf = "acme/U"')
    assert set(catalog.specs) == {"t"} and "downloads are off" in reasons(catalog)["u"]
    everything = discover("hf:", DEFAULTS)
    assert set(everything.specs) == {"acme/T:Q8_0"} and set(reasons(everything)) == {"acme/T:Q2_K"}


ONE = '[models.a]\npath = "files/one.gguf"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("deflt = 1", r"^models.toml: has an unknown key 'deflt'; did you mean 'default'\?$"),
        ("zzz = 1", "has an unknown key 'zzz'; there is default, directory, memory-limit, models, models-max"),
        (ONE + "ctx_size = 5", r"^models.toml: \[models.a\] has an unknown key 'ctx_size'; did you mean 'ctx-size'\?$"),
        (ONE + 'ctx-size = "5"', r"\[models.a\] ctx-size is '5'; give a whole number$"),
        (ONE + "ctx-size = true", "ctx-size is true; give a whole number$"),
        (ONE + "ctx-size = 0", r"\[models.a\] ctx-size is 0; give 1 to 67108864 cells"),
        (ONE + "slots = 65", "slots is 65; give 1 to 64"),
        (ONE + "threads = 0", "threads is 0; give 1 to 1024"),
        (ONE + "batch-size = 99999", "batch-size is 99999; give at most 65536"),
        (ONE + "ubatch-size = 4096", r"ubatch-size is 4096; give 1 to batch-size \(2048\)"),
        (ONE + "max-checkpoints = -1", "max-checkpoints is -1; give 0 to 1048576"),
        (ONE + "checkpoint-every = -2", "checkpoint-every is -2; give -1 to"),
        (ONE + "checkpoint-min-gap = -2", "checkpoint-min-gap is -2; give 0 to"),
        (ONE + "n-gpu-layers = -2", "n-gpu-layers is -2; give a whole number of at least -1"),
        (
            ONE + 'cache-type-k = "f17"',
            "cache-type-k is 'f17'; give one of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1",
        ),
        (ONE + 'flash-attn = "yes"', "flash-attn is 'yes'; give one of auto, on, off"),
        (ONE + "alias = 3", "alias is 3; give a text or a list"),
        (ONE + 'alias = ["x", 3]', "alias is .*; give a text for each entry"),
        (ONE + 'alias = ""', "alias is ''; give a text that is not empty"),
        (ONE + 'alias = "a\\nb"', "name or alias is 'a.*b'; give 1 to 256 printable characters"),
        (ONE + 'lora = "x"', "lora is 'x'; give a list"),
        (ONE + 'lora = ["x:1e9"]', "the scale of LoRA .*x is 1000000000.0; give a number"),
        (ONE + "pinned = 1", "pinned is 1; give true or false"),
        (ONE + 'ttl = "soon"', "'soon' is not a time; give a number like 30d, 12h or 90m"),
        (ONE + "ttl = -1", "ttl is -1.0; give seconds or a time like 10m, or 0 for never"),
        (ONE + "ttl = nan", "ttl is nan; give seconds"),
        (ONE + "ttl = true", "ttl is true; give a number or a text"),
        (ONE + 'cache-ram = "lots"', "cache-ram: 'lots' is not a size; give a number like 8GiB or 500MB"),
        (ONE + 'disk-cache = "5"', "disk-cache is 5; give at least 1 MiB"),
        (ONE + 'hf = "a/b"', "has both path and hf; give one of them"),
        ('[models.a]\nhf = "nonsense"', "'nonsense' is not a model on the Hub; give owner/repo"),
        ("[models.a]\nslots = 1", "has no path; give path, or hf, or a directory above"),
        ("[models.a]\npath = 3", "path is 3; give a text"),
        ("models = 3", "models is 3; give a table"),
        ("[models]\na = 3", "models is {'a': 3}; give a table"),
        ("models-max = -1", "models-max is -1; give a whole number of at least 0"),
        ('memory-limit = "8 cows"', "memory-limit: '8 cows' is not a size"),
        (ONE + ONE, "models.toml is not valid TOML: Cannot declare"),
        ("default = [", "models.toml is not valid TOML: "),
        (b'default = "\xff"', "models.toml is not valid TOML: 'utf-8' codec"),
        ('default = "x"', r"the default model 'x' does not exist; there is nothing$"),
        ('default = "b"\n' + ONE.replace("a]", "bb]"), r"the default model 'b' does not exist; did you mean 'bb'\?"),
        ('directory = "none"', "none is not a folder; give one with GGUF files"),
        (
            ONE + 'alias = "b"\n[models.b]\npath = "files/two.gguf"',
            r"^models.toml: two models are called 'b', models.toml: \[models.a\] and models.toml: \[models.b\]; give each",
        ),
        (ONE + 'alias = "x"\n[models.b]\npath = "files/two.gguf"\nalias = ["x"]', "two models are called 'x'"),
        (
            ONE.replace("a]", "two]") + '[models.b]\npath = "files/gone.gguf"\nalias = "two"',
            "two models are called 'two'",
        ),
        ('directory = "files"\n' + ONE.replace("a]", "two]"), "two models are called 'two', .* and two in files"),
        ('directory = "files"\n' + ONE + 'alias = "two"', "two models are called 'two'"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_sentence(configured: Configure, text: str | bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as raised:
        configured(text)
    assert "\n" not in str(raised.value)


def test_a_configuration_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "huge.toml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(BadRequest, match=r"huge.toml has more than 1048576 bytes"):
        discover(tmp_path / "huge.toml", DEFAULTS)


def test_a_default_may_be_given_from_outside(tmp_path: Path) -> None:
    put(tmp_path, "alpha.gguf", "beta.gguf")
    assert found(tmp_path, default="beta").find("x") == found(tmp_path).specs["beta"]
    with pytest.raises(BadRequest, match=r"the default model 'alpa' does not exist; did you mean 'alpha'\?"):
        found(tmp_path, default="alpa")
