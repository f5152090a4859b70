"""mamba_ssm's module on the plugin's operator: the contract, on stubs with its names and signatures; and, where the
environment variable MAMBA_SSM names a checkout of state-spaces/mamba, the real module."""

from __future__ import annotations

import inspect
import os
import re
import sys
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from mindspeed_mamba3_plugin.patches import PatchError, mamba_ssm
from plain_mamba3 import plain_mamba3
from triton.runtime.autotuner import Autotuner

from mindspeed_mamba3_plugin.config import ConfigError, Mamba3Config
from mindspeed_mamba3_plugin.layers.sizes import MixerSizes
from mindspeed_mamba3_plugin.layers.weights import from_upstream, to_upstream
from mindspeed_mamba3_plugin.ops import api, registry, upstream
from mindspeed_mamba3_plugin.ops.triton.blocks import tanh

KERNELS = ("forward_kernel", "backward_kernel")


def signature(function, without=()) -> str:
    parameters = [p for name, p in inspect.signature(function).parameters.items() if name not in without]
    return ", ".join(
        str(p.replace(annotation=p.empty)) if p.default is p.empty else f"{p.name}=None" for p in parameters
    )


@pytest.fixture(autouse=True)
def back():
    yield
    mamba_ssm.revert()


@pytest.fixture
def package(stub):
    """package(source of modules.mamba3) -> that module."""

    def make(source: str):
        stub("mamba_ssm", "__version__ = '2.3.2.post1'")
        stub("mamba_ssm.modules")
        return stub("mamba_ssm.modules.mamba3", source)

    return make


def test_runs_without_tilelang(package, monkeypatch):
    module = package("mamba3_mimo_combined = None")
    seen = {}
    monkeypatch.setattr(api, "mamba3_mimo", lambda *a, **k: seen.update(k) or a)
    settings = Mamba3Config(mamba3_forward_kernel="reference", mamba3_backward_kernel="reference")
    assert mamba_ssm.apply(settings) == ("mamba_ssm.modules.mamba3:mamba3_mimo_combined",)
    assert mamba_ssm.apply(settings) == ()
    assert module.mamba3_mimo_combined(1, 2, chunk_size=16) == (1, 2)
    assert seen == {"chunk_size": 16, "forward_kernel": "reference", "backward_kernel": "reference"}
    mamba_ssm.revert()
    assert module.mamba3_mimo_combined is None


def test_takes_the_place_of_the_tilelang_operator(package):
    module = package(f"def mamba3_mimo_combined({signature(api.mamba3_mimo, KERNELS)}): pass")
    original = module.mamba3_mimo_combined
    mamba_ssm.apply()
    assert module.mamba3_mimo_combined is not original
    mamba_ssm.revert()
    assert module.mamba3_mimo_combined is original


def test_another_operator_is_refused(package):
    module = package("def mamba3_mimo_combined(Q, K): pass")
    with pytest.raises(PatchError, match=r"mamba3_mimo takes \(Q, K\)"):
        mamba_ssm.apply()
    assert module.mamba3_mimo_combined.__name__ == "mamba3_mimo_combined"


def test_backward_only_replaces_what_the_backward_calls(package, stub):
    package("mamba3_mimo_combined = None")
    for name in ("mamba_ssm.ops", "mamba_ssm.ops.tilelang", "mamba_ssm.ops.tilelang.mamba3"):
        stub(name)
    names = ("mamba_mimo_bwd_combined", "mamba_mimo_bwd_combined_varlen")
    source = "\n".join(f"def {name}({signature(getattr(upstream, name))}): pass" for name in names)
    module = stub("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo", source)
    originals = [getattr(module, name) for name in names]
    mamba_ssm.apply(backward_only=True)
    assert [getattr(module, name) for name in names] == [getattr(upstream, name) for name in names]
    mamba_ssm.revert()
    assert [getattr(module, name) for name in names] == originals


def test_what_is_missing_is_named(stub, monkeypatch):
    monkeypatch.delitem(sys.modules, "mamba_ssm", raising=False)
    with pytest.raises(PatchError, match=r"mamba_ssm.* not installed"):
        mamba_ssm.apply()
    stub("mamba_ssm", "__version__ = '2.2.4'")
    with pytest.raises(PatchError, match=r"knows mamba_ssm>=2.3,<3, installed is mamba_ssm 2\.2\.4"):
        mamba_ssm.apply()
    if registry.missing("tilelang"):
        with pytest.raises(ConfigError, match="--mamba3-backward-kernel tilelang"):
            mamba_ssm.apply(Mamba3Config(mamba3_backward_kernel="tilelang"))


