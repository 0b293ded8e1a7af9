"""The command line as a user meets it: help, settings and where they come from, mistakes, chat and demo."""

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import everwarm
from everwarm.demo import EMBEDDED_MODEL
from support.server import run_cli, serving

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")  # it sees argv all the same


def settings_in(done: CompletedProcess[str]) -> dict[str, str]:
    """What `everwarm config` says, by name."""
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^(\w+) = (.*)$", done.stdout, re.MULTILINE))


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
    assert shown()["n_ctx"] == "16384"
    assert shown(EVERWARM_CONFIG=str(toml))["n_ctx"] == "1111"
    assert shown(**env)["n_ctx"] == "2222" and shown(**env)["n_slots"] == "3"
    assert shown("-c", "3333", **env)["n_ctx"] == "3333"


def test_config_shows_what_serve_would_run_with(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text("[serve]\nctx-size = 1111\n")
    assert shown(EVERWARM_CONFIG=str(path))["n_ctx"] == "1111"
    assert shown(EVERWARM_SERVE_CTX_SIZE="2222")["n_ctx"] == "2222"


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
    said = sentence(here("config"))
    assert name in said and hint in said


def test_short_names_are_llama_servers(here):
    flags = ["-c", "512", "-np", "3", "-b", "64", "-ub", "32", "-t", "2", "-fa", "off", "-ctk", "q8_0"]
    found = settings_in(here("config", *flags))
    assert (found["n_ctx"], found["n_slots"], found["n_batch"], found["n_ubatch"]) == ("512", "3", "64", "32")
    assert (found["n_threads"], found["flash_attention"], found["cache_type_k"]) == ("2", '"off"', '"q8_0"')


def test_sizes_have_units(here):
    for size, n_bytes in {"2GiB": 2 << 30, "500MB": 500_000_000, "0": 0}.items():
        assert settings_in(here("config", "--cache-ram", size))["ram_bytes"] == str(n_bytes)


def test_a_key_is_not_shown(here):
    found = here("config", "--api-key", "very-secret")
    assert "very-secret" not in found.stdout + found.stderr and "api_key = (hidden)" in found.stdout


# mistakes


def test_an_unknown_key_in_the_file_is_an_error(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text("[config]\nctx-sise = 5\n")
    assert "ctx-sise" in usage_error(run_cli("config", EVERWARM_CONFIG=str(path)))


@pytest.mark.parametrize("text", ["[config\n", "ctx-size = = 1\n"])
def test_a_file_that_is_no_toml_is_an_error(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    assert "toml" in usage_error(run_cli("config", EVERWARM_CONFIG=str(path))).lower()


def test_a_file_that_is_missing_is_an_error(tmp_path):
    assert "nothing.toml" in usage_error(run_cli("config", EVERWARM_CONFIG=str(tmp_path / "nothing.toml")))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--slots", "0"], "n_slots is 0; give 1 to 64"),
        (["-c", "-1"], "n_ctx is -1; give 1 to 67108864 cells"),
        (["-c", "0"], "ctx-size is 0, which means the model's own; give a number where it is not one model"),
        (["--port", "70000"], "port is 70000; give 0 (any free one) to 65535"),
        (["--cache-ram", "much"], "'much' is not a size; give a number like 8GiB or 500MB"),
        (["--max-requests", "0"], "max_requests is 0; give at least 1"),
        (["--threads", "2000"], "n_threads is 2000; give 1 to 1024"),
        (["--api-key", ""], "the API key is empty; leave it out or give one"),
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines: give --api-key, or bind to 127.0.0.1"),
    ],
)
def test_a_bad_value_is_answered_with_one_sentence(here, flags, said):
    assert sentence(here("config", *flags)) == f"everwarm: {said}"


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
        said = sentence(run_cli("serve", str(path), "--port", "0")).splitlines()[-1]
        assert said.startswith("everwarm: ") and path.name in said


def test_a_port_that_is_taken_is_said():
    with serving() as server:
        said = sentence(run_cli("serve", "--demo", "--port", str(server.port)))
    assert said == f"everwarm: cannot listen on 127.0.0.1:{server.port}: Address already in use"


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
        assert done.returncode == 0 and "mmproj-m.gguf: its projector for images" in done.stdout.replace("\n", "")
    for file in ("m.gguf", "mmproj-m.gguf"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
