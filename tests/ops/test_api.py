"""The public operator: errors before any work, autograd, counting, and the choice of implementation."""

import inspect
from dataclasses import replace

import pytest
import torch
from cases import DEVICE, make, relative_error
from test_kernels import FAMILIES

from mindspeed_mamba3_plugin import mamba3_mimo
from mindspeed_mamba3_plugin.ops import api, reference, registry
from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES, TENSOR_ARGS, Inputs

UPSTREAM_SIGNATURE = [
    *TENSOR_ARGS[:-1], "chunk_size", "rotary_dim_divisor", "dtype", "return_state", "cu_seqlens",
    "fuse_pregate_headwise_rms_norm", "outproj_norm_weight", "outproj_norm_eps",
]  # fmt: skip


def call(x: Inputs, **kernels):
    return mamba3_mimo(
        *x.tensors[:14], x.chunk_size, x.rotary_dim_divisor, x.dtype, x.return_state, x.cu_seqlens, x.fuse_norm,
        x.outproj_norm_weight, x.norm_eps, **kernels,
    )  # fmt: skip


def leaves(x: Inputs) -> Inputs:
    given = {n: t.clone().requires_grad_() for n, t in zip(TENSOR_ARGS, x.tensors, strict=True) if t is not None}
    return replace(x, **given)


def test_upstreams_arguments_in_upstreams_order():
    parameters = list(inspect.signature(mamba3_mimo).parameters)
    assert parameters[: len(UPSTREAM_SIGNATURE)] == UPSTREAM_SIGNATURE


@pytest.mark.parametrize(
    ("kernel", "norm", "packed"),
    [("reference", False, False), ("triton", True, False), ("triton", False, True)],
)
def test_every_gradient_arrives_at_its_argument(kernel, norm, packed):
    x = leaves(make(norm=norm, cu_seqlens=[0, 20, 36] if packed else None, device=DEVICE))
    out = call(x, forward_kernel="reference", backward_kernel=kernel)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    true = reference.backward(x, grad_out)
    for name, tensor, expected in zip(TENSOR_ARGS, x.tensors, true, strict=True):
        if tensor is not None:
            assert tensor.grad.dtype == tensor.dtype
            assert relative_error(tensor.grad, expected) < 1e-4, name


def test_a_flat_norm_weight_gets_a_flat_gradient():
    x = make(norm=True, device=DEVICE)
    flat = x.outproj_norm_weight.flatten().requires_grad_()
    call(replace(x, outproj_norm_weight=flat)).sum().backward()
    assert flat.grad.shape == flat.shape and flat.grad.abs().sum() > 0


