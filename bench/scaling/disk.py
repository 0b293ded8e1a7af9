"""What many objects on disk cost, as ``bench.objects`` measures it: conversations of ten turns, real files."""

from __future__ import annotations

from bench.objects import SIZES, DiskCosts, measure
from bench.scaling.fit import Curve, Growth

WANTED: dict[str, tuple[str, Growth, str]] = {
    "open": ("open_s", "linear", "the folder is listed and the index read, but no file"),
    "open, by the clock": ("open_clock_s", "linear", "the same; up to 1,000 files with their headers"),
    "read every header, in the background": ("pass_s", "linear", "each file is opened once"),
    "a turn's questions": ("turn_s", "constant", "each is one lookup"),
    "find a prompt": ("find_s", "linear", "one digest for each length that a state has, on a thread of its own"),
    "put a turn": ("put_s", "constant", "two files, two rows, one way up the order of eviction"),
    "evict one": ("evict_s", "constant", "one file, one row, one way up the order of eviction"),
}


def curves(sizes: tuple[int, ...] = SIZES) -> list[Curve]:
    costs = [measure(n) for n in sizes]
    return [_curve(name, field, should, why, costs) for name, (field, should, why) in WANTED.items()]


def _curve(name: str, field: str, should: Growth, why: str, costs: list[DiskCosts]) -> Curve:
    return Curve(name, should, why, tuple((float(each.n_objects), getattr(each, field)) for each in costs))
