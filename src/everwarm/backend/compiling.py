"""Source to libraries: the tools that a build needs, cmake's switches, the build with its progress, and a trial before the
result gets its place.

The tools are a C++ compiler, cmake, ninja or make, and for CUDA nvcc with its libraries: those of the system, else those
of PyPI's wheels, by pip, in a folder of their own. A C++ compiler and Vulkan's glslc have no wheels. With all of it on the
system nothing is asked of the network.
"""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everwarm.backend.installed import LIBRARY, Kind, backends_directory, folder_of
from everwarm.backend.source_archive import last_line, unpack
from everwarm.errors import EverwarmError

Progress = Callable[[str, float], None]  # what is being done, and how much of it: 0 to 1

_CUDA_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
_CMAKE_WHEELS = ("cmake", "ninja")
_CUDA_WHEELS = tuple(
    f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl", "cublas")
)
_CUDA_MAJOR = 13
_FIRST_DRIVER = 580  # the oldest that runs CUDA 13
_NINJA = re.compile(r"\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"\[ *(\d+)%\]")
_N_LAST = 15
_SWITCHES: dict[Kind, tuple[str, ...]] = {
    "cuda": ("-DGGML_CUDA=ON",),
    "vulkan": ("-DGGML_VULKAN=ON",),
    "native": (),
}
_ALWAYS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
    "-DGGML_NATIVE=ON",
]
_ALWAYS += [f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "EXAMPLES", "TOOLS", "SERVER", "APP")]
_ALWAYS += ["-DLLAMA_BUILD_MTMD=ON"]
_TRIAL = "import sys, pathlib; from everwarm.llama.lib import Lib; Lib(pathlib.Path(sys.argv[1])).mtmd"


@dataclass(frozen=True, slots=True)
class Tools:
    cmake: str
    ninja: str | None
    nvcc: str | None = None
    cuda_root: Path | None = None  # the toolkit, where it is none of the system's


def find_tools(kind: Kind, wheels: Path, progress: Progress, root: Path = Path("/")) -> Tools:
    """``wheels`` is the folder for what comes from PyPI: cmake and ninja where the system has no cmake, or neither ninja
    nor make; nvcc and its libraries where it has no nvcc."""
    compiler = _found((os.environ.get("CXX") or "c++", "g++", "clang++"))
    if compiler is None:
        raise EverwarmError("no C++ compiler was found: install g++ or clang, or name one in CXX")
    if kind == "vulkan" and shutil.which("glslc") is None:
        raise EverwarmError("glslc was not found: install the Vulkan SDK, or the packages libvulkan-dev and glslc")
    cuda_root = None
    nvcc = _system_nvcc() if kind == "cuda" else None
    if kind == "cuda" and nvcc is None:
        _require_driver(root)
        cuda_root = _cuda_from_wheels(wheels / f"cuda-{_CUDA_MAJOR}", compiler, progress)
        nvcc = str(cuda_root / "bin/nvcc")
    cmake = shutil.which("cmake")
    ninja = shutil.which("ninja")
    if cmake is None or (ninja is None and shutil.which("make") is None):
        cmake, ninja = _cmake_from_wheels(wheels / "cmake", progress)
    return Tools(cmake, ninja, nvcc, cuda_root)


def _found(names: Sequence[str]) -> str | None:
    return next((found for found in map(shutil.which, names) if found), None)


def _system_nvcc() -> str | None:
    """From CUDACXX, PATH, or where CUDA is usually installed. One that CUDACXX names must be there."""
    chosen = os.environ.get("CUDACXX")
    found = shutil.which(chosen or "nvcc", path=os.pathsep.join((os.environ.get("PATH", os.defpath), *_CUDA_FOLDERS)))
    if chosen and found is None:
        raise EverwarmError(f"CUDACXX is {chosen!r}, which is no program: give the path of nvcc, or leave it unset")
    return found


def _require_driver(root: Path) -> None:
    """A machine without NVIDIA's kernel module may build for another one."""
    try:
        about = (root / "proc/driver/nvidia/version").read_text("utf-8", "replace")
    except OSError:
        return
    version = re.search(r"\s(\d{3,4})\.\d+", about)
    if version is not None and int(version[1]) < _FIRST_DRIVER:
        raise EverwarmError(
            f"nvcc was not found, and PyPI's (CUDA {_CUDA_MAJOR}) needs driver {_FIRST_DRIVER} or newer, not "
            f"{version[1]}: install a newer driver, or the CUDA toolkit of this one"
        )


def _cuda_from_wheels(folder: Path, compiler: str, progress: Progress) -> Path:
    root = folder / "nvidia" / f"cu{_CUDA_MAJOR}"
    if not (folder / "complete").is_file():
        progress("fetching nvcc and cuBLAS (about 500 MB)", 0.0)
        _pip_install(_CUDA_WHEELS, folder, "nvcc was not found", "install the CUDA toolkit")
        _complete_toolkit(root, compiler)
        (folder / "complete").touch()
    return root


