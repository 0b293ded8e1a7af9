"""Where a model lies and what would fit, from facts that devices reported."""

import pytest

from everwarm.engine.inspect.report import USABLE_SHARE, place
from everwarm.gateway.server import gpu_line
from everwarm.llama.lib import Device
from support.server import Server, serving

GIB = 1 << 30
# one H200 with the 27B shape and 32,768 tokens of context on it
H200 = Device(1, "CUDA0", "NVIDIA H200", True, 108 * GIB, 140 * GIB)
L4 = Device(2, "CUDA1", "NVIDIA L4", True, 6 * GIB, 22 * GIB)
SHAPE = {"n_layers": 64, "n_ctx": 32_768, "kv_bytes_per_token": 65_536}


def test_with_all_layers_on_the_gpu_its_memory_decides():
    placed = place([H200], 10 * GIB, n_gpu_layers=-1, **SHAPE)
    assert (placed.n_layers, placed.n_gpu_layers) == (64, 64)
    fits = 32_768 + int(USABLE_SHARE * 108 * GIB / 65_536)
    assert placed.n_ctx_fits is not None and fits - 1024 < placed.n_ctx_fits <= fits
    assert gpu_line(placed) == (
        "\n  GPU: all 64 layers on NVIDIA H200 (108.0 of 140.0 GiB left for KV and states); "
        f"about {placed.n_ctx_fits:,} tokens of context would fit"
    )
    assert place([H200], 0, n_gpu_layers=65, **SHAPE) == place([H200], 0, n_gpu_layers=-1, **SHAPE)


def test_layers_on_both_sides_need_memory_on_both():
    """16 of 64 layers and a quarter of the KV: the smaller side decides, whichever it is."""
    host_short = place([H200], 3 * GIB, n_gpu_layers=16, **SHAPE)
    assert host_short.n_ctx_fits == 32_768 + int(USABLE_SHARE * 3 * GIB / (65_536 * 0.75)) // 1024 * 1024
    gpu_short = place([L4], 1000 * GIB, n_gpu_layers=16, **SHAPE)
    assert gpu_short.n_ctx_fits == 32_768 + int(USABLE_SHARE * 6 * GIB / (65_536 * 0.25)) // 1024 * 1024
    assert gpu_line(gpu_short).startswith("\n  GPU: 16 of 64 layers on NVIDIA L4")


def test_two_gpus_share_the_model():
    both = place([H200, L4], 0, n_gpu_layers=-1, **SHAPE)
    assert [gpu.name for gpu in both.gpus] == ["NVIDIA H200", "NVIDIA L4"]
    assert "NVIDIA L4 (6.0 of 22.0 GiB left" in gpu_line(both)


@pytest.mark.parametrize("n_gpu_layers", [-1, 0, 99])
def test_without_a_gpu_the_host_decides_and_no_line_is_shown(n_gpu_layers):
    placed = place([], 64 * GIB, n_gpu_layers=n_gpu_layers, **SHAPE)
    assert placed.n_gpu_layers == 0 and gpu_line(placed) == ""
    assert placed.n_ctx_fits == 32_768 + int(USABLE_SHARE * 64 * GIB / 65_536) // 1024 * 1024


def test_kv_that_stays_on_the_host_is_counted_there():
    placed = place([H200], 3 * GIB, n_gpu_layers=-1, kv_on_gpu=False, **SHAPE)
    assert placed.n_ctx_fits == 32_768 + int(USABLE_SHARE * 3 * GIB / 65_536) // 1024 * 1024


def test_a_model_without_kv_takes_any_context():
    placed = place([H200], 0, n_layers=64, n_ctx=4096, n_gpu_layers=-1, kv_bytes_per_token=0)
    assert placed.n_ctx_fits is None and gpu_line(placed).endswith("left for KV and states)")


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def test_a_server_tells_where_its_model_lies(server: Server):
    placed = server.get("/props").json["placement"]
    assert placed["n_layers"] > 0 and placed["host_free_bytes"] > 0
    assert placed["n_ctx_fits"] > 4096 and len(placed["gpus"]) == 0 == placed["n_gpu_layers"]
