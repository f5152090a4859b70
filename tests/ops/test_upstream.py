"""Upstream's calling conventions against fp64 automatic differentiation, at the caller's chunk size."""

import inspect
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import DEVICE, exact, make, relative_error

from mindspeed_mamba3_plugin.ops import reference, upstream
from mindspeed_mamba3_plugin.ops.api import mamba3_mimo
from mindspeed_mamba3_plugin.ops.types import TENSOR_ARGS, Inputs

COMMON = (
    "q", "k", "v", "q_bias", "k_bias", "mimo_v", "mimo_o", "z", "D", "mimo_z", "angles", "dA_cs", "dA_cs_rev", "dt",
    "trap", "segsum",
)  # fmt: skip
RESULTS = (
    "dq", "dk", "dv", "dA", "ddt", "dtrap", "dq_bias", "dk_bias", "dmimo_v", "dmimo_z", "dmimo_o", "dangles", "dD",
    "dz", "dnorm_weight",
)  # fmt: skip
SCAN_BUFFERS = (
    "dk", "dv", "dmimo_v", "dq", "dfactor", "dgamma_diag", "dangles", "dD", "ddA", "dSSdA", "ddA_cs_rev", "ddA_cs",
)  # fmt: skip

OPTIONS = {
    "a batch": {"B": 2, "S": 32},
    "ragged": {"S": 21, "chunk_size": 8},
    "a chunk of 12": {"S": 30, "chunk_size": 12},
    "rank 3": {"S": 20, "R": 3, "H": 1},
    "rank 8, rows in two parts": {"S": 27, "R": 8, "H": 1},
    "groups": {"H": 4, "G": 2, "S": 20},
    "norm": {"norm": True, "S": 20, "B": 2},
    "norm without weight": {"norm": True, "weight": False, "S": 20},
    "no reduction": {"reduce": False, "z": False, "S": 20},
    "nothing optional": {"z": False, "d": False, "S": 20},
    "divisor 2": {"divisor": 2, "S": 20},
    "odd sizes": {"N": 12, "P": 9, "S": 20},
    "packed": {"S": 50, "cu_seqlens": [0, 17, 17, 33, 34, 50]},
    "packed, small chunks": {"S": 50, "cu_seqlens": [0, 0, 31, 50], "chunk_size": 8, "norm": True},
}


def sums(x: Inputs) -> tuple:
    return upstream.compute_dacs_segsum_triton_varlen(x.ADT, x.chunk_size, x.cu_seqlens)


def common(x: Inputs) -> dict:
    """Upstream's arguments; the angles of x are taken as accumulated ones."""
    values = (
        x.Q, x.K, x.V, x.Q_bias, x.K_bias, x.MIMO_V, x.MIMO_Out, x.Z, x.D, x.MIMO_Z, x.Angles, *sums(x)[:2], x.DT,
        x.Trap, sums(x)[2],
    )  # fmt: skip
    return dict(zip(COMMON, values, strict=True))


def settings(x: Inputs) -> dict:
    return {
        "chunk_size": x.chunk_size,
        "rotary_dim_divisor": x.rotary_dim_divisor,
        "dtype": x.dtype,
        "fuse_pregate_headwise_rms_norm": x.fuse_norm,
        "outproj_norm_weight": x.outproj_norm_weight,
        "outproj_norm_eps": x.norm_eps,
    }


def run_forward(x: Inputs, **more):
    return upstream.mamba_mimo_forward_varlen(**common(x), **settings(x), cu_seqlens=x.cu_seqlens, **more)


def truth(x: Inputs, grad_out=None):
    """Output, last state and last k in fp64 with the angles as given; with grad_out the gradients instead."""
    x = exact(x)
    if x.fuse_norm and x.outproj_norm_weight is None:
        x = replace(x, outproj_norm_weight=torch.ones(x.V.shape[-2:], dtype=torch.float64))
    leaves = {n: t.requires_grad_() for n, t in zip(TENSOR_ARGS, x.tensors, strict=True) if t is not None}
    bounds = x.cu_seqlens.tolist() if x.cu_seqlens is not None else [0, x.Q.shape[1]]
    parts = [sequence(reference._slice(x, a, b)) for a, b in itertools.pairwise(bounds)]
    out, states, ks = (torch.cat(p, dim=d) for p, d in zip(zip(*parts, strict=True), (1, 0, 0), strict=True))
    if grad_out is None:
        return out, states, ks
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.cpu().double())
    by_name = dict(zip(leaves, grads, strict=True))
    return dict(zip(RESULTS, (by_name.get(n) for n in TENSOR_ARGS), strict=True))


