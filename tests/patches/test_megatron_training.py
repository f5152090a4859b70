"""The flags on Megatron's parser and on its way to TransformerConfig, on stubs with the signatures of 0.16.1."""

from __future__ import annotations

import argparse
import sys

import pytest
from mindspeed_mamba3_plugin.patches import enable, revert

from mindspeed_mamba3_plugin import patches
from mindspeed_mamba3_plugin.config import ConfigError, Mamba3Config

pytest.importorskip("megatron.core")

ARGUMENTS = """
    import argparse

    def parse_args(extra_args_provider=None, ignore_unknown_args=False):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--hidden-size", type=int)
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()

    def core_transformer_config_from_args(args, config_class=None):
        from megatron.core.transformer import TransformerConfig
        return (config_class or TransformerConfig)(num_layers=1, hidden_size=args.hidden_size, num_attention_heads=1)
"""


TRAINING = """
    def num_floating_point_operations(args, batch_size):
        pattern = args.hybrid_override_pattern
        if pattern is None:
            pattern = "M" * (args.num_layers - round(args.num_layers * args.hybrid_attention_ratio)) + "*"
        return batch_size * (1000 * pattern.count("M") + 7 * pattern.count("*"))
"""


@pytest.fixture
def arguments(stub):
    stub("megatron.training")
    stub("megatron.training.training", TRAINING)
    return stub("megatron.training.arguments", ARGUMENTS)


@pytest.fixture
def argv(monkeypatch):
    def put(*flags: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", "--hidden-size", "8", *flags])

    return put


def test_flags_reach_the_transformer_config(arguments, stub, argv):
    early = stub("megatron.training.initialize", "from megatron.training.arguments import parse_args")
    enable(mamba3_mimo_rank=2, mamba3_expand=3)
    argv("--mamba3-mimo-rank", "8", "--mamba3-recompute", "--mine", "5")

    def mine(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--mine", type=int)
        return parser

    args = early.parse_args(extra_args_provider=mine)
    assert (args.mine, args.hidden_size) == (5, 8)
    config = arguments.core_transformer_config_from_args(args)
    assert Mamba3Config.from_object(config) == Mamba3Config(
        use_mamba3_mixer=True, mamba3_mimo_rank=8, mamba3_recompute=True, mamba3_expand=3
    )


def test_a_bad_flag_is_named_while_parsing(arguments, argv, capsys):
    enable()
    argv("--mamba3-mimo-rank", "0")
    with pytest.raises(ConfigError, match="--mamba3-mimo-rank 0: must be"):
        arguments.parse_args()
    argv("--mamba3-params-dtype", "fp8")
    with pytest.raises(SystemExit):
        arguments.parse_args()
    assert "--mamba3-params-dtype" in capsys.readouterr().err


def test_off_leaves_megatrons_parser_alone(arguments, argv, capsys):
    originals = arguments.parse_args, arguments.core_transformer_config_from_args
    enable(use_mamba3_mixer=False)
    argv("--mamba3-mimo-rank", "8")
    with pytest.raises(SystemExit):
        arguments.parse_args()
    assert "--mamba3-mimo-rank" in capsys.readouterr().err
    enable()
    assert {t for t in patches.applied() if t.startswith("megatron.training")} == {
        "megatron.training.arguments:parse_args",
        "megatron.training.arguments:core_transformer_config_from_args",
        "megatron.training.training:num_floating_point_operations",
    }
    revert()
    assert (arguments.parse_args, arguments.core_transformer_config_from_args) == originals


def test_another_signature_is_refused(arguments, stub):
    stub("megatron.training.arguments", ARGUMENTS.replace("ignore_unknown_args=False", "strict=True"))
    with pytest.raises(patches.PatchError, match=r"parse_args of megatron-core .* takes \(.*, strict\)"):
        enable()
    assert patches.applied() == ()


@pytest.mark.parametrize("named", [True, False])
def test_flops_count_mamba3_layers(arguments, named):
    from megatron.training import training

    from mindspeed_mamba3_plugin.layers.flops import layer_flops
    from mindspeed_mamba3_plugin.layers.sizes import MixerSizes

    args = argparse.Namespace(
        hybrid_override_pattern="MM*" if named else None, hybrid_attention_ratio=1 / 3, hybrid_mlp_ratio=0.0,
        num_layers=3, is_hybrid_model=True, hidden_size=16, seq_length=32, mamba_state_dim=8, mamba_head_dim=8,
        mamba_num_groups=1, mamba3_mimo_rank=2,
    )  # fmt: skip
    enable()
    sizes = MixerSizes(hidden=16, heads=4, groups=1, rank=2, state=8, head_dim=8, angles=2)
    ours = layer_flops(sizes, 32).total
    assert training.num_floating_point_operations(args, 5) == 5 * (2 * 32 * ours + 7)
    args.hybrid_override_pattern = "**"
    assert training.num_floating_point_operations(args, 5) == 5 * 14
