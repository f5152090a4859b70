"""The Mamba-3 MIMO mixer for the `M` slot of megatron-core's hybrid stack.

Source of the architecture: state-spaces/mamba, mamba_ssm/modules/mamba3.py (commit e9594ce). It differs in layout
only, so that heads and groups can be split over tensor-parallel ranks: the rotation angles, which all heads share,
have a replicated projection of their own, and B and C are laid out (g r n).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from ..config import ConfigError, Mamba3Config, flag
from ..ops.api import mamba3_mimo
from .checkpoint import mixer_sharded_state_dict
from .context import heads_for_tokens, sequence_order, tokens_for_heads
from .initial import InProjInit, initial_dt_bias, layer_rng
from .norms import NORM_EPS, StateNorm
from .parallel import sum_gradient
from .sizes import MixerSizes


@dataclass
class Mamba3MixerSubmodules:
    """The linear layers of the mixer: a ModuleSpec or a class like ColumnParallelLinear and RowParallelLinear."""

    in_proj: Any = None
    out_proj: Any = None


class Mamba3Mixer(MegatronModule):
    """Mamba-3 MIMO token mixer.

    Args:
        config: TransformerConfig; the plugin's settings are read from its attributes of the same names.
        submodules: in_proj (column-parallel, without a layer norm of its own) and out_proj (row-parallel).
        d_model: width of the input and of the output.
        layer_number: position in the model; it seeds the initial values that do not come from in_proj and out_proj.
        pg_collection: process groups; without it, megatron's global ones.
        pp_layer_offset, name: not used; some versions of MambaLayer pass them.

    Raises:
        ConfigError: settings or sizes that do not fit together, or kernels that are not installed.
    """

    def __init__(
        self,
        config: Any,
        submodules: Mamba3MixerSubmodules,
        d_model: int,
        layer_number: int | None = None,
        pg_collection: Any = None,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.settings = Mamba3Config.from_object(config)
        self.settings.check_environment()
        self.recompute = _recomputes(config, self.settings)
        self.tp_group, self.cp_group = _groups(pg_collection)
        self.tp_size, self.cp_size = self.tp_group.size(), self.cp_group.size() if self.cp_group else 1
        self.sequence_parallel = config.sequence_parallel and self.tp_size > 1
        self.sizes = MixerSizes.from_config(config, d_model, self.settings)
        self.local = self.sizes.local(self.tp_size, self.cp_size)
        self.layer_number = layer_number

        in_proj_init = InProjInit(config.init_method, self.sizes, self.tp_size)
        linear = dict(config=config, bias=False, is_expert=False)
        if pg_collection is not None:
            linear["tp_group"] = self.tp_group
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            self.local.in_proj_rows * self.tp_size,
            init_method=in_proj_init,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **linear,
        )
        if hasattr(self.in_proj, "layer_norm_weight"):
            raise ConfigError(
                f"in_proj is {type(self.in_proj).__name__}, which normalises its input itself: the angle projection "
                "needs the same normalised input, so give a plain column-parallel layer and put the norm into "
                "MambaLayer (layers.specs.without_fused_norm)"
            )
        self.in_proj.weight.partition_sizes = list(self.local.in_proj_parts.values())
        self._add_parameters(in_proj_init.shared)
        self.out_proj = build_module(
            submodules.out_proj,
            self.sizes.inner,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **linear,
        )

    def _add_parameters(self, bc_proj: Tensor | None) -> None:
        """Parameters other than those of the linear layers. Random ones are drawn whole and then cut, so that they
        do not depend on the number of tensor-parallel ranks. bc_proj: its value, or None to draw one."""
        whole, local, config = self.sizes, self.local, self.config
        device = self.in_proj.weight.device
        per_rank = (local.heads, local.rank, local.head_dim)
        per_state = (local.heads, local.rank, local.state)
        with layer_rng(self.layer_number or 0):
            dt_bias = initial_dt_bias(whole.heads, self.settings)
            angle_proj = torch.empty(whole.angles, whole.hidden)
            config.init_method(angle_proj)
            if bc_proj is None and not local.bc_sharded:
                bc_proj = torch.empty(sum(local.bc_parts.values()), whole.hidden)
                config.init_method(bc_proj)

        keep = self.settings.mamba3_params_dtype == "fp32"
        for name, value in {
            "dt_bias": dt_bias.chunk(self.tp_size)[self.tp_group.rank()],
            "D": torch.ones(local.heads),
            "B_bias": torch.ones(per_state),
            "C_bias": torch.ones(per_state),
            "mimo_x": torch.full(per_rank, 1 / local.rank),
            "mimo_z": torch.ones(per_rank),
            "mimo_o": torch.full(per_rank, 1 / local.rank),
        }.items():
            # Wider parameters (fp64) stay as wide as the model.
            dtype = torch.promote_types(torch.float32, config.params_dtype) if keep else config.params_dtype
            self._add_sharded(name, value.to(device, dtype))
            if keep:
                getattr(self, name).keep_in_fp32 = True
        # One-dimensional, so that Megatron's rule for weight decay exempts it like other norm weights.
        if self.settings.mamba3_outproj_norm:
            self._add_sharded("norm_weight", torch.ones(local.inner, device=device, dtype=config.params_dtype))
        else:
            self.register_parameter("norm_weight", None)
        # Bare parameters: older stacks re-initialise every nn.Linear, differently on each tensor-parallel rank.
        self.angle_proj = nn.Parameter(angle_proj.to(device, config.params_dtype))
        if local.bc_sharded:
            self.register_parameter("bc_proj", None)
        else:
            self.bc_proj = nn.Parameter(bc_proj.to(device, config.params_dtype))
        norm = dict(group=self.tp_group, device=device, dtype=config.params_dtype)
        self.B_norm = StateNorm(local.state, **norm)
        self.C_norm = StateNorm(local.state, **norm)

    def _add_sharded(self, name: str, value: Tensor) -> None:
        parameter = nn.Parameter(value.contiguous())
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.register_parameter(name, parameter)

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix along the sequence.

        Args:
            hidden_states: [s, b, h]; under sequence parallelism this rank's part of s.
            packed_seq_params: bounds of packed sequences (cu_seqlens_q, or cu_seqlens_q_padded); then b must be 1.

        Returns:
            (out [s, b, h], bias), the bias being None.

        Raises:
            NotImplementedError: called for inference.
        """
        if inference_context is not None or inference_params is not None:
            raise NotImplementedError("Mamba3Mixer trains and evaluates; inference_context must be None")
        cu_seqlens = order = None
        tokens = hidden_states.shape[0] * (self.tp_size if self.sequence_parallel else 1) * self.cp_size
        if packed_seq_params is not None:
            if (ranks := getattr(packed_seq_params, "local_cp_size", None)) not in (None, self.cp_size):
                allowed = f"None or --context-parallel-size, which is {self.cp_size}"
                raise NotImplementedError(f"packed_seq_params.local_cp_size {ranks}: must be {allowed}")
            cu_seqlens = _bounds(packed_seq_params, tokens)
        if self.cp_size > 1:
            order = sequence_order(tokens, self.cp_size, cu_seqlens, hidden_states.device)
        if self.recompute and torch.is_grad_enabled():
            y = checkpoint(self._mix, hidden_states, cu_seqlens, order, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self._mix(hidden_states, cu_seqlens, order)
        return self.out_proj(y)

    def _mix(self, hidden_states: Tensor, cu_seqlens: Tensor | None, order: Tensor | None) -> Tensor:
        """Everything before the output projection: [s, b, h] -> [s, b, inner / tp]."""
        n, settings = self.sizes, self.settings
        parts = [part.transpose(0, 1) for part in self._projected(hidden_states, order)]
        z, x, B, C, dd_dt, dd_A, trap, angles = parts  # each [b, s, .], of the heads that this rank scans
        heads = dd_dt.shape[-1]
        B, C = (y.unflatten(-1, (-1, n.rank, n.state)).transpose(2, 3) for y in (B, C))

        wide = torch.promote_types(torch.float32, x.dtype)
        DT = F.softplus(dd_dt.to(wide) + self._scanned(self.dt_bias).to(wide))
        A = -_ACTIVATIONS[settings.mamba3_a_activation](dd_A.to(wide)).clamp(min=settings.mamba3_a_floor)

        out = mamba3_mimo(
            Q=self.C_norm(C),
            K=self.B_norm(B),
            V=x.unflatten(-1, (heads, n.head_dim)),
            ADT=(A * DT).transpose(1, 2),
            DT=DT.transpose(1, 2),
            Trap=trap.transpose(1, 2),
            Q_bias=self._scanned(self.C_bias),
            K_bias=self._scanned(self.B_bias),
            MIMO_V=self._scanned(self.mimo_x),
            MIMO_Z=self._scanned(self.mimo_z),
            MIMO_Out=self._scanned(self.mimo_o),
            Angles=angles[:, :, None].expand(-1, -1, heads, -1),
            D=self._scanned(self.D),
            Z=z.unflatten(-1, (heads, n.head_dim)),
            chunk_size=settings.chunk_size,
            rotary_dim_divisor=settings.rotary_dim_divisor,
            dtype=x.dtype,
            cu_seqlens=cu_seqlens,
            fuse_pregate_headwise_rms_norm=settings.mamba3_outproj_norm,
            outproj_norm_weight=None if self.norm_weight is None else self._scanned(self.norm_weight),
            outproj_norm_eps=NORM_EPS,
            forward_kernel=settings.mamba3_forward_kernel,
            backward_kernel=settings.mamba3_backward_kernel,
        )
        out = out.flatten(2).transpose(0, 1)
        return out.contiguous() if order is None else tokens_for_heads(out, order, self.cp_group).contiguous()

    def _projected(self, hidden_states: Tensor, order: Tensor | None) -> list[Tensor]:
        """z, x, B, C, dd_dt, dd_A, trap, angles for the heads that this rank scans, each [s, b, .]."""
        n, cp = self.local, self.cp_size
        packed, _ = self.in_proj(hidden_states)
        parts = dict(zip(n.in_proj_parts, packed.split(list(n.in_proj_parts.values()), dim=-1), strict=True))
        if n.bc_sharded:
            angles = self._replicated(hidden_states, self.angle_proj)
        else:
            weight = torch.cat([self.bc_proj, self.angle_proj])
            rows = [*n.bc_parts.values(), n.angles]
            parts["B"], parts["C"], angles = self._replicated(hidden_states, weight).split(rows, dim=-1)
        for name in ("B", "C"):
            parts[name] = self._groups_read(parts[name])
        parts = [parts[name] for name in self.sizes.in_proj_parts]
        if order is None:
            return [*parts, angles]
        parts = [part.unflatten(-1, (cp, -1)) for part in parts]
        parts.append(angles[:, :, None].expand(-1, -1, cp, -1))
        return heads_for_tokens(parts, order, self.cp_group)

    def _groups_read(self, y: Tensor) -> Tensor:
        """B or C of the groups on this rank -> of those that the heads read, context-parallel rank by rank."""
        n, cp = self.local, self.cp_size
        held = self.tp_group.rank() * n.groups if n.bc_sharded else 0
        first = self.tp_group.rank() * cp
        read = [g - held for i in range(cp) for g in self.sizes.groups_of(self.tp_size * cp, first + i)]
        if read == list(range(n.groups)):
            return y
        index = torch.tensor(read, device=y.device)
        return y.unflatten(-1, (n.groups, -1)).index_select(-2, index).flatten(-2)

    def _scanned(self, parameter: Tensor) -> Tensor:
        """The share, of a parameter with a value for each head, of the heads that this rank scans."""
        return parameter if self.cp_size == 1 else parameter.chunk(self.cp_size)[self.cp_group.rank()]

    def _replicated(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        """[s, b, rows] of a projection that is the same on every tensor-parallel rank.

        Each rank's heads give a share of the gradient. The shares are summed on the projected values, which are
        narrow, so that the gradients of the weight and of the input come out whole; under sequence parallelism they
        are whole for the rank's part of s, and the weight's are summed over the ranks.
        """
        if self.sequence_parallel:
            weight = sum_gradient(weight, self.tp_group)
            return gather_from_sequence_parallel_region(F.linear(hidden_states, weight), group=self.tp_group)
        return sum_gradient(F.linear(hidden_states, weight), self.tp_group)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For megatron's distributed checkpoints, such that another number of tensor-parallel ranks can load them."""
        return mixer_sharded_state_dict(self, prefix, sharded_offsets, metadata)


def heavy_tail(x: Tensor) -> Tensor:
    """1 + x for x >= 0 and 1 / (1 - x) below: positive, with derivative 1 at 0."""
    return torch.where(x >= 0, 1 + x, 1 / (1 - x.clamp(max=0)))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"heavy_tail": heavy_tail, "softplus": F.softplus}


def _groups(pg_collection: Any) -> tuple[ProcessGroup, ProcessGroup | None]:
    """The tensor-parallel group and the context-parallel one, where there is one."""
    if pg_collection is None:
        return (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_context_parallel_group(check_initialized=False),
        )
    return pg_collection.tp, getattr(pg_collection, "cp", None)


def _recomputes(config: Any, settings: Mamba3Config) -> bool:
    """Whether the mixer recomputes its activations itself: when it is asked to, and for Megatron's full recomputation
    where the hybrid stack, as before 0.18, silently leaves that out."""
    asked = settings.mamba3_recompute
    if getattr(config, "recompute_granularity", None) == "full":
        asked = find_spec("megatron.core.recompute") is None
    if asked and getattr(config, "fp8", None):
        given = flag("mamba3_recompute") if settings.mamba3_recompute else "--recompute-granularity full"
        raise ConfigError(f"{given}: cannot be combined with --fp8-format {config.fp8}")
    return asked


def _bounds(packed: Any, tokens: int) -> Tensor:
    """Bounds of the packed sequences; tokens after the last bound (padding) are a sequence of their own."""
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    bounds = packed.cu_seqlens_q if padded is None else padded
    if int(bounds[-1]) < tokens:
        bounds = torch.cat([bounds, bounds.new_tensor([tokens])])
    return bounds
