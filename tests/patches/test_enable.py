"""enable() and revert() on the installed megatron-core, with the real mixer."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from mindspeed_mamba3_plugin.patches import PatchError, enable, revert

from mindspeed_mamba3_plugin import patches
from mindspeed_mamba3_plugin.config import ConfigError, Mamba3Config

pytest.importorskip("megatron.core")

from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from mindspeed_mamba3_plugin.layers.mamba3_mixer import Mamba3Mixer
from mindspeed_mamba3_plugin.ops import registry

ON = Mamba3Config(use_mamba3_mixer=True, mamba3_mimo_rank=2, mamba3_chunk_size=8)
CORE = {  # targets that are patched in every version
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    "megatron.core.transformer.module:Float16Module.__init__",
    "megatron.core.ssm.mamba_layer:MambaLayer.__init__",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_optimizer_group_ranges",
    "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.sharded_state_dict",
}


def entry(target: str):
    """The raw __dict__ entry of a patch's target."""
    module, _, path = target.partition(":")
    holder = importlib.import_module(module)
    *owners, name = path.split(".")
    for owner in owners:
        holder = getattr(holder, owner)
    return vars(holder)[name]


def core_entries() -> dict:
    return {s.target: entry(s.target) for s in patches.report(ON) if s.state != "absent"}


@pytest.fixture
def group(megatron):
    """The argument with the process groups that a layer asks for, of this one process."""
    takes = "pg_collection" in inspect.signature(MambaLayer.__init__).parameters  # since 0.15
    return {"pg_collection": SimpleNamespace(tp=dist.group.WORLD)} if takes else {}


def transformer_config(cls=TransformerConfig, **more):
    return cls(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        mamba_state_dim=16,
        mamba_head_dim=16,
        mamba_num_groups=1,
        **more,
    )


def megatrons_spec():
    try:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
    except ImportError:  # before 0.18
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec
    return spec


def layer_spec(mixer=None, norm=WrappedTorchNorm) -> MambaLayerSubmodules:
    mixer = mixer or ModuleSpec(
        module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    )
    return MambaLayerSubmodules(norm=norm, mixer=mixer)


