"""llama-server's command line: every flag of the wheel's own parser is understood, or refused with a sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from everwarm.cli.app import app
from everwarm.cli.flags.llama_flags import ROWS, Row, declared, from_environment, our_line, unknown_variables
from everwarm.cli.flags.serve_options import ServeOptions
from everwarm.errors import BadRequest
from everwarm.gateway.settings import ServerSettings

# The wheel has llama-server's parser, under its C++ name; it prints its help and ends the process.
THEIR_HELP = """
import ctypes, glob, os, xllamacpp
library = ctypes.CDLL(glob.glob(os.path.join(os.path.dirname(xllamacpp.__file__), "*.so"))[0])
parse = library._Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E
parse.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
owner = xllamacpp.CommonParams()
SERVER, HEAD = 12, 16
parse(2, (ctypes.c_char_p * 3)(b"llama-server", b"--help", None), id(owner) + HEAD, SERVER, None)
"""
VALUES = {  # for flags that take something else than a number
    "--flash-attn": "on",
    "--spec-type": "draft-mtp",
    "--rope-scaling": "yarn",
    "--cache-type-k": "q8_0",
    "--cache-type-v": "q8_0",
    "--load-mode": "mlock",
    "--split-mode": "row",
    "--override-tensor": "ffn=CPU",
    "--device": "GPU0",
    "--lora": "a.gguf",
    "--samplers": "top_k;temperature",
    "--sampler-seq": "kt",
    "--logit-bias": "5-1",
    "--json-schema": "{}",
    "--chat-template-kwargs": '{"a": 1}',
    "--chat-template": "{{ messages }}",
    "--reasoning-format": "deepseek",
    "--reasoning": "off",
    "--log-verbosity": "4",
    "--cors-origins": "https://a.example",
    "--dry-sequence-breaker": "x",
    "--pooling": "mean",
}


@pytest.fixture(scope="module")
def their_flags() -> dict[str, str]:
    """Their names, with the variable of each."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    done = subprocess.run([sys.executable, "-c", THEIR_HELP], capture_output=True, text=True, env=bare, check=True)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in done.stdout.splitlines():
        if line.startswith("-") and not line.startswith("-----"):
            names = re.findall(
                r"(?:^|,\s*)(--?[A-Za-z][\w.-]*)", line[:40] if len(line) > 40 and line[39] == " " else line
            )
            found |= dict.fromkeys(names, "")
        variable = re.fullmatch(r"\s+\(env: (\w+)\)", line)
        if variable:
            found |= dict.fromkeys(names, variable[1])
    assert len(found) > 300, done.stderr
    return found


def test_the_table_has_exactly_the_flags_of_their_parser(their_flags: dict[str, str]) -> None:
    ours = {name for row in ROWS if row.is_theirs for name in (*row.names, *row.negatives)}
    assert their_flags.keys() - ours == set(), "llama-server has it, and the table does not"
    assert ours - their_flags.keys() == set(), "the table has it, and llama-server does not"


def test_the_table_has_their_variables(their_flags: dict[str, str]) -> None:
    theirs = {name: variable for name, variable in their_flags.items() if variable.startswith("LLAMA_")}
    ours = {name: row.env for row in ROWS if row.env and row.is_theirs for name in (*row.names, *row.negatives)}
    assert ours == theirs


def test_no_name_is_in_two_rows() -> None:
    names = [name for row in ROWS for name in (*row.names, *row.negatives)]
    assert len(names) == len(set(names))


def value_for(row: Row, name: str) -> list[str]:
    if name in row.negatives or not row.n_values:
        return []
    return [next((VALUES[known] for known in row.names if known in VALUES), "1")] * row.n_values


def settings(tokens: list[str]) -> ServeOptions:
    _, bound, *_ = app.parse_args(["serve", *tokens], exit_on_error=False, print_error=False)
    found = bound.arguments.get("options", ServeOptions())
    assert isinstance(found, ServeOptions)
    return found


