"""The feature's contract with MindSpeed, on stubs that behave as its two managers do (core_r0.16.0)."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace

import pytest
from mindspeed_mamba3_plugin.patches import mindspeed as mamba3

from mindspeed_mamba3_plugin import patches
from mindspeed_mamba3_plugin.config import ConfigError, Mamba3Config

pytest.importorskip("megatron.core")

from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

FEATURE = """
    class MindSpeedFeature:
        def __init__(self, feature_name, optimization_level=2):
            self.feature_name = feature_name.lower().strip().replace("-", "_")
            self.optimization_level = optimization_level

        def is_need_apply(self, args):
            return self.optimization_level <= args.optimization_level and getattr(args, self.feature_name, None)

        def register_args(self, parser): pass
        def pre_validate_args(self, args): pass
        def validate_args(self, args): pass
        def post_validate_args(self, args): pass
        def pre_register_patches(self, patch_manager, args): pass
        def register_patches(self, patch_manager, args): pass
"""
MANAGER = """
    from mindspeed.patch_utils import MindSpeedPatchesManager

    class MindSpeedFeaturesManager:
        FEATURES_LIST = []

        @classmethod
        def set_features_list(cls, features_list):
            cls.FEATURES_LIST[:] = features_list

        @classmethod
        def apply_features_patches(cls, args):
            for feature in cls.FEATURES_LIST:
                if feature.is_need_apply(args):
                    feature.register_patches(MindSpeedPatchesManager, args)
            MindSpeedPatchesManager.apply_patches()

        @classmethod
        def validate_features_args(cls, args):
            for feature in cls.FEATURES_LIST:
                feature.validate_args(args)
"""
ARGS_UTILS = """
    import argparse

    PARSED = argparse.Namespace()

    def get_mindspeed_args(get_defaults=False):
        return PARSED

    def get_full_args():
        return PARSED
"""
PATCH_UTILS = """
    import importlib

    class Patch:
        def __init__(self, path):
            *owner, self.name = path.split(".")
            self.owner, self.wrappers, self.is_applied, self.original = ".".join(owner), [], False, None

        def holder(self):
            try:
                return importlib.import_module(self.owner)
            except ModuleNotFoundError:
                module, _, name = self.owner.rpartition(".")
                return getattr(importlib.import_module(module), name)

        def apply(self):
            if self.is_applied:
                return
            if self.original is None:
                self.original = getattr(self.holder(), self.name)
            new = self.original
            for wrapper in self.wrappers:
                new = wrapper(new)
            setattr(self.holder(), self.name, new)
            self.is_applied = True

    class MindSpeedPatchesManager:
        patches_info = {}

        @staticmethod
        def register_patch(orig_func_name, new_func=None, force_patch=False, create_dummy=False):
            assert new_func.__name__.endswith(("wrapper", "decorator")), "MindSpeed would replace, not wrap"
            patch = MindSpeedPatchesManager.patches_info.setdefault(orig_func_name, Patch(orig_func_name))
            patch.wrappers.append(new_func)
            patch.is_applied = False

        @staticmethod
        def apply_patches():
            for patch in MindSpeedPatchesManager.patches_info.values():
                patch.apply()

        @staticmethod
        def remove_patches():
            for patch in MindSpeedPatchesManager.patches_info.values():
                if patch.original is not None:
                    setattr(patch.holder(), patch.name, patch.original)
                patch.wrappers, patch.is_applied = [], False
