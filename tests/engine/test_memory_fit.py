"""What a context costs is measured, and one that does not fit is refused before libllama asks the kernel."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from everwarm.config import ContextOptions
from everwarm.demo.tiny import ARCHITECTURES
from everwarm.engine import memory_plan
from everwarm.engine.memory_plan import MemoryShape, free_bytes, measure, require_fit
from everwarm.errors import BadRequest, ContextTooBig
from support.steps import KINDS, OPTIONS, SLOT, mark, open_context, read_to, text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_measured_state_is_what_a_capture_takes(arch: str, open_tiny: Callable) -> None:
    shape = measure(open_tiny(arch), OPTIONS)
    if not KINDS[arch].needs_checkpoints:
        assert shape.state_bytes == 0
        return
    with open_context(open_tiny(arch)) as context:
        read_to(context, SLOT, text(300), 300)
        taken = len(context.capture(SLOT))
    assert taken <= shape.state_bytes <= 1.05 * taken


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_measured_kv_is_what_a_segment_takes(arch: str, open_tiny: Callable) -> None:
    shape = measure(open_tiny(arch), OPTIONS)
    if not KINDS[arch].has_attention:
        assert shape.kv_bytes_per_token == 0
        return
    with open_context(open_tiny(arch)) as context:
        read_to(context, SLOT, text(300), 300)
        longer, shorter = (len(context.capture_segment(SLOT, mark(0), mark(n))) for n in (300, 100))
    assert longer - shorter == 200 * shape.kv_bytes_per_token


def test_a_smaller_cache_type_is_measured_smaller(open_tiny: Callable) -> None:
    small = replace(OPTIONS, cache_type_k="q8_0", cache_type_v="q8_0")
    assert (
        measure(open_tiny("llama"), small).kv_bytes_per_token < measure(open_tiny("llama"), OPTIONS).kv_bytes_per_token
    )


def test_a_huge_context_is_refused_with_both_numbers(open_tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "host_free_bytes", lambda: 1 << 30)
    huge = ContextOptions(n_ctx=1 << 26, n_seq_max=4)
    with pytest.raises(ContextTooBig) as raised:
        require_fit(open_tiny("llama"), huge)
    needed = measure(open_tiny("llama"), huge).context_bytes(1 << 26, 5) >> 20
    words = (
        f"a context of {1 << 26} tokens and 4 sequences needs {needed} MiB but {free_bytes(open_tiny('llama')) >> 20}"
    )
    assert str(raised.value).startswith(words)
    assert str(raised.value).endswith("are free; give fewer tokens, slots or spares")


def test_many_large_states_are_refused_too(open_tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_tiny("mamba2")
    state = measure(model, OPTIONS).state_bytes
    monkeypatch.setattr(memory_plan, "free_bytes", lambda model: 100 * state)
    require_fit(model, replace(OPTIONS, n_seq_max=99))
    with pytest.raises(ContextTooBig, match="100 sequences"):
        require_fit(model, replace(OPTIONS, n_seq_max=100))


def test_the_limit_is_exact(open_tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_tiny("qwen35")
    needed = measure(model, OPTIONS).context_bytes(OPTIONS.n_ctx, OPTIONS.n_seq_max + 1)
    monkeypatch.setattr(memory_plan, "free_bytes", lambda model: needed)
    require_fit(model, OPTIONS)
    monkeypatch.setattr(memory_plan, "free_bytes", lambda model: needed - 1)
    with pytest.raises(ContextTooBig):
        require_fit(model, OPTIONS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_small_context_fits(arch: str, open_tiny: Callable) -> None:
    require_fit(open_tiny(arch), OPTIONS)


def test_free_memory_is_the_least_of_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, group, expected in (
        (10, None, 10),
        (10, 7, 7),
        (5, 7, 5),
        (None, 7, 7),
        (None, None, 1 << 62),
        (0, 3, 0),
    ):
        monkeypatch.setattr(memory_plan, "_meminfo_available", lambda known=machine: known)
        monkeypatch.setattr(memory_plan, "limited_bytes", lambda known=group: known)
        assert memory_plan.host_free_bytes() == expected


def test_the_cost_is_linear_in_tokens_and_sequences() -> None:
    shape = MemoryShape(kv_bytes_per_token=10, state_bytes=1000)
    assert shape.context_bytes(100, 3) == 4000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_ctx": 0}, "n_ctx is 0; give 1 to"),
        ({"n_ctx": (1 << 26) + 1}, "n_ctx is 67108865"),
        ({"n_ubatch": 0}, "n_ubatch is 0; give 1 to n_batch"),
        ({"n_ubatch": 99, "n_batch": 98}, r"n_ubatch is 99; give 1 to n_batch \(98\)"),
        ({"n_batch": (1 << 16) + 1}, "n_batch is 65537; give at most 65536"),
        ({"n_seq_max": 0}, "n_seq_max is 0; give 1 to 255"),
        ({"n_seq_max": 257}, "n_seq_max is 257"),
        ({"n_threads": 0}, "n_threads is 0; give 1 to 1024"),
        ({"n_threads_batch": 1025}, "n_threads_batch is 1025"),
    ],
)
def test_a_context_option_out_of_range_says_what_would_be_right(wrong: dict, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        ContextOptions(**wrong)