@triton.jit
def sech2(x):
    e = tl.exp(x) + tl.exp(-x)
    return 4 / (e * e)


@pytest.fixture
def real(stub, monkeypatch):
    """real(TileLang's modules are there) -> mamba_ssm.modules.mamba3 of the checkout, without the package's own
    imports, which need CUDA extensions. Its Triton kernels run in the interpreter: no GPU to select or to time on."""
    if "MAMBA_SSM" not in os.environ:
        pytest.skip("MAMBA_SSM names no checkout of state-spaces/mamba")
    root = Path(os.environ["MAMBA_SSM"])
    version = re.search(r"__version__ = .*", (root / "mamba_ssm/__init__.py").read_text())[0]
    for name in ("mamba_ssm", "mamba_ssm.modules", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        stub(name, version).__path__ = [str(root.joinpath(*name.split(".")))]
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))

    monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: [0.0])

    def load(tilelang: bool):
        if tilelang:  # in the place of its kernels: their forward is ours here, their backward is nothing
            for name in ("fwd", "fwd_varlen", "bwd", "bwd_varlen"):
                module = stub(f"mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_{name}")
                function = {"fwd": "forward", "bwd": "bwd_combined"}[name[:3]] + name[3:]
                ours = getattr(upstream, f"mamba_mimo_{function}")
                if name.startswith("fwd"):
                    setattr(module, ours.__name__, ours)
                else:
                    exec(f"def {ours.__name__}({signature(ours)}): raise AssertionError", vars(module))
            angles = import_module("mamba_ssm.ops.triton.mamba3.angle_dt")
            monkeypatch.setattr(angles, "tanh_approx", tanh)  # theirs is inline assembly
            monkeypatch.setattr(angles, "sech2_approx", sech2)
        return import_module("mamba_ssm.modules.mamba3")

    yield load
    mamba_ssm.revert()
    for name in [name for name in sys.modules if name.startswith("mamba_ssm.")]:
        del sys.modules[name]


@pytest.mark.parametrize("backward_only", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_the_real_module_computes_the_formula(real, norm, packed, backward_only):
    """Mamba3(is_mimo=True) on the Triton kernels: output and all gradients."""
    source = real(tilelang=backward_only)
    kernels = Mamba3Config(mamba3_forward_kernel="triton", mamba3_backward_kernel="triton")
    mamba_ssm.apply(kernels, backward_only=backward_only)
    torch.manual_seed(0)
    module = source.Mamba3(
        32, d_state=16, headdim=16, ngroups=2, mimo_rank=2, chunk_size=8, is_mimo=True, is_outproj_norm=norm
    )
    u = torch.randn(1 if packed else 2, 21, 32, requires_grad=True)
    bounds = [0, 9, 21] if packed else [0, 21]
    out = module(u, cu_seqlens=torch.tensor(bounds, dtype=torch.int32) if packed else None)
    seed = torch.randn_like(out)
    registry.reset_kernel_calls()
    gradients = torch.autograd.grad(out, [u, *module.parameters()], seed)
    assert {call.partition(".")[2] for call in registry.kernel_calls()} == {"bwd_fwd", "bwd_bwd"}
    assert all(call.startswith("triton-") for call in registry.kernel_calls())

    sizes = MixerSizes(hidden=32, heads=4, head_dim=16, state=16, groups=2, rank=2, angles=module.num_rope_angles)
    assert to_upstream(from_upstream(module.state_dict(), sizes), sizes).keys() == module.state_dict().keys()
    weights = {name: value.detach().double().requires_grad_() for name, value in module.named_parameters()}
    wide = u.detach().double().requires_grad_()
    plain = partial(plain_mamba3, weights, n=sizes, a_activation="heavy_tail", a_floor=module.A_floor)
    expected = torch.cat([plain(wide[:, start:end]) for start, end in pairwise(bounds)], dim=1)
    wanted = torch.autograd.grad(expected, [wide, *weights.values()], seed.double())
    for name, a, b in zip(["out", "u", *weights], [out, *gradients], [expected, *wanted], strict=True):
        assert (a.double() - b).norm() / b.norm() < 1e-5, name
