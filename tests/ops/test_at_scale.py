"""Long sequences, tensors past 2^31 elements, and more than one device."""

from dataclasses import replace

import pytest
import torch
from cases import DEVICE, make
from test_api import call, leaves
from test_kernels import FAMILIES, check

from mindspeed_mamba3_plugin.ops import registry
from mindspeed_mamba3_plugin.ops.triton import ascend
from mindspeed_mamba3_plugin.ops.triton.chunks import cut
from mindspeed_mamba3_plugin.ops.triton.plan import plain_plan
from mindspeed_mamba3_plugin.ops.types import Inputs

LONG = 65536


@pytest.fixture(params=FAMILIES)
def family(request):
    return registry.load(request.param)


def test_the_error_of_an_angle_does_not_grow():
    x = make(1, LONG, H=1, R=1, N=8, P=1, device=DEVICE)
    x = replace(x, Angles=x.Angles.abs())  # always onward
    plan = plain_plan(8, 1, 1, x.dtype, DEVICE)
    turns, _ = ascend.angles(x, cut(x, plan.C), plan)
    cos, sin = turns.chunk(2, dim=-1)
    steps = torch.tanh(x.Angles.double()) * x.DT.double().transpose(1, 2)[..., None]
    theta = torch.pi * torch.cumsum(steps, dim=1)[0, :, 0]
    error = torch.maximum(
        (cos[..., :2].reshape(-1, 2) - theta.cos()).abs(), (sin[..., :2].reshape(-1, 2) - theta.sin()).abs()
    ).amax(1)
    assert theta.max() > 1000 * torch.pi
    # Beside a constant, half a unit in the last place of the fp32 angle itself: the steps' own rounding, which is
    # one-sided with the GPU's exponential, adds up to that.
    assert (error < 2e-5 + 2**-24 * theta.amax(1)).all()


@pytest.mark.gpu
def test_a_long_sequence_meets_the_standard(family):
    check(family, make(1, LONG, H=2, R=2, N=32, P=32, chunk_size=128, device=DEVICE))


def large(B: int, S: int, H: int, N: int, P: int) -> Inputs:
    """bf16 inputs made on the GPU; rank 1, nothing optional but the reduction."""

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    small = make(1, 1, H, R=1, N=N, P=P, z=False, d=False, dtype=torch.bfloat16, device="cuda")
    dt = torch.rand(B, H, S, device="cuda") * 0.1
    return replace(
        small,
        Q=normal(B, S, 1, 1, N),
        K=normal(B, S, 1, 1, N),
        V=normal(B, S, H, P),
        ADT=-dt,
        DT=dt,
        Trap=normal(B, H, S),
        Angles=normal(B, S, H, N // 4, dtype=torch.float32),
    )


@pytest.mark.gpu
def test_tensors_past_two_to_the_31_elements(family):
    """The last batch element, all of whose V lies past 2^31, equals a call with it alone."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 110 * 2**30:
        pytest.skip("needs 110 GiB of free GPU memory")
    x = large(9, 32768, 64, N=16, P=128)
    grad_out = torch.randn_like(x.V)
    assert x.V[:-1].numel() >= 2**31
    names = ("Q", "K", "V", "ADT", "DT", "Trap", "Angles")
    alone = replace(x, **{n: getattr(x, n)[-1:].clone() for n in names})
    assert torch.equal(family.forward(x)[0][-1:], family.forward(alone)[0])
    grads, own = family.backward(x, grad_out), family.backward(alone, grad_out[-1:].clone())
    for name in ("dq", "dk", "dv", "dadt", "ddt", "dtrap", "dangles"):
        assert torch.equal(getattr(grads, name)[-1:], getattr(own, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton-ascend", "triton-gpu"])
def test_a_view_that_spans_past_two_to_the_31_elements(kernel):
    torch.cuda.empty_cache()
    x = make(S=20, dtype=torch.bfloat16, device="cuda")
    memory = torch.zeros(2**31 + 2**12, dtype=torch.bfloat16, device="cuda")
    spread = memory.as_strided(x.V.shape, (0, 2**31 // 19, x.V.shape[3], 1))
    spread.copy_(x.V)
    assert torch.equal(spread, x.V)
    kernels = {"forward_kernel": kernel, "backward_kernel": kernel}
    a, b = leaves(x), leaves(x)
    b = replace(b, V=spread.requires_grad_())
    for inputs in (a, b):
        call(inputs, **kernels).float().square().sum().backward()
    assert torch.equal(a.V.grad, b.V.grad) and torch.equal(a.Q.grad, b.Q.grad)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kernel", ["triton-ascend", "triton-gpu", "reference"])
def test_another_device_is_current(kernel):
    def run(device: str) -> tuple:
        with torch.cuda.device(0):
            x = leaves(make(S=40, norm=True, device=device, cu_seqlens=[0, 17, 40], return_state=True))
            out, *state = call(x, forward_kernel=kernel, backward_kernel=kernel)
            out.square().sum().backward()
            assert torch.cuda.current_device() == 0
        grads = [t.grad for t in x.tensors]
        assert all(t.device == torch.device(device) for t in (out, *state, *grads))
        return out, *state, *grads

    for here, there in zip(run("cuda:0"), run("cuda:1"), strict=True):
        assert torch.equal(here.cpu(), there.cpu())