def test_every_flag_is_understood_or_refused_with_a_sentence() -> None:
    handed_on: dict[str, str] = {}
    for row in ROWS:
        for name in (*row.names, *row.negatives):
            refusal = row.refusal if name in row.names else row.refuses_negatives
            if refusal and name in declared(ServeOptions):
                continue  # ours has it by now
            line = [name, *value_for(row, name)]
            if refusal:
                with pytest.raises(BadRequest, match=re.escape(f"{name} of llama-server")) as refused:
                    our_line(line, ServeOptions)
                assert refusal in str(refused.value)
                continue
            tokens = our_line(line, ServeOptions)
            assert bool(tokens) is not bool(row.holds or (row.refusal and name in row.negatives)), name
            handed_on |= {token.partition("=")[0].replace("--no-", "--"): token for token in tokens}
    settings([token for flag, token in handed_on.items() if flag not in ("--help", "--version")])  # ours take them all


def test_what_is_handed_on_is_one_of_ours() -> None:
    known = declared(ServeOptions) | {"--model", "--models", "--help", "--version"}
    targets = {to.partition("=")[0] for row in ROWS for to in (*row.to.split(), *row.to_negative.split())}
    assert targets <= known


# meanings


def line(text: str) -> ServeOptions:
    return settings(our_line(text.split(), ServeOptions))


def server(text: str) -> ServerSettings:
    return line(text).server()


def test_cache_ram_is_in_mib() -> None:
    assert line("--cache-ram 8192").engine().ram_bytes == 8192 << 20
    assert line("-cram 0").engine().ram_bytes == 0
    assert line("--cache-ram 8GiB").engine().ram_bytes == 8 << 30
    assert (line("-cram -1").engine().ram_bytes or 0) >= 1 << 40


def test_keys_and_aliases_are_lists() -> None:
    assert server("--api-key k1,k2").api_keys == ("k1", "k2")
    assert line("-a two,one,two").aliases == ("one", "two")  # llama-server names it by the first of the alphabet


def test_keys_come_from_a_file(tmp_path) -> None:
    (tmp_path / "keys").write_text("# ours\nk1\n\n k2 \nk1\n")
    assert server(f"--api-key k3 --api-key-file {tmp_path / 'keys'}").api_keys == ("k3", "k1", "k2")
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(BadRequest, match="no keys"):
        server(f"--api-key-file {tmp_path / 'keys'}")


def test_slots_is_theirs_without_a_number_and_ours_with_one() -> None:
    assert line("--slots 3").engine().n_slots == 3
    assert (line("--slots -c 512").engine().n_slots, line("--slots -c 512").engine().n_ctx) == (4, 512)
    assert server("--no-slots").shows_slots is False and server("--slots").shows_slots


def test_a_number_that_means_auto_is_our_default() -> None:
    auto = line("-t -1 -tb -1 -np -1 -ngl auto --yarn-ext-factor -1.0 --yarn-orig-ctx 0").engine()
    assert auto == ServeOptions().engine()


def test_placement_and_rope_reach_the_engine() -> None:
    text = "-sm row -mg 1 -ts 3,1 -ot exps=CPU,attn=CPU -cmoe -ncffn 2 --no-mmap --mlock -nkvo --no-op-offload -nr -dev A,B"
    found = line(f"{text} --rope-scale 4 --rope-scaling yarn --yarn-orig-ctx 4096 -tb 3").engine()
    assert (found.model.split_mode, found.model.main_gpu, found.model.tensor_split) == ("row", 1, (3.0, 1.0))
    assert [name for name, _ in found.model.override_tensors][:2] == ["exps", "attn"]
    assert len(found.model.override_tensors) == 3 and found.model.n_cpu_ffn == 2
    assert (found.model.load_mode, found.model.devices, found.model.repack) == ("mlock", ("A", "B"), False)
    assert (found.kv_offload, found.op_offload, found.n_threads_batch) == (False, False, 3)
    assert (found.rope.scaling, found.rope.freq_scale, found.rope.yarn_orig_ctx) == ("yarn", 0.25, 4096)


def test_no_device_is_the_cpu() -> None:
    found = line("-dev none").engine()
    assert (found.model.n_gpu_layers, found.op_offload, found.model.devices) == (0, False, ())


