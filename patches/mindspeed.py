"""MindSpeed: the same patches offered as one of its features, applied by its own patch manager.

In a training script, before MindSpeed's adaptor:

    from mindspeed_mamba3_plugin.patches import mindspeed as mamba3
    mamba3.register()
    import mindspeed.megatron_adaptor
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import Any

from ..config import Mamba3Config
from . import megatron_core, megatron_training
from .engine import Engine, Patch, Status, check_version

FEATURE_NAME = "use-mamba3-mixer"
_KEY = FEATURE_NAME.replace("-", "_")

_engine = Engine()


def adaptor_has_run() -> bool:
    """True when MindSpeed has patched Megatron in this process."""
    return "mindspeed.megatron_adaptor" in sys.modules


def registered() -> bool:
    """True when MindSpeed has the feature."""
    module = sys.modules.get("mindspeed.features_manager.features_manager")
    return module is not None and bool(_offered(module.MindSpeedFeaturesManager.FEATURES_LIST))


def register(defaults: Mamba3Config | None = None) -> bool:
    """Offer the feature to MindSpeed, once; its flags switch it on.

    Args:
        defaults: default values of the flags, from now on.

    Returns:
        False when MindSpeed is not installed.

    Raises:
        PatchError: MindSpeed's features manager is not the one this plugin knows.
    """
    if find_spec("mindspeed") is None:
        return False
    # The package first: its import fills the list, and would drop what was appended before.
    import_module("mindspeed.features_manager")
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager as manager

    if not _offered(manager.FEATURES_LIST):
        manager.FEATURES_LIST.append(_feature())
    if defaults is not None:
        _offered(manager.FEATURES_LIST)[0].defaults = defaults
    _engine.apply([_KEEP_OFFERED])
    return True


def apply(settings: Mamba3Config) -> None:
    """Apply the patches now, by MindSpeed's manager, when its adaptor has run already."""
    register(settings)
    from mindspeed.args_utils import get_full_args, get_mindspeed_args
    from mindspeed.patch_utils import MindSpeedPatchesManager

    # MindSpeed copies its parsed arguments onto every TransformerConfig. They were parsed before these settings came,
    # which are defaults: what the command line says counts, as it does where Megatron parses it later.
    parser = megatron_training.add_arguments_with(
        argparse.ArgumentParser(allow_abbrev=False, add_help=False), settings
    )
    flags = vars(parser.parse_known_args()[0])
    for args in (get_mindspeed_args(), get_full_args()):
        vars(args).update(flags)
    _hand_over(MindSpeedPatchesManager, settings)
    MindSpeedPatchesManager.apply_patches()


def report(patches: Iterable[Patch], settings: Mamba3Config) -> list[Status]:
    """One line for each patch, as `Engine.report`."""
    from mindspeed.patch_utils import MindSpeedPatchesManager

    def state(patch: Patch) -> tuple[str, str]:
        if patch.engine_only:
            return "off", "not needed under MindSpeed"
        if not patch.wanted(settings):
            return "off", f"{patch.flag} is {getattr(settings, patch.flag)!r}, not {patch.value!r}"
        return ("applied" if _known(MindSpeedPatchesManager, patch) else "would apply"), ""

    return [Status(p.target, *state(p), p.flag, p.reason) for p in patches]


def _path(patch: Patch) -> str:
    return patch.target.replace(":", ".")


def _offered(features: Iterable[Any]) -> list[Any]:
    return [f for f in features if f.feature_name == _KEY]


def _known(manager: Any, patch: Patch) -> bool:
    """True when MindSpeed's manager has the patch: it tells wrappers apart by their names."""
    theirs = manager.patches_info.get(_path(patch))
    return theirs is not None and any(w.__name__ == patch.wrapper.__name__ for w in theirs.wrappers)


def _hand_over(manager: Any, settings: Mamba3Config) -> bool:
    """Register what MindSpeed's manager does not have yet; it applies it later. False when there was nothing."""
    todo = [
        p
        for p in (*megatron_core.patches(settings), *megatron_training.patches(settings))
        if not (p.optional and megatron_core.absent(p.target))
        and p.wanted(settings)
        and not p.engine_only
        and not _known(manager, p)
    ]
    for patch in todo:
        check_version(patch)  # MindSpeed's manager knows no version ranges
        manager.register_patch(_path(patch), _for_manager(patch.wrapper))
    return bool(todo)


def _for_manager(wrapper: Callable) -> Callable:
    """The wrapper for a manager that reads a class method as bound to its class, and puts a function in its place."""

    @wraps(wrapper)
    def for_manager(original: Any) -> Any:
        if not isinstance(original, MethodType):
            return wrapper(original)
        new, owner = wrapper(original.__func__), original.__self__

        @wraps(new)
        def called_on_instances(_, *args, **kwargs):
            return new(owner, *args, **kwargs)

        return called_on_instances

    return for_manager


def _feature() -> Any:
    from mindspeed.features_manager.feature import MindSpeedFeature

    from . import applied

    class Mamba3Feature(MindSpeedFeature):
        """Hooks get a Namespace, or the TransformerConfig that MindSpeed validates like one."""

        def __init__(self) -> None:
            super().__init__(FEATURE_NAME, optimization_level=2)
            self.defaults = Mamba3Config()

        def is_need_apply(self, args: Any) -> bool:
            # The flag alone decides: a lower --optimization-level must not switch the mixer off unseen.
            return bool(getattr(args, self.feature_name, False))

        def register_args(self, parser: Any) -> None:
            megatron_training.add_arguments_with(parser, self.defaults)

        def validate_args(self, args: Any) -> None:
            settings = Mamba3Config.from_object(args)
            if not settings.use_mamba3_mixer:
                return
            settings.check_environment()
            from mindspeed.patch_utils import MindSpeedPatchesManager as manager

            # A flag that MindSpeed's first look at the command line did not see, one from a YAML file for example.
            if not applied() and _hand_over(manager, settings):
                manager.apply_patches()

        def register_patches(self, patch_manager: Any, args: Any) -> None:
            if not applied():
                _hand_over(patch_manager, Mamba3Config.from_object(args))

    return Mamba3Feature()


def _set_features_list_wrapper(original: Callable) -> Callable:
    @wraps(original)
    def set_features_list(cls: Any, features_list: list[Any]) -> None:
        ours = _offered(cls.FEATURES_LIST)
        original(cls, features_list)
        if not _offered(cls.FEATURES_LIST):
            cls.FEATURES_LIST.extend(ours)

    return set_features_list


_KEEP_OFFERED = Patch(
    "mindspeed.features_manager.features_manager:MindSpeedFeaturesManager.set_features_list",
    "the feature stays when MindSpeed-LLM sets the list anew",
    flag=_KEY,
    wrapper=_set_features_list_wrapper,
    parameters=("cls", "features_list"),
)
