"""The adapter to upstream's kernels: here against stand-ins with upstream's names, argument order and results (this
package's own functions in upstream's conventions, tested on their own); the real kernels need a GPU and TileLang."""

import itertools
import sys
from types import ModuleType

import pytest
import torch
from cases import DEVICE, exact, gradient_errors, make, relative_error

from mindspeed_mamba3_plugin.ops import reference, registry, tilelang, upstream


def angle_dt_fwd(angle, dt, init_state=None, chunk_size=64, return_output_state=False, cu_seqlens=None):
    steps = torch.tanh(angle) * dt.transpose(1, 2)[..., None] * torch.pi
    bounds = [0, steps.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    theta = torch.cat([steps[:, a:b].cumsum(1) for a, b in itertools.pairwise(bounds)], dim=1)
    last = theta[:, -1] if cu_seqlens is None else theta[0, cu_seqlens[1:].long() - 1]
    return theta, last


def angle_dt_bwd(*, grad_out, angle, dt, has_init_state, chunk_size, cu_seqlens=None):
    with torch.enable_grad():
        angle, dt = angle.detach().requires_grad_(), dt.detach().requires_grad_()
        theta, _ = angle_dt_fwd(angle, dt, cu_seqlens=cu_seqlens)
        return (*torch.autograd.grad(theta, (angle, dt), grad_out), None)


@pytest.fixture
def kernels(monkeypatch):
    module = ModuleType(tilelang._KERNELS)
    vars(module).update(
        {name: getattr(upstream, name) for name in dir(upstream) if name.startswith(("mamba_mimo", "compute_dacs"))},
        angle_dt_fwd=angle_dt_fwd,
        angle_dt_bwd=angle_dt_bwd,
    )
    monkeypatch.setitem(sys.modules, tilelang._KERNELS, module)


@pytest.mark.parametrize(
    "options",
    [{}, {"norm": True}, {"z": False, "reduce": False, "d": False}, {"cu_seqlens": [0, 20, 48], "R": 1}],
)
def test_the_adapter_keeps_the_contract(kernels, options):
    x = make(S=48, chunk_size=16, return_state=True, device=DEVICE, **options)
    registry.reset_kernel_calls()
    out, state = tilelang.forward(x)
    true, true_state = reference.chunk_form(exact(x))
    assert relative_error(out, true) < 1e-4
    for name, a, b in zip(state._fields, state, true_state, strict=True):
        assert relative_error(a, b) < 1e-4, name
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    errors = gradient_errors(tilelang.backward(x, grad_out), reference.backward(exact(x), grad_out.cpu().double()))
    assert max(errors.values()) < 1e-4, errors
    assert registry.kernel_calls().items() >= {"tilelang.forward": 1, "tilelang.backward": 1}.items()
