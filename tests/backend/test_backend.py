"""Builds of libllama: the pinned source is fetched and checked, what is built is tried before it is used, and servers find
it. The compiler is a stand-in but in a campaign, where libllama is built for this CPU and loaded."""

import ctypes
import hashlib
import io
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from everwarm.backend import compiling, installed, source_archive
from everwarm.backend.compiling import Tools, configure_command, find_tools, share_done
from everwarm.cli import backend as cli
from everwarm.errors import BadRequest, EverwarmError
from everwarm.llama.abi import BUILD, WHEEL
from everwarm.llama.lib import library_path, warn_of_blind_build
from support.campaign import CAMPAIGN

ROOT = Path(__file__).parents[2]
REAL_COMPILER = shutil.which("c++") or "c++"


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("EVERWARM_LIBLLAMA", raising=False)
    return tmp_path / "data" / "everwarm" / "backends"


def put(kind: installed.Kind, build: str = BUILD) -> Path:
    folder = installed.folder_of(kind, build)
    folder.mkdir(parents=True)
    (folder / "libllama.so").write_bytes(b"12345")
    return folder


# which build is used


def test_a_build_is_used_once_it_is_chosen_and_the_wheel_after_it_is_gone(data):
    folder = put("cuda")
    assert installed.used_kind() is None and installed.used_library(BUILD) is None
    installed.use("cuda", BUILD)
    assert installed.used_library(BUILD) == folder / "libllama.so"
    assert installed.remove("cuda") == 5
    assert installed.used_kind() is None and not folder.exists()


def test_the_wheel_can_be_chosen_again():
    put("native")
    installed.use("native", BUILD)
    installed.use("wheel", BUILD)
    assert installed.used_library(BUILD) is None and len(installed.all_backends()) == 1


@pytest.mark.parametrize("name", ["cuda", "metal", "../native", ""])
def test_what_was_not_built_cannot_be_chosen(name):
    put("native")
    put("cuda", "b1")
    with pytest.raises(BadRequest, match=f"for libllama {BUILD}; there is wheel, native"):
        installed.use(name, BUILD)


def test_a_build_of_another_version_is_not_loaded_but_mentioned(caplog):
    put("cuda", "b1")
    installed.use("cuda", "b1")
    assert installed.used_library(BUILD) is None
    assert "everwarm backend install cuda" in caplog.text


@pytest.mark.parametrize("text", ["", "metal", "../../etc", "\xff\xfe"])
def test_a_damaged_choice_is_the_wheel(data, text):
    data.mkdir(parents=True)
    (data / "used").write_bytes(text.encode("latin-1"))
    assert installed.used_library(BUILD) is None


# the source


def test_the_source_is_the_one_that_the_lock_and_the_wheel_name():
    assert f"{source_archive.PACKAGE}=={source_archive.VERSION}" == WHEEL
    assert source_archive.SHA256 in (ROOT / "requirements.lock").read_text()


