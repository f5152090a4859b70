"""The mixer against a plain transcription of the upstream module, and what Megatron expects of its parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from building import HIDDEN, build_mixer, scatter_values
from plain_mamba3 import plain_mamba3

from mindspeed_mamba3_plugin.config import ConfigError
from mindspeed_mamba3_plugin.ops import registry

CASES = {
    "defaults": {},
    "softplus": {"mamba3_a_activation": "softplus"},
    "outproj_norm": {"mamba3_outproj_norm": True},
    "all rotated": {"mamba3_rope_fraction": 1.0},
    "groups": {"mamba_num_groups": 3},
    "a group per head": {"mamba_num_groups": 6, "mamba3_outproj_norm": True, "mamba3_rope_fraction": 1.0},
    "rank 1": {"mamba3_mimo_rank": 1},
    "rank 4, expand 1": {"mamba3_mimo_rank": 4, "mamba3_expand": 1},
    "number of heads": {"mamba_num_heads": 4, "mamba_num_groups": 2},
    "floor of A": {"mamba3_a_floor": 0.9},
    "recompute": {"mamba3_recompute": True, "mamba3_outproj_norm": True},
}
SHARDED = {"dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "norm_weight"}


def inputs(length: int, batch: int = 2, dtype=torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.randn(length, batch, HIDDEN, generator=g, dtype=torch.float64).to(dtype).requires_grad_()


def plain(mixer, hidden: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The transcription's output [s, b, h] with the mixer's weights, and those weights as leaves."""
    from mindspeed_mamba3_plugin.layers.weights import to_upstream

    state = {name: p.detach() for name, p in mixer.named_parameters()}
    leaves = {name: t.clone().requires_grad_() for name, t in to_upstream(state, mixer.sizes).items()}
    s = mixer.settings
    out = plain_mamba3(
        leaves,
        hidden.transpose(0, 1),
        mixer.sizes,
        a_activation=s.mamba3_a_activation,
        a_floor=s.mamba3_a_floor,
    )
    return out.transpose(0, 1), leaves


@pytest.mark.parametrize("length", [1, 21])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_of_the_upstream_module(make_mixer, case, length):
    compare(make_mixer(**CASES[case]), length, torch.float64, 1e-10)


def test_output_and_gradients_in_fp32(make_mixer):
    compare(make_mixer(params_dtype=torch.float32, mamba_num_groups=2), 21, torch.float32, 2e-5)


def compare(mixer, length, dtype, tolerance):
    from mindspeed_mamba3_plugin.layers.weights import to_upstream

    scatter_values(mixer)
    hidden = inputs(length, dtype=dtype)
    out, bias = mixer(hidden)
    expected, leaves = plain(mixer, hidden)
    assert bias is None and out.shape == hidden.shape and out.dtype == dtype
    assert relative(out, expected) < tolerance

    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)
    (grad_hidden,) = torch.autograd.grad((expected * weight).sum(), hidden, retain_graph=True)
    (expected * weight).sum().backward(inputs=list(leaves.values()))
    (out * weight).sum().backward()
    assert relative(hidden.grad, grad_hidden) < 10 * tolerance
    grads = to_upstream({name: p.grad for name, p in mixer.named_parameters()}, mixer.sizes)
    for name, leaf in leaves.items():
        assert relative(grads[name], leaf.grad) < 10 * tolerance, name


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    scale = b.double().norm().item()
    return (a.double() - b.double()).norm().item() / scale if scale else a.double().norm().item()


