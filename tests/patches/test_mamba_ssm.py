"""mamba_ssm's module on the plugin's operator: the contract, on stubs with its names and signatures."""

from __future__ import annotations

import inspect
import sys

import pytest
from mindspeed_mamba3_plugin.patches import PatchError, mamba_ssm

from mindspeed_mamba3_plugin.config import ConfigError, Mamba3Config
from mindspeed_mamba3_plugin.ops import api, registry, upstream

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
