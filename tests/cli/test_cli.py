"""The command line as a user meets it: help, settings and where they come from, mistakes, chat and demo."""

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import everwarm
from everwarm.cli.help_page import option_lines
from everwarm.demo import EMBEDDED_MODEL
from support.server import run_cli, serving, until

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")  # it sees argv all the same


def settings_in(done: CompletedProcess[str]) -> dict[str, str]:
    """What `everwarm config` says, by name."""
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([\w-]+) = (.*)$", done.stdout, re.MULTILINE))


def shown(*flags: str, **env: str) -> dict[str, str]:
    return settings_in(run_cli("config", *flags, **env))


def sentence(done: CompletedProcess[str]) -> str:
    """The one sentence a mistake is answered with."""
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    return done.stderr.strip()


def usage_error(done: CompletedProcess[str]) -> str:
    """What is said to somebody who called it wrongly."""
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done
    return done.stderr + done.stdout


@pytest.fixture
def toml(tmp_path) -> Path:
    path = tmp_path / "everwarm.toml"
    path.write_text('[serve]\nctx-size = 1111\nslots = 3\nalias = "from the file"\n')
    return path


# help


def test_an_option_of_serve_takes_one_line_and_all_of_it_with_help_all(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    short, whole = here("serve", "--help").stdout, here("serve", "--help-all").stdout
    (line,) = (line for line in short.splitlines() if line.lstrip().startswith("-c, --ctx-size"))
    assert line.endswith("tokens of context, shared by all slots; 0: as trained [16384]")
    wrapped = [line for line in short.splitlines() if line.startswith(" " * 30)]
    assert len(wrapped) < 5 and "EVERWARM_SERVE" not in short
    assert "quarter of the free memory" in " ".join(whole.split()) and len(whole) > len(short)


def test_the_environment_variables_are_listed_when_they_are_asked_for(here):
    listed = here("serve", "--help-env").stdout
    assert "EVERWARM_SERVE_CTX_SIZE" in listed and "tokens of context" not in listed


def test_clauses_that_do_not_fit_are_left_out_and_the_default_is_not():
    text = "so much; a number of the machine that this is or of another one; and what else there is to say"
    begin = "  --size INT                  so much"
    assert option_lines("--size INT", text, " [1]", 60, shows_all=False) == [f"{begin} [1]"]
    assert option_lines("--size INT", text, " [1]", 200, shows_all=False) == [
        f"  --size INT                  {text} [1]"
    ]
    assert len(option_lines("--size INT", text, " [1]", 60, shows_all=True)) > 2


def test_a_text_without_an_end_is_wrapped():
    lines = option_lines("--a-name-that-is-longer-than-others STR", "word " * 30, "", 80, shows_all=False)
    assert len(lines) > 2 and all(len(line) <= 80 for line in lines)


def test_help_names_every_command(here):
    done = here("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("serve", "chat", "demo", "config", "tiny"))


@pytest.mark.parametrize("command", ["serve", "chat", "demo", "config", "tiny"])
def test_every_command_has_help(here, command):
    done = here(command, "--help")
    assert done.returncode == 0 and "Usage: everwarm" in done.stdout and done.stderr == ""


def test_the_version_is_the_packages_own(here):
    assert here("--version").stdout.strip() == everwarm.__version__


# where settings come from


def test_a_flag_wins_over_the_environment_and_that_over_the_file(toml):
    env = {"EVERWARM_CONFIG": str(toml), "EVERWARM_SERVE_CTX_SIZE": "2222"}
    assert shown()["ctx-size"] == "16384"
    assert shown(EVERWARM_CONFIG=str(toml))["ctx-size"] == "1111"
    assert shown(**env)["ctx-size"] == "2222" and shown(**env)["slots"] == "3"
    assert shown("-c", "3333", **env)["ctx-size"] == "3333"


def test_config_shows_what_serve_would_run_with(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text("[serve]\nctx-size = 1111\n")
    assert shown(EVERWARM_CONFIG=str(path))["ctx-size"] == "1111"
    assert shown(EVERWARM_SERVE_CTX_SIZE="2222")["ctx-size"] == "2222"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("EVERWARM_SERVE_CTX_SIZ", "EVERWARM_SERVE_CTX_SIZE"),
        ("EVERWARM_SERVE_NO_PREWARM", "EVERWARM_SERVE_PREWARM"),
        ("EVERWARM_SERVE_QQQQQQQQQQQQQQQQQQ", "--help"),
    ],
)
def test_a_misspelt_variable_is_an_error_that_says_what_would_be_right(here, monkeypatch, name, hint):
    monkeypatch.setenv(name, "1")
    message = sentence(here("config"))
    assert name in message and hint in message


def test_short_names_are_llama_servers(here):
    flags = ["-c", "512", "-np", "3", "-b", "64", "-ub", "32", "-t", "2", "-fa", "off", "-ctk", "q8_0"]
    found = settings_in(here("config", *flags))
    assert (found["ctx-size"], found["slots"], found["batch-size"], found["ubatch-size"]) == ("512", "3", "64", "32")
    assert (found["threads"], found["flash-attn"], found["cache-type-k"]) == ("2", '"off"', '"q8_0"')


def test_what_is_printed_gives_the_same_settings(tmp_path):
    flags = ["m.gguf", "--ctx-size", "2048", "-ts", "3", "-ts", "1.5", "--allowed-host", 'a"b', "--no-prewarm"]
    flags += ["--cache-ram", "2GiB", "--api-key", "very-secret", "--request-timeout", "1e-3"]
    first = run_cli("config", *flags)
    path = tmp_path / "printed.toml"
    path.write_text(first.stdout)
    assert (
        first.returncode == 0 and 'cache-ram = "2GiB"' in first.stdout and "tensor-split = [3.0, 1.5]" in first.stdout
    )
    again = run_cli("config", EVERWARM_CONFIG=str(path))
    assert again.stdout == first.stdout.replace("# api-key is set, and not shown\n", "")


def test_a_key_is_not_shown(here):
    found = here("config", "--api-key", "very-secret")
    assert "very-secret" not in found.stdout + found.stderr and "# api-key is set" in found.stdout


# mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serve]\nctx-sise = 5\n", "has ctx-sise in [serve], which is nothing known; did you mean ctx-size?"),
        ("[srve]\nctx-size = 5\n", "has a table [srve], which is nothing known; did you mean serve?"),
        ("ctx-size = 5\n", "has ctx-size in no table, which is nothing known; give a table per command, like [serve]"),
        ("[chat]\nsistem = 'x'\n", "has sistem in [chat], which is nothing known; did you mean system?"),
        ("[cache.prune]\nkeeb = 1\n", "has keeb in [cache.prune], which is nothing known; did you mean keep?"),
    ],
)
def test_an_unknown_table_or_key_in_the_file_is_an_error(here, monkeypatch, tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    monkeypatch.setenv("EVERWARM_CONFIG", str(path))
    assert message in sentence(here("config"))


@pytest.mark.parametrize("text", ["[config\n", "ctx-size = = 1\n"])
def test_a_file_that_is_no_toml_is_an_error(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    assert "toml" in usage_error(run_cli("config", EVERWARM_CONFIG=str(path))).lower()


def test_a_file_that_is_missing_is_an_error(tmp_path):
    assert "nothing.toml" in usage_error(run_cli("config", EVERWARM_CONFIG=str(tmp_path / "nothing.toml")))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slots", "0"], "--slots is 0; give 1 to 64"),
        (["-c", "-1"], "--ctx-size is -1; give 1 to 67108864 cells"),
        (["-c", "0"], "--ctx-size is 0, which means the model's own; give a number where it is not one model"),
        (["--port", "70000"], "--port is 70000; give 0 (any free one) to 65535"),
        (["--cache-ram", "much"], "'much' is not a size; give a number like 8GiB or 500MB"),
        (["--max-requests", "0"], "--max-requests is 0; give at least 1"),
        (["--threads", "2000"], "--threads is 2000; give 1 to 1024"),
        (["--api-key", ""], "the API key is empty; leave it out or give one"),
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines: give --api-key, or bind to 127.0.0.1"),
    ],
)
def test_a_bad_value_is_answered_with_one_sentence(here, flags, message):
    assert sentence(here("config", *flags)) == f"everwarm: {message}"


