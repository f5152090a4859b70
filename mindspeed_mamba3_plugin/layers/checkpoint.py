"""megatron's distributed checkpoints of the mixer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer import utils
from torch import Tensor, nn


def mixer_sharded_state_dict(mixer: nn.Module, prefix: str, sharded_offsets: tuple, metadata: dict | None) -> dict:
    """The sharded state dict of a Mamba3Mixer: own parameters, then those of its children."""
    groups, dp_cp = {}, {}
    if hasattr(utils, "ensure_metadata_has_dp_cp_group"):  # 0.16: before, Megatron's global groups are used
        metadata = utils.ensure_metadata_has_dp_cp_group(metadata)
        groups, dp_cp = {"tp_group": mixer.tp_group}, {"dp_cp_group": metadata["dp_cp_group"]}
    own = {name: p for name, p in mixer.named_parameters(recurse=False)}
    result = utils.make_sharded_tensors_for_checkpoint(
        own,
        prefix,
        {name: 0 for name, p in own.items() if getattr(p, "tensor_model_parallel", False)},
        sharded_offsets,
        **groups,
        **dp_cp,
    )
    for name, child in mixer.named_children():
        result.update(
            utils.sharded_state_dict_default(child, f"{prefix}{name}.", sharded_offsets, metadata, **groups)
        )
    key = f"{prefix}in_proj.weight"
    if mixer.bc_proj is not None:  # under the same keys as where B and C are packed
        shared = f"{prefix}bc_proj"
        result[shared] = split_rows(replace(result[shared], key=result[key].key), mixer.local.bc_parts)
    result[key] = split_rows(result[key], mixer.local.in_proj_parts)
    return result


def split_rows(packed: ShardedTensor, parts: dict[str, int]) -> ShardedTensorFactory:
    """Save the parts of a packed weight [rows, .] under keys of their own, so that another number of tensor-parallel
    ranks can load them.

    Raises:
        ValueError: the parts do not add up to the rows of the weight.
    """
    if sum(parts.values()) != packed.local_shape[0]:
        raise ValueError(f"{packed.key} has {packed.local_shape[0]} rows, its parts have {sum(parts.values())}")
    shape = packed.without_data()

    @torch.no_grad()
    def build(key: str, data: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        whole = replace(
            shape, key=key, data=data, dtype=data.dtype, replica_id=replica_id, flattened_range=flattened_range
        )
        shards, start = [], 0
        for name, rows in parts.items():
            shards += [replace(shard, key=f"{key}.{name}") for shard in whole.narrow(0, start, rows)]
            start += rows
        return shards

    @torch.no_grad()
    def merge(loaded: list[Tensor]) -> Tensor:
        return torch.cat(loaded)

    return ShardedTensorFactory(packed.key, packed.data, build, merge, packed.replica_id)
