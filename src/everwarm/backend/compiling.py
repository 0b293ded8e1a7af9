"""Source to libraries: the tools that are needed, cmake's switches, the build with its progress, and a trial before the
result gets its place."""

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
from everwarm.backend.source_archive import unpack
from everwarm.errors import EverwarmError

Progress = Callable[[str, float], None]  # what is being done, and how much of it: 0 to 1

_NINJA = re.compile(r"\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"\[ *(\d+)%\]")
_N_LAST = 15
_CUDA_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
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


def find_tools(kind: Kind, wheels: Path) -> Tools:
    """From PATH; cmake and ninja are installed from their wheels into ``wheels`` where the system has no cmake, or neither
    ninja nor make. With both here nothing is asked of the network."""
    if not any(map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))):
        raise EverwarmError("no C++ compiler was found: install g++ or clang, or name one in CXX")
    nvcc = _nvcc() if kind == "cuda" else None
    if kind == "vulkan" and shutil.which("glslc") is None:
        raise EverwarmError("glslc was not found: install the Vulkan SDK, or the packages libvulkan-dev and glslc")
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    if cmake is None or (ninja is None and shutil.which("make") is None):
        return _from_wheels(wheels, nvcc)
    return Tools(cmake, ninja, nvcc)


def _nvcc() -> str:
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), *_CUDA_FOLDERS))
    found = shutil.which(os.environ.get("CUDACXX") or "nvcc", path=places)
    if found is None:
        raise EverwarmError(
            "nvcc was not found: install the CUDA toolkit, and put nvcc on PATH or its path into CUDACXX"
        )
    return found


def _from_wheels(folder: Path, nvcc: str | None) -> Tools:
    cmake, ninja = folder / "cmake/data/bin/cmake", folder / "bin/ninja"
    if not cmake.is_file():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*command, "--target", str(folder), "cmake", "ninja"], capture_output=True, text=True)
        if done.returncode != 0 or not cmake.is_file():
            raise EverwarmError(
                "cmake with ninja or make was not found, and pip could not install them: install CMake 3.18 or newer"
            )
    return Tools(str(cmake), str(ninja) if ninja.is_file() else None, nvcc)


def configure_command(kind: Kind, tools: Tools, source: Path, build: Path, architectures: str) -> list[str]:
    """Pure. ``architectures`` are CUDA's, like ``90``; ``native`` is the card of this machine."""
    command = [tools.cmake, "-S", str(source), "-B", str(build), *_ALWAYS, *_SWITCHES[kind]]
    if tools.ninja is not None:
        command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.ninja}"]
    if kind == "cuda":
        command += [f"-DCMAKE_CUDA_ARCHITECTURES={architectures}", f"-DCMAKE_CUDA_COMPILER={tools.nvcc}"]
    return command


def install(
    kind: Kind, build: str, archive: Path, progress: Progress, *, jobs: int, architectures: str = "native"
) -> Path:
    """Builds the libraries and puts them in their place, all at once. Returns the place.

    A build that failed keeps its folder, and the next one continues it.
    """
    work = backends_directory() / f".building-{kind}-{build}"
    work.mkdir(parents=True, exist_ok=True)
    tools = find_tools(kind, backends_directory() / ".tools")
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
        said = "".join(last).rstrip()
        raise EverwarmError(f"{doing} failed{_hint(said)}; the last lines of {work / 'build.log'}:\n{said}")


def _hint(said: str) -> str:
    """What cmake means, where its own words do not say what to do. Pure."""
    known = {
        "CUDA::cublas": "the CUDA toolkit has no cuBLAS: install all of it",
        "no GPU was detected": "no GPU is here to build for: give its number with --cuda-architectures",
    }
    return next((f" ({hint})" for words, hint in known.items() if words in said), "")


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
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EverwarmError(f"what was built cannot be used: {said}")
    shutil.rmtree(place, ignore_errors=True)
    unfinished.replace(place)
    return place
