from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
from small_runs import SMALL

from mindspeed_mamba3_plugin.config import ConfigError
from mindspeed_mamba3_plugin.training.config import RunConfig
from mindspeed_mamba3_plugin.training.trainer import main, parse_plant

SMOKE = Path(__file__).parents[2] / "configs" / "smoke_cpu.yaml"


def test_round_trip_through_a_mapping(small):
    assert RunConfig.from_mapping(small.to_mapping()) == small


def test_the_smoke_config_loads_and_takes_overrides():
    run = RunConfig.from_yaml(SMOKE, ["training.steps=7", "optimizer.lr=1e-2", "mamba3.mamba3_chunk_size=16"])
    assert (run.training.steps, run.optimizer.lr, run.mamba3.mamba3_chunk_size) == (7, 1e-2, 16)
    assert run.training.steps != RunConfig.from_yaml(SMOKE).training.steps >= 40


def test_numbers_in_exponent_form_are_numbers(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("mamba3: {use_mamba3_mixer: true, mamba3_dt_min: 1e-4}\noptimizer: {lr: 2e-3, adam_eps: 1E-6}\n")
    run = RunConfig.from_yaml(path)
    assert (run.optimizer.lr, run.optimizer.adam_eps, run.mamba3.mamba3_dt_min) == (2e-3, 1e-6, 1e-4)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("optimizer", "lrr", 1.0, "unknown key 'optimizer.lrr': allowed are lr,"),
        ("mamba3", "mamba3_rank", 2, "unknown setting 'mamba3_rank'"),
        ("training", "steps", "many", "training.steps 'many': must be of type int, not str"),
        ("training", "steps", True, "training.steps True: must be of type int, not bool"),
        ("training", "steps", 0, "training.steps 0: must be at least 1"),
        ("model", "hybrid_override_pattern", "MX", "model.hybrid_override_pattern 'MX'"),
        ("model", "num_attention_heads", 3, "must divide hidden_size, 32"),
        ("model", "params_dtype", "fp8", "must be one of fp32, bf16"),
        ("model", "mamba_num_groups", 3, "--mamba-num-groups 3"),
        ("mamba3", "use_mamba3_mixer", False, "mamba3.use_mamba3_mixer: must be true"),
        ("mamba3", "mamba3_mimo_rank", 0, "--mamba3-mimo-rank 0"),
        ("optimizer", "lr", 0.0, "optimizer.lr 0.0: must be above 0"),
        ("optimizer", "lr_warmup_steps", 2, "must be below training.steps, 2"),
        ("data", "max_bytes", 5, "data.max_bytes 5: must be at least 10000"),
    ],
)
def test_errors_name_the_key_the_value_and_what_is_allowed(section, key, value, message):
    content = deepcopy(SMALL)
    content.setdefault(section, {})[key] = value
    with pytest.raises(ConfigError) as error:
        RunConfig.from_mapping(content)
    assert message in str(error.value)


def test_errors_of_the_file_itself(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        RunConfig.from_yaml(tmp_path / "none.yaml")
    for text, message in (
        ("a: [", "not valid YAML"),
        ("- 1", "must be a mapping of sections"),
        ("models: {}", "unknown section 'models'"),
        ("model: 3", "section model: must be a mapping"),
    ):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            RunConfig.from_yaml(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match=r"--set steps: must be SECTION\.KEY=VALUE"):
        RunConfig.from_yaml(SMOKE, ["steps"])


def test_the_digest_sees_what_changes_a_run_and_not_what_judges_it(small):
    def digest(section, key, value):
        content = small.to_mapping()
        content[section][key] = value
        return RunConfig.from_mapping(content).digest()

    assert digest("compare", "max_floor_ratio", 5.0) == small.digest()
    assert digest("training", "seed", 1) != small.digest()
    assert digest("mamba3", "mamba3_chunk_size", 32) != small.digest()


def test_plant():
    assert parse_plant("dk=1.01,dz=0.5") == {"dk": 1.01, "dz": 0.5}
    assert parse_plant("") == {}
    with pytest.raises(ConfigError, match="no gradient named 'dx'; allowed are dq, dk"):
        parse_plant("dx=1.01")
    with pytest.raises(ConfigError, match="'dk=much' must be NAME=FACTOR"):
        parse_plant("dk=much")


def test_usage_errors_end_with_status_2(capsys):
    assert main(["--config", "none.yaml"]) == 2
    assert "none.yaml: no such file" in capsys.readouterr().err
    assert main(["--config", str(SMOKE), "--plant", "dx=1"]) == 2
