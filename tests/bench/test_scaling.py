"""Exponents that are found are those that were put in, and every curve can be measured."""

import pytest
from bench.scaling import context, disk, report, slots, tree, turns
from bench.scaling.fit import Curve, exponent


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_is_found(power):
    assert exponent([(n, 3e-6 * n**power) for n in (1, 10, 100, 1000)]) == pytest.approx(power)


def test_one_size_has_no_exponent():
    assert exponent([(10, 1.0)]) == 0.0 and exponent([]) == 0.0


def curve(should, power, floor=0.0) -> Curve:
    return Curve("x", should, "", tuple((n, floor + 1e-6 * n**power) for n in (1, 10, 100, 1000, 10_000)))


def test_what_grows_more_than_it_should_is_found():
    assert curve("constant", 0.1).is_as_it_should_be and not curve("constant", 0.5).is_as_it_should_be
    assert curve("linear", 1.0).is_as_it_should_be and not curve("linear", 1.5).is_as_it_should_be


def test_growth_that_a_large_beginning_hides_is_found_in_the_upper_half():
    hidden = curve("constant", 1.0, floor=1e-3)
    assert hidden.exponent < 0.25 < hidden.late_exponent and not hidden.is_as_it_should_be


def test_every_curve_can_be_measured_and_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "N_TOKENS", 512)
    monkeypatch.setattr(turns, "N_CTX", 2048)
    found = {
        "context": context.curves((1024, 2048)),
        "turns": turns.curves((1, 2)),
        "tree": tree.curves((32, 64)),
        "slots": slots.curves((1, 2)),
        "disk": disk.curves((400, 800)),
    }
    assert [len(curves) for curves in found.values()] == [7, 1, 4, 2, 7]
    assert all(seconds > 0 for curves in found.values() for each in curves for _, seconds in each.points)
    measured = {name: report.Measured("a machine", curves) for name, curves in found.items()}
    files = report.files(measured)
    assert set(files) == {"scaling.md", "data/scaling.json", *(f"scaling-{name}.svg" for name in found)}
    assert files["scaling.md"].count("| context |") == 7 + 1, "and where it was measured"
    (tmp_path / "scaling.json").write_text(files["data/scaling.json"])
    assert report.files(report._read(tmp_path / "scaling.json")) == files, "what is measured once can be reported again"
