"""Somebody's training script with the plugin in it: settings from a YAML file and from the script's own flags, and
patches before Megatron is imported."""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from .config import ConfigError, Mamba3Config, add_arguments, flag

_SECTIONS = ("mamba3", "megatron")


def run(script: str, flags: Sequence[str], config: str | None = None) -> None:
    """Run `script` as Python would, with the plugin in it.

    Args:
        flags: the script's arguments; the plugin's own among them count before those of the file.
        config: YAML file with the sections `mamba3` (settings) and `megatron` (flags of the script, dashes as
            underscores; true for a flag without a value, a list for several values).

    Raises:
        ConfigError: no such file, an unknown section or setting, or a setting that cannot work.
    """
    if not Path(script).is_file():
        raise ConfigError(f"SCRIPT {script}: no such file")
    sections = _read(config) if config else {}
    given = [*_as_flags(sections.get("megatron", {})), *flags]
    settings = Mamba3Config.from_mapping(sections.get("mamba3", {}))
    sys.argv = [script, *given]
    sys.path.insert(0, str(Path(script).resolve().parent))
    prepare(script, given, settings)
    runpy.run_path(script, run_name="__main__")


def prepare(script: str, flags: Sequence[str], defaults: Mamba3Config | None = None) -> Mamba3Config:
    """Put the plugin into this process, before the script imports Megatron or MindSpeed.

    Returns:
        The settings: `defaults` with those that `flags` give.

    Raises:
        ConfigError: a setting that cannot work, or one given while the master switch is off.
    """
    defaults = defaults or Mamba3Config()
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    parser.set_defaults(**asdict(defaults))
    settings = Mamba3Config.from_object(parser.parse_known_args(flags)[0])
    if not settings.use_mamba3_mixer:
        for f in fields(settings):
            if getattr(settings, f.name) != f.default:
                raise ConfigError(f"{flag(f.name)} is given without {flag('use_mamba3_mixer')}")
        return settings
    settings.check_environment()
    if imports_mindspeed(script):
        from .patches import mindspeed

        if not mindspeed.register(settings):
            raise ConfigError(f"SCRIPT {script} imports MindSpeed, which is not installed")
    else:
        from .patches import enable

        enable(settings)
    return settings


def imports_mindspeed(script: str) -> bool:
    """Whether the script imports MindSpeed or MindSpeed-LLM, which patch Megatron when they are imported."""
    names: list[str] = []
    for node in ast.walk(ast.parse(Path(script).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return any(name.split(".")[0] in ("mindspeed", "mindspeed_llm") for name in names)


def _read(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ConfigError(f"--config {path}: no such file")
    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config {path}: must be a mapping of sections, not {type(content).__name__}")
    for name, keys in content.items():
        if name not in _SECTIONS:
            raise ConfigError(f"--config {path}: unknown section {name!r}: allowed are {', '.join(_SECTIONS)}")
        if not isinstance(keys, Mapping):
            raise ConfigError(f"--config {path}: section {name} must be a mapping of keys, not {type(keys).__name__}")
    return dict(content)


def _as_flags(section: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in section.items():
        if value is False or value is None:
            continue
        flags.append(flag(name))
        if value is not True:
            flags += map(str, value) if isinstance(value, list) else [str(value)]
    return flags