@pytest.mark.parametrize("arguments", [["serve"], ["serve", "--demo", "x.gguf"]])
def test_a_model_must_be_given_once(here, arguments):
    assert sentence(here(*arguments)) == "everwarm: give a GGUF file, --models for many, or --demo"


@pytest.mark.parametrize("arguments", [["nothing"], ["serve", "--nothing"], ["config", "--slots", "many"]])
def test_what_is_unknown_is_named(here, arguments):
    assert arguments[-1].lstrip("-") in usage_error(here(*arguments))


def test_a_model_file_that_is_missing_or_none_is_said_at_once(tmp_path):
    missing, broken = tmp_path / "missing.gguf", tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    for path in (missing, broken):
        message = sentence(run_cli("serve", str(path), "--port", "0"))
        assert message.startswith("everwarm: ") and path.name in message and "\n" not in message


def test_the_summary_at_the_start_says_what_was_loaded_and_what_the_disk_may_take(tmp_path):
    with serving("--disk-cache", "900TiB", "--state-dir", str(tmp_path)) as server:
        until(lambda: "page at /" in server.log, "it has said everything")
    message = " ".join(server.log.split())
    assert "(qwen35 " in message and "?B" not in message
    assert re.search(
        r"kept on disk: up to [\d.]+ [GT]iB more in \S+ \(--disk-cache 900.0 TiB has no room there\)", message
    )


def test_a_port_that_is_taken_is_said():
    with serving() as server:
        message = sentence(run_cli("serve", "--demo", "--port", str(server.port)))
    assert message == f"everwarm: cannot listen on 127.0.0.1:{server.port}: Address already in use"


# the demo, and models for tests


def test_the_demo_makes_its_point_in_80_columns_without_warnings():
    done = run_cli("demo", timeout_s=120, COLUMNS="80")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "regret: " in done.stdout and "bit-exact: yes" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    last = " ".join(done.stdout.split()[-30:])
    assert re.search(
        r"would have read [\d,]+ tokens. Everwarm read [\d,]+, and all but \d+ of them for the first time", last
    )


def test_a_tiny_model_is_written_and_the_same_flags_write_the_same(here, tmp_path):
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf")]
    for path in paths:
        assert here("tiny", "--out", str(path), "--width", "64").returncode == 0
    assert paths[0].read_bytes() == paths[1].read_bytes() and EMBEDDED_MODEL.exists()


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_a_tiny_model_that_sees_has_its_projector_beside_it(arch, here, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        out = str(tmp_path / name / "m.gguf")
        done = here("tiny", "--arch", arch, "--vision", "--out", out, "--width", "64")
        assert done.returncode == 0 and "mmproj-m.gguf: its projector," in done.stdout.replace("\n", "")
    for file in ("m.gguf", "mmproj-m.gguf"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
