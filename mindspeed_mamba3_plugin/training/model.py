"""The hybrid model and its optimizer, all of them megatron.core's own."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from ..layers.mamba3_mixer import Mamba3Mixer
from ..layers.specs import hybrid_model, hybrid_stack_spec
from .config import RunConfig
from .data import VOCAB_SIZE

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(run: RunConfig) -> DistributedDataParallel:
    """The model of a run in megatron's DDP. Needs initialised process groups and seeds, and `enable(run.mamba3)`,
    which is all that makes a Mamba-3 model of it."""
    m, dtype = run.model, _DTYPES[run.model.params_dtype]
    config = TransformerConfig(
        num_layers=len(m.hybrid_override_pattern),
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_attention_heads,
        mamba_state_dim=m.mamba_state_dim,
        mamba_head_dim=m.mamba_head_dim,
        mamba_num_groups=m.mamba_num_groups,
        init_method_std=m.init_method_std,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=run.training.tensor_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        is_hybrid_model=True,
        use_cpu_initialization=True,  # the same weights on every device
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    config.mamba_num_heads = m.mamba_num_heads  # no field before 0.13
    model = hybrid_model(
        config,
        _stock_stack_spec(),
        m.hybrid_override_pattern,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=run.data.sequence_length,
        share_embeddings_and_output_weights=True,
    ).cuda()  # megatron's word for the current device
    if config.bf16:
        model = Float16Module(config, model)
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def build_optimizer(
    run: RunConfig, model: DistributedDataParallel
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """megatron's Adam and its schedule, one schedule step per training step."""
    o, dtype = run.optimizer, _DTYPES[run.model.params_dtype]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=o.lr,
            min_lr=o.min_lr,
            weight_decay=o.weight_decay,
            adam_beta1=o.adam_beta1,
            adam_beta2=o.adam_beta2,
            adam_eps=o.adam_eps,
            clip_grad=o.clip_grad,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        ),
        [model],
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=o.lr,
        min_lr=o.min_lr,
        lr_warmup_steps=o.lr_warmup_steps,
        lr_decay_steps=run.training.steps,
        lr_decay_style=o.lr_decay_style,
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=run.training.steps,
        wd_incr_style="constant",
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer, schedule


def _stock_stack_spec() -> ModuleSpec:
    """A stack without TransformerEngine whose 'M' slot holds megatron's own MambaMixer."""
    spec = hybrid_stack_spec()
    try:
        from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    except ImportError:  # before 0.13 without mamba_ssm: the spec names Mamba3Mixer itself
        return spec
    mixer = ModuleSpec(
        module=MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    layer = spec.submodules.mamba_layer
    layer.submodules = replace(layer.submodules, mixer=mixer)
    return spec


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of all parameters, by name and bits."""
    digest = hashlib.sha256()
    for name, parameter in _named(model):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parameter_count(model: nn.Module) -> int:
    """Elements of all parameters, whole ones under tensor parallelism too."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return sum(p.numel() * (ranks if getattr(p, "tensor_model_parallel", False) else 1) for p in model.parameters())


def gradient_norms(model: DistributedDataParallel) -> dict[str, float]:
    """The norm of every parameter's accumulated gradient by name, whole parameters under tensor parallelism too; the
    mixers' packed projection part by part ("....in_proj.weight[trap]"), or an error in a narrow part would drown in
    the wide ones."""
    parts = {
        f"{name}.in_proj.weight": module.local.in_proj_parts
        for name, module in _unwrapped(model).named_modules()
        if isinstance(module, Mamba3Mixer)
    }
    names, gradients, sharded = [], [], []
    for name, parameter in _named(model):
        widths = parts.get(name)
        pieces = parameter.main_grad.split(list(widths.values())) if widths else (parameter.main_grad,)
        names += [f"{name}[{part}]" for part in widths] if widths else [name]
        gradients += pieces
        sharded += [getattr(parameter, "tensor_model_parallel", False)] * len(pieces)
    whole = torch.stack(torch._foreach_norm(gradients))  # as torch.nn.utils takes them: few launches
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        squares = whole.square()
        dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        whole = torch.where(torch.tensor(sharded, device=whole.device), squares.sqrt(), whole)
    return dict(zip(names, whole.tolist(), strict=True))


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return sorted(_unwrapped(model).named_parameters())


def _unwrapped(model: nn.Module) -> nn.Module:
    while isinstance(model, (DistributedDataParallel, Float16Module)):
        model = model.module
    return model