def test_off_patches_and_imports_nothing():
    code = """
import sys
import mindspeed_mamba3_plugin as plugin
plugin.enable(plugin.Mamba3Config())
plugin.enable(plugin.Mamba3Config(), mamba3_mimo_rank=2)
plugin.enable(use_mamba3_mixer=False)
from mindspeed_mamba3_plugin import patches
assert {s.state for s in patches.report(plugin.Mamba3Config())} == {"off"}
assert patches.applied() == () and patches.enabled() is None and plugin.revert() == ()
loaded = [m for m in ("megatron", "megatron.core", "triton", "torch", "mindspeed") if m in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_enable_twice_then_revert_restores_every_original():
    before = core_entries()
    assert before.keys() >= CORE
    assert enable(ON) == ON
    once = core_entries()
    assert all(once[t] is not before[t] for t in before)
    assert enable(ON) == enable(ON, mamba3_mimo_rank=2) == patches.enabled()
    assert all(core_entries()[t] is once[t] for t in before)
    assert patches.applied() == tuple(before)
    assert {s.target for s in patches.report() if s.state == "applied"} == before.keys()
    revert()
    assert all(core_entries()[t] is before[t] for t in before)
    assert patches.enabled() is None


def test_settings_alone_switch_on():
    assert enable(mamba3_mimo_rank=8) == Mamba3Config(use_mamba3_mixer=True, mamba3_mimo_rank=8)
    assert patches.applied()


@pytest.mark.parametrize(
    ("again", "named"),
    [({"mamba3_mimo_rank": 4}, "--mamba3-mimo-rank"), ({"use_mamba3_mixer": False}, "--use-mamba3")],
)
def test_other_settings_need_a_revert_first(again, named):
    enable(ON)
    with pytest.raises(PatchError, match=f"{named}.*revert"):
        enable(ON, **again)
    assert patches.enabled() == ON
    revert()
    enable(ON, **again)


def test_bad_settings_are_refused_before_anything_is_patched():
    with pytest.raises(ConfigError, match="unknown setting 'mamba3_rank'"):
        enable(mamba3_rank=4)
    with pytest.raises(ConfigError, match="unknown setting 'mamba3_rank'"):
        enable(ON, mamba3_rank=4)
    with pytest.raises(ConfigError, match="--mamba3-mimo-rank 0"):
        enable(mamba3_mimo_rank=0)
    with pytest.raises(ConfigError, match="--mamba3-backward-kernel tilelang"):
        enable(mamba3_backward_kernel="tilelang")
    assert patches.applied() == ()


def test_megatrons_own_spec_object_holds_the_mixer_while_enabled():
    captured = megatrons_spec().submodules.mamba_layer  # held by somebody since before
    was = captured.submodules
    from megatron.core.extensions import transformer_engine as te

    norm = te.TENorm
    enable(ON)
    assert megatrons_spec().submodules.mamba_layer is captured
    assert captured.submodules.mixer.module is Mamba3Mixer
    assert captured.submodules.mixer.submodules.in_proj is te.TEColumnParallelLinear, "the fused norm has moved"
    assert captured.submodules.norm is norm
    assert captured.submodules.mixer.submodules.out_proj is was.mixer.submodules.out_proj
    assert captured.submodules.mamba_bda is was.mamba_bda
    revert()
    assert captured.submodules is was
    assert was.mixer.module is MambaMixer


@pytest.mark.parametrize("spelling", ["class, before", "tuple, before", "tuple, after"])
def test_a_layer_from_any_spec_builds_and_trains_the_mixer(spelling, group):
    """Captured before enable() or named after it; MambaMixer itself cannot be built here, mamba_ssm is absent."""
    spec = layer_spec()
    if spelling.startswith("tuple"):
        spec.mixer.module = ("megatron.core.ssm.mamba_mixer", "MambaMixer")
    if spelling.endswith("after"):
        enable(ON)
        spec = layer_spec(ModuleSpec(spec.mixer.module, submodules=spec.mixer.submodules))
    enable(ON)
    layer = MambaLayer(transformer_config(), spec, layer_number=1, **group)
    assert type(layer.mixer) is Mamba3Mixer
    assert layer.mixer.B_bias.shape == (4, 2, 16), "H = 2 * 32 / 16 heads and the rank that enable() was given"
    out, bias = layer.mixer(torch.randn(12, 1, 32))
    assert out.shape == (12, 1, 32)
    assert bias is None
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.mixer.parameters())
    assert spec.mixer.module is not Mamba3Mixer, "somebody's own spec is read, not changed"


@pytest.mark.skipif("mamba_ssm" in sys.modules, reason="a stand-in for mamba_ssm is loaded")
def test_without_enable_the_same_spec_asks_for_mambamixer(group):
    with pytest.raises(ImportError, match="MambaSSM is not installed"):
        MambaLayer(transformer_config(), layer_spec(), layer_number=1, **group)
    enable(ON)
    revert()
    with pytest.raises(ImportError, match="MambaSSM is not installed"):
        MambaLayer(transformer_config(), layer_spec(), layer_number=1, **group)


def test_a_baseline_after_revert_makes_no_kernel_call(group, monkeypatch):
    class Baseline(MegatronModule):
        def __init__(self, config, submodules, d_model, **_):
            super().__init__(config)
            self.proj = torch.nn.Linear(d_model, d_model)

        def forward(self, x, **_):
            return self.proj(x), None

    spec = layer_spec()
    spec.mixer.module = ("megatron.core.ssm.mamba_mixer", "MambaMixer")

    def calls() -> int:
        registry.reset_kernel_calls()
        layer = MambaLayer(transformer_config(), spec, **group)
        layer.mixer(torch.randn(12, 1, 32))[0].sum().backward()
        return sum(registry.kernel_calls().values())

    enable(ON)
    assert calls() > 0
    revert()
    monkeypatch.setattr(mamba_mixer, "MambaMixer", Baseline)
    assert calls() == 0


def test_a_spec_that_asks_for_something_else_is_refused(group):
    class Theirs(MambaMixer):
        pass

    enable(ON)
    for mixer in (ModuleSpec(Theirs, submodules=MambaMixerSubmodules()), IdentityOp, MambaMixer):
        with pytest.raises(PatchError, match=f"--use-mamba3-mixer.*{getattr(mixer, 'module', mixer).__name__}"):
            MambaLayer(transformer_config(), layer_spec(mixer), **group)
    with_params = ModuleSpec(MambaMixer, params={"d_conv": 2}, submodules=MambaMixerSubmodules())
    with pytest.raises(PatchError, match="sets d_conv"):
        MambaLayer(transformer_config(), layer_spec(with_params), **group)


def test_a_spec_that_names_the_mixer_is_left_alone(group):
    from mindspeed_mamba3_plugin.layers.specs import mamba3_mixer_spec

    spec = layer_spec(mamba3_mixer_spec())
    enable(ON)
    layer = MambaLayer(transformer_config(), spec, **group)
    assert type(layer.mixer) is Mamba3Mixer
    assert layer.submodules_config is spec


@pytest.mark.parametrize("cls", [TransformerConfig, MLATransformerConfig])
def test_every_transformer_config_carries_the_settings(cls):
    assert not hasattr(transformer_config(cls), "mamba3_mimo_rank")
    enable(ON)
    assert Mamba3Config.from_object(transformer_config(cls)) == ON

    class Derived(cls):
        mamba3_mimo_rank = 8

    assert transformer_config(Derived).mamba3_mimo_rank == 8, "what a config says itself counts"
    revert()
    assert not hasattr(transformer_config(cls), "mamba3_mimo_rank")


class Model(MegatronModule):
    def __init__(self, config, keep: bool):
        super().__init__(config)
        self.plain = torch.nn.Linear(3, 3)
        self.D = torch.nn.Parameter(torch.tensor([1 / 3, 2 / 3]))
        if keep:
            self.D.keep_in_fp32 = True


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_marked_parameters_stay_fp32_through_float16module(half):
    config = transformer_config(bf16=half is torch.bfloat16, fp16=half is torch.float16)
    cast = Float16Module(config, Model(config, keep=True)).module
    assert cast.D.dtype is half, "megatron-core 0.16 alone casts everything"

    enable(ON)
    model = Model(config, keep=True)
    parameter, bits = model.D, model.D.detach().clone()
    kept = Float16Module(config, model).module
    assert kept.D is parameter
    assert kept.D.dtype is torch.float32
    assert torch.equal(kept.D, bits)
    assert kept.plain.weight.dtype is half
    kept.D.sum().backward()
    assert kept.D.grad.dtype is torch.float32
    assert Float16Module(config, Model(config, keep=False)).module.D.dtype is half


@pytest.mark.parametrize(("dtype", "stays"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_mixers_parameters_have_the_dtype_that_was_asked_for(dtype, stays, group):
    enable(ON, mamba3_params_dtype=dtype)
    states = {s.target.rpartition(":")[2]: s.state for s in patches.report()}
    assert states["Float16Module.__init__"] == ("applied" if dtype == "fp32" else "off")
    config = transformer_config(bf16=True, params_dtype=torch.bfloat16)
    layer = Float16Module(config, MambaLayer(config, layer_spec(), layer_number=1, **group)).module
    own = {n: p.dtype for n, p in layer.mixer.named_parameters(recurse=False)}
    assert {own[n] for n in ("dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o")} == {stays}
    assert layer.mixer.in_proj.weight.dtype is torch.bfloat16


def test_a_model_built_before_is_an_error():
    before = core_entries()
    mixer = MambaMixer.__new__(MambaMixer)
    torch.nn.Module.__init__(mixer)
    mixer.itself = SimpleNamespace(mixer=mixer)
    with pytest.raises(PatchError, match=r"model with 1 MambaMixer was built before: call enable\(\) before"):
        enable(ON)
    assert all(core_entries()[t] is before[t] for t in before)
    del mixer
    enable(ON)


def test_somebody_elses_patch_on_the_same_symbol(monkeypatch, stub):
    other = stub(
        "other_party",
        """
        import functools
        def wrap(original):
            @functools.wraps(original)
            def theirs(self, *args, **kwargs):
                return original(self, *args, **kwargs)
            return theirs
        """,
    )
    original = MambaLayer.__init__
    monkeypatch.setattr(MambaLayer, "__init__", other.wrap(original))
    with pytest.raises(PatchError, match=r"MambaLayer\.__init__: other_party\.theirs .* mindspeed_mamba3_plugin"):
        enable(ON)
    assert patches.applied() == ()
    assert Float16Module.__init__.__globals__["__name__"] == "megatron.core.transformer.module"

    monkeypatch.setattr(MambaLayer, "__init__", original)
    enable(ON)
    ours = MambaLayer.__init__
    MambaLayer.__init__ = other.wrap(ours)
    try:
        with pytest.raises(PatchError, match=r"other_party\.theirs has replaced"):
            revert()
        assert patches.enabled() == ON
    finally:
        MambaLayer.__init__ = ours
    revert()
    assert MambaLayer.__init__ is original


def test_another_megatron_version_is_refused_by_name(monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.21.0")
    with pytest.raises(PatchError, match=r"megatron-core>=.*installed is megatron-core 0\.21\.0"):
        enable(ON)
    assert patches.applied() == ()


def test_names_imported_earlier_are_rebound(stub):
    early = stub("early", "from megatron.core.ssm.mamba_layer import MambaLayer\ninit = MambaLayer.__init__")
    original = early.init
    enable(ON)
    assert early.init is MambaLayer.__init__ is not original
    assert mamba_mixer.MambaMixer is MambaMixer, "Mamba-2 stays importable"
    revert()
    assert early.init is original


def test_threads_enable_once():
    start, seen = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        try:
            enable(ON)
            seen.append(inspect.unwrap(MambaLayer.__init__, stop=lambda f: f is MambaLayer.__init__))
        except Exception as error:
            seen.append(error)

    original = MambaLayer.__init__
    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(seen) == 8
    assert set(seen) == {MambaLayer.__init__}
    assert MambaLayer.__init__.__wrapped__ is original