def archive(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / source_archive.NAME
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def pinned(tmp_path, monkeypatch) -> Path:
    """An archive that counts as the right one, with a file beside the source."""
    inside = f"{source_archive.PACKAGE}-{source_archive.VERSION}"
    path = archive(tmp_path, {f"{inside}/thirdparty/llama.cpp/CMakeLists.txt": b"cmake", f"{inside}/setup.py": b"no"})
    monkeypatch.setattr(source_archive, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_only_the_source_of_a_checked_archive_is_unpacked(pinned, tmp_path):
    tree = source_archive.unpack(pinned, tmp_path / "source")
    assert (tree / "CMakeLists.txt").read_bytes() == b"cmake"
    assert not list((tmp_path / "source").rglob("setup.py"))


def test_another_archive_is_refused_before_it_is_opened(tmp_path):
    path = archive(tmp_path, {"../evil": b"x"})
    with pytest.raises(EverwarmError, match=r"is not xllamacpp-.*remove it and try again"):
        source_archive.unpack(path, tmp_path / "source")
    with pytest.raises(EverwarmError, match="is not xllamacpp-"):
        source_archive.fetch(tmp_path)
    assert not (tmp_path / "source").exists()


def test_a_name_that_leaves_the_folder_is_refused_even_in_the_right_archive(tmp_path, monkeypatch):
    inside = f"{source_archive.PACKAGE}-{source_archive.VERSION}/thirdparty/llama.cpp"
    path = archive(tmp_path, {f"{inside}/../../../../../evil": b"x"})
    monkeypatch.setattr(source_archive, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(tarfile.OutsideDestinationError):
        source_archive.unpack(path, tmp_path / "deep" / "source")
    assert not (tmp_path / "evil").exists()


def index(folder: Path, content: bytes) -> dict[str, str]:
    """A package index of files, for pip: what it says of the archive is in its PKG-INFO."""
    place = folder / "links"
    place.mkdir()
    about = f"Metadata-Version: 2.1\nName: {source_archive.PACKAGE}\nVersion: {source_archive.VERSION}\n"
    inside = f"{source_archive.PACKAGE}-{source_archive.VERSION}"
    build = b'[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    made = archive(
        folder, {f"{inside}/PKG-INFO": about.encode(), f"{inside}/pyproject.toml": build, f"{inside}/x": content}
    )
    made.rename(place / made.name)
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(place), "PIP_CONFIG_FILE": os.devnull}


def test_the_archive_is_fetched_as_pip_is_set_up_and_its_digest_decides(tmp_path, monkeypatch):
    for name, value in index(tmp_path, b"right").items():
        monkeypatch.setenv(name, value)
    made = tmp_path / "links" / source_archive.NAME
    with pytest.raises(EverwarmError, match=r"pip could not fetch .*--archive"):
        source_archive.fetch(tmp_path / "to")  # pip sees another digest
    assert not (tmp_path / "to" / source_archive.NAME).exists()
    monkeypatch.setattr(source_archive, "SHA256", hashlib.sha256(made.read_bytes()).hexdigest())
    assert source_archive.fetch(tmp_path / "to").read_bytes() == made.read_bytes()
    made.unlink()
    assert source_archive.fetch(tmp_path / "to").is_file()  # what is there is not fetched again
    assert [path.name for path in (tmp_path / "to").iterdir()] == [source_archive.NAME]


# the build


def test_the_switches_are_those_of_the_kind():
    tools = Tools("cmake", "ninja", "nvcc")
    commands = {kind: configure_command(kind, tools, Path("s"), Path("b"), "90") for kind in installed.KINDS}
    assert {"-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90", "-DCMAKE_CUDA_COMPILER=nvcc"} < set(commands["cuda"])
    assert "-DGGML_VULKAN=ON" in commands["vulkan"] and "-DGGML_CUDA=ON" not in commands["vulkan"]
    assert not [switch for switch in commands["native"] if "CUDA" in switch or "VULKAN" in switch]
    assert all("-DGGML_NATIVE=ON" in command and "-GNinja" not in command for command in commands.values())


@pytest.mark.parametrize(
    ("line", "share"), [("[3/12] Building", 0.25), ("[ 40%] Building", 0.4), ("[3] x", None), ("-- found [1/2]", None)]
)
def test_progress_is_what_the_build_tool_says(line, share):
    assert share_done(line) == share


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A PATH with an unused compiler, and a cmake that copies the wheel's library to where it would build one."""
    folder = tmp_path / "bin"
    program(folder, "c++", "exit 1")
    program(folder, "make", "exit 1")
    program(
        folder,
        "cmake",
        f'case "$1" in\n  -S) echo configured; mkdir -p "$4/bin" ;;\n'
        f'  --build) echo "[1/2] one"; echo "[2/2] two"; cp "{library_path()}" "$2/bin/libllama.so"; '
        'ln -sf libllama.so "$2/bin/libllama.so.1" ;;\nesac',
    )
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("shutil.which", _only_in(folder))
    return folder


def _only_in(folder: Path):
    def which(name: str, path: str | None = None) -> str | None:
        found = folder / name
        return str(found) if found.is_file() else None

    return which


def quietly(doing: str, done: float) -> None:
    pass


def install(kind: installed.Kind, source: Path, progress=quietly, kept: Path | None = None) -> Path:
    tools = find_tools(kind, installed.backends_directory() / ".tools", progress)
    return compiling.install(kind, BUILD, source, tools, progress, jobs=2, kept=kept)


def test_what_is_built_is_tried_then_put_in_place_and_used(path, pinned):
    seen: list[tuple[str, float]] = []
    place = install("native", pinned, lambda doing, done: seen.append((doing, done)))
    assert place == installed.folder_of("native", BUILD)
    assert [doing for doing, _ in seen] == ["unpacking", "configuring", "compiling", "compiling", "compiling"]
    assert seen[-1][1] == 1.0
    assert sorted(file.name for file in place.iterdir()) == ["libllama.so", "libllama.so.1"]
    assert (place / "libllama.so.1").is_symlink()
    installed.use("native", BUILD)
    assert library_path() == place / "libllama.so"
    assert not list(place.parent.glob(".building*"))


def test_a_build_that_fails_says_its_last_lines_and_leaves_what_was_there(path, pinned):
    before = put("native")
    program(path, "cmake", "echo something is missing; exit 1")
    with pytest.raises(EverwarmError, match=r"configuring failed; .*build\.log:\nsomething is missing"):
        install("native", pinned)
    assert (before / "libllama.so").read_bytes() == b"12345"


@pytest.mark.parametrize(
    ("message", "hint"),
    [("links to CUDA::cublas", "install all of it"), ("but no GPU was detected", "give its number with --cuda-arch")],
)
def test_what_cmake_leaves_unsaid_is_said(path, pinned, message, hint):
    program(path, "cmake", f"echo '{message}'; exit 1")
    with pytest.raises(EverwarmError, match=f"configuring failed .*{hint}"):
        install("native", pinned)


def test_a_library_that_cannot_be_loaded_is_not_put_in_place(path, pinned):
    program(path, "cmake", 'if test "$1" = --build; then mkdir -p "$2/bin"; echo no > "$2/bin/libllama.so"; fi')
    with pytest.raises(EverwarmError, match="what was built cannot be used"):
        install("native", pinned)
    assert installed.all_backends() == []


def test_a_build_without_media_is_not_put_in_place(path, pinned):
    lost = "sed s/mtmd_image_tokens_get_nx/mtmd_image_tokens_get_no/"
    program(
        path,
        "cmake",
        f'if test "$1" = --build; then mkdir -p "$2/bin"; {lost} "{library_path()}" > "$2/bin/libllama.so"; fi',
    )
    with pytest.raises(EverwarmError, match=r"cannot be used: .*has no function mtmd_image_tokens_get_nx"):
        install("native", pinned)
    assert installed.all_backends() == []


@pytest.mark.parametrize("kind", ["native", "cuda"])
def test_with_an_archive_and_the_tools_nothing_is_asked_of_the_network(path, pinned, monkeypatch, kind):
    """Also where ninja is missing: make will do."""
    program(path, "nvcc", "exit 1")

    def no_network(*_: object) -> None:
        raise AssertionError("pip was asked")

    monkeypatch.setattr(source_archive, "_download", no_network)
    monkeypatch.setattr(compiling, "_pip_install", no_network)
    cli.install(kind, archive=pinned, jobs=1)
    assert library_path() == installed.folder_of(kind, BUILD) / "libllama.so"


def test_a_folder_for_the_build_is_kept_and_continued(path, pinned, tmp_path):
    kept = tmp_path / "work"
    seen: list[str] = []
    install("native", pinned, kept=kept)
    (kept / f"native-{BUILD}" / "build" / "object").touch()
    (place,) = kept.glob("native-*/source/*/thirdparty/llama.cpp")
    (place / "CMakeLists.txt").write_text("changed")
    install("native", pinned, lambda doing, done: seen.append(doing), kept=kept)
    assert (kept / f"native-{BUILD}" / "build" / "object").is_file() and "compiling" in seen
    assert (place / "CMakeLists.txt").read_text() == "changed", "it was unpacked again"


def test_where_there_is_no_terminal_progress_is_lines(path, pinned, capsys):
    cli.install("native", archive=pinned)
    told = capsys.readouterr().err.splitlines()
    assert told[:5] == ["unpacking: 0%", "configuring: 0%", "compiling: 0%", "compiling: 50%", "compiling: 100%"]
    assert "is used from now on" in " ".join(told[5:])


# the tools


@pytest.mark.parametrize(
    ("kind", "gone", "message"), [("native", "c++", "no C.. compiler"), ("vulkan", "", "glslc was not found")]
)
def test_a_tool_that_is_missing_is_named_before_anything_is_fetched(path, tmp_path, kind, gone, message):
    if gone:
        (path / gone).unlink()
    with pytest.raises(EverwarmError, match=message):
        find_tools(kind, tmp_path / "tools", quietly)


@pytest.fixture
def wheels(monkeypatch) -> list[str]:
    """pip, which puts files where the wheels have them. Returns the packages that were asked for."""
    asked: list[str] = []

    def pip_install(packages, folder: Path, *_: str) -> None:
        asked.extend(packages)
        for name in (
            "nvidia/cu13/bin/nvcc",
            "nvidia/cu13/lib/libcudart.so.13",
            "nvidia/cu13/include/cuda.h",
            "cmake/data/bin/cmake",
            "bin/ninja",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("CUresult CUDAAPI cuMemCreate(int handle);\n")

    monkeypatch.setattr(compiling, "_pip_install", pip_install)
    return asked


def test_without_cmake_both_come_from_their_wheels(path, tmp_path, wheels):
    (path / "cmake").unlink()
    found = find_tools("native", tmp_path / "tools", quietly)
    assert wheels == ["cmake", "ninja"]
    assert Path(found.cmake).is_file() and found.ninja is not None and Path(found.ninja).is_file()
    assert find_tools("native", tmp_path / "tools", quietly) == found and len(wheels) == 2, "they were fetched again"


def test_without_nvcc_it_comes_from_its_wheels_and_what_they_lack_is_added(path, tmp_path, wheels):
    program(path, "c++", f'PATH=/usr/bin:/bin exec {REAL_COMPILER} "$@"')
    found = find_tools("cuda", tmp_path / "tools", quietly, tmp_path)
    assert all(name.startswith("nvidia-") and name.endswith("==13.0.*") for name in wheels) and len(wheels) == 6
    root = found.cuda_root
    assert root is not None and found.nvcc == str(root / "bin/nvcc")
    assert (root / "lib64/libcudart.so").is_file(), "the linker finds no library"
    assert ctypes.CDLL(str(root / "lib/stubs/libcuda.so")).cuMemCreate is not None
    command = configure_command("cuda", found, Path("s"), Path("b"), "89")
    assert {f"-DCUDAToolkit_ROOT={root}", f"-DCMAKE_BUILD_RPATH={root}/lib"} < set(command)
    find_tools("cuda", tmp_path / "tools", quietly, tmp_path)
    assert len(wheels) == 6, "they were fetched again"


def test_the_systems_nvcc_comes_first(path, tmp_path, wheels):
    program(path, "nvcc", "exit 1")
    assert find_tools("cuda", tmp_path / "tools", quietly) == Tools(str(path / "cmake"), None, str(path / "nvcc"))
    assert wheels == []


def test_an_nvcc_that_is_named_and_not_there_is_an_error(path, tmp_path, wheels, monkeypatch):
    monkeypatch.setenv("CUDACXX", "/opt/none/nvcc")
    with pytest.raises(EverwarmError, match="CUDACXX is '/opt/none/nvcc', which is no program"):
        find_tools("cuda", tmp_path / "tools", quietly)
    assert wheels == []


@pytest.mark.parametrize(
    ("version", "is_new_enough"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 2024", False),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", True),
        ("something else", True),
    ],
)
def test_a_driver_that_is_too_old_for_the_wheels_is_told(path, tmp_path, wheels, version, is_new_enough):
    program(path, "c++", "exit 0")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(f"{version}\nGCC version: 12.2.0\n")
    if is_new_enough:
        assert find_tools("cuda", tmp_path / "tools", quietly, tmp_path).cuda_root is not None
    else:
        with pytest.raises(EverwarmError, match="needs driver 580 or newer, not 550"):
            find_tools("cuda", tmp_path / "tools", quietly, tmp_path)
        assert wheels == []


def test_what_pip_cannot_install_is_said_with_its_reason(path, tmp_path, monkeypatch):
    (path / "cmake").unlink()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        EverwarmError, match=r"cmake .* was not found, and pip could not .*No matching.*: install CMake"
    ):
        find_tools("native", tmp_path / "tools", quietly)


