"""Flags of ``serve`` that say where weights lie and how positions are encoded; most need none of them."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts import Parameter

from everwarm.cli.flags.option_groups import PLACEMENT, ROPE
from everwarm.config import LoadMode, RopeOptions, RopeScaling, SplitMode, require

_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class PlacementOptions:
    load_mode: Annotated[
        LoadMode | None,
        Parameter(group=PLACEMENT, help="how the model file is read, instead of --mmap and --mlock; dio: direct I/O"),
    ] = None
    split_mode: Annotated[SplitMode, Parameter(group=PLACEMENT, help="how several GPUs share the model")] = "layer"
    main_gpu: Annotated[
        int, Parameter(group=PLACEMENT, help="the GPU for all of it (--split-mode none) or for small tensors (row)")
    ] = 0
    device: Annotated[
        tuple[str, ...], Parameter(group=PLACEMENT, negative=(), help="GPU to use; repeatable; default: all")
    ] = ()
    override_tensor: Annotated[
        tuple[str, ...],
        Parameter(
            group=PLACEMENT,
            negative=(),
            help="PATTERN=BUFFER keeps tensors whose names fit elsewhere, like 'ffn_.*_exps=CPU'; repeatable",
        ),
    ] = ()
    cpu_moe: Annotated[bool, Parameter(group=PLACEMENT, negative=(), help="all experts stay in host memory")] = False
    n_cpu_ffn: Annotated[int, Parameter(group=PLACEMENT, help="layers whose dense FFN stays in host memory")] = 0
    repack: Annotated[bool, Parameter(group=PLACEMENT, help="keep weights in a layout for quicker kernels")] = True
    no_host: Annotated[bool, Parameter(group=PLACEMENT, negative=(), help="do without pinned host buffers")] = False
    check_tensors: Annotated[
        bool, Parameter(group=PLACEMENT, negative=(), help="look for invalid numbers in the model file")
    ] = False
    kv_offload: Annotated[bool, Parameter(group=PLACEMENT, help="keep KV where its layer is")] = True
    op_offload: Annotated[
        bool, Parameter(group=PLACEMENT, help="let a GPU compute large batches of layers in host memory, too")
    ] = True
    threads_batch: Annotated[
        int | None, Parameter(group=PLACEMENT, help="CPU threads for prompts; default: --threads")
    ] = None

    rope_scaling: Annotated[RopeScaling | None, Parameter(group=ROPE, help="default: the model's")] = None
    rope_freq_base: Annotated[float | None, Parameter(group=ROPE, help="default: the model's")] = None
    rope_freq_scale: Annotated[float | None, Parameter(group=ROPE, help="1/N extends the context N times")] = None
    yarn_orig_ctx: Annotated[
        int | None, Parameter(group=ROPE, help="context of the training; default: the model's")
    ] = None
    yarn_ext_factor: Annotated[float | None, Parameter(group=ROPE, help="default: the model's")] = None
    yarn_attn_factor: Annotated[float | None, Parameter(group=ROPE, help="default: the model's")] = None
    yarn_beta_fast: Annotated[float | None, Parameter(group=ROPE, help="default: the model's")] = None
    yarn_beta_slow: Annotated[float | None, Parameter(group=ROPE, help="default: the model's")] = None

    def overrides(self) -> tuple[tuple[str, str], ...]:
        found = []
        for text in self.override_tensor:
            pattern, _, buffer_type = text.rpartition("=")
            require(bool(pattern and buffer_type), f"{text!r} is no PATTERN=BUFFER; give one like 'ffn_.*_exps=CPU'")
            found.append((pattern, buffer_type))
        return (*found, *([(_EXPERTS, "CPU")] if self.cpu_moe else []))

    def rope(self) -> RopeOptions:
        return RopeOptions(
            self.rope_scaling,
            self.rope_freq_base,
            self.rope_freq_scale,
            self.yarn_orig_ctx,
            self.yarn_ext_factor,
            self.yarn_attn_factor,
            self.yarn_beta_fast,
            self.yarn_beta_slow,
        )