def sequence(x: Inputs):
    _, S, H, G, _, _, _ = x.sizes
    heads = torch.arange(H) // (H // G)
    t = dict(zip(TENSOR_ARGS, x.tensors, strict=True))
    q, k = (
        reference._rotate(y[:, :, :, heads].transpose(2, 3) + b, x.Angles)
        for y, b in ((x.Q, x.Q_bias), (x.K, x.K_bias))
    )
    v = x.V[:, :, :, None] * x.MIMO_V
    adt, dt, trap = (y.transpose(1, 2) for y in (x.ADT, x.DT, torch.sigmoid(x.Trap)))
    o, state = reference._chunk_core(q, k, v, adt, dt, trap, 16)
    if x.D is not None:
        o = o + x.D[:, None, None] * v
    last = k[:, -1] if S else k.new_zeros(1, *k.shape[2:])
    return reference._gate(x, o, t), state, last.transpose(1, 2)


def loss_gradient(x: Inputs) -> torch.Tensor:
    B, S, H, _, R, _, P = x.sizes
    shape = (B, S, H, P) if x.MIMO_Out is not None else (B, S, R, H, P)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, x.dtype)


def run_combined(x: Inputs, grad_out, **more) -> dict:
    if x.cu_seqlens is None:
        found = upstream.mamba_mimo_bwd_combined(grad_out, **common(x), **settings(x), **more)
    else:
        found = upstream.mamba_mimo_bwd_combined_varlen(
            grad_out, **common(x), **settings(x), cu_seqlens=x.cu_seqlens, **more
        )
    return dict(zip(RESULTS, found, strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward(options):
    x = make(**options, device=DEVICE)
    out, state, k = run_forward(x, return_state=True)
    for ours, true in zip((out, state, k), truth(x), strict=True):
        assert relative_error(ours, true) < 1e-5
    assert run_forward(x)[1:] == (None, None)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_all_gradients(options):
    x = make(**options, device=DEVICE)
    grad_out = loss_gradient(x)
    found, true = run_combined(x, grad_out), truth(x, grad_out)
    for name in RESULTS:
        assert (found[name] is None) == (true[name] is None), name
        if true[name] is not None:
            assert relative_error(found[name], true[name]) < 1e-4, name


def test_bf16():
    x = make(1, 64, R=4, N=32, P=32, dtype=torch.bfloat16, device=DEVICE)
    grad_out = loss_gradient(x)
    found, true = run_combined(x, grad_out, bb_threads=256, states_dtype=torch.bfloat16), truth(x, grad_out)
    for name in RESULTS[:-1]:
        assert relative_error(found[name], true[name]) < 1e-2, name
    assert found["dtrap"].dtype == torch.bfloat16 and found["dangles"].dtype == torch.float32


def test_the_same_function_as_the_public_operator():
    """Angles accumulated outside, and their gradient taken through that sum, give the operator's results."""
    x = make(S=40, norm=True, device=DEVICE)
    angles, dt = x.Angles.clone().requires_grad_(), x.DT.clone().requires_grad_()
    theta = torch.cumsum(torch.tanh(angles) * dt.transpose(1, 2)[..., None] * torch.pi, dim=1)
    at = replace(x, Angles=theta.detach())
    grad_out = loss_gradient(x)
    found = run_combined(at, grad_out)
    theta.backward(found["dangles"])
    true = reference.backward(exact(x), grad_out.cpu().double())
    assert relative_error(run_forward(at)[0], reference.forward(exact(x))[0]) < 1e-5
    assert relative_error(angles.grad, true.dangles) < 1e-4
    assert relative_error(found["ddt"] + dt.grad, true.ddt) < 1e-4
    assert relative_error(found["dA"], true.dadt) < 1e-4


def chunked(q, k, v, do, U, *, gamma, scale, exp_cs, exp_rev, exp_seg, whole):
    """<dO, O> of one batch in chunks of U, with every decay and weight a tensor of its own; rows are [B, S, H, R, .]
    and weights [B, H, S]."""
    B, S, H, _, N = q.shape
    state = q.new_zeros(B, H, N, v.shape[-1])
    total = 0
    for c in range(-(-S // U)):
        at = slice(c * U, min(S, (c + 1) * U))
        n = at.stop - at.start
        Q, K, V, dO = (y[:, at].permute(0, 2, 1, 3, 4) for y in (q, k, v, do))  # [B, H, t, R, .]
        g, s, cs, rev = (y[:, :, at] for y in (gamma, scale, exp_cs, exp_rev))
        mix = torch.tril(exp_seg[:, :, c, :n, :n], -1) * s[..., None, :] + torch.diag_embed(g)
        o = torch.einsum("bhtrn,bhusn,bhtu,bhusp->bhtrp", Q, K, mix, V)
        o = o + cs[..., None, None] * torch.einsum("bhtrn,bhnp->bhtrp", Q, state)
        total = total + (o * dO).sum()
        state = whole[:, :, c, None, None] * state + torch.einsum("bhusn,bhusp,bhu->bhnp", K, V, s * rev)
    return total


@pytest.mark.parametrize("options", [{"B": 2, "S": 32}, {"S": 21, "chunk_size": 8}, {"H": 4, "G": 2, "S": 20}])
def test_the_twelve_results_of_bwd_bwd(options):
    x = make(**options, reduce=False, z=False, d=False, device=DEVICE)
    B, S, H, G, R, N, _ = x.sizes
    U, chunks = x.chunk_size, -(-S // x.chunk_size)
    grad_out = loss_gradient(x)
    found = two_halves(x, grad_out)

    t = exact(x)
    dA_cs, dA_cs_rev, segsum = upstream.compute_dacs_segsum_triton(t.ADT, U)
    ends = [min(S, (c + 1) * U) - 1 for c in range(chunks)]
    weight = torch.sigmoid(t.Trap)
    gamma = t.DT * weight
    leaves = {
        "gamma": gamma,
        "scale": gamma + F.pad((t.DT * (1 - weight))[..., 1:], (0, 1)),
        "exp_cs": dA_cs.exp(),
        "exp_rev": dA_cs_rev.exp(),
        "exp_seg": segsum.exp(),
        "whole": dA_cs[..., ends].exp(),
    }
    leaves = {n: y.detach().requires_grad_() for n, y in leaves.items()}
    heads = torch.arange(H) // (H // G)
    q, k = (
        reference._rotate(y[:, :, :, heads].transpose(2, 3) + b, t.Angles)
        for y, b in ((t.Q, t.Q_bias), (t.K, t.K_bias))
    )
    v, do = t.V[:, :, :, None] * t.MIMO_V, grad_out.cpu().double().transpose(2, 3)
    chunked(q, k, v, do, U, **leaves).backward()

    true = truth(x, grad_out)
    per_token = (leaves["whole"].grad * leaves["whole"]).repeat_interleave(U, dim=-1)[..., :S]
    checks = {
        "dfactor": leaves["scale"].grad,
        "dgamma_diag": leaves["gamma"].grad,
        "ddA": per_token,
        "ddA_cs": leaves["exp_cs"].grad,
        "ddA_cs_rev": leaves["exp_rev"].grad,
        "dangles": true["dangles"],
        "dv": true["dv"],
    }
    for name, expected in checks.items():
        assert relative_error(found[name], expected) < 1e-4, name
    below = found["dSSdA"].transpose(-1, -2).tril(-1)  # above it upstream's result is unused
    assert relative_error(below, leaves["exp_seg"].grad) < 1e-4
    assert relative_error(found["dmimo_v"].sum(0), true["dmimo_v"]) < 1e-4
    for name in ("dq", "dk"):
        per_head = found[name].view(B, S, R, G, H // G, N)
        assert relative_error(per_head.sum(4), true[name]) < 1e-4, name
        assert relative_error(per_head.flatten(3, 4).sum((0, 1)).transpose(0, 1), true[f"{name}_bias"]) < 1e-4, name


def two_halves(x: Inputs, grad_out) -> dict:
    """Both factories as upstream's combined function calls them, in buffers that betray a missing write."""
    B, S, H, G, R, N, P = x.sizes
    chunks = -(-S // x.chunk_size)

    def buffer(*shape, dtype=torch.float32):
        return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)

    ranks = (B, H, R, P)
    b = {
        "dmimo_o": buffer(*ranks), "dnorm_weight": buffer(*ranks), "dout_pre_rms": buffer(B, H, S * R, P),
        "states": buffer(B, H, chunks, N, P), "dz": buffer(B, S, H, P), "dmimo_z": buffer(*ranks),
        "qk_dot": buffer(B, H, S, R, R), "dk": buffer(B, S * R, H, N), "dq": buffer(B, S * R, H, N),
        "dv": buffer(B, S, H, P), "dmimo_v": buffer(*ranks), "dangles": buffer(*x.Angles.shape), "dD": buffer(B, H),
        "dSSdA": buffer(B, H, chunks, x.chunk_size, x.chunk_size),
        **{n: buffer(B, H, S) for n in ("dfactor", "dgamma_diag", "ddA", "ddA_cs_rev", "ddA_cs")},
    }  # fmt: skip
    c = common(x)
    sizes = (B, S, H, G, N, P, R)
    given = (x.Z is not None, x.D is not None, x.MIMO_Out is not None)
    first = (c[n] for n in ("q", "k", "v", "q_bias", "k_bias", "mimo_v", "mimo_o"))
    path = tuple(c[n] for n in ("angles", "dA_cs", "dA_cs_rev", "dt", "trap"))
    rest = (x.chunk_size, x.rotary_dim_divisor, str(x.dtype).removeprefix("torch."))
    upstream.mamba_mimo_bwd_fwd(*sizes, *given, x.fuse_norm, *rest, x.norm_eps, 128, 0, states_dtype=torch.float32)(
        grad_out, *first, x.outproj_norm_weight, b["dmimo_o"], b["dnorm_weight"], b["dout_pre_rms"], b["states"],
        c["z"], c["mimo_z"], b["dz"], b["dmimo_z"], *path, c["D"], b["qk_dot"], c["segsum"],
    )  # fmt: skip
    packed = x.fuse_norm
    given = (given[0] and not packed, given[1], given[2] and not packed)
    upstream.mamba_mimo_bwd_bwd(*sizes, *given, packed, *rest, 256, 0, states_dtype=torch.float32)(
        b["dout_pre_rms"] if packed else grad_out, *(c[n] for n in COMMON[:7]), b["dk"], b["dv"], b["dmimo_v"],
        b["states"], b["dq"], c["z"], c["mimo_z"], *path, b["dfactor"], b["dgamma_diag"], b["dangles"], c["D"],
        b["dD"], b["qk_dot"], b["ddA"], b["dSSdA"], b["ddA_cs_rev"], b["ddA_cs"], c["segsum"],
    )  # fmt: skip
    return b


@pytest.mark.parametrize(
    "options", [{"B": 2, "S": 20}, {"B": 2, "S": 20, "norm": True}, {"R": 8, "S": 20, "norm": True}]
)
def test_both_halves_fill_the_callers_buffers(options):
    x = make(**options, device=DEVICE)
    grad_out = loss_gradient(x)
    b, true = two_halves(x, grad_out), truth(x, grad_out)
    for name in ("dmimo_o", "dmimo_z", "dmimo_v", "dD"):
        assert relative_error(b[name].sum(0), true[name]) < 1e-4, name
    for name in ("dz", "dv", "dangles"):
        assert relative_error(b[name], true[name]) < 1e-4, name
    if x.fuse_norm:
        assert relative_error(b["dnorm_weight"].sum((0, 2)), true["dnorm_weight"]) < 1e-4
    q, k = x.Q + x.Q_bias.transpose(0, 1)[:, :1], x.K + x.K_bias.transpose(0, 1)[:, :1]
    dots = torch.einsum("bsrn,bstn->bsrt", q[:, :, :, 0], k[:, :, :, 0])
    assert relative_error(b["qk_dot"][:, 0], dots) < 1e-5
    half = replace(x, **{n: getattr(x, n)[:, :16] for n in ("Q", "K", "V", "Z", "Angles")})
    half = replace(half, **{n: getattr(x, n)[..., :17] for n in ("ADT", "DT", "Trap")})
    assert relative_error(b["states"][:, :, 0], torch.zeros_like(b["states"][:, :, 0])) == 0
    # The state that enters the second chunk holds the share of its first token in the scale of the token before.
    entering = first_state(exact(half))
    assert relative_error(b["states"][:, :, 1], entering) < 1e-5


def first_state(x: Inputs) -> torch.Tensor:
    """The state after 16 tokens, from steps of 17."""
    k = reference._rotate((x.K + x.K_bias.transpose(0, 1)).transpose(2, 3), x.Angles)
    v = x.V[:, :, :, None] * x.MIMO_V
    weight = torch.sigmoid(x.Trap)
    scale = (x.DT * weight)[..., :-1] + (x.DT * (1 - weight))[..., 1:]
    to_end = torch.stack([x.ADT[..., t + 1 : 16].sum(-1) for t in range(16)], dim=-1).exp()
    return torch.einsum("bshrn,bshrp,bhs->bhnp", k, v, scale * to_end)


@pytest.mark.parametrize("lengths", [[20], [32], [7, 0, 32, 19, 0]])
def test_sums_of_decays(lengths):
    C, S = 16, sum(lengths)
    da = -torch.rand(2, 3, S, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) if len(lengths) > 1 else None
    cs, rev, segsum = upstream.compute_dacs_segsum_triton_varlen(da, C, cu)
    assert segsum.shape[2] == (-(-S // C) if cu is None else S // C + len(lengths))
    start = 0
    for i, length in enumerate(lengths):
        for first in range(0, length, C):
            a, b = start + first, start + min(first + C, length)
            slot = first // C + (start // C + i if cu is not None else 0)
            for t in range(a, b):
                torch.testing.assert_close(cs[..., t], da[..., a : t + 1].sum(-1))
                torch.testing.assert_close(rev[..., t], da[..., t + 1 : b].sum(-1))
                for u in range(a, t):
                    torch.testing.assert_close(segsum[:, :, slot, t - a, u - a], da[..., u + 1 : t + 1].sum(-1))
        start += length
    assert (upstream.compute_dacs_segsum_triton(da.abs(), C)[0] == 0).all()


SIGNATURES = {
    "mamba_mimo_forward": [
        *COMMON, "chunk_size", "rotary_dim_divisor", "dtype", "return_state", "fuse_pregate_headwise_rms_norm",
        "outproj_norm_weight", "outproj_norm_eps", "threads", "num_stages",
    ],
    "mamba_mimo_bwd_combined": [
        "dout", "q", "k", "v", "q_bias", "k_bias", "mimo_v", "mimo_o", "z", "mimo_z", "angles", "dA_cs", "dA_cs_rev",
        "dt", "trap", "D", "segsum", "chunk_size", "rotary_dim_divisor", "dtype", "bf_threads", "bf_num_stages",
        "bb_threads", "bb_num_stages", "states_dtype", "fuse_pregate_headwise_rms_norm", "outproj_norm_weight",
        "outproj_norm_eps",
    ],
    "mamba_mimo_bwd_fwd": [
        "B", "S", "H", "G", "N", "P", "R", "hasZ", "hasD", "reduceO", "fuse_pregate_headwise_rms_norm", "chunk_size",
        "rotary_dim_divisor", "dtype", "outproj_norm_eps", "threads", "num_stages", "states_dtype",
    ],
    "mamba_mimo_bwd_bwd": [
        "B", "S", "H", "G", "N", "P", "R", "hasZ", "hasD", "reduceO", "packed_dout", "chunk_size",
        "rotary_dim_divisor", "dtype", "threads", "num_stages", "states_dtype",
    ],
    "compute_dacs_segsum_triton": ["da", "chunk_size"],
    "compute_dacs_segsum_triton_varlen": ["da", "chunk_size", "cu_seqlens"],
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_upstreams_arguments_in_upstreams_order(name):
    assert list(inspect.signature(getattr(upstream, name)).parameters) == SIGNATURES[name]


def test_packed_forms_add_the_bounds_after_the_dtype():
    for name in ("mamba_mimo_forward", "mamba_mimo_bwd_combined"):
        order = list(SIGNATURES[name])
        order.insert(order.index("dtype") + 1, "cu_seqlens")
        assert list(inspect.signature(getattr(upstream, f"{name}_varlen")).parameters) == order
    assert upstream.mamba3_mimo is mamba3_mimo


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segsum": torch.zeros(1, 2, 3, 16, 15)}, r"segsum has shape .*must be \(1, 2, 3, 16, 16\)"),
        ({"dA_cs_rev": torch.zeros(1, 2, 35)}, r"dA_cs_rev has shape .*must be \(1, 2, 36\)"),
        ({"chunk_size": 65}, r"chunk_size is 65 and q has R = 2: chunks of 256 rows .* must be at most 128"),
        ({"chunk_size": 4}, "chunk_size is 4: must be an integer of at least 8"),
        ({"dtype": "float12"}, "dtype is float12"),
        ({"mimo_o": None, "fuse_pregate_headwise_rms_norm": True}, "needs Z, MIMO_Z and MIMO_Out"),
    ],
)
def test_a_broken_argument_is_named(change, message):
    x = make(device=DEVICE)
    with pytest.raises((ValueError, TypeError), match=message):
        upstream.mamba_mimo_forward(**{**common(x), **settings(x), **change})


def test_no_token_and_wrong_gradient_are_named():
    x = make(S=0, device=DEVICE)
    with pytest.raises(ValueError, match=r"q has shape .*must have at least one token"):
        run_forward(x)
    x = make(device=DEVICE)
    with pytest.raises(ValueError, match=r"dout has shape .*that of the output"):
        run_combined(x, torch.zeros(1, 36, 2, 2, 16, device=DEVICE))
    with pytest.raises(ValueError, match=r"q has shape .*the kernel was made for"):
        upstream.mamba_mimo_bwd_fwd(1, 35, 2, 1, 16, 16, 2, True, True, True)(*[x.Q] * 2, x.K, x.V, *[None] * 21)