@pytest.mark.skipif(not CAMPAIGN, reason="compiles libllama; EVERWARM_CAMPAIGN=1")
def test_libllama_is_built_for_this_cpu_and_answers(tmp_path):
    """The real thing, from the archive that pip fetches to an answer of the embedded model."""
    command = [sys.executable, "-m", "everwarm"]
    subprocess.run([*command, "backend", "install", "native"], check=True)
    asked = subprocess.run(
        [*command, "chat", "--demo", "--temperature", "0"],
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Paris" in asked.stdout


# GPUs that do nothing


def machine(root: Path, nvidia: list[str] = [], amd: int = 0) -> Path:  # noqa: B006
    for i, name in enumerate(nvidia):
        folder = root / "proc/driver/nvidia/gpus" / f"0000:0{i}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    for i in range(amd):
        folder = root / f"sys/class/drm/card{i}/device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1002\n")
    return root


@pytest.fixture
def no_smi(monkeypatch) -> None:
    """As on a machine without nvidia-smi, whatever this one has."""
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)


def said_of(root: Path) -> str | None:
    found = (installed.nvidia_gpus(root), installed.amd_gpus(root))
    return installed.unused_gpu(*found, installed.used_kind(), installed.all_backends())


@pytest.mark.usefixtures("no_smi")
def test_a_gpu_that_is_not_used_is_named_with_the_command(tmp_path):
    one = machine(tmp_path / "one", ["NVIDIA H200"])
    assert said_of(one) == "NVIDIA H200 found, but this libllama is a CPU build: `everwarm backend install cuda`"
    two = machine(tmp_path / "two", ["NVIDIA L4", "NVIDIA L4"])
    assert str(said_of(two)).startswith("2 × NVIDIA L4 found")
    amd = machine(tmp_path / "amd", amd=1)
    assert str(said_of(amd)).endswith("`everwarm backend install vulkan`")
    assert said_of(tmp_path / "none") is None


