"""What is particular to the GPU family; that it computes the right thing is in test_kernels.py."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE, make

from mindspeed_mamba3_plugin.ops import registry
from mindspeed_mamba3_plugin.ops.triton import gpu
from mindspeed_mamba3_plugin.ops.triton.chunks import cut
from mindspeed_mamba3_plugin.ops.triton.gpu import angles, states, walk
from mindspeed_mamba3_plugin.ops.triton.plan import gpu_plan
from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES

OFFICIAL = [
    (16, 64, 4), (32, 64, 4), (64, 64, 4), (128, 64, 4), (256, 64, 4), (64, 128, 4), (128, 32, 4), (128, 128, 4),
    (128, 64, 8), (128, 64, 2), (128, 64, 1),
]  # fmt: skip


@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("N, P, R", OFFICIAL)
def test_every_official_shape_has_a_plan(N, P, R, dtype, split):
    plan = gpu_plan(N, P, R, dtype, 90, split)
    assert 2 * plan.NH >= N and plan.PP >= P and plan.RP >= R
    assert max(plan.NW, plan.PW) <= 64 and plan.C * plan.RP <= 64
    assert plan.split == (split and dtype != torch.float32)


def test_operands_are_split_in_the_backward_with_the_norm_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(gpu, "gpu_plan", lambda *a: asked.append(a[-1]) or gpu_plan(*a))
    for norm in (False, True):
        x = make(1, 4, H=1, device=DEVICE, norm=norm)
        gpu.forward(x)
        gpu.backward(x, torch.randn(x.V.shape, device=DEVICE))
    assert asked == [False, False, False, True]


@pytest.mark.parametrize("N, P, R", OFFICIAL)
def test_the_norm_has_a_plan_on_every_chip_that_the_rest_has(N, P, R):
    for sm in (80, 89):
        assert gpu_plan(N, P, R, torch.bfloat16, sm, True).C <= gpu_plan(N, P, R, torch.bfloat16, sm).C


def test_split_operands_of_narrow_heads_are_padded():
    assert (gpu_plan(64, 32, 4, torch.bfloat16, 90).PP, gpu_plan(64, 32, 4, torch.bfloat16, 90, True).PP) == (32, 64)


@pytest.mark.parametrize("N, P, R", [(512, 64, 4), (64, 256, 4), (64, 64, 65)])
def test_what_does_not_fit_is_refused_with_its_sizes(N, P, R):
    with pytest.raises(ValueError, match=f"N = {N}, P = {P}, R = {R}"):
        gpu_plan(N, P, R, torch.bfloat16, 90)


def test_a_chip_with_less_shared_memory_gets_fewer_rows_or_a_refusal():
    rows = [(p := gpu_plan(256, P, 4, torch.bfloat16, sm)).C * p.RP for sm, P in ((90, 128), (80, 128), (89, 64))]
    assert rows == [64, 32, 16]
    with pytest.raises(ValueError, match=r"N = 256, P = 128, R = 4 .* shared memory, sm_89"):
        gpu_plan(256, 128, 4, torch.bfloat16, 89)


def test_two_halves_give_every_gradient_once():
    x = make(1, 20, device=DEVICE, norm=True)
    registry.reset_kernel_calls()
    grad_out = torch.randn(1, 20, 2, 16, device=DEVICE)
    first, residuals = gpu.bwd_fwd(x, grad_out)
    second = gpu.bwd_bwd(x, residuals)
    assert sorted([*first, *second]) == sorted(GRADIENT_NAMES)
    assert registry.kernel_calls() == {"triton-gpu.bwd_fwd": 1, "triton-gpu.bwd_bwd": 1}


def test_states_are_freed_before_the_gradients_of_each_head_are_made():
    x = make(1, 20, device=DEVICE)
    _, residuals = gpu.bwd_fwd(x, torch.randn(1, 20, 2, 16, device=DEVICE))
    gpu.bwd_bwd(x, residuals)
    assert not hasattr(residuals, "states")


@pytest.mark.parametrize(
    "options", [{}, {"z": False}, {"reduce": False}, {"R": 3, "N": 20, "P": 40}], ids=["all", "no Z", "rows", "odd"]
)
def test_a_walk_finds_the_states_that_a_scan_finds(options, monkeypatch):
    x = make(2, 50, H=4, G=2, device=DEVICE, **options)
    _, _, H, _, R, N, P = x.sizes
    plan = replace(gpu_plan(N, P, R, x.dtype, 0), walk={"NW": 8, "PW": 16, "AHEAD": 2}, walkers=1)
    chunks = cut(x, plan.C)
    at = gpu.turns(x, plan, chunks)
    grad_out = torch.randn(2, 50, H, P, device=DEVICE) if x.MIMO_Out is not None else torch.randn_like(
        x.V.unsqueeze(2).expand(-1, -1, R, -1, -1)
    )  # fmt: skip
    found = []
    for walked in (True, False):
        monkeypatch.setattr(walk, "fits", lambda *_, walked=walked: walked)
        entering, last = states.entering(x, plan, chunks, at, True)
        leaving, through = states.leaving(x, plan, chunks, at, grad_out, None, entering)
        through = through.sum(2)
        found.append((entering, last, leaving, through[:, :, 0].sum(-1), through[:, :, 1]))
    for ours, other in zip(*found, strict=True):
        assert other.norm() > 0 and (ours - other).norm() < 1e-5 * other.norm()


def test_a_walk_wants_dense_sequences_and_programs_enough():
    plan = gpu_plan(128, 64, 4, torch.bfloat16, 90)
    assert plan.walk is not None and gpu_plan(64, 64, 4, torch.bfloat16, 90).walk is None
    assert gpu_plan(128, 64, 4, torch.bfloat16, 90, split=True).walk is None

    def fits(B, H, **options):
        x = make(B, 8, H=H, N=128, P=64, R=4, **options)
        return walk.fits(x, plan, cut(x, plan.C))

    assert fits(4, 16) and not fits(3, 16) and not fits(1, 16)
    assert not fits(1, 64, cu_seqlens=[0, 3, 8])


def test_cosine_and_sine_of_half_turns():
    @triton.jit
    def kernel(U, Cos, Sin, n: tl.constexpr):
        i = tl.arange(0, n)
        cos, sin = angles._cos_sin(tl.load(U + i))
        tl.store(Cos + i, cos)
        tl.store(Sin + i, sin)

    u = torch.cat(
        (torch.linspace(-1, 1, 4000), torch.tensor([0.0, 1e-8, -1e-8, 0.25, -0.25, 0.5, -0.5, 0.75, -0.75]))
    )
    u = torch.nn.functional.pad(u, (0, 4096 - len(u))).to(DEVICE)
    cos, sin = torch.empty_like(u), torch.empty_like(u)
    kernel[(1,)](u, cos, sin, 4096)
    exact = u.double() * torch.pi
    assert (cos.double() - exact.cos()).abs().max() < 1.5e-7
    assert (sin.double() - exact.sin()).abs().max() < 1.5e-7
    assert ((sin.double() - exact.sin()).abs() <= 2e-7 * exact.sin().abs() + 1e-7 * (u.abs() > 0.2)).all()


def test_angles_do_not_drift_over_a_long_sequence():
    x = make(1, 4096, H=1, R=1, device=DEVICE)
    _, state = gpu.forward(replace(x, return_state=True))
    exact = (torch.tanh(x.Angles.double()) * x.DT.double().transpose(1, 2)[..., None]).sum(1) * torch.pi
    difference = torch.remainder(state.angle.double() - exact + torch.pi, 2 * torch.pi) - torch.pi
    assert difference.abs().max() < 1e-5
