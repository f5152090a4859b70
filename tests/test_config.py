"""The settings: one source for flags, YAML keys and attributes, with errors that name the flag."""

import argparse
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_mamba3_plugin.config import ConfigError, Mamba3Config, add_arguments, flag
from mindspeed_mamba3_plugin.ops import registry

ROOT = Path(__file__).parent.parent


def parse(*arguments: str) -> Mamba3Config:
    return Mamba3Config.from_object(add_arguments(argparse.ArgumentParser()).parse_args(arguments))


def test_every_setting_is_a_flag_with_the_same_default():
    assert parse() == Mamba3Config()
    parser = add_arguments(argparse.ArgumentParser())
    assert {flag(f.name) for f in fields(Mamba3Config)} <= set(parser._option_string_actions)


def test_flags_of_others_are_left_alone():
    flags = {flag(f.name) for f in fields(Mamba3Config)}
    assert not flags & {"--mamba-chunk-size", "--mamba-expand", "--mamba-state-dim", "--mamba-num-groups", "--spec"}


def test_adding_the_flags_twice_is_harmless():
    parser = add_arguments(add_arguments(argparse.ArgumentParser()))
    assert parser.parse_args(["--mamba3-mimo-rank", "2"]).mamba3_mimo_rank == 2


def test_values_arrive():
    config = parse("--use-mamba3-mixer", "--mamba3-mimo-rank", "2", "--mamba3-rope-fraction", "1.0")
    assert config.use_mamba3_mixer and config.mamba3_mimo_rank == 2 and config.rotary_dim_divisor == 2
    assert config == Mamba3Config.from_mapping(
        {"use_mamba3_mixer": True, "mamba3_mimo_rank": 2, "mamba3_rope_fraction": 1.0}
    )
    assert config == Mamba3Config.from_object(SimpleNamespace(**vars(config), something_else=1))


@pytest.mark.parametrize(("rank", "chunk"), [(1, 64), (2, 32), (4, 16), (8, 8), (16, 8)])
def test_default_chunk_size(rank, chunk):
    assert Mamba3Config(mamba3_mimo_rank=rank).chunk_size == chunk


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mamba3_mimo_rank": 0}, "--mamba3-mimo-rank 0: must be an integer of at least 1"),
        ({"mamba3_mimo_rank": "4"}, "--mamba3-mimo-rank '4': must be of type int, not str"),
        ({"mamba3_mimo_rank": True}, "--mamba3-mimo-rank True: must be of type int"),
        ({"mamba3_chunk_size": 7}, "--mamba3-chunk-size 7: must be an integer of at least 8"),
        ({"mamba3_expand": 0}, "--mamba3-expand 0"),
        ({"mamba3_rope_fraction": 0.7}, "--mamba3-rope-fraction 0.7: must be one of 0.5, 1.0"),
        ({"mamba3_forward_kernel": "cuda"}, "--mamba3-forward-kernel cuda: must be one of auto, reference"),
        ({"mamba3_backward_kernel": "fast"}, "--mamba3-backward-kernel fast: must be one of auto, reference"),
        ({"mamba3_params_dtype": "fp16"}, "--mamba3-params-dtype fp16: must be one of fp32, bf16"),
        ({"mamba3_a_activation": "relu"}, "--mamba3-a-activation relu: must be one of heavy_tail, softplus"),
        ({"mamba3_a_floor": 0.0}, "--mamba3-a-floor 0.0: must be a number above 0"),
        ({"mamba3_dt_min": 0.2}, "--mamba3-dt-max 0.1: must be at least --mamba3-dt-min"),
        ({"use_mamba3_mixer": 1}, "--use-mamba3-mixer 1: must be of type bool"),
    ],
)
def test_a_bad_value_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        Mamba3Config(**settings)


def test_an_unknown_key_is_named():
    with pytest.raises(ConfigError, match="unknown setting 'mamba3_rank': allowed are mamba3_a_activation"):
        Mamba3Config.from_mapping({"mamba3_rank": 4})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"state_dim": 33}, "--mamba-state-dim 33: must be a positive multiple of 4"),
        ({"state_dim": 0}, "--mamba-state-dim 0"),
        ({"num_groups": 3}, "--mamba-num-groups 3: must divide the number of Mamba heads, which is 8"),
        ({"head_dim": 0}, "--mamba-head-dim 0: must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Mamba3Config().check_model(**{"state_dim": 32, "head_dim": 16, "num_heads": 8, "num_groups": 2, **sizes})


def test_a_kernel_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"--mamba3-backward-kernel triton: .*not installed.*usable here: auto, ref"
    ):
        Mamba3Config(mamba3_backward_kernel="triton").check_environment()


def test_setup_cfg_lists_every_package():
    listed = {
        line.strip()
        for line in (ROOT / "setup.cfg").read_text().splitlines()
        if line.startswith("    mindspeed_mamba3")
    }
    mapped = {"patches": "mindspeed_mamba3_plugin.patches", "configs": "mindspeed_mamba3_plugin.configs"}
    found = {mapped[name] for name in mapped if (ROOT / name / "__init__.py").exists()}
    for init in (ROOT / "mindspeed_mamba3_plugin").rglob("__init__.py"):
        found.add(".".join(init.parent.relative_to(ROOT).parts))
    assert found <= listed, found - listed


def test_the_readme_lists_every_flag_with_its_default():
    rows = {
        cells[1].strip(" `"): cells[2].strip()
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("| `--") and (cells := line.split("|"))
    }
    assert set(rows) == {flag(f.name) for f in fields(Mamba3Config)}
    for f in fields(Mamba3Config):
        default = {True: "on", False: "off", None: "64 // rank"}.get(f.default, f.default)
        assert rows[flag(f.name)] == str(default), f.name