@pytest.mark.usefixtures("no_smi")
def test_a_gpu_without_a_name_is_seen_by_its_device(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    assert installed.nvidia_gpus(tmp_path) == ["NVIDIA GPU"]


def test_a_build_that_is_there_only_has_to_be_chosen(tmp_path):
    root = machine(tmp_path / "one", ["NVIDIA H200"])
    put("cuda")
    assert re.search("backend use cuda", str(said_of(root)))
    installed.use("cuda", BUILD)
    assert said_of(root) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("echo NVIDIA H200; echo NVIDIA L4", ["NVIDIA H200", "NVIDIA L4"]),
        ("echo 'Failed to initialize NVML'; exit 9", []),
        ("kill -9 $$", []),
    ],
)
def test_without_the_kernel_module_nvidia_smi_is_asked(path, tmp_path, text, found):
    program(path, "nvidia-smi", text)
    assert installed.nvidia_gpus(tmp_path / "wsl") == found


def test_a_build_for_gpus_that_sees_none_is_told():
    assert "cuda build, but it sees no GPU" in str(installed.blind_build("cuda", 0))
    assert installed.blind_build("cuda", 1) is None
    assert installed.blind_build("native", 0) is None and installed.blind_build(None, 0) is None


def test_a_library_that_is_the_cuda_build_and_has_no_gpu_is_warned_of(monkeypatch, caplog):
    folder = put("cuda")
    loaded = SimpleNamespace(path=folder / "libllama.so", ggml_backend_dev_count=lambda: 0)
    warn_of_blind_build(loaded)
    assert caplog.text == "", "another build is used"
    installed.use("cuda", BUILD)
    warn_of_blind_build(loaded)
    assert "sees no GPU" in caplog.text