def _complete_toolkit(root: Path, compiler: str) -> None:
    """Adds what a toolkit has and the wheels lack: names without a version for the linker, ``lib64``, and a stub of the
    driver's library: the linker sees its functions there, and the loader takes the machine's own."""
    for library in ("cudart", "cublas", "cublasLt"):
        _link(root / "lib" / f"lib{library}.so", f"lib{library}.so.{_CUDA_MAJOR}")
    _link(root / "lib64", "lib")
    stub = root / "lib/stubs/libcuda.so"
    stub.parent.mkdir(exist_ok=True)
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w*", (root / "include/cuda.h").read_text("utf-8", "replace"))))
    source = "".join(f'extern "C" void {name}() {{}}\n' for name in functions)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(stub), "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode != 0:
        raise EverwarmError(f"{compiler} cannot make a library: {last_line(done.stderr)}")


def _link(place: Path, target: str) -> None:
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def _cmake_from_wheels(folder: Path, progress: Progress) -> tuple[str, str | None]:
    cmake = folder / "cmake/data/bin/cmake"
    ninja = folder / "bin/ninja"
    if not cmake.is_file():
        progress("fetching cmake and ninja", 0.0)
        missing = "cmake with ninja or make was not found"
        _pip_install(_CMAKE_WHEELS, folder, missing, "install CMake 3.18 or newer")
    return str(cmake), str(ninja) if ninja.is_file() else None


def _pip_install(packages: Sequence[str], folder: Path, missing: str, instead: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--upgrade", "--target", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise EverwarmError(
            f"{missing}, and pip could not install what is needed ({last_line(done.stderr)}): {instead}"
        )


def configure_command(kind: Kind, tools: Tools, source: Path, build: Path, architectures: str) -> list[str]:
    """Pure. ``architectures`` are CUDA's, like ``90``; ``native`` is the card of this machine."""
    command = [tools.cmake, "-S", str(source), "-B", str(build), *_ALWAYS, *_SWITCHES[kind]]
    if tools.ninja is not None:
        command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.ninja}"]
    if kind == "cuda":
        command += [f"-DCMAKE_CUDA_ARCHITECTURES={architectures}", f"-DCMAKE_CUDA_COMPILER={tools.nvcc}"]
    if tools.cuda_root is not None:  # else cmake takes parts of another toolkit, and the loader finds none of this one
        command += [f"-DCUDAToolkit_ROOT={tools.cuda_root}", f"-DCMAKE_BUILD_RPATH={tools.cuda_root / 'lib'}"]
    return command


def install(
    kind: Kind,
    build: str,
    archive: Path,
    tools: Tools,
    progress: Progress,
    *,
    jobs: int,
    architectures: str = "native",
    kept: Path | None = None,
) -> Path:
    """Builds the libraries and puts them in their place, all at once. Returns the place.

    A build that failed keeps its folder, and the next one continues it. The folder ``kept`` stays after success, too.
    """
    work = backends_directory() / f".building-{kind}-{build}" if kept is None else kept.absolute() / f"{kind}-{build}"
    work.mkdir(parents=True, exist_ok=True)
    progress("unpacking", 0.0)
    source = work / "source"
    if not (work / "unpacked").exists():
        unpack(archive, source)
        (work / "unpacked").touch()
    (tree,) = source.glob("*/thirdparty/llama.cpp")
    out = work / "build"
    _run(configure_command(kind, tools, tree, out, architectures), work, "configuring", progress)
    targets = ["--target", "llama", "mtmd", "-j", str(jobs)]
    _run([tools.cmake, "--build", str(out), *targets], work, "compiling", progress)
    place = _collect(out / "bin", folder_of(kind, build))
    if kept is None:
        shutil.rmtree(work)
    return place


def _run(command: Sequence[str], work: Path, doing: str, progress: Progress) -> None:
    progress(doing, 0.0)
    last: collections.deque[str] = collections.deque(maxlen=_N_LAST)
    with (
        (work / "build.log").open("a") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            last.append(line)
            done = share_done(line)
            if done is not None:
                progress(doing, done)
    if process.returncode != 0:
        output = "".join(last).rstrip()
        raise EverwarmError(f"{doing} failed{_hint(output)}; the last lines of {work / 'build.log'}:\n{output}")


def _hint(output: str) -> str:
    """What to do about an error of cmake whose own text does not say it; empty for any other. Pure."""
    known = {
        "CUDA::cublas": "the CUDA toolkit has no cuBLAS: install all of it",
        "no GPU was detected": "no GPU is here to build for: give its number with --cuda-architectures",
    }
    return next((f" ({hint})" for words, hint in known.items() if words in output), "")


def share_done(line: str) -> float | None:
    """What ninja or make say of their progress at the beginning of a line. Pure."""
    steps = _NINJA.match(line)
    if steps is not None:
        return int(steps[1]) / max(1, int(steps[2]))
    percent = _MAKE.match(line)
    return None if percent is None else int(percent[1]) / 100


def _collect(built: Path, place: Path) -> Path:
    """Copies the libraries; they get their place only if libllama and libmtmd can be loaded and are the right ones."""
    unfinished = place.with_name(f".{place.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for path in sorted(built.glob("*.so*")):
        shutil.copy2(path, unfinished / path.name, follow_symlinks=False)
    trial = [sys.executable, "-c", _TRIAL, str(unfinished / LIBRARY)]
    done = subprocess.run(trial, capture_output=True, text=True)
    if done.returncode != 0:
        raise EverwarmError(f"what was built cannot be used: {last_line(done.stderr)}")
    shutil.rmtree(place, ignore_errors=True)
    unfinished.replace(place)
    return place
