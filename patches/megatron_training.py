"""megatron.training, where it exists: the flags on Megatron's own parser, and from there onto TransformerConfig."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import lru_cache, wraps
from typing import Any

from ..config import Mamba3Config, add_arguments
from .engine import Patch
from .megatron_core import SUPPORTED


@lru_cache
def patches(settings: Mamba3Config) -> tuple[Patch, ...]:
    """The changes to megatron.training. MindSpeed has ways of its own for both, so it leaves them out."""
    common = dict(flag="use_mamba3_mixer", requires=SUPPORTED, optional=True, engine_only=True)
    return (
        Patch(
            "megatron.training.arguments:parse_args",
            "Megatron's parser knows the --mamba3-* flags",
            wrapper=_parse_args_wrapper(settings),
            parameters=("extra_args_provider", "ignore_unknown_args"),
            **common,
        ),
        Patch(
            "megatron.training.arguments:core_transformer_config_from_args",
            "the flags reach TransformerConfig, of which Megatron copies declared fields only",
            wrapper=config_from_args_wrapper,
            parameters=("args", "config_class"),
            **common,
        ),
    )


def add_arguments_with(parser: argparse.ArgumentParser, settings: Mamba3Config) -> argparse.ArgumentParser:
    """Add the flags to `parser`, their defaults being `settings`."""
    add_arguments(parser).set_defaults(**asdict(settings))
    return parser


def _parse_args_wrapper(settings: Mamba3Config) -> Callable[[Callable], Callable]:
    def parse_args_wrapper(original: Callable) -> Callable:
        @wraps(original)
        def parse_args(extra_args_provider=None, ignore_unknown_args=False):
            def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
                if extra_args_provider is not None:
                    parser = extra_args_provider(parser)
                return add_arguments_with(parser, settings)

            args = original(provider, ignore_unknown_args)
            Mamba3Config.from_object(args).check_environment()
            return args

        return parse_args

    return parse_args_wrapper


def config_from_args_wrapper(original: Callable) -> Callable:
    """core_transformer_config_from_args that also copies the plugin's settings."""

    @wraps(original)
    def core_transformer_config_from_args(args, config_class=None) -> Any:
        config = original(args, config_class)
        for f in fields(Mamba3Config):
            if hasattr(args, f.name):
                setattr(config, f.name, getattr(args, f.name))
        return config

    return core_transformer_config_from_args
