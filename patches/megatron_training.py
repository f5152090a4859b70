"""megatron.training, where it exists: the flags on Megatron's own parser, and from there onto TransformerConfig."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, fields
from functools import lru_cache, wraps
from typing import Any

from ..config import Mamba3Config, add_arguments
from .engine import Patch
from .megatron_core import SUPPORTED


@lru_cache
def patches(settings: Mamba3Config) -> tuple[Patch, ...]:
    """The changes to megatron.training. MindSpeed has ways of its own for the flags, so it leaves those out."""
    common = dict(flag="use_mamba3_mixer", requires=SUPPORTED, optional=True)
    return (
        Patch(
            "megatron.training.arguments:parse_args",
            "Megatron's parser knows the --mamba3-* flags",
            wrapper=_parse_args_wrapper(settings),
            parameters=("extra_args_provider", "ignore_unknown_args"),
            engine_only=True,
            **common,
        ),
        Patch(
            "megatron.training.arguments:core_transformer_config_from_args",
            "the flags reach TransformerConfig, of which Megatron copies declared fields only",
            wrapper=config_from_args_wrapper,
            parameters=("args", "config_class"),
            engine_only=True,
            **common,
        ),
        Patch(
            "megatron.training.training:num_floating_point_operations",
            "the TFLOP/s that Megatron prints count Mamba-3 layers, not Mamba-2 ones",
            wrapper=flops_wrapper,
            parameters=("args", "batch_size", "seqlen_squared_sum_in_batch", "total_real_tokens_in_batch"),
            older=(("args", "batch_size"),),
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


def flops_wrapper(original: Callable) -> Callable:
    """num_floating_point_operations with the mixer's own formula for each `M` layer.

    Megatron's formula for such a layer is nested in the function, so its value is the difference that one more makes.
    """

    @wraps(original)
    def num_floating_point_operations(args, batch_size, *rest, **kwargs):
        total = original(args, batch_size, *rest, **kwargs)
        name, pattern = _pattern(args)
        if not pattern or "M" not in pattern:
            return total
        from ..layers.flops import layer_flops
        from ..layers.sizes import MixerSizes

        counted = copy(args)
        setattr(counted, name, pattern)
        longer = copy(args)
        setattr(longer, name, f"M{pattern}")
        theirs = original(longer, batch_size, *rest, **kwargs) - original(counted, batch_size, *rest, **kwargs)
        settings = Mamba3Config.from_object(args)
        sizes = MixerSizes.from_config(args, args.hidden_size, settings)
        real = (*rest, None, None)[1] if rest else None
        tokens = kwargs.get("total_real_tokens_in_batch", real) or batch_size * args.seq_length
        ours = tokens * layer_flops(sizes, settings.chunk_size).total
        return total + pattern.count("M") * (ours - theirs)

    return num_floating_point_operations


def _pattern(args: Any) -> tuple[str, str | None]:
    """The argument that names the layers, and its value; made from the ratios where those are given instead."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        if value := getattr(args, name, None):
            return name, value
    if not getattr(args, "is_hybrid_model", False) or not hasattr(args, "hybrid_attention_ratio"):
        return "", None
    others = [round(args.num_layers * ratio) for ratio in (args.hybrid_attention_ratio, args.hybrid_mlp_ratio)]
    return "hybrid_override_pattern", "M" * (args.num_layers - sum(others)) + "*" * others[0] + "-" * others[1]
