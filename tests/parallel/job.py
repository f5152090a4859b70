"""A small hybrid model trained in any layout, its checkpoints, and its gradients as one whole: what the processes of
the parallel tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from mindspeed_mamba3_plugin import platforms
from mindspeed_mamba3_plugin.layers.specs import hybrid_model, hybrid_stack_spec

LENGTH, VOCABULARY, SAMPLES = 32, 64, 4


@dataclass(frozen=True)
class Layout:
    """How the model is spread, and anything else that must not change what it learns."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    pattern: str = "M*M-"
    groups: int = 2
    bounds: tuple[int, ...] = ()  # of packed sequences
    bf16: bool = False
    sharding: str = "fully_reshardable"  # of the distributed optimizer's checkpoints; "torch": no torch_dist format
    mamba3: dict[str, Any] = field(default_factory=dict, hash=False)
    config: dict[str, Any] = field(default_factory=dict, hash=False)


class Job:
    """Model and optimizer in a layout. The process groups are made here, and unmade by `close`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
        )
        torch.manual_seed(5)
        tensor_parallel.model_parallel_cuda_manual_seed(5)
        dtype = torch.bfloat16 if layout.bf16 else torch.float32
        config = TransformerConfig(
            num_layers=len(layout.pattern), hidden_size=32, ffn_hidden_size=64, num_attention_heads=4,
            mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=layout.groups,
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp, sequence_parallel=layout.sequence_parallel,
            pipeline_dtype=dtype, params_dtype=dtype, bf16=layout.bf16,
            normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
            bias_dropout_fusion=False, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
            is_hybrid_model=True, use_cpu_initialization=True, deterministic_mode=True, **layout.config,
        )  # fmt: skip
        for name, value in layout.mamba3.items():
            setattr(config, name, value)
        model = hybrid_model(
            config,
            hybrid_stack_spec(),
            layout.pattern,
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
        ).cuda()  # megatron's word for the current device
        self.core = model
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_grad_reduce=layout.overlap,
            overlap_param_gather=layout.overlap and layout.distributed_optimizer,
            bucket_size=2000 if layout.overlap else None,
        )
        self.model = DistributedDataParallel(config, ddp, Float16Module(config, model) if layout.bf16 else model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                weight_decay=0.01,
                clip_grad=1.0,
                params_dtype=dtype,
                bf16=layout.bf16,
                use_distributed_optimizer=layout.distributed_optimizer,
                overlap_param_gather=ddp.overlap_param_gather,
            ),
            [self.model],
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if layout.overlap:
            config.no_sync_func = self.model.no_sync
        self.config = config

    def close(self) -> None:
        parallel_state.destroy_model_parallel()

    def gradients(self, step: int) -> float:
        """Forward and backward of one step; returns the loss, the same on every rank."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        mine = batch(step)[rank::ranks]
        parts = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(mine),
            model=[self.model],
            num_microbatches=len(mine),
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        loss = (
            torch.stack([part["loss"] for part in parts]).sum() if parts else mine[0].new_zeros((), dtype=torch.float)
        )
        loss = loss / SAMPLES
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(loss, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        return float(loss)

    def train(self, *steps: int) -> list[tuple[float, float]]:
        """(loss, gradient norm) of each step."""
        curve = []
        for step in steps:
            loss = self.gradients(step)
            curve.append((loss, float(self.optimizer.step()[1])))
        return curve

    def _forward_step(self, batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        tokens = next(batches)
        x, y, positions = tokens[:, :-1], tokens[:, 1:], torch.arange(LENGTH, device=tokens.device)[None]
        bounds, ranks = self.layout.bounds, self.layout.cp
        if ranks > 1:  # the share of each sequence that Megatron's own data loading gives a rank
            r, mine = parallel_state.get_context_parallel_rank(), []
            for start, end in pairwise(bounds or (0, LENGTH)):
                pieces = torch.arange(start, end).chunk(2 * ranks)
                mine += [pieces[r], pieces[-1 - r]]
            x, y, positions = (t[:, torch.cat(mine)] for t in (x, y, positions))
        more = {}
        if bounds:
            ends = torch.tensor(bounds, dtype=torch.int32, device=tokens.device)
            more["packed_seq_params"] = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        out = model(x, positions, None, labels=y, **more)

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.float().sum() / LENGTH
            return loss, {"loss": loss.detach().clone()}  # the schedule divides the other in place

        return out, loss_of

    @property
    def _metadata(self) -> dict[str, Any]:
        return {
            "distrib_optim_sharding_type": self.layout.sharding,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }

    def save(self, folder: Path) -> None:
        """Model and optimizer in Megatron's torch_dist format, or in its older one of a file per rank."""
        if self.layout.sharding == "torch":
            folder.mkdir(parents=True)
            model = self.core.state_dict_for_save_checkpoint()
            torch.save({"model": model, "optimizer": self.optimizer.state_dict()}, folder / "model.pt")
            if self.layout.distributed_optimizer:
                self.optimizer.save_parameter_state(str(folder / "optimizer.pt"))
            return
        model = self.core.sharded_state_dict(metadata=self._metadata)
        _save(
            {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, metadata=self._metadata)}, folder
        )

    def load(self, folder: Path, optimizer: bool = True) -> None:
        """What any layout has saved in the same format."""
        if (folder / "model.pt").exists():
            state = torch.load(folder / "model.pt", weights_only=False)
            self.core.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.layout.distributed_optimizer:
                self.optimizer.load_parameter_state(str(folder / "optimizer.pt"))
            return
        model = self.core.sharded_state_dict(metadata=self._metadata)
        wanted = {"model": model}
        if optimizer:
            wanted["optimizer"] = self.optimizer.sharded_state_dict(model, is_loading=True, metadata=self._metadata)
        state = dist_checkpointing.load(wanted, str(folder))
        self.core.load_state_dict(state["model"], strict=False)
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self.optimizer.reload_model_params()

    def save_gradients(self, folder: Path) -> None:
        """The accumulated gradients, whole, under the names of the parameters."""
        if self.layout.distributed_optimizer:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            for buffer in self.model.buffers:
                for bucket in buffer.buckets:  # each rank holds the sum of its share
                    shares = bucket.grad_data.chunk(group.size())
                    dist.all_gather_into_tensor(bucket.grad_data, shares[group.rank()].clone(), group=group)
        parameters = dict(self.core.named_parameters())
        state = {}
        for name, entry in self.core.sharded_state_dict(metadata=self._metadata).items():
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
                gradient = parameters[name].main_grad.clone()
                dtype = {"dtype": gradient.dtype} if isinstance(entry, ShardedTensor) else {}
                state[name] = replace(entry, data=gradient, **dtype)
        _save(state, folder)


def batch(step: int) -> list[torch.Tensor]:
    """The step's samples of one more than LENGTH tokens: the same for every layout."""
    g = torch.Generator().manual_seed(100 + step)
    return list(torch.randint(0, VOCABULARY, (SAMPLES, 1, LENGTH + 1), generator=g).to(platforms.current().device()))


def _save(state: dict, folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))
    dist.barrier()
