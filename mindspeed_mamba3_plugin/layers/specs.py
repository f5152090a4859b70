"""ModuleSpecs: the mixer, and a hybrid stack of megatron-core that needs no TransformerEngine."""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
except ImportError:  # before 0.18
    from megatron.core.models.mamba import MambaModel as HybridModel
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as HybridStackSubmodules

from .mamba3_mixer import Mamba3Mixer, Mamba3MixerSubmodules
from .norms import StackNorm


def mamba3_mixer_spec(in_proj: Any = ColumnParallelLinear, out_proj: Any = RowParallelLinear) -> ModuleSpec:
    """The mixer with the given linear layers. in_proj must not normalise its input itself (`without_fused_norm`)."""
    return ModuleSpec(module=Mamba3Mixer, submodules=Mamba3MixerSubmodules(in_proj=in_proj, out_proj=out_proj))


def hybrid_stack_spec() -> ModuleSpec:
    """Layers `M` (Mamba-3), `*` (attention) and `-` (MLP) of megatron-core alone, for its hybrid model."""
    mamba = MambaLayerSubmodules(norm=StackNorm, mixer=mamba3_mixer_spec(), mamba_bda=get_bias_dropout_add)
    attention = TransformerLayerSubmodules(
        input_layernorm=StackNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=StackNorm,
        mlp=ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        ),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


def hybrid_model(config: Any, stack_spec: ModuleSpec, pattern: str, **settings: Any) -> HybridModel:
    """megatron-core's hybrid model, whose class and arguments have had other names before.

    Args:
        settings: its other arguments, vocab_size and max_sequence_length among them.
    """
    known = inspect.signature(HybridModel).parameters
    spec = next(name for name in ("hybrid_stack_spec", "mamba_stack_spec") if name in known)
    letters = next(name for name in ("hybrid_layer_pattern", "hybrid_override_pattern") if name in known)
    return HybridModel(config, **{spec: stack_spec, letters: pattern}, **settings)


def without_fused_norm(norm: Any, in_proj: Any) -> tuple[Any, Any]:
    """The norm of a MambaLayer and the in_proj of its mixer, such that in_proj does not normalise its input itself.

    TransformerEngine's layer that does both becomes its two halves; anything else is returned as it is.
    """
    from megatron.core.extensions import transformer_engine as te

    if in_proj is te.TELayerNormColumnParallelLinear:
        return te.TENorm, te.TEColumnParallelLinear
    return norm, in_proj
