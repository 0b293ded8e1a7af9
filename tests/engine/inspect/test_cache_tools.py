"""`everwarm cache` over what real engines kept: what it lists is so, what it verifies is exact, and every lie is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import numpy as np
import pytest

from everwarm.cli import app
from everwarm.config import parse_bytes, parse_duration
from everwarm.engine.core import Core
from everwarm.engine.settings import StoreSettings
from everwarm.engine.slotfile import slot_io
from everwarm.engine.verify import Finding, Report, check_up
from everwarm.errors import BadRequest
from everwarm.llama.batch import Feed
from everwarm.state.store.folder_meta import read_about, write_about
from everwarm.state.store.object import ObjectHeader, ObjectReader, encode, name_of
from everwarm.state.store.slot_file import Claim
from everwarm.state.tools.inventory import folders, read_folder
from support.crash_writer import in_memory
from support.drive import EVERY_KIND, check, drain, open_core, run, submit, text
from support.models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")  # it sees argv all the same

HISTORY, NEW = text(1, 600), text(2, 40)
STABLE = 580

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def here(monkeypatch, capsys) -> Run:
    """The command line in this very process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["everwarm", "cache", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        message = capsys.readouterr()
        assert "Traceback" not in message.err
        return CompletedProcess(arguments, int(ended.value.code or 0), message.out, message.err)

    return run


@contextmanager
def kept_core(directory: Path, arch: str = "qwen35", **settings):
    store = StoreSettings(str(directory), 1 << 30, restore_policy="always")
    with open_core(arch, store=store, **settings) as core:
        assert core.cache.tiers.disk.is_on
        yield core


def keep(core: Core, prompt: Sequence[int] = HISTORY, stable: int = STABLE) -> None:
    run(core, prompt, stable=stable)
    core.put_away()
    check(core)


_made: dict[str, tempfile.TemporaryDirectory[str]] = {}


@pytest.fixture(scope="module", autouse=True)
def _removed_afterwards() -> Iterator[None]:
    yield
    while _made:
        _made.popitem()[1].cleanup()


def kept(directory: Path, arch: str = "qwen35") -> Path:
    """A state directory with one conversation; returns its only folder. An engine makes it once, then it is copied."""
    if arch not in _made:
        _made[arch] = in_memory()
        with kept_core(Path(_made[arch].name), arch) as core:
            keep(core)
    shutil.copytree(_made[arch].name, directory, dirs_exist_ok=True)
    (place,) = folders(directory)
    return place


def one(place: Path, kind: str) -> Path:
    return sorted(place.glob(f"{kind}-*.ew"))[0]


def rewrite(path: Path, change: Callable[[ObjectHeader, dict[str, np.ndarray]], ObjectHeader | None]) -> Path:
    """An object with something changed and every digest made right again."""
    with path.open("rb") as file:
        reader = ObjectReader(file.fileno())
        parts = {section.name: reader.read(section.name).copy() for section in reader.header.sections}
    header = change(reader.header, parts) or reader.header
    path.unlink()
    path = path.with_name(name_of(header))
    path.write_bytes(b"".join(encode(header, parts)))
    return path


def flip(section: str, at: int) -> Callable[[ObjectHeader, dict[str, np.ndarray]], None]:
    def change(_: ObjectHeader, parts: dict[str, np.ndarray]) -> None:
        parts[section][at] ^= 1

    return change


def verified(directory: Path, model: Path | None = None, limit: int | None = None) -> list[Report]:
    return check_up([read_folder(path) for path in folders(directory)], model, limit, lambda *_: lambda _: None)


def by_name(report: Report) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


# what an engine says of itself


def seconds_per_token(core: Core) -> list[float]:
    """Of every step from now on that reads a part of a prompt."""
    found: list[float] = []
    decode = core.context.decode

    def timed(feeds: Sequence[Feed]) -> None:
        began, n = time.monotonic(), sum(len(feed.tokens) for feed in feeds)
        decode(feeds)
        found.extend([(time.monotonic() - began) / n] * (n >= 32))

    core.context.decode = timed
    return found


def test_an_engine_says_what_it_is_and_how_fast_it_reads(tmp_path):
    with kept_core(tmp_path) as core:
        (place,) = folders(tmp_path)
        assert read_about(place).seconds_per_token is None, "nothing was read yet"
        steps = seconds_per_token(core)
        keep(core)
        about, speed = read_about(place), core.speed.seconds_per_token
        assert about.path == str(core.model.path) and about.model == core.model.path.name
        assert about.description == core.model.description
        assert about.fingerprint == core.settings.fingerprint(core.model.fingerprint, core.model.rope_limit)
        assert about.ways[0].context == core.context.options and about.ways[0].model == core.model.options
        assert about.seconds_per_token == pytest.approx(speed, rel=0.11)
        assert min(steps) / 2 <= speed <= 2 * max(steps), "measured, and no guess among it"
    with kept_core(tmp_path, n_threads=2) as core:
        assert core.speed.seconds_per_token == about.seconds_per_token, "it need not be measured again"
    assert [way.context.n_threads for way in read_about(place).ways] == [2, 1]


def test_a_folder_that_cannot_say_what_it_is_harms_nobody(tmp_path):
    place = kept(tmp_path)
    (place / "about.json").unlink()
    (place / "about.json").mkdir()
    with kept_core(tmp_path) as core:
        assert run(core, [*HISTORY[:STABLE], *NEW]).n_cached == STABLE


# ls and show


def test_ls_lists_a_running_engines_states_and_leaves_no_trace(tmp_path, here):
    with kept_core(tmp_path) as core:
        keep(core)
        branch = [*HISTORY[:STABLE], *text(21, 100)]
        keep(core, branch, 675)
        (place,) = folders(tmp_path)
        before = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
        done = here("ls", "--json", "--state-dir", tmp_path)
        assert {path.name: path.stat().st_mtime_ns for path in place.iterdir()} == before
        speed = read_about(place).seconds_per_token
        text_of = core.model.vocab.detokenize(HISTORY[:8]).decode("utf-8", "replace").split()[0]
    assert done.returncode == 0
    (folder,) = json.loads(done.stdout)["folders"]
    assert folder["model"] == tiny_model("qwen35").name and folder["n_bytes"] == sum(
        path.stat().st_size for path in place.glob("*.ew")
    )
    states = {state["n_tokens"]: state for state in folder["states"]}
    assert set(states) == {STABLE, 675}
    for n_tokens, state in states.items():
        head = read_folder(place).objects[state["name"]].header
        sizes = {need: (place / need).stat().st_size for need in head.needs}
        assert state["n_bytes"] == (place / state["name"]).stat().st_size + sum(sizes.values())
        assert state["n_bytes_shared"] == sum(sizes[need] for need in _needs(place, STABLE) & _needs(place, 675))
        assert state["seconds_saved"] == pytest.approx(n_tokens * speed)
        assert state["tier"] == "disk" and state["hits"] == 0 and state["is_whole"] and state["clean"]
        assert state["words"].startswith(text_of)


def _needs(place: Path, n_items: int) -> set[str]:
    states = [t.header for t in read_folder(place).objects.values() if t.header.kind == "state"]
    return {need for head in states if head.n_items == n_items for need in head.needs}


def test_ls_counts_uses_and_says_it_in_words(tmp_path, here):
    place = kept(tmp_path)
    with kept_core(tmp_path) as core:
        assert run(core, [*HISTORY[:STABLE], *NEW]).n_cached == STABLE
    rewrite(one(place, "state"), lambda head, _: msgspec.structs.replace(head, words="hello \x1b[31m\n[bold]there"))
    (folder,) = json.loads(here("ls", "--json", "--state-dir", tmp_path).stdout)["folders"]
    assert folder["states"][0]["hits"] == 1
    done = here("ls", "--state-dir", tmp_path)
    assert "hello ·[31m·[bold]there" in done.stdout and "\x1b" not in done.stdout
    assert " 580 " in done.stdout and " disk " in done.stdout and tiny_model("qwen35").name in done.stdout


def test_ls_of_nothing_creates_nothing(tmp_path, here):
    done = here("ls", "--state-dir", tmp_path / "nowhere")
    assert done.returncode == 0 and "nothing is kept" in done.stdout and not (tmp_path / "nowhere").exists()


def test_show_says_what_an_object_is_and_whether_it_is_whole(tmp_path, here):
    place = kept(tmp_path)
    state = read_folder(place).lineages()[0].state
    done = here("show", state.header.key[:10], "--json", "--state-dir", tmp_path)
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["is_whole"] and facts["kind"] == "state" and facts["n_tokens"] == STABLE
    assert (facts["key"], facts["start"], facts["clean"]) == (state.header.key, state.header.start, True)
    assert [need["name"] for need in facts["needs"]] == list(state.header.needs)
    assert [s["blake3"] for s in facts["sections"]] == [s.blake3 for s in state.header.sections]
    (place / state.header.needs[0]).unlink()
    done = here("show", state.name, "--state-dir", tmp_path)
    assert done.returncode == 1 and "it is not there" in done.stdout
    for wrong in ("zzz", ""):
        assert here("show", wrong, "--state-dir", tmp_path).returncode == 1


def test_show_takes_the_path_of_a_slots_companion(tmp_path, here):
    main = tmp_path / "a.bin"
    with open_core() as core:
        run(core, HISTORY, stable=STABLE)
        slot = next(slot for slot in core.slots if slot.n_fed)
        slot_io.write(main, slot_io.capture(core, slot, ""), Claim("fingerprint", ""))
    done = here("show", f"{main}.checkpoints", "--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["kind"] == "slot" and facts["is_whole"]
    assert STABLE in [point["n_tokens"] for point in facts["points"]]
    data = bytearray(main.read_bytes())
    data[-100] ^= 1
    main.write_bytes(data)
    done = here("show", f"{main}.checkpoints")
    assert done.returncode == 1 and "another file" in done.stdout
    done = here("show", main)
    assert done.returncode == 1 and "no object" in done.stderr


# verify


@pytest.mark.parametrize("arch", [*EVERY_KIND, "jamba"])
def test_what_an_engine_kept_is_what_a_cold_reading_gives(tmp_path, arch):
    place = kept(tmp_path, arch)
    with kept_core(tmp_path, arch) as core:
        keep(core, [*HISTORY[:590], *text(31, 60)], 640)
    (report,) = verified(tmp_path)
    verdicts = {name: finding.verdict for name, finding in by_name(report).items()}
    clean = {t.name for t in read_folder(place).objects.values() if t.header.kind == "state" and t.header.clean}
    assert report.is_well and report.not_replayed == "" and not report.folder.quarantined()
    assert len(clean) == (0 if arch == "llama" else 2)
    assert all(verdicts[name] == "exact" for name in clean)
    n_kv = sum(name.startswith("kv") for name, verdict in verdicts.items() if verdict == "exact")
    assert (n_kv > 0) == (arch != "mamba2")


@pytest.mark.parametrize("arch", EVERY_KIND)
def test_one_wrong_bit_with_right_digests_is_found_and_never_offered_again(tmp_path, arch):
    """The negative control of the test above."""
    place = kept(tmp_path, arch)
    kind, section = ("kv", "kv") if arch == "llama" else ("state", "state")
    victim = rewrite(one(place, kind), flip(section, 20_001))
    assert not verified(tmp_path, limit=0)[0].wrong, "the digests are right: only reading again can find it"
    (report,) = verified(tmp_path)
    assert not report.is_well and not report.not_put_aside and victim.name in report.wrong
    assert by_name(report)[victim.name].verdict == "differs"
    assert by_name(report)[victim.name].spread > 0
    assert not victim.exists() and (place / "quarantine" / victim.name).exists()
    (report,) = verified(tmp_path)
    assert victim.name not in report.wrong
    with kept_core(tmp_path, arch) as core:
        assert run(core, [*HISTORY[:STABLE], *NEW]).n_cached == 0


def test_one_wrong_bit_in_kv_is_found_in_the_kv(tmp_path):
    place = kept(tmp_path)
    victim = rewrite(one(place, "kv"), flip("kv", -2001))
    (report,) = verified(tmp_path)
    assert report.wrong == (victim.name,)
    assert by_name(report)[one(place, "state").name].verdict == "exact"


def test_a_state_of_another_prompt_is_found(tmp_path):
    with kept_core(tmp_path) as core:
        keep(core)
        keep(core, text(9, 600))
    (place,) = folders(tmp_path)
    first, second = (lineage.state.path for lineage in read_folder(place).lineages())
    stolen: dict[str, np.ndarray] = {}
    rewrite(first, lambda _, parts: stolen.update(parts))
    rewrite(second, lambda _, parts: parts.update(state=stolen["state"]))
    (report,) = verified(tmp_path)
    assert report.wrong == (second.name,) and by_name(report)[first.name].verdict == "exact"


def test_a_state_that_libllama_does_not_take_is_put_aside(tmp_path):
    place = kept(tmp_path)
    victim = rewrite(one(place, "state"), lambda _, parts: parts.update(state=parts["state"][:-64]))
    (report,) = verified(tmp_path)
    assert by_name(report)[victim.name].verdict == "refused" and report.wrong == (victim.name,)


@pytest.mark.parametrize(
    "lie",
    [
        lambda head, _: msgspec.structs.replace(head, chunks=((600, 1 << 60), (0, 1 << 60))),
        lambda head, _: msgspec.structs.replace(head, chunks=((-1, 1), (581, 1))),
        lambda head, _: msgspec.structs.replace(head, reaches=(1 << 40,) * len(head.needs)),
        lambda head, _: msgspec.structs.replace(head, reaches=()),
        lambda head, _: msgspec.structs.replace(head, needs=head.needs[::-1]),
        lambda head, _: msgspec.structs.replace(head, n_items=1 << 30, n_start=1 << 30),
        lambda _, parts: parts.update(items=np.full(4 * STABLE, 0x7F, np.uint8)),
        lambda _, parts: parts.update(items=parts["items"][:-3]),
        lambda _, parts: parts.__delitem__("state"),
    ],
)
def test_lies_with_right_digests_reach_nobody(tmp_path, lie):
    place = kept(tmp_path)
    victim = rewrite(one(place, "state"), lie)
    (report,) = verified(tmp_path)
    assert by_name(report)[victim.name].verdict in ("refused", "skipped", "exact", "close")


def test_damage_is_found_by_digest_alone_and_what_needs_it_is_not_read_again(tmp_path):
    place = kept(tmp_path)
    victim = one(place, "kv")
    data = bytearray(victim.read_bytes())
    data[-5000] ^= 1
    victim.write_bytes(data)
    (report,) = verified(tmp_path)
    assert [broken.path for broken in report.broken] == [victim] and report.findings == ()
    assert not report.is_well and (place / "quarantine" / victim.name).exists()


def test_a_state_that_is_not_clean_is_measured_and_stays(tmp_path):
    with kept_core(tmp_path, "llama") as core:
        for seed in (41, 42):
            submit(core, text(seed, 300), stable=280)
        drain(core)
        core.put_away()
    (place,) = folders(tmp_path)
    (report,) = verified(tmp_path)
    close = [finding for finding in report.findings if finding.verdict == "close"]
    assert report.is_well and len(close) == 2 and all(0 <= finding.spread < 0.1 for finding in close)
    victim = rewrite(
        place / _kv_of(place, close[0].name), lambda _, parts: parts["kv"].__setitem__(slice(-9000, -1), 9)
    )
    (report,) = verified(tmp_path)
    assert by_name(report)[close[0].name].spread > 0.1 > by_name(report)[close[1].name].spread
    assert report.is_well and victim.exists(), "a float difference alone is never a reason"


def _kv_of(place: Path, state: str) -> str:
    return read_folder(place).objects[state].header.needs[0]


def test_a_way_of_opening_the_model_that_was_used_before_explains_other_bits(tmp_path):
    with kept_core(tmp_path, n_threads=2) as core:
        reply = run(core, HISTORY, max_tokens=12).tokens
        keep(core, [*HISTORY, *reply, *NEW], len(HISTORY) + 20)
    with kept_core(tmp_path, n_threads=1):
        pass
    (report,) = verified(tmp_path)
    (place,) = folders(tmp_path)
    assert report.is_well and {finding.verdict for finding in report.findings} == {"exact"}
    about = read_about(place)
    write_about(place, msgspec.structs.replace(about, ways=about.ways[:1]))
    (report,) = verified(tmp_path)
    assert report.wrong, "bits do depend on it: this test could not fail"


def test_only_the_states_own_model_is_asked(tmp_path, here):
    place = kept(tmp_path)
    other = tiny_model("qwen35", seed=7)
    done = here("verify", "--model", other, "--state-dir", tmp_path)
    assert done.returncode == 1 and "another model" in done.stderr
    done = here("verify", "--model", tmp_path / "nowhere.gguf", "--state-dir", tmp_path)
    assert done.returncode == 1 and "no model file" in done.stderr
    about = read_about(place)
    for path in (str(other), "", "/dev/zero"):
        write_about(place, msgspec.structs.replace(about, path=path))
        (report,) = verified(tmp_path)
        assert report.is_well and report.not_replayed and not report.findings
    assert verified(tmp_path, tiny_model("qwen35"))[0].findings
    (place / "about.json").unlink()
    assert "not known" in verified(tmp_path)[0].not_replayed
    assert verified(tmp_path, tiny_model("qwen35"))[0].is_well, "how it was opened is not known: nothing is proven"


def test_beside_a_running_engine_mismatches_are_reported_and_stay(tmp_path, here):
    place = kept(tmp_path)
    victim = rewrite(one(place, "state"), flip("state", -2001))
    with kept_core(tmp_path):
        done = here("verify", "--state-dir", tmp_path)
        assert done.returncode == 1 and "reported but not quarantined" in done.stdout and victim.exists()
    done = here("verify", "--json", "--state-dir", tmp_path)
    (report,) = json.loads(done.stdout)
    assert done.returncode == 1 and report["quarantined"] == [victim.name] and not victim.exists()
    done = here("verify", "--state-dir", tmp_path)
    assert done.returncode == 0 and "objects are what was written" in done.stdout


def test_a_limit_leaves_the_rest(tmp_path):
    with kept_core(tmp_path) as core:
        keep(core)
        keep(core, text(9, 600))
    newest = read_folder(folders(tmp_path)[0]).lineages()[0].state.name
    (report,) = verified(tmp_path, limit=1)
    assert [f.name for f in report.findings if f.name.startswith("state")] == [newest] and report.n_left == 1


# prune


def test_prune_frees_space_and_what_is_left_is_found(tmp_path, here):
    with kept_core(tmp_path) as core:
        keep(core)
        keep(core, text(9, 600))
        done = here("prune", "--keep", "0", "--state-dir", tmp_path)
        assert done.returncode == 1 and "running server" in done.stderr
    (place,) = folders(tmp_path)
    first = read_folder(place).lineages()[0]
    done = here("prune", "--keep", str(first.n_bytes), "--dry-run", "--state-dir", tmp_path)
    assert done.stdout.startswith("would remove 1 states") and len(read_folder(place).lineages()) == 2
    here("prune", "--keep", str(first.n_bytes), "--state-dir", tmp_path)
    (left,) = read_folder(place).lineages()
    assert not left.missing and {t.name for t in (left.state, *left.kv)} == set(read_folder(place).objects)
    assert here("prune", "--older-than", "1h", "--state-dir", tmp_path).stdout.startswith("removed 0 states")
    with kept_core(tmp_path, n_slots=1) as core:
        warm = {run(core, [*prompt[:STABLE], *NEW]).n_cached for prompt in (HISTORY, text(9, 600))}
    assert warm == {0, STABLE}


def test_prune_all_removes_folders_of_every_format_and_nothing_else(tmp_path, here):
    place = kept(tmp_path)
    foreign = tmp_path / f"v7-{'0' * 24}"
    foreign.mkdir()
    (foreign / "whatever").write_text("x")
    (tmp_path / "mine").mkdir()
    assert f"{foreign.name}: another format" in here("ls", "--state-dir", tmp_path).stdout
    assert here("prune", "--all", "--dry-run", "--state-dir", tmp_path).stdout.count("would remove") == 2
    assert place.exists() and foreign.exists()
    with kept_core(tmp_path):
        assert here("prune", "--all", "--state-dir", tmp_path).returncode == 1
        assert foreign.exists()
    assert here("prune", "--all", "--state-dir", tmp_path).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# export and import


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_another_machine_goes_on_with_what_was_exported(tmp_path, here, arch):
    with kept_core(tmp_path / "a", arch) as core:
        keep(core)
        keep(core, text(9, 600))
        expected = run(core, [*HISTORY[:STABLE], *NEW], use_cache=False).tokens
    (place,) = folders(tmp_path / "a")
    wanted = next(lin.state for lin in read_folder(place).lineages() if _first(lin.state.path) == HISTORY[0])
    done = here("export", tmp_path / "one.tar", wanted.header.key[:12], "--state-dir", tmp_path / "a")
    assert done.returncode == 0 and "1 states" in done.stdout
    done = here("import", tmp_path / "one.tar", "--state-dir", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    with kept_core(tmp_path / "b", arch) as core:
        result = run(core, [*HISTORY[:STABLE], *NEW])
        assert result.n_cached == STABLE and result.tokens == expected
        assert run(core, [*text(9, 600)[:STABLE], *NEW]).n_cached == 0, "only one was exported"
    assert verified(tmp_path / "b", tiny_model(arch))[0].is_well


def _first(path: Path) -> int:
    with path.open("rb") as file:
        return int(ObjectReader(file.fileno()).read("items").view("<i4")[0])


def test_export_asks_for_one_model_and_for_states(tmp_path, here):
    kept(tmp_path, "qwen35")
    with kept_core(tmp_path, "mamba2") as core:
        keep(core)
    done = here("export", tmp_path / "x.tar", "--state-dir", tmp_path)
    assert done.returncode == 1 and "one model" in done.stderr
    assert here("export", tmp_path / "x.tar", "--folder", "mamba2", "--state-dir", tmp_path).returncode == 0
    done = here("export", tmp_path / "x.tar", "--folder", "mamba2", "--state-dir", tmp_path)
    assert done.returncode == 1 and "there already" in done.stderr
    kv = next(path for place in folders(tmp_path) for path in place.glob("kv-*"))
    done = here("export", tmp_path / "y.tar", kv.name, "--state-dir", tmp_path)
    assert done.returncode == 1 and "is KV" in done.stderr


# mistakes


@pytest.mark.parametrize(
    "arguments",
    [
        ("prune",),
        ("prune", "--keep", "lots"),
        ("prune", "--keep", "9" * 400),
        ("prune", "--older-than", "yesterday"),
        ("prune", "--older-than", "9" * 400 + "d"),
        ("prune", "--all", "--keep", "1GiB"),
        ("verify", "--limit", "-1"),
        ("verify", "--folder", "nothing"),
        ("verify", "--model", "nowhere.gguf"),
        ("export", "x.tar"),
        ("export", "x.tar", "nothing"),
        ("import", "nowhere.tar"),
        ("import", "."),
        ("show", "nothing"),
        ("show", "/dev/zero"),
        ("show", "x" * 5000),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(tmp_path, here, arguments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = here(*arguments, "--state-dir", tmp_path / "states")
    assert done.returncode == 1 and done.stderr.startswith("everwarm: ") and len(done.stderr) > 20
    assert list(tmp_path.iterdir()) == []


def test_times_and_sizes_are_numbers_with_units():
    assert (parse_duration("30d"), parse_duration("1.5h"), parse_duration(" 90 m ")) == (2_592_000, 5400, 5400)
    assert parse_bytes("10GiB") == 10 << 30
    for wrong in ("30", "d", "-1d", "1y", "1e9s"):
        with pytest.raises(BadRequest):
            parse_duration(wrong)


def test_only_verify_loads_libllama(tmp_path):
    kept(tmp_path)
    code = (
        "import sys\nfrom everwarm.cli.app import app\nfile = sys.argv[2]\n"
        "for a in (['ls'], ['show', 'state'], ['export', file], ['import', file], ['prune', '--keep', '0']):\n"
        "    try: app(['cache', *a, '--state-dir', sys.argv[1]])\n"
        "    except SystemExit as ended: assert not ended.code, a\n"
        "assert not [name for name in sys.modules if name.startswith('everwarm.llama')], 'libllama'\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "x.tar")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_env(tmp_path))
    assert done.returncode == 0, done.stderr


def test_the_state_directory_may_come_from_the_environment(tmp_path, here, monkeypatch):
    kept(tmp_path)
    monkeypatch.setenv("EVERWARM_CACHE_LS_STATE_DIR", str(tmp_path))
    assert len(json.loads(here("ls", "--json").stdout)["folders"]) == 1


def _env(tmp_path: Path) -> dict[str, Any]:
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
