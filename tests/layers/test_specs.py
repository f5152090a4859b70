from __future__ import annotations

import pytest
import torch


@pytest.fixture
def enabled():
    from mindspeed_mamba3_plugin import enable, revert

    enable()
    yield
    revert()


def test_hybrid_stack_trains(megatron, enabled):
    from building import build_config
    from megatron.core.models.mamba import MambaModel

    from mindspeed_mamba3_plugin.layers.mamba3_mixer import Mamba3Mixer
    from mindspeed_mamba3_plugin.layers.specs import hybrid_stack_spec

    torch.manual_seed(0)
    pattern = "M*M-"
    config = build_config(num_layers=len(pattern), params_dtype=torch.float32)
    model = MambaModel(
        config,
        mamba_stack_spec=hybrid_stack_spec(),
        vocab_size=32,
        max_sequence_length=16,
        hybrid_override_pattern=pattern,
    )
    mixers = [m for m in model.modules() if isinstance(m, Mamba3Mixer)]
    assert [m.layer_number for m in mixers] == [1, 3]
    assert not torch.equal(mixers[0].dt_bias, mixers[1].dt_bias)
    tokens = torch.arange(17).repeat(2, 1) % 5
    x, y = tokens[:, :-1], tokens[:, 1:]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(x, torch.arange(16).expand_as(x), None, labels=y).mean()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_fused_norm_is_taken_apart(megatron):
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    from mindspeed_mamba3_plugin.layers.specs import without_fused_norm

    fused = without_fused_norm(IdentityOp, te.TELayerNormColumnParallelLinear)
    assert fused == (te.TENorm, te.TEColumnParallelLinear)
    assert without_fused_norm(te.TENorm, ColumnParallelLinear) == (te.TENorm, ColumnParallelLinear)