@pytest.mark.parametrize("padding", [0, 4])
def test_packed_sequences_do_not_see_each_other(make_mixer, padding):
    mixer = make_mixer(mamba_num_groups=2)
    scatter_values(mixer)
    bounds = [0, 5, 5, 17]
    hidden = inputs(bounds[-1] + padding, batch=1)
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32), cu_seqlens_q_padded=None)
    out, _ = mixer(hidden, packed_seq_params=packed)
    alone = [mixer(hidden[a:b])[0] for a, b in ((0, 5), (5, 17))]
    torch.testing.assert_close(out[:17], torch.cat(alone), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(out[5:17], mixer(hidden)[0][5:17])


def test_recomputation_gives_the_same_bits_and_runs_the_forward_twice(make_mixer):
    results = {}
    for recompute in (False, True):
        mixer = make_mixer(mamba3_recompute=recompute, params_dtype=torch.float32)
        scatter_values(mixer)
        hidden = inputs(21, dtype=torch.float32)
        registry.reset_kernel_calls()
        out, _ = mixer(hidden)
        out.square().sum().backward()
        assert registry.kernel_calls() == {"reference.forward": 1 + recompute, "reference.backward": 1}
        results[recompute] = [out, hidden.grad, *(p.grad for p in mixer.parameters())]
    for kept, recomputed in zip(results[False], results[True], strict=True):
        assert torch.equal(kept, recomputed)


def test_recomputation_keeps_only_the_ends(make_mixer):
    def kept(recompute: bool) -> int:
        mixer = make_mixer(mamba3_recompute=recompute)
        weights = {p.data_ptr() for p in mixer.parameters()}
        saved = {}

        def pack(t):
            if t.untyped_storage().data_ptr() not in weights:
                saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out, _ = mixer(inputs(64))
        assert out.requires_grad
        return sum(saved.values())

    assert kept(True) < kept(False) / 4


@pytest.mark.parametrize("norm", [False, True])
def test_parameters_and_their_attributes(make_mixer, norm):
    mixer = make_mixer(mamba_num_groups=3, mamba3_outproj_norm=norm)
    shapes = {name: tuple(p.shape) for name, p in mixer.named_parameters()}
    H, P, G, R, N, A = 6, 8, 3, 2, 8, 2
    per_state, per_rank = (H, R, N), (H, R, P)
    rows = [H * P, H * P, G * R * N, G * R * N, H, H, H]
    assert shapes == {
        "in_proj.weight": (sum(rows), HIDDEN), "angle_proj": (A, HIDDEN), "out_proj.weight": (HIDDEN, H * P),
        "dt_bias": (H,), "D": (H,), "B_bias": per_state, "C_bias": per_state, "B_norm.weight": (N,),
        "C_norm.weight": (N,), "mimo_x": per_rank, "mimo_z": per_rank, "mimo_o": per_rank,
        **({"norm_weight": (H * P,)} if norm else {}),
    }  # fmt: skip
    assert mixer.in_proj.weight.partition_sizes == rows
    for name, p in mixer.named_parameters():
        if "proj.weight" not in name:
            assert getattr(p, "tensor_model_parallel", False) == (name in SHARDED), name
        if name in SHARDED:
            assert (p.partition_dim, p.partition_stride) == (0, 1)


@pytest.mark.parametrize("params_dtype", ["fp32", "bf16"])
def test_which_parameters_stay_fp32(make_mixer, params_dtype):
    mixer = make_mixer(
        params_dtype=torch.bfloat16, bf16=True, mamba3_params_dtype=params_dtype, mamba3_outproj_norm=True
    )
    wide = SHARDED - {"norm_weight"} if params_dtype == "fp32" else set()
    for name, p in mixer.named_parameters():
        assert getattr(p, "keep_in_fp32", False) == (name in wide), name
        assert p.dtype == (torch.float32 if name in wide else torch.bfloat16), name
    hidden = inputs(9, dtype=torch.bfloat16)
    out, _ = mixer(hidden)
    out.float().sum().backward()
    assert out.dtype == hidden.grad.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())


def test_decay_and_step_size_are_computed_in_fp32_under_bf16(make_mixer, monkeypatch):
    from mindspeed_mamba3_plugin.layers import mamba3_mixer

    seen = {}

    def spy(**kwargs):
        seen.update(kwargs)
        return operator(**kwargs)

    operator = mamba3_mixer.mamba3_mimo
    monkeypatch.setattr(mamba3_mixer, "mamba3_mimo", spy)
    mixer = make_mixer(params_dtype=torch.bfloat16, bf16=True)
    hidden = inputs(9, dtype=torch.bfloat16)
    mixer(hidden)
    assert seen["ADT"].dtype == seen["DT"].dtype == torch.float32
    assert seen["dtype"] == seen["Q"].dtype == seen["V"].dtype == torch.bfloat16
    dd_dt = mixer.in_proj(hidden)[0].split(list(mixer.local.in_proj_parts.values()), -1)[4]
    exact = torch.nn.functional.softplus(dd_dt.double() + mixer.dt_bias.double()).permute(1, 2, 0)
    assert relative(seen["DT"], exact) < 1e-6


