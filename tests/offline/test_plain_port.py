"""The direct translation computes the right gradients, so what is compared with it is the same work."""

import importlib.util
from dataclasses import replace

import torch
from conftest import ROOT

from mindspeed_mamba3_plugin.ops import reference
from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES, Inputs

spec = importlib.util.spec_from_file_location("plain_port", ROOT / "scripts/plain_port.py")
plain_port = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plain_port)
B, S, H, R, N, P, C = 2, 32, 2, 2, 16, 16, 8


def problem() -> Inputs:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    dt = torch.nn.functional.softplus(normal(B, H, S) - 3)
    return Inputs(
        Q=normal(B, S, R, 1, N), K=normal(B, S, R, 1, N), V=normal(B, S, H, P), ADT=-torch.rand(B, H, S) * dt, DT=dt,
        Trap=normal(B, H, S), Q_bias=normal(H, R, N), K_bias=normal(H, R, N), MIMO_V=normal(H, R, P),
        MIMO_Z=normal(H, R, P), MIMO_Out=normal(H, R, P), Angles=normal(B, S, H, N // 4), D=normal(H),
        Z=normal(B, S, H, P), outproj_norm_weight=None, cu_seqlens=None, chunk_size=C, rotary_dim_divisor=4,
        dtype=torch.float32, return_state=False, fuse_norm=False, norm_eps=1e-5,
    )  # fmt: skip


def finished(x: Inputs, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of what `prepare` sums, through torch."""
    given = {n: getattr(x, n).clone().requires_grad_() for n in ("ADT", "DT", "Trap", "Angles")}
    sums = plain_port.prepare(replace(x, **given))
    inside = torch.log(sums.decay_in)
    (
        (found["dtheta"] * torch.atan2(sums.sin, sums.cos)).sum()
        + (found["dmixing"] * sums.mixing).sum()
        + (found["dcarry_in"] * inside).sum()
        + (found["dcarry_out"] * sums.scale * sums.decay_out).sum()
        + (found["dwhole"] * inside[..., C - 1 :: C]).sum()
    ).backward()
    return {f"d{n.lower()}": t.grad for n, t in given.items()}


def test_all_gradients_against_the_reference():
    x = problem()
    grad_out = torch.randn(B, S, H, P, generator=torch.Generator().manual_seed(1))
    true = reference.backward(x, grad_out)._asdict()
    sums = plain_port.prepare(x)
    first = plain_port.bwd_fwd(x, sums, grad_out)
    second = plain_port.bwd_bwd(x, sums, grad_out, first["states"])
    ours = {**first, **second, **finished(x, second)}
    for name in GRADIENT_NAMES:
        if true[name] is not None:
            assert (ours[name] - true[name]).norm() < 1e-4 * true[name].norm(), name
