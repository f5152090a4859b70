"""megatron-core: the Mamba-3 mixer in the `M` slot, its settings on TransformerConfig, its fp32 parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..config import Mamba3Config, flag
from . import megatron_optimizer
from .engine import Patch, PatchError

SUPPORTED = "megatron-core>=0.12.1,<0.20"
_MAMBA_LAYER_INIT = tuple(
    tuple(f"self config submodules layer_number {names}".split())
    for names in (
        "pg_collection pp_layer_offset name",
        "pg_collection pp_layer_offset",
        "residual_in_fp32 pg_collection pp_layer_offset",
        "residual_in_fp32 pg_collection",
        "residual_in_fp32",
    )
)
_STACK_SPECS = {  # module: its stack spec; megatron-core has the first since 0.18, and the second before
    "megatron.core.models.hybrid.hybrid_layer_specs": "hybrid_stack_spec",
    "megatron.core.models.mamba.mamba_layer_specs": "mamba_stack_spec",
}


@lru_cache
def patches(settings: Mamba3Config) -> tuple[Patch, ...]:
    """The changes to megatron-core, in order. Importing it is left to whoever applies them."""
    return (
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            "every TransformerConfig carries the mamba3_* settings, from which the mixer reads them",
            flag="use_mamba3_mixer",
            requires=SUPPORTED,
            wrapper=_settings_wrapper(settings),
            parameters=("self",),
        ),
        Patch(
            "megatron.core.transformer.module:Float16Module.__init__",
            "parameters marked keep_in_fp32 (dt_bias, D, B and C bias, mimo_*) survive the cast of the model",
            flag="mamba3_params_dtype",
            value="fp32",
            requires=SUPPORTED,
            wrapper=keep_in_fp32_wrapper,
            parameters=("self", "config", "module"),
        ),
        # The constructor, not the class MambaMixer: it sees every spec, whoever made it and whenever, it can move a
        # norm that is fused into in_proj, and other people's patches of MambaMixer do not land on our class.
        Patch(
            "megatron.core.ssm.mamba_layer:MambaLayer.__init__",
            "an 'M' layer builds Mamba3Mixer where its spec says MambaMixer",
            flag="use_mamba3_mixer",
            requires=SUPPORTED,
            wrapper=mamba_layer_wrapper,
            parameters=_MAMBA_LAYER_INIT[0],
            older=_MAMBA_LAYER_INIT[1:],
            built="megatron.core.ssm.mamba_mixer:MambaMixer",
        ),
        Patch(
            f"{_stack_spec()}.submodules.mamba_layer.submodules",
            "megatron's own stack spec shows the mixer that will be built",
            flag="use_mamba3_mixer",
            requires=SUPPORTED,
            wrapper=with_mamba3_mixer,
            optional=True,
            engine_only=True,
        ),
        *megatron_optimizer.patches(settings, SUPPORTED),
        *(() if find_spec("transformer_engine") else (_final_norm(),)),
    )


def _stack_spec() -> str:
    known = list(_STACK_SPECS)
    found = next((name for name in known if _exists(name)), known[-1])
    return f"{found}:{_STACK_SPECS[found]}"


def absent(target: str) -> bool:
    """Whether megatron has no module of this name."""
    return not _exists(target.partition(":")[0])


def _exists(module: str) -> bool:
    """Whether megatron-core has the module; importlib's own look-up would import the packages on the way."""
    package = find_spec("megatron")
    path = module.split(".")[1:]
    folders = package.submodule_search_locations if package else ()
    return any(Path(folder, *path).with_suffix(".py").is_file() for folder in folders)


def _final_norm() -> Patch:
    return Patch(
        "megatron.core.extensions.transformer_engine:TENorm",
        "the stack can build its last norm, for which it names this one, without TransformerEngine",
        flag="use_mamba3_mixer",
        requires=SUPPORTED,
        wrapper=stack_norm_wrapper,
        optional=True,
        engine_only=True,
    )


def stack_norm_wrapper(_: Any) -> Any:
    """A norm of plain torch in the place of TransformerEngine's."""
    from ..layers.norms import StackNorm

    return StackNorm


def with_mamba3_mixer(layer: Any) -> Any:
    """The same MambaLayerSubmodules with Mamba3Mixer in the place of MambaMixer.

    A norm fused into the mixer's in_proj moves to the layer, because the angle projection reads its output too.

    Raises:
        PatchError: the mixer is neither of the two, or its spec has parameters that only MambaMixer knows.
    """
    from megatron.core.transformer.spec_utils import get_module

    from ..layers.mamba3_mixer import Mamba3Mixer
    from ..layers.specs import mamba3_mixer_spec, without_fused_norm

    mixer = get_module(layer.mixer)
    if isinstance(mixer, type) and issubclass(mixer, Mamba3Mixer):
        return layer
    from megatron.core.ssm.mamba_mixer import MambaMixer

    if mixer is not MambaMixer or layer.mixer is MambaMixer:
        raise PatchError(
            f"{flag('use_mamba3_mixer')}: the 'M' layer's spec says {layer.mixer!r}, and Mamba3Mixer takes the place "
            "of a ModuleSpec of MambaMixer only"
        )
    if layer.mixer.params:
        raise PatchError(
            f"{flag('use_mamba3_mixer')}: the spec of MambaMixer sets {', '.join(layer.mixer.params)}, which "
            "Mamba3Mixer does not take: use the --mamba3-* flags"
        )
    norm, in_proj = without_fused_norm(layer.norm, layer.mixer.submodules.in_proj)
    return replace(layer, norm=norm, mixer=mamba3_mixer_spec(in_proj, layer.mixer.submodules.out_proj))


def mamba_layer_wrapper(init: Callable) -> Callable:
    """MambaLayer.__init__ that builds Mamba3Mixer."""

    @wraps(init)
    def __init__(self, config, submodules, *args, **kwargs):
        init(self, config, with_mamba3_mixer(submodules), *args, **kwargs)

    return __init__


def keep_in_fp32_wrapper(init: Callable) -> Callable:
    """Float16Module.__init__ after which parameters marked keep_in_fp32 have their dtype and bits of before."""

    @wraps(init)
    def __init__(self, config, module):
        kept = {n: p.data for n, p in module.named_parameters() if getattr(p, "keep_in_fp32", False)}
        init(self, config, module)
        for name, parameter in module.named_parameters():
            if name in kept:
                parameter.data = kept[name].to(parameter.device)

    return __init__


def _settings_wrapper(settings: Mamba3Config) -> Callable[[Callable], Callable]:
    def settings_wrapper(post_init: Callable) -> Callable:
        @wraps(post_init)
        def __post_init__(self):
            post_init(self)
            for name, value in asdict(settings).items():
                if not hasattr(self, name):
                    setattr(self, name, value)

        return __post_init__

    return settings_wrapper
