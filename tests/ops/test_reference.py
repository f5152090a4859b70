"""The oracle: its two forms agree, autograd agrees with finite differences, and the contract's corners hold."""

from dataclasses import replace

import pytest
import torch
from cases import exact, make, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mamba3_plugin.ops import reference, upstream
from mindspeed_mamba3_plugin.ops.sums import running_sum
from mindspeed_mamba3_plugin.ops.types import TENSOR_ARGS, Inputs

OPTIONS = {
    "plain": {},
    "norm": {"norm": True},
    "norm without weight": {"norm": True, "weight": False},
    "no Z": {"z": False},
    "no D": {"d": False},
    "no reduction": {"reduce": False},
    "nothing optional": {"z": False, "d": False, "reduce": False},
    "divisor 2": {"divisor": 2},
    "groups": {"H": 6, "G": 3},
    "a group per head": {"H": 3, "G": 3},
    "rank 1": {"R": 1},
    "rank 3": {"R": 3},
    "ragged last chunk": {"S": 35},
    "shorter than a chunk": {"S": 5},
    "one token": {"S": 1},
    "no token": {"S": 0},
    "packed": {"B": 1, "S": 40, "cu_seqlens": [0, 17, 17, 33, 34, 40]},
}


def small(**options) -> Inputs:
    sizes = {"B": 2, "S": 20, "H": 2, "R": 2, "N": 8, "P": 3, "chunk_size": 8, "return_state": True}
    return make(**{**sizes, **options}, dtype=torch.float64)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_chunk_form_equals_step_form(options):
    x = small(**options)
    stepped, step_state = reference.step_form(x)
    chunked, chunk_state = reference.chunk_form(x)
    assert stepped.shape == chunked.shape and torch.isfinite(chunked).all()
    assert relative_error(chunked, stepped) < 1e-13
    for name, a, b in zip(step_state._fields, chunk_state, step_state, strict=True):
        assert relative_error(a, b) < 1e-13, name


@pytest.mark.parametrize("form", [reference.step_form, reference.chunk_form])
def test_gradcheck(form):
    x = make(1, 3, 2, 1, 2, 4, 2, norm=True, divisor=2, dtype=torch.float64)
    x = replace(x, chunk_size=2)  # two chunks, one ragged

    def function(*tensors):
        return form(replace(x, **dict(zip(TENSOR_ARGS, tensors, strict=True))))[0]

    assert torch.autograd.gradcheck(function, [t.clone().requires_grad_() for t in x.tensors], atol=1e-7)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_both_forms_have_the_same_gradients(options):
    x = replace(small(**options), return_state=False)
    leaves = {n: t.clone().requires_grad_() for n, t in zip(TENSOR_ARGS, x.tensors, strict=True) if t is not None}
    x = replace(x, **leaves)
    out, _ = reference.step_form(x)
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, list(leaves.values()), grad_out, allow_unused=True, materialize_grads=True)
    actual = [g for g in reference.backward(x, grad_out) if g is not None]
    for name, a, b in zip(leaves, actual, expected, strict=True):
        # The angle gradient of a single token is 0: it is held against the size of the others.
        assert (a - b).norm() < 1e-12 * max(float(b.norm()), 1e-3), name


def test_chunk_size_changes_rounding_only():
    x = small(S=40)
    results = [reference.chunk_form(replace(x, chunk_size=c))[0] for c in (8, 16, 40, 64)]
    for other in results[1:]:
        assert relative_error(other, results[0]) < 1e-13


def test_packed_equals_separate_sequences():
    x = small(B=1, S=48, cu_seqlens=[0, 31, 48])
    packed, state = reference.chunk_form(x)
    for i, (a, b) in enumerate([(0, 31), (31, 48)]):
        alone, own = reference.chunk_form(reference._slice(x, a, b))
        assert torch.equal(packed[:, a:b], alone)
        for name, p, q in zip(state._fields, state, own, strict=True):
            assert torch.equal(p[i], q[0]), name


def test_low_precision_inputs_are_computed_in_fp32():
    x = make(dtype=torch.bfloat16)
    out, _ = reference.chunk_form(x)
    true, _ = reference.chunk_form(exact(x))
    assert out.dtype == torch.bfloat16
    assert relative_error(out, true) < 2e-3  # the rounding of the output alone is 1.1e-3


def test_suffix_sums_lose_no_bits():
    """A huge decay early in the chunk must not swallow the small ones after it, nor give a NaN gradient."""
    x = small(B=1, S=16, chunk_size=16)
    adt = x.ADT.clone()
    adt[:, :, 3] = -1e8
    x = replace(x, ADT=adt)
    out, _ = reference.chunk_form(replace(exact(x), dtype=torch.float32))
    assert relative_error(out, reference.step_form(x)[0]) < 1e-6
    assert all(torch.isfinite(g).all() for g in reference.backward(x, torch.ones_like(out)) if g is not None)


def test_nothing_in_it_is_refused_under_deterministic_algorithms_on_cuda():
    """PyTorch refuses cumsum of floats there; a CPU would not say so."""

    class NoFloatCumsum(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten.cumsum.default or not args[0].is_floating_point(), "cumsum of floats"
            return func(*args, **(kwargs or {}))

    x = make(1, 20, 2, 1, 2, 8, 3, norm=True, dtype=torch.float32)
    with NoFloatCumsum():
        out, _ = reference.forward(x)
        reference.backward(x, torch.ones_like(out))
        upstream.compute_dacs_segsum_triton(x.ADT, 8)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 16])
def test_running_sums_are_cumulative_sums(n, dim):
    x = torch.randn((n, 3) if dim == 0 else (3, n), dtype=torch.float64)
    torch.testing.assert_close(running_sum(x, dim), x.cumsum(dim))