"""


@pytest.fixture
def mindspeed(stub):
    """MindSpeed's modules; `.adaptor(args)` does what importing mindspeed.megatron_adaptor does, `.repatch(args)` the
    same as its function."""
    stub("mindspeed")
    pm = stub("mindspeed.patch_utils", PATCH_UTILS).MindSpeedPatchesManager
    parsed = stub("mindspeed.args_utils", ARGS_UTILS).PARSED
    stub("mindspeed.features_manager")
    stub("mindspeed.features_manager.feature", FEATURE)
    fm = stub("mindspeed.features_manager.features_manager", MANAGER).MindSpeedFeaturesManager

    def adaptor(**args):
        stub("mindspeed.megatron_adaptor")
        vars(parsed).update(args)
        fm.apply_features_patches(argparse.Namespace(optimization_level=2, **args))

    def repatch(**args):
        pm.remove_patches()
        vars(parsed).update(args)
        fm.apply_features_patches(argparse.Namespace(optimization_level=2, **vars(parsed)))

    yield SimpleNamespace(pm=pm, fm=fm, adaptor=adaptor, repatch=repatch, parsed=parsed)
    pm.remove_patches()
    mamba3._engine.revert()
    patches._settings = None


@pytest.fixture
def originals():
    return MambaLayer.__init__, Float16Module.__init__, TransformerConfig.__post_init__


def current():
    return MambaLayer.__init__, Float16Module.__init__, TransformerConfig.__post_init__


def ours(features) -> list:
    return [f for f in features if f.feature_name == "use_mamba3_mixer"]


def test_without_mindspeed_nothing_is_registered():
    assert mamba3.register() is False


def test_registers_once_and_survives_a_new_features_list(mindspeed):
    fm = mindspeed.fm
    assert mamba3.register() is True
    assert mamba3.register() is True
    (feature,) = fm.FEATURES_LIST
    other = SimpleNamespace(feature_name="other")
    fm.set_features_list([other])
    assert [other, feature] == fm.FEATURES_LIST
    fm.set_features_list([feature, other])
    assert [feature, other] == fm.FEATURES_LIST
    mamba3._engine.revert()
    fm.set_features_list([other])
    assert [other] == fm.FEATURES_LIST


def test_the_flag_switches_and_flags_are_parsed_as_ours(mindspeed):
    mamba3.register()
    (feature,) = mindspeed.fm.FEATURES_LIST
    parser = argparse.ArgumentParser()
    feature.register_args(parser)
    feature.register_args(parser)
    args = parser.parse_args(["--use-mamba3-mixer", "--mamba3-mimo-rank", "8"])
    assert Mamba3Config.from_object(args) == Mamba3Config(use_mamba3_mixer=True, mamba3_mimo_rank=8)
    assert feature.is_need_apply(args)
    args.optimization_level = 0
    assert feature.is_need_apply(args), "a lower --optimization-level must not switch it off unseen"
    assert not feature.is_need_apply(parser.parse_args([]))
    assert not feature.is_need_apply(argparse.Namespace())


def test_the_adaptor_applies_the_list_when_the_flag_is_given(mindspeed, originals):
    mamba3.register()
    mindspeed.adaptor(use_mamba3_mixer=False)
    assert current() == originals
    mindspeed.adaptor(use_mamba3_mixer=True)
    assert all(new.__wrapped__ is old for new, old in zip(current(), originals, strict=True))
    mindspeed.pm.remove_patches()
    assert current() == originals
    mindspeed.adaptor(use_mamba3_mixer=True, mamba3_params_dtype="bf16")
    assert Float16Module.__init__ is originals[1], "nothing to keep in fp32"
    assert MambaLayer.__init__ is not originals[0]


def test_a_repatch_wraps_once_and_can_switch_off(mindspeed, originals):
    mamba3.register()
    mindspeed.adaptor(use_mamba3_mixer=True)
    mindspeed.repatch(mamba3_mimo_rank=2)
    assert all(new.__wrapped__ is old for new, old in zip(current(), originals, strict=True))
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert config.mamba3_mimo_rank == 2, "the settings of the second time"
    mindspeed.repatch(use_mamba3_mixer=False)
    assert current() == originals


def test_a_flag_seen_only_by_the_second_parse_is_applied(mindspeed, originals):
    mamba3.register()
    mindspeed.adaptor()
    assert current() == originals
    late = argparse.Namespace(use_mamba3_mixer=True, mamba3_mimo_rank=2)
    mindspeed.fm.validate_features_args(late)
    assert all(new.__wrapped__ is old for new, old in zip(current(), originals, strict=True))
    once = current()
    mindspeed.fm.validate_features_args(late)
    late.mamba3_mimo_rank = 4
    mindspeed.fm.validate_features_args(late)
    assert current() == once, "validated again, and again with each TransformerConfig: wrapped once"


def test_hooks_take_a_namespace_and_a_config(mindspeed):
    mamba3.register()
    (feature,) = mindspeed.fm.FEATURES_LIST
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    feature.validate_args(config)
    config.use_mamba3_mixer, config.mamba3_mimo_rank = True, 0
    for args in (config, argparse.Namespace(use_mamba3_mixer=True, mamba3_mimo_rank=0)):
        with pytest.raises(ConfigError, match="--mamba3-mimo-rank 0"):
            feature.validate_args(args)
    kernel = argparse.Namespace(use_mamba3_mixer=True, mamba3_backward_kernel="tilelang")
    with pytest.raises(ConfigError, match="--mamba3-backward-kernel tilelang"):
        feature.validate_args(kernel)


def test_another_megatron_version_is_refused(mindspeed, originals, monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.11.0")
    mamba3.register()
    with pytest.raises(patches.PatchError, match=r"installed is megatron-core 0\.11\.0"):
        mindspeed.adaptor(use_mamba3_mixer=True)
    assert current() == originals


def test_enable_goes_through_mindspeed_when_its_adaptor_has_run(mindspeed, originals):
    mindspeed.adaptor()
    settings = patches.enable(mamba3_mimo_rank=2)
    assert patches.applied() == ()
    assert all(new.__wrapped__ is old for new, old in zip(current(), originals, strict=True))
    states = {s.target.rpartition(":")[2]: s.state for s in patches.report()}
    assert states["MambaLayer.__init__"] == "applied"
    assert {state for name, state in states.items() if name.endswith("mamba_layer.submodules")} == {"off"}
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert Mamba3Config.from_object(config) == settings
    assert patches.enable(settings) == settings
    assert MambaLayer.__init__.__wrapped__ is originals[0]
    with pytest.raises(patches.PatchError, match="MindSpeed's patch manager applied"):
        patches.revert()


@pytest.mark.parametrize(("flags", "rank"), [([], 2), (["--mamba3-mimo-rank", "8"], 8)])
def test_settings_given_late_reach_the_arguments_that_mindspeed_copies(mindspeed, monkeypatch, flags, rank):
    """Defaults that were parsed before must not win over enable(); a flag does."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--num-layers", "4", *flags])
    mamba3.register()
    mindspeed.adaptor(use_mamba3_mixer=False, mamba3_mimo_rank=4)
    patches.enable(mamba3_mimo_rank=2, mamba3_recompute=True)
    assert Mamba3Config.from_object(mindspeed.parsed) == Mamba3Config(
        use_mamba3_mixer=True, mamba3_mimo_rank=rank, mamba3_recompute=True
    )
    (feature,) = mindspeed.fm.FEATURES_LIST
    parser = argparse.ArgumentParser()
    feature.register_args(parser)
    assert parser.parse_args(flags).mamba3_mimo_rank == rank


def test_what_enable_has_applied_is_not_wrapped_again(mindspeed, originals):
    patches.enable()
    once = current()
    mamba3.register()
    mindspeed.adaptor(use_mamba3_mixer=True)
    mindspeed.fm.validate_features_args(argparse.Namespace(use_mamba3_mixer=True))
    assert current() == once
    patches.revert()
    assert current() == originals


def test_another_features_manager_is_refused(mindspeed, stub):
    changed = MANAGER.replace("cls, features_list", "cls, features, extra=None")
    stub("mindspeed.features_manager.features_manager", changed.replace("= features_list", "= features"))
    with pytest.raises(patches.PatchError, match=r"set_features_list takes \(cls, features, extra\)"):
        mamba3.register()
