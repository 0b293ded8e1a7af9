"""Source to libraries: cmake's switches, the build with its progress, and a trial before the result gets its place."""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from everwarm.backend.build_tools import Progress, Tools
from everwarm.backend.installed import LIBRARY, Kind, backends_directory, folder_of
from everwarm.backend.source_archive import last_line, unpack
from everwarm.errors import EverwarmError

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
        raise EverwarmError(f"what was built cannot be used: {last_line(done.stderr)}")
    shutil.rmtree(place, ignore_errors=True)
    unfinished.replace(place)
    return place
