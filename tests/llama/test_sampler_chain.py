"""The same logits give the same tokens as llama-server's own sampler, which the wheel holds beside libllama."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import xllamacpp

from everwarm.config import DEFAULT_SAMPLERS, Sampling, parse_samplers
from everwarm.llama.context import Context
from everwarm.llama.lib import library_path
from everwarm.llama.model import Model
from everwarm.llama.sampler import Sampler
from support.steps import SLOT, open_context, say, text

N_STEPS = 40
HEAD = 3 * ctypes.sizeof(ctypes.c_void_p)  # of a wrapper: Python's two fields and its methods; then comes its pointer


class TheirParams(ctypes.Structure):
    """The numbers at the beginning of ``common_params_sampling``, by our names."""

    _fields_ = [
        ("seed", ctypes.c_uint32),
        ("n_prev", ctypes.c_int32),
        ("n_probs", ctypes.c_int32),
        ("min_keep", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("xtc_probability", ctypes.c_float),
        ("xtc_threshold", ctypes.c_float),
        ("typical_p", ctypes.c_float),
        ("temperature", ctypes.c_float),
        ("dynatemp_range", ctypes.c_float),
        ("dynatemp_exponent", ctypes.c_float),
        ("penalty_last_n", ctypes.c_int32),
        ("repeat_penalty", ctypes.c_float),
        ("frequency_penalty", ctypes.c_float),
        ("presence_penalty", ctypes.c_float),
        ("dry_multiplier", ctypes.c_float),
        ("dry_base", ctypes.c_float),
        ("dry_allowed_length", ctypes.c_int32),
        ("dry_penalty_last_n", ctypes.c_int32),
        ("adaptive_target", ctypes.c_float),
        ("adaptive_decay", ctypes.c_float),
        ("mirostat", ctypes.c_int32),
        ("top_n_sigma", ctypes.c_float),
        ("mirostat_tau", ctypes.c_float),
        ("mirostat_eta", ctypes.c_float),
    ]


LOOSE: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "greedy": {"temperature": 0.0},
    "loose": LOOSE,
    "greedy with penalties": {"temperature": 0.0, "repeat_penalty": 1.5, "presence_penalty": 0.5},
    "greedy with DRY": {"temperature": 0.0, "dry_multiplier": 2.0, "dry_allowed_length": 1},
    "greedy with XTC": {"temperature": 0.0, "xtc_probability": 0.5, "xtc_threshold": 0.001},
    "greedy with typical": {"temperature": 0.0, "typical_p": 0.3},
    "penalties": LOOSE | {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "penalty_last_n": 20},
    "dry": LOOSE | {"dry_multiplier": 5.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": 400},
    "xtc": LOOSE | {"xtc_probability": 0.7, "xtc_threshold": 0.004},
    "typical": LOOSE | {"typical_p": 0.5},
    "top_n_sigma": LOOSE | {"top_n_sigma": 1.0},
    "dynatemp": LOOSE | {"dynatemp_range": 1.0, "dynatemp_exponent": 1.5},
    "min_keep": {"top_p": 0.01, "min_keep": 5},
    "mirostat": LOOSE | {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    "mirostat 2": LOOSE | {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    "mirostat has no penalties": {"mirostat": 2, "repeat_penalty": 1.5},
    "adaptive": {"samplers": (*DEFAULT_SAMPLERS, "adaptive_p"), "adaptive_target": 0.3, "adaptive_decay": 0.8},
    "another order": {"samplers": ("temperature", "min_p", "top_k"), "min_p": 0.5, "temperature": 3.0},
    "no temperature": {"samplers": ("top_k",), "top_k": 5, "temperature": 0.0},
    "no samplers": {"samplers": ()},
    "infill": {"samplers": ("top_k", "top_p", "infill", "temperature")},
    "everything": {
        "repeat_penalty": 1.1,
        "dry_multiplier": 1.0,
        "top_n_sigma": 2.0,
        "typical_p": 0.9,
        "xtc_probability": 0.3,
        "xtc_threshold": 0.01,
        "dynatemp_range": 0.3,
    },
}


@pytest.fixture(scope="module")
def model(open_tiny: Callable[..., Model]) -> Model:
    return open_tiny("llama", n_layers=2, width=64)


@pytest.fixture(scope="module")
def common() -> ctypes.CDLL:
    """The functions of llama.cpp's ``common`` that llama-server samples with; they have C++ names."""
    library = ctypes.CDLL(str(library_path()))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("_Z19common_sampler_initPK11llama_modelR22common_params_sampling", pointer, (pointer, pointer)),
        ("_Z21common_sampler_acceptP14common_samplerib", None, (pointer, number, ctypes.c_bool)),
        (
            "_Z21common_sampler_sampleP14common_samplerP13llama_contextib",
            number,
            (pointer, pointer, number, ctypes.c_bool),
        ),
        ("_Z19common_sampler_freeP14common_sampler", None, (pointer,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@contextmanager
def their_sampler(common: ctypes.CDLL, model: Model, sampling: Sampling, prompt: Any) -> Iterator[Callable[..., int]]:
    owner = xllamacpp.CommonParams()
    params = owner.sampling
    address = ctypes.c_void_p.from_address(id(params) + HEAD).value
    numbers = TheirParams.from_address(address)
    for name, _ in TheirParams._fields_:
        if hasattr(sampling, name):
            setattr(numbers, name, getattr(sampling, name))
    if sampling.samplers != DEFAULT_SAMPLERS:
        params.samplers = ";".join(sampling.samplers)
    sampler = common._Z19common_sampler_initPK11llama_modelR22common_params_sampling(model.ptr, address)
    for token in prompt:
        common._Z21common_sampler_acceptP14common_samplerib(sampler, int(token), False)

    def pick(context: Context) -> int:
        at = context.batch_index(0)
        token = common._Z21common_sampler_sampleP14common_samplerP13llama_contextib(sampler, context.native, at, False)
        common._Z21common_sampler_acceptP14common_samplerib(sampler, token, True)
        return int(token)

    try:
        yield pick
    finally:
        common._Z19common_sampler_freeP14common_sampler(sampler)


def both(common: ctypes.CDLL, model: Model, ours: Sampling, theirs: Sampling) -> tuple[list[int], list[int]]:
    """What each picks from the same rows; our tokens continue the text."""
    prompt = text(60)
    picked: tuple[list[int], list[int]] = ([], [])
    with (
        open_context(model) as context,
        Sampler(model, ours, prompt) as sampler,
        their_sampler(common, model, theirs, prompt) as their_pick,
    ):
        say(context, SLOT, prompt)
        for _ in range(N_STEPS):
            picked[1].append(their_pick(context))
            token = sampler.pick(context, 0)
            assert token is not None
            picked[0].append(token)
            say(context, SLOT, text(1) * 0 + token)
    return picked


@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_as_llama_servers_sampler(case: str, common: ctypes.CDLL, model: Model) -> None:
    sampling = Sampling(seed=7, **CASES[case])
    ours, theirs = both(common, model, sampling, sampling)
    assert ours == theirs


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"defaults", "greedy", "loose"}))
def test_every_case_picks_otherwise_than_without_it(case: str, common: ctypes.CDLL, model: Model) -> None:
    """The negative control: a setting that was ignored would be seen."""
    is_greedy = CASES[case].get("temperature") == 0.0 and "samplers" not in CASES[case]
    without = CASES["greedy"] if is_greedy else LOOSE if LOOSE.items() <= CASES[case].items() else {}
    ours, theirs = both(common, model, Sampling(seed=7, **CASES[case]), Sampling(seed=7, **without))
    assert ours != theirs


def test_the_defaults_are_llama_servers() -> None:
    owner = xllamacpp.CommonParams()
    theirs = TheirParams.from_address(ctypes.c_void_p.from_address(id(owner.sampling) + HEAD).value)
    ours = dataclasses.asdict(Sampling())
    for name in (name for name, _ in TheirParams._fields_ if name in ours and name != "seed"):
        assert getattr(theirs, name) == pytest.approx(ours[name]), name
    assert tuple(owner.sampling.samplers.split(";")) == DEFAULT_SAMPLERS


def test_samplers_are_named_by_letters_and_by_other_spellings() -> None:
    assert parse_samplers("edskypmxt") == DEFAULT_SAMPLERS
    assert parse_samplers(["top-k", "topp", "nucleus", "temp", "typ"]) == (
        "top_k",
        "top_p",
        "top_p",
        "temperature",
        "typ_p",
    )