def test_sampling_defaults_hold_for_requests() -> None:
    text = r"--temp 0.2 --top_k 7 --seed 42 -n 16 --sampler-seq kt -l 5-1.5 -l 6+2 -r \n --ignore-eos --no-cache-prompt"
    found = server(f"{text} --dry-sequence-breaker none --reasoning off --reasoning-effort low").defaults
    assert (found.sampling.temperature, found.sampling.top_k, found.sampling.seed) == (0.2, 7, 42)
    assert found.sampling.samplers == ("top_k", "temperature") and found.sampling.logit_bias == {5: -1.5, 6: 2.0}
    assert found.sampling.dry_sequence_breakers == ()
    assert (found.max_tokens, found.stop, found.ignore_eos, found.cache_prompt) == (16, ("\n",), True, False)
    assert found.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert server(r"--no-escape -r \n").defaults.stop == (r"\n",)


def test_a_flag_may_be_one_that_ours_declares_later() -> None:
    """A row that refuses gives way where our own options have the flag."""

    class Declares:
        spec_draft_p_min: str = ""

    assert our_line(["--spec-draft-p-min", "0.5"], Declares) == ["--spec-draft-p-min", "0.5"]


@pytest.mark.parametrize(
    ("theirs", "ours"), [("none", "off"), ("draft-mtp", "mtp"), ("draft-simple", "draft"), ("ngram-mod", "lookup")]
)
def test_kinds_of_speculation_have_our_names(theirs: str, ours: str) -> None:
    assert our_line(["--spec-type", theirs], ServeOptions) == [f"--speculate={ours}"]


def test_what_is_not_theirs_passes_unchanged() -> None:
    tokens = ["model.gguf", "--prewarm", "--models-default", "a", "--nothing", "--", "--jinja"]
    assert our_line(tokens, ServeOptions) == tokens


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("-c", "-c needs a value"),
        ("--tools all", "let the client run them"),
        ("--poll 0", "leave it out"),
        ("--spec-draft-p-min 0.5", "leave it out"),
    ],
)
def test_a_refusal_says_what_to_use(text: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(sentence)):
        our_line(text.split(), ServeOptions)


# variables


def test_their_variables_are_read() -> None:
    theirs = {
        "LLAMA_ARG_CTX_SIZE": "777",
        "LLAMA_ARG_HF_REPO": "a/b:Q8_0",
        "LLAMA_ARG_TENSOR_SPLIT": "1,2",
        "LLAMA_ARG_NO_MMAP": "1",
        "LLAMA_ARG_ENDPOINT_SLOTS": "false",
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
        "LLAMA_ARG_CONTEXT_SHIFT": "0",
        "LLAMA_API_KEY": "k1,k2",
    }
    assert from_environment(theirs) == {
        "--ctx-size": "777",
        "--model": "hf:a/b:Q8_0",
        "--tensor-split": ["1", "2"],
        "--mmap": False,
        "--slots-endpoint": False,
        "--metrics": True,
        "--context-shift": False,
        "--api-key": "k1,k2",
    }
    assert unknown_variables(["LLAMA_ARG_CTX_SIZ", "LLAMA_ARG_CTX_SIZE", "PATH"]) == ["LLAMA_ARG_CTX_SIZ"]


@pytest.mark.parametrize("variable", ["LLAMA_ARG_RPC", "LLAMA_ARG_TOOLS"])
def test_a_variable_may_be_refused(variable: str) -> None:
    with pytest.raises(BadRequest, match=variable):
        from_environment({variable: "1"})


def test_a_switch_is_on_or_off() -> None:
    with pytest.raises(BadRequest, match="give 1 or 0"):
        from_environment({"LLAMA_ARG_MLOCK": "perhaps"})


def test_ours_win_over_theirs(monkeypatch: Any) -> None:
    for name, value in {"CTX_SIZE": "777", "THREADS": "7", "PORT": "1", "MODEL": "x.gguf"}.items():
        monkeypatch.setenv(f"LLAMA_ARG_{name}", value)
    monkeypatch.setenv("EVERWARM_SERVE_THREADS", "2")
    found = settings(["--port", "5"])
    assert (found.ctx_size, found.threads, found.port) == (777, 2, 5)
    for chosen in (["y.gguf"], ["--demo"], ["--models", "dir"]):
        _, bound, *_ = app.parse_args(["serve", *chosen], exit_on_error=False)
        assert bound.arguments.get("model") == (chosen[0] if len(chosen) == 1 and chosen != ["--demo"] else None)
    _, bound, *_ = app.parse_args(["serve"], exit_on_error=False)
    assert bound.arguments["model"] == "x.gguf"
