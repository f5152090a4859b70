"""MindSpeed-LLM's FSDP2 Mamba-3 block with this plugin's operator as its MIMO core.

    from mindspeed_mamba3_plugin.patches import mindspeed_llm
    mindspeed_llm.apply()

The block accumulates angles and decays in two functions of its own and hands the sums to its core, which rounds
them to the model's dtype. Here the two hand over what they are given, token by token, and the operator accumulates in
fp32 and keeps it: in bf16 the results differ by what that rounding loses. Sequences need not be multiples of the
chunk, and `cu_seqlens`, which the block refuses, is followed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, partial, wraps
from typing import Any

from ..config import Mamba3Config
from ..ops import MIN_CHUNK_SIZE
from .engine import Engine, Patch

_BLOCK = "mindspeed_llm.fsdp2.models.mamba3.mamba3_block"
_CORE = (
    "q k v q_bias k_bias mimo_v mimo_o z mimo_z angles dA_cs dA_cs_rev dt trap D chunk_size rotary_dim_divisor "
    "return_final_state dtype rotate_pairwise contract_mimo_out"
)
_engine = Engine()
_bounds: ContextVar[Any] = ContextVar("cu_seqlens", default=None)


def apply(settings: Mamba3Config | None = None) -> tuple[str, ...]:
    """Apply the patches, once; returns the targets that this call changed.

    Args:
        settings: of these, the two kernel settings are used.

    Raises:
        PatchError: the block is absent, has other functions, or was patched by somebody else.
    """
    settings = settings or Mamba3Config()
    settings.check_environment()
    return _engine.apply(patches(settings))


def revert() -> tuple[str, ...]:
    """Put back every original; returns the targets."""
    return _engine.revert()


@lru_cache
def patches(settings: Mamba3Config) -> tuple[Patch, ...]:
    """The changes to the block; they work together only."""
    common = dict(flag="use_mamba3_mixer")
    return (
        Patch(
            f"{_BLOCK}:apply_angle_dt_reference",
            "angles reach the core per token, not accumulated",
            replacement=angles_per_token,
            parameters=("angle", "dt"),
            **common,
        ),
        Patch(
            f"{_BLOCK}:dacs_segsum_torch",
            "decays reach the core per token, not accumulated",
            replacement=decays_per_token,
            parameters=("da", "chunk_size"),
            **common,
        ),
        Patch(
            f"{_BLOCK}:mamba3_MIMO_chunk_ref",
            "the MIMO core runs on this plugin's operator",
            wrapper=partial(_core_wrapper, settings),
            parameters=tuple(_CORE.split()),
            **common,
        ),
        Patch(
            f"{_BLOCK}:Mamba3.forward",
            "the bounds of packed sequences reach the core",
            wrapper=bounds_wrapper,
            parameters=("self", "u", "seq_idx", "cu_seqlens", "inference_params"),
            **common,
        ),
    )


def angles_per_token(angle: Any, dt: Any) -> Any:
    return angle


def decays_per_token(da: Any, chunk_size: int) -> tuple[Any, None, None]:
    return da, None, None


def bounds_wrapper(original: Callable) -> Callable:
    @wraps(original)
    def forward(self, u, seq_idx=None, cu_seqlens=None, inference_params=None):
        token = _bounds.set(cu_seqlens)
        try:
            return original(self, u, seq_idx, None, inference_params)  # it refuses bounds
        finally:
            _bounds.reset(token)

    return forward


def _core_wrapper(settings: Mamba3Config, original: Callable) -> Callable:
    @wraps(original)
    def core(
        q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, D, chunk_size=64,
        rotary_dim_divisor=4, return_final_state=False, dtype=None, rotate_pairwise=False, contract_mimo_out=True,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        from ..ops.api import mamba3_mimo

        if rotate_pairwise:
            raise ValueError("rotate_pairwise is True: must be False")
        if contract_mimo_out and mimo_o is None:
            raise ValueError("mimo_o is None: must be given with contract_mimo_out")
        result = mamba3_mimo(
            q, k, v, dA_cs, dt, trap, q_bias, k_bias, mimo_v, None if z is None else mimo_z,
            mimo_o if contract_mimo_out else None, angles, D, z, max(chunk_size, MIN_CHUNK_SIZE), rotary_dim_divisor,
            dtype or q.dtype, return_state=return_final_state, cu_seqlens=_bounds.get(),
            forward_kernel=settings.mamba3_forward_kernel, backward_kernel=settings.mamba3_backward_kernel,
        )  # fmt: skip
        if not return_final_state:
            return result, None, None
        out, _, state, last_k, _ = result
        return out, state.transpose(-1, -2), last_k

    return core
