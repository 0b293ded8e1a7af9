"""``everwarm simulate`` as a user meets it."""

import json
import re
import xml.etree.ElementTree as ElementTree

from bench.workload.chat import to_turn
from bench.workload.scenarios import scenario

from everwarm.simulate.simulated_machine import LARGE
from everwarm.simulate.trace import to_line
from support.server import run_cli


def written(path, name="edit", size=0.1):
    path.write_bytes(b"".join(to_line(to_turn(step)) for step in scenario(name, 0, size)))
    return str(path)


def rows(out: str) -> dict[tuple[str, str], int]:
    """What each policy read under each budget."""
    cells = (line.strip("| \n").split(" | ") for line in out.splitlines() if line.startswith("| "))
    return {(c[0], c[1]): int(c[2].replace(",", "")) for c in cells if re.fullmatch(r"[\d,]+", c[2])}


def test_a_sweep_prints_a_table_and_draws_a_chart(tmp_path):
    chart = tmp_path / "chart.svg"
    trace = written(tmp_path / "t.jsonl")
    shown = ("--budget", "0,256MiB,8GiB", "--policy", "ours,lru,cold", "--svg", str(chart))
    done = run_cli("simulate", trace, *shown, "--spares", "0")
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert len(found) == 9 and found["ours", "8 GiB"] < found["ours", "0 B"] == found["cold", "8 GiB"]
    with_device = rows(run_cli("simulate", trace, *shown).stdout)
    assert with_device["ours", "0 B"] < found["ours", "0 B"], "four states lie on the device"
    assert "requests simulated per second of CPU" in done.stdout
    names = {node.text for node in ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}text")}
    assert {"ours", "lru", "cold", "8 GiB"} <= names


def test_curves_come_from_a_file_and_change_the_seconds(tmp_path):
    trace, curves = written(tmp_path / "t.jsonl"), tmp_path / "curves.json"
    slow = {
        "name": "slow",
        "state_bytes": 1000,
        "kv_bytes_per_token": 10,
        "load_bytes_per_s": 1e9,
        "prefill": [[0, 1.0]],
    }
    curves.write_text(json.dumps(slow))
    done = run_cli("simulate", trace, "--policy", "cold", "--curves", str(curves), "--most", "1")
    assert done.returncode == 0, done.stderr
    (n_read,) = rows(done.stdout).values()
    assert f"| {n_read:,}.0 |" in done.stdout and LARGE.read_s(0, n_read) < n_read


def test_mistakes_are_answered_with_a_sentence(tmp_path):
    trace, bad = written(tmp_path / "t.jsonl"), tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}\n')
    curves = tmp_path / "curves.json"
    curves.write_text('{"name": 1}')
    for arguments, why in [
        ((str(bad),), "line 1 of the trace: 0 hash_ids for 9 tokens"),
        ((trace, "--policy", "magic"), "unknown policy 'magic'"),
        ((trace, "--curves", str(curves)), "curves cannot be read"),
        ((trace, "--optimum"), "at most 12"),
    ]:
        done = run_cli("simulate", *arguments)
        assert done.returncode == 1 and why in done.stderr and "Traceback" not in done.stderr, done
