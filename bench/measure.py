"""What the benchmarks share: models on disk, medians, Markdown tables."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from everwarm.demo.tiny import TinySpec, write_tiny

EMBEDDED = Path(__file__).parent.parent / "src/everwarm/demo/everwarm-tiny.gguf"


def model_file(spec: TinySpec) -> Path:
    """A tiny model, written once per machine."""
    seeing = ("-vision" if spec.vision else "") + ("-mtp" if spec.mtp else "")
    name = f"{spec.arch}-{spec.n_layers}x{spec.width}-{spec.dtype}-{spec.seed}{seeing}.gguf"
    path = Path(tempfile.gettempdir()) / "everwarm-bench" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tiny(path, spec)
    return path


def hundred_megabytes(*, mtp: bool = False) -> Path:
    return model_file(TinySpec(arch="qwen35", n_layers=8, width=960, dtype="q8_0", mtp=mtp))


def much_kv() -> Path:
    """16 KiB of KV per token, as larger models have it."""
    return model_file(TinySpec(arch="falcon-h1", n_layers=16, width=1024, dtype="q8_0"))


def median_s(action: Callable[[], object], repeats: int, before: Callable[[], object] | None = None) -> float:
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def least_cpu_s(action: Callable[[], object], repeats: int, before: Callable[[], object] | None = None) -> float:
    """The least of several, of this thread's own time: without other work on the machine."""
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        started = time.thread_time()
        action()
        times.append(time.thread_time() - started)
    return min(times)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print(f"### {title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
