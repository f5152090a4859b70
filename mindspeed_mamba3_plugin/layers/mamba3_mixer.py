"""The Mamba-3 MIMO mixer for the `M` slot of megatron-core's hybrid stack.

Source of the architecture: state-spaces/mamba, mamba_ssm/modules/mamba3.py (commit e9594ce). It differs in layout
only, so that heads and groups can be split over tensor-parallel ranks: the rotation angles, which all heads share,
have a replicated projection of their own, and B and C are laid out (g r n).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from .initial import by_rank, initial_dt_bias, layer_rng
from .parallel import sum_gradient
from .sizes import MixerSizes

NORM_EPS = 1e-5


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
        _check_parallelism(config, self.settings)
        if pg_collection is None:
            self.tp_group, groups = parallel_state.get_tensor_model_parallel_group(), {}
        else:
            self.tp_group, groups = pg_collection.tp, {"tp_group": pg_collection.tp}
        self.tp_size = self.tp_group.size()
        self.sequence_parallel = config.sequence_parallel and self.tp_size > 1
        self.sizes = MixerSizes.from_config(config, d_model, self.settings)
        self.local = self.sizes.local(self.tp_size)
        self.layer_number = layer_number

        linear = dict(config=config, bias=False, is_expert=False, **groups)
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            self.sizes.in_proj_rows,
            init_method=by_rank(config.init_method, self.sizes, self.tp_size),
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
        self._add_parameters()
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

    def _add_parameters(self) -> None:
        """Parameters other than those of the linear layers. Random ones are drawn whole and then cut, so that they
        do not depend on the number of tensor-parallel ranks."""
        whole, local, config = self.sizes, self.local, self.config
        device = self.in_proj.weight.device
        per_rank = (local.heads, local.rank, local.head_dim)
        per_state = (local.heads, local.rank, local.state)
        with layer_rng(self.layer_number or 0):
            dt_bias = initial_dt_bias(whole.heads, self.settings)
            angle_proj = torch.empty(whole.angles, whole.hidden)
            config.init_method(angle_proj)

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
        # A bare parameter: older stacks re-initialise every nn.Linear, differently on each tensor-parallel rank.
        self.angle_proj = nn.Parameter(angle_proj.to(device, config.params_dtype))
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
        cu_seqlens = None
        if packed_seq_params is not None:
            tokens = hidden_states.shape[0] * (self.tp_size if self.sequence_parallel else 1)
            cu_seqlens = _bounds(packed_seq_params, tokens)
        if self.settings.mamba3_recompute and torch.is_grad_enabled():
            y = checkpoint(self._mix, hidden_states, cu_seqlens, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self._mix(hidden_states, cu_seqlens)
        return self.out_proj(y)

    def _mix(self, hidden_states: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Everything before the output projection: [s, b, h] -> [s, b, inner / tp]."""
        n, settings = self.local, self.settings
        packed, _ = self.in_proj(hidden_states)
        parts = packed.transpose(0, 1).split(list(n.in_proj_parts.values()), dim=-1)
        z, x, B, C, dd_dt, dd_A, trap = parts  # each [b, s, .]
        B, C = (y.unflatten(-1, (n.groups, n.rank, n.state)).transpose(2, 3) for y in (B, C))
        angles = self._angles(hidden_states).transpose(0, 1)[:, :, None].expand(-1, -1, n.heads, -1)

        wide = torch.promote_types(torch.float32, packed.dtype)
        DT = F.softplus(dd_dt.to(wide) + self.dt_bias.to(wide))
        A = -_ACTIVATIONS[settings.mamba3_a_activation](dd_A.to(wide)).clamp(min=settings.mamba3_a_floor)

        out = mamba3_mimo(
            Q=self.C_norm(C),
            K=self.B_norm(B),
            V=x.unflatten(-1, (n.heads, n.head_dim)),
            ADT=(A * DT).transpose(1, 2),
            DT=DT.transpose(1, 2),
            Trap=trap.transpose(1, 2),
            Q_bias=self.C_bias,
            K_bias=self.B_bias,
            MIMO_V=self.mimo_x,
            MIMO_Z=self.mimo_z,
            MIMO_Out=self.mimo_o,
            Angles=angles,
            D=self.D,
            Z=z.unflatten(-1, (n.heads, n.head_dim)),
            chunk_size=settings.chunk_size,
            rotary_dim_divisor=settings.rotary_dim_divisor,
            dtype=packed.dtype,
            cu_seqlens=cu_seqlens,
            fuse_pregate_headwise_rms_norm=settings.mamba3_outproj_norm,
            outproj_norm_weight=self.norm_weight,
            outproj_norm_eps=NORM_EPS,
            forward_kernel=settings.mamba3_forward_kernel,
            backward_kernel=settings.mamba3_backward_kernel,
        )
        return out.flatten(2).transpose(0, 1).contiguous()

    def _angles(self, hidden_states: Tensor) -> Tensor:
        """[s, b, angles], the same on every tensor-parallel rank.

        Each rank's heads give a share of the gradient. The shares are summed on the angles, which are narrow, so that
        the gradients of the weight and of the input come out whole; under sequence parallelism they are whole for the
        rank's part of s, and the weight's are summed over the ranks.
        """
        if self.sequence_parallel:
            weight = sum_gradient(self.angle_proj, self.tp_group)
            return gather_from_sequence_parallel_region(F.linear(hidden_states, weight), group=self.tp_group)
        return sum_gradient(F.linear(hidden_states, self.angle_proj), self.tp_group)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For megatron's distributed checkpoints, such that another number of tensor-parallel ranks can load them."""
        return mixer_sharded_state_dict(self, prefix, sharded_offsets, metadata)


class StateNorm(nn.Module):
    """RMSNorm over the state dimension, with one weight for all heads of all tensor-parallel ranks.

    A module, because DDP waits for gathered parameters in the forward of the module that owns them.
    """

    def __init__(self, state: int, group: ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.ones(state, device=device, dtype=dtype))

    def forward(self, y: Tensor) -> Tensor:
        """y [..., state], of any float dtype; computed in fp32 or wider."""
        wide = y.to(torch.promote_types(torch.float32, y.dtype))
        weight = sum_gradient(self.weight, self.group).to(wide.dtype)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS) * weight).to(y.dtype)


def heavy_tail(x: Tensor) -> Tensor:
    """1 + x for x >= 0 and 1 / (1 - x) below: positive, with derivative 1 at 0."""
    return torch.where(x >= 0, 1 + x, 1 / (1 - x.clamp(max=0)))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"heavy_tail": heavy_tail, "softplus": F.softplus}


def _check_parallelism(config: Any, settings: Mamba3Config) -> None:
    if (cp := getattr(config, "context_parallel_size", 1)) > 1:
        raise ConfigError(f"--context-parallel-size {cp}: must be 1 with {flag('use_mamba3_mixer')}")
    if settings.mamba3_recompute and getattr(config, "fp8", None):
        raise ConfigError(f"{flag('mamba3_recompute')}: cannot be combined with --fp8-format {config.fp8}")


def _bounds(packed: Any, tokens: int) -> Tensor:
    """Bounds of the packed sequences; tokens after the last bound (padding) are a sequence of their own."""
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    bounds = packed.cu_seqlens_q if padded is None else padded
    if int(bounds[-1]) < tokens:
        bounds = torch.cat([bounds, bounds.new_tensor([tokens])])
    return bounds
