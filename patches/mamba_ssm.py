"""state-spaces/mamba's own module `Mamba3(is_mimo=True)` on this plugin's operator.

from mindspeed_mamba3_plugin.patches import mamba_ssm
mamba_ssm.apply()                       # needs no TileLang
mamba_ssm.apply(backward_only=True)     # TileLang's forward, this plugin's backward; NVIDIA
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from ..config import Mamba3Config
from .engine import Engine, Patch, PatchError

SUPPORTED = "mamba_ssm>=2.3,<3"

_engine = Engine()


def apply(settings: Mamba3Config | None = None, backward_only: bool = False) -> tuple[str, ...]:
    """Apply the patches, once; returns the targets that this call changed.

    Args:
        settings: of these, the two kernel settings are used.
        backward_only: keep mamba_ssm's forward and replace what its backward calls.

    Raises:
        PatchError: mamba_ssm is absent, another version, or patched by somebody else; without TileLang there is no
            forward to keep.
    """
    settings = settings or Mamba3Config()
    settings.check_environment()
    return _engine.apply(_backward() if backward_only else (_operator(settings),))


def revert() -> tuple[str, ...]:
    """Put back every original; returns the targets."""
    return _engine.revert()


@lru_cache
def _operator(settings: Mamba3Config) -> Patch:
    return Patch(
        "mamba_ssm.modules.mamba3:mamba3_mimo_combined",
        "Mamba3(is_mimo=True) runs on this plugin's operator",
        flag="use_mamba3_mixer",
        requires=SUPPORTED,
        wrapper=partial(_operator_wrapper, settings),
    )


def _operator_wrapper(settings: Mamba3Config, original: Callable | None) -> Callable:
    from ..ops.api import mamba3_mimo

    kernels = dict(
        forward_kernel=settings.mamba3_forward_kernel,
        backward_kernel=settings.mamba3_backward_kernel,
    )
    if original is not None:  # None without TileLang
        theirs = list(inspect.signature(original).parameters)
        ours = [name for name in inspect.signature(mamba3_mimo).parameters if name not in kernels]
        if theirs != ours:
            raise PatchError(f"mamba3_mimo takes ({', '.join(theirs)}), this plugin's takes ({', '.join(ours)})")

    def combined(*args: Any, **kwargs: Any) -> Any:
        return mamba3_mimo(*args, **kernels, **kwargs)

    return combined


@lru_cache
def _backward() -> tuple[Patch, ...]:
    return tuple(
        Patch(
            f"mamba_ssm.ops.tilelang.mamba3.mamba3_mimo:{name}",
            "the backward of TileLang's Mamba-3 MIMO runs on Triton",
            flag="use_mamba3_mixer",
            requires=SUPPORTED,
            wrapper=partial(_backward_wrapper, name),
        )
        for name in ("mamba_mimo_bwd_combined", "mamba_mimo_bwd_combined_varlen")
    )


def _backward_wrapper(name: str, original: Callable) -> Callable:
    from ..ops import upstream

    ours = getattr(upstream, name)
    wanted, found = (list(inspect.signature(f).parameters) for f in (ours, original))
    if found != wanted:
        raise PatchError(f"{name} takes ({', '.join(found)}), this plugin's takes ({', '.join(wanted)})")
    return ours
