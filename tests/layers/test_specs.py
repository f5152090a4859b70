from __future__ import annotations

import inspect

import pytest
import torch


@pytest.fixture
def enabled():
    from mindspeed_mamba3_plugin import enable, revert

    enable()
    yield
    revert()


def build_model(pattern: str, **settings):
    from building import build_config
    from megatron.core import tensor_parallel

    from mindspeed_mamba3_plugin.layers.specs import hybrid_model, hybrid_stack_spec

    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = build_config(num_layers=len(pattern), params_dtype=torch.float32, **settings)
    return hybrid_model(config, hybrid_stack_spec(), pattern, vocab_size=32, max_sequence_length=16)


def gradients(model, **settings) -> tuple[list[torch.Tensor], int]:
    """Loss and gradients of one batch, and the bytes kept for the backward."""
    kept = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    tokens = torch.arange(16).repeat(1, 1) * 7 % 32
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(tokens, torch.arange(16)[None], None, labels=tokens.flip(1), **settings)
    loss.sum().backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], sum(kept.values())


@pytest.mark.parametrize(
    "asked",
    [
        {"mamba3_recompute": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "mamba3_recompute": True},
    ],
    ids=str,
)
def test_recomputation_keeps_less_and_changes_no_bit(megatron, enabled, asked):
    expected, all_bytes = gradients(build_model("M*M-"))
    got, some_bytes = gradients(build_model("M*M-", **asked))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    mixers = len(asked) != 1 or "mamba3_recompute" in asked
    assert some_bytes < (0.75 if mixers else 1) * all_bytes, (some_bytes, all_bytes)


def test_packed_sequences_equal_separate_ones(megatron, enabled):
    from megatron.core.packed_seq_params import PackedSeqParams

    model = build_model("MM")
    if "packed_seq_params" not in inspect.signature(model.forward).parameters:
        pytest.skip("megatron-core passes packed_seq_params since 0.16")
    tokens = torch.arange(16)[None] * 7 % 32
    ends = torch.tensor([0, 5, 16], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)

    def run(*spans: tuple[int, int], **more):
        model.zero_grad()
        losses = []
        for start, end in spans:
            x = tokens[:, start:end]
            losses.append(model(x, torch.arange(end - start)[None], None, labels=x.flip(1) * 0 + 3, **more))
        sum(loss.sum() for loss in losses).backward()
        return [torch.cat(losses, 1).detach(), *(p.grad.clone() for p in model.parameters())]

    together, apart = run((0, 16), packed_seq_params=packed), run((0, 5), (5, 16))
    one = run((0, 16))
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(one[0], together[0], rtol=1e-4), "the bounds matter"


def test_hybrid_stack_trains(megatron, enabled):
    from mindspeed_mamba3_plugin.layers.mamba3_mixer import Mamba3Mixer

    model = build_model("M*M-")
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