def test_initial_values(make_mixer):
    mixer = make_mixer(mamba3_dt_min=0.01, mamba3_dt_max=0.02)
    dt = torch.nn.functional.softplus(mixer.dt_bias.double())
    assert ((dt > 0.0099) & (dt < 0.0201)).all() and dt.unique().numel() == 6
    for name, value in {"D": 1, "B_bias": 1, "C_bias": 1, "mimo_x": 0.5, "mimo_z": 1, "mimo_o": 0.5}.items():
        assert (getattr(mixer, name) == value).all(), name
    assert (make_mixer(mamba3_dt_init_floor=0.5).dt_bias.exp().log1p() > 0.4999).all()

    again, other_layer, other_seed = make_mixer(), make_mixer(layer_number=2), make_mixer(seed=1)
    reference = make_mixer()
    for name in ("dt_bias", "angle_proj"):
        value = getattr(reference, name)
        assert torch.equal(value, getattr(again, name))
        assert not torch.equal(value, getattr(other_layer, name))
        assert not torch.equal(value, getattr(other_seed, name))


def test_heavy_tail_has_derivative_one_at_zero():
    from mindspeed_mamba3_plugin.layers.mamba3_mixer import heavy_tail

    x = torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.5], dtype=torch.float64, requires_grad=True)
    y = heavy_tail(x)
    y.sum().backward()
    assert y.tolist() == [0.25, 0.5, 1.0, 2.0, 3.5]
    assert x.grad.tolist() == [0.0625, 0.25, 1.0, 1.0, 1.0]


def test_kernel_flags_reach_the_operator(make_mixer):
    mixer = make_mixer(mamba3_forward_kernel="auto", mamba3_backward_kernel="reference", params_dtype=torch.float32)
    registry.reset_kernel_calls()
    mixer(inputs(9, dtype=torch.float32))[0].sum().backward()
    assert registry.kernel_calls() == {"reference.forward": 1, "reference.backward": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mamba_head_dim": 7}, "--mamba-head-dim 7: must divide the inner width.*48"),
        ({"mamba_num_groups": 4}, "--mamba-num-groups 4: must divide the number of Mamba heads, which is 6"),
        ({"mamba_state_dim": 6}, "--mamba-state-dim 6: must be a positive multiple of 4"),
        ({"mamba3_mimo_rank": 0}, "--mamba3-mimo-rank 0: must be an integer of at least 1"),
        ({"mamba3_recompute": True, "fp8": "hybrid"}, "--mamba3-recompute: cannot be combined with --fp8-format"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make_mixer, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_mixer(**settings)


def test_an_input_projection_that_normalises_is_refused(make_mixer):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class LayerNormLinear(ColumnParallelLinear):
        layer_norm_weight = None

    with pytest.raises(ConfigError, match="in_proj is LayerNormLinear, which normalises its input itself"):
        make_mixer(in_proj=LayerNormLinear)


def test_calls_that_do_not_fit_are_refused(make_mixer):
    mixer = make_mixer()
    with pytest.raises(NotImplementedError, match="inference_context must be None"):
        mixer(inputs(3), inference_context=object())
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="B = 2: packed input must have B = 1"):
        mixer(inputs(3), packed_seq_params=packed)


def test_a_mixer_without_process_groups_uses_megatrons(megatron):
    torch.manual_seed(0)
    mixer = build_mixer(pg_collection=None)
    assert mixer(inputs(3))[0].shape == (3, 2, HIDDEN)


def test_checkpoint_keys_and_the_way_back(make_mixer):
    from mindspeed_mamba3_plugin.layers.checkpoint import split_rows

    mixer = make_mixer(mamba3_outproj_norm=True)
    scatter_values(mixer)
    sharded = mixer.sharded_state_dict("mixer.")
    parameters = {f"mixer.{name}" for name, _ in mixer.named_parameters()}
    assert {key for key in sharded if not key.endswith("_extra_state")} == parameters
    factory = sharded["mixer.in_proj.weight"]
    parts = factory.build()
    assert [p.key.removeprefix("mixer.in_proj.weight.") for p in parts] == [
        "z", "x", "B", "C", "dd_dt", "dd_A", "trap",
    ]  # fmt: skip
    assert torch.equal(factory.merge_fn([p.data for p in parts]), mixer.in_proj.weight)
    with pytest.raises(ValueError, match=r"out_proj.weight has 24 rows, its parts have 3"):
        split_rows(sharded["mixer.out_proj.weight"], {"z": 3})
