"""What this plugin changes in other people's code, and the switch for it.

One file per patched project lists its changes as data; `engine.py` applies them. Importing this package, and enabling
nothing, imports neither Megatron nor Triton.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from threading import RLock
from typing import Any

from ..config import Mamba3Config, flag
from . import megatron_core, megatron_training, mindspeed
from .engine import Engine, Patch, PatchError, Status

__all__ = ["Patch", "PatchError", "Status", "applied", "enable", "enabled", "report", "revert"]

_lock = RLock()
_engine = Engine()
_settings: Mamba3Config | None = None


def enable(config: Mamba3Config | None = None, **settings: Any) -> Mamba3Config:
    """Put the Mamba-3 mixer into megatron-core: call it before the model is built. Calling it again with the same
    settings changes nothing.

    Args:
        config: the settings; with use_mamba3_mixer False, nothing is patched and Megatron is not imported.
        settings: single settings, which override those of `config`. Without a `config`, use_mamba3_mixer is True
            unless it is given here.

    Returns:
        The settings in force.

    Raises:
        ConfigError: a setting that is unknown or cannot work, or a kernel that is not installed.
        PatchError: a patch cannot be applied (nothing is changed then), a model was built before, or enable() was
            called before with other settings.
    """
    global _settings
    if config is None:
        config = Mamba3Config.from_mapping({"use_mamba3_mixer": True, **settings})
    elif settings:
        Mamba3Config.from_mapping(settings)
        config = replace(config, **settings)
    with _lock:
        if _settings is not None and config != _settings:
            name = next(n for n, value in asdict(config).items() if value != getattr(_settings, n))
            raise PatchError(
                f"enable() is called with {flag(name)} {getattr(config, name)!r}, and was called before with "
                f"{getattr(_settings, name)!r}: call revert() in between"
            )
        if not config.use_mamba3_mixer:
            return config
        config.check_environment()
        if mindspeed.adaptor_has_run() and not _engine.applied:
            mindspeed.apply(config)
        else:
            _engine.apply(p for p in _patches(config) if p.wanted(config))
        _settings = config
    return config


def revert() -> tuple[str, ...]:
    """Put back every original; returns the targets. Models that are built keep the mixer they have.

    Raises:
        PatchError: somebody replaced a symbol after us, or MindSpeed's patch manager applied the patches.
    """
    global _settings
    with _lock:
        if _settings is not None and not _engine.applied:
            raise PatchError(
                "MindSpeed's patch manager applied these patches: MindSpeedFeaturesManager.remove_patches() takes "
                "them back, together with MindSpeed's own"
            )
        targets = _engine.revert()
        _settings = None
    return targets


def enabled() -> Mamba3Config | None:
    """The settings in force, or None."""
    return _settings


def applied() -> tuple[str, ...]:
    """Targets of the patches that enable() applied itself, without MindSpeed."""
    return _engine.applied


def report(config: Mamba3Config | None = None) -> list[Status]:
    """What is applied, what would be with `config`, and why not. It imports Megatron.

    Args:
        config: the settings to ask about; by default those in force, or the defaults with the mixer switched on.
    """
    with _lock:
        config = config or _settings or Mamba3Config(use_mamba3_mixer=True)
        if not config.use_mamba3_mixer and not _engine.applied:
            why = f"{flag('use_mamba3_mixer')} is not given"
            return [Status(p.target, "off", why, p.flag, p.reason) for p in _patches(config)]
        if mindspeed.adaptor_has_run() and not _engine.applied:
            return mindspeed.report(_patches(config), config)
        return _engine.report(_patches(config), config)


def _patches(config: Mamba3Config) -> tuple[Patch, ...]:
    return (*megatron_core.patches(config), *megatron_training.patches(config))
