"""Builds a small mixer; also used by the processes of the tensor-parallel test."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

HIDDEN = 24


def build_config(**settings: Any):
    """A TransformerConfig with Megatron's and the plugin's settings; H = 6, N = 8, P = 8, G = 1, R = 2 by default."""
    from megatron.core.transformer import TransformerConfig

    megatron = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        is_hybrid_model=True,
        mamba_state_dim=8,
        mamba_head_dim=8,
        mamba_num_groups=1,
    )
    plugin = dict(mamba3_mimo_rank=2, mamba3_chunk_size=8, mamba3_forward_kernel="reference")
    plugin["mamba3_backward_kernel"] = "reference"
    known = {f.name for f in fields(TransformerConfig)}
    for name, value in settings.items():  # mamba_num_heads is no field before 0.13
        (megatron if name in known else plugin)[name] = value
    config = TransformerConfig(**megatron)
    for name, value in plugin.items():
        setattr(config, name, value)
    return config


def process_groups() -> Any:
    """megatron's global process groups; None before 0.15, whose layers take no others."""
    try:
        from megatron.core.process_groups_config import ProcessGroupCollection
    except ImportError:
        return None
    return ProcessGroupCollection.use_mpu_process_groups()


def build_mixer(pg_collection: Any = None, layer_number: int = 1, in_proj: Any = None, **settings: Any):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from mindspeed_mamba3_plugin.layers.mamba3_mixer import Mamba3Mixer, Mamba3MixerSubmodules

    return Mamba3Mixer(
        build_config(**settings),
        Mamba3MixerSubmodules(in_proj=in_proj or ColumnParallelLinear, out_proj=RowParallelLinear),
        d_model=HIDDEN,
        layer_number=layer_number,
        pg_collection=pg_collection,
        pp_layer_offset=0,
    )


@torch.no_grad()
def scatter_values(module: torch.nn.Module, seed: int = 5) -> None:
    """Move every parameter away from its initial value: ones and equal slices would hide a wrong index."""
    g = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        noise = torch.randn(p.shape, generator=g, dtype=torch.float64)
        p.add_((0.3 * noise).to(p.dtype))