@pytest.mark.parametrize("name", TENSOR_ARGS)
def test_a_gradient_for_one_input_only(name):
    x = make(S=20, norm=True, device=DEVICE)
    leaf = getattr(x, name).clone().requires_grad_()
    call(replace(x, **{name: leaf}), backward_kernel="triton").sum().backward()
    true = reference.backward(x, torch.ones_like(x.V))[TENSOR_ARGS.index(name)]
    assert relative_error(leaf.grad, true) < 1e-4
    assert all(t.grad is None for other, t in zip(TENSOR_ARGS, x.tensors, strict=True) if other != name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(use_reentrant):
    plain, kept = leaves(make(norm=True, device=DEVICE)), leaves(make(norm=True, device=DEVICE))
    call(plain, backward_kernel="triton").square().sum().backward()
    names = [n for n, t in zip(TENSOR_ARGS, kept.tensors, strict=True) if t is not None]
    out = torch.utils.checkpoint.checkpoint(
        lambda *tensors: call(replace(kept, **dict(zip(names, tensors, strict=True))), backward_kernel="triton"),
        *(getattr(kept, n) for n in names),
        use_reentrant=use_reentrant,
    )
    out.square().sum().backward()
    for name in names:
        assert torch.equal(getattr(plain, name).grad, getattr(kept, name).grad), name


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_and_their_gradient_need_not_be_contiguous(family):
    """Every input reversed in memory, one of them expanded, and a gradient of the output expanded from a scalar."""
    kernels = {"forward_kernel": family, "backward_kernel": family}
    x = make(S=20, norm=True, device=DEVICE)
    x = replace(x, Angles=x.Angles[:, :, :1].expand_as(x.Angles))

    def reversed_in_memory(t: torch.Tensor) -> torch.Tensor:
        order = tuple(reversed(range(t.ndim)))
        return t.permute(order).contiguous().permute(order)

    dense = leaves(replace(x, Angles=x.Angles.contiguous()))
    spread = {n: reversed_in_memory(t) for n, t in zip(TENSOR_ARGS, x.tensors, strict=True)}
    spread = replace(x, **{n: t.requires_grad_() for n, t in {**spread, "Angles": x.Angles.detach()}.items()})
    assert not any(t.is_contiguous() for t in (spread.Q, spread.V, spread.ADT, spread.Angles))
    out, expected = call(spread, **kernels), call(dense, **kernels)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.backward(torch.ones_like(expected))
    for name, a, b in zip(TENSOR_ARGS, spread.tensors, dense.tensors, strict=True):
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("kernel", ["reference", "triton"])
def test_autocast_changes_nothing(kernel):
    """Mixed bf16 activations and fp32 parameters are the normal case, and products keep the dtype asked for."""
    plain, cast = leaves(make(dtype=torch.bfloat16, device=DEVICE)), leaves(make(dtype=torch.bfloat16, device=DEVICE))
    call(plain, forward_kernel=kernel, backward_kernel=kernel).float().sum().backward()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = call(cast, forward_kernel=kernel, backward_kernel=kernel)
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    for name, a, b in zip(TENSOR_ARGS, plain.tensors, cast.tensors, strict=True):
        if a is not None:
            assert b.grad.dtype == b.dtype and torch.equal(a.grad, b.grad), name


def test_calls_are_counted_by_implementation():
    registry.reset_kernel_calls()
    call(leaves(make(device=DEVICE)), forward_kernel="reference", backward_kernel="triton").sum().backward()
    family = registry.resolve("triton", DEVICE)
    assert registry.kernel_calls() == {"reference.forward": 1, f"{family}.bwd_fwd": 1, f"{family}.bwd_bwd": 1}


@pytest.mark.parametrize("name", GRADIENT_NAMES)
def test_a_planted_error_reaches_its_gradient_alone(name):
    x, planted = leaves(make(norm=True, device=DEVICE)), leaves(make(norm=True, device=DEVICE))
    call(x).sum().backward()
    out = call(planted).sum()
    with api.planted({name: 1.01}):
        out.backward()
    for other, a, b in zip(GRADIENT_NAMES, x.tensors, planted.tensors, strict=True):
        factor = 1.01 if other == name else 1.0
        torch.testing.assert_close(b.grad, a.grad * factor)


def test_planting_an_unknown_gradient_is_refused():
    with pytest.raises(ValueError, match=r"no gradient named 'dx'.*dk"), api.planted({"dx": 2.0}):
        pass


def test_a_loss_on_the_state_is_refused():
    x = leaves(make(return_state=True, device=DEVICE))
    out, _angle, ssm, _k, _v = call(x)
    with pytest.raises(RuntimeError, match="loss on the returned state"):
        (out.sum() + ssm.sum()).backward()


def test_a_second_derivative_is_refused():
    x = leaves(make(device=DEVICE))
    with pytest.raises(RuntimeError, match=r"second derivatives .* not supported"):
        torch.autograd.grad(call(x).sum(), x.V, create_graph=True)


BROKEN = {
    "rank of Q": (lambda x: {"Q": x.Q[0]}, ValueError, r"Q has shape .*must be \[B, S, R, G, N\]"),
    "shape of K": (lambda x: {"K": x.K[:, 1:]}, ValueError, r"K has shape \(1, 35, .*must be \(1, 36, "),
    "shape of Angles": (lambda x: {"Angles": x.Angles[..., :1]}, ValueError, r"Angles has shape .*must be"),
    "heads and groups": (lambda x: {"V": x.V[:, :, :1].expand(-1, -1, 3, -1)}, ValueError, "3 heads and Q 2 groups"),
    "odd N": (lambda x: {"Q": x.Q[..., :15], "K": x.K[..., :15]}, ValueError, "N = 15: must be a multiple of"),
    "chunk": (lambda x: {"chunk_size": 4}, ValueError, "chunk_size is 4: must be an integer of at least 8"),
    "divisor": (lambda x: {"rotary_dim_divisor": 3}, ValueError, "rotary_dim_divisor is 3: must be 2 or 4"),
    "Z alone": (lambda x: {"MIMO_Z": None}, ValueError, "Z and MIMO_Z must be given together"),
    "norm without Z": (
        lambda x: {"fuse_norm": True, "Z": None, "MIMO_Z": None},
        ValueError,
        "fuse_pregate_headwise_rms_norm needs Z, MIMO_Z and MIMO_Out",
    ),
    "norm without reduction": (lambda x: {"fuse_norm": True, "MIMO_Out": None}, ValueError, "needs Z, MIMO_Z and"),
    "weight without norm": (lambda x: {"outproj_norm_weight": x.V[0, 0]}, ValueError, "without fuse_pregate"),
    "weight shape": (
        lambda x: {"fuse_norm": True, "outproj_norm_weight": x.V[0, 0, :1]},
        ValueError,
        r"outproj_norm_weight has shape \(1, 16\): must be \(2, 16\) or \(32,\)",
    ),
    "not a tensor": (lambda x: {"DT": 1.0}, TypeError, "DT is float: must be a tensor"),
    "missing": (lambda x: {"MIMO_V": None}, TypeError, "MIMO_V is NoneType"),
    "integers": (lambda x: {"Trap": x.Trap.int()}, TypeError, "Trap has dtype torch.int32"),
    "dtype": (lambda x: {"dtype": torch.int32}, TypeError, "dtype is torch.int32"),
    "device": (
        lambda x: {"D": x.D.to("meta")},
        ValueError,
        r"D is on meta: must be on (cpu|cuda:0|npu:0), where Q is",
    ),
    "packed batch": (
        lambda x: {"cu_seqlens": torch.tensor([0, 36], device=x.Q.device)},
        ValueError,
        "cu_seqlens is given with B = 2",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_argument_is_named(change, error, message):
    x = make(G=2, B=2, device=DEVICE) if message.startswith(("3 heads", "cu_seqlens")) else make(device=DEVICE)
    with pytest.raises(error, match=message):
        call(replace(x, **change(x)))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0.0, 36.0], "1-D int32 or int64"),
        ([36], "at least two bounds"),
        ([1, 36], "starts with 1"),
        ([0, 35], "ends with 35: must end with the length of Q, which is 36"),
        ([0, 20, 10, 36], "decreases from 20 to 10 at position 2"),
    ],
)
def test_malformed_cu_seqlens_is_named(bounds, message):
    with pytest.raises(ValueError, match=message):
        call(replace(make(device=DEVICE), cu_seqlens=torch.tensor(bounds, device=DEVICE)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_integer_types_of_cu_seqlens(dtype):
    x = make(cu_seqlens=[0, 20, 36], device=DEVICE)
    out = call(replace(x, cu_seqlens=x.cu_seqlens.to(dtype)), forward_kernel="triton")
    assert relative_error(out, call(x)) < 1e-5


def test_auto_is_the_reference_on_a_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert registry.resolve("auto", "cpu") == "reference"
    assert registry.resolve("triton", "cpu") == "triton-ascend"  # the plain family, in the interpreter
    assert registry.resolve("auto", "npu") == "triton-ascend"


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("cuda", "cpu", "unknown kernel 'cuda': allowed are auto, reference"),
        ("tilelang", "cpu", "tilelang and mamba_ssm are not both installed|needs an NVIDIA GPU"),
    ],
)
def test_an_impossible_kernel_is_refused(name, device, message):
    with pytest.raises(ValueError, match=message):
        registry.resolve(name, device)


def test_triton_without_an_interpreter_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        registry.resolve("triton", "cpu")


def test_triton_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        registry.resolve("triton", "cuda")
