"""The launcher and the import line, on small scripts, with megatron-core's real patches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mamba3_plugin import launch
from mindspeed_mamba3_plugin.__main__ import main
from mindspeed_mamba3_plugin.config import ConfigError

pytest.importorskip("megatron.core")

SCRIPT = """
import sys
assert "megatron" not in sys.modules or "mindspeed_mamba3_plugin" in sys.modules
import beside
from mindspeed_mamba3_plugin import patches
print("argv", sys.argv[1:])
print("main", __name__ == "__main__", beside.VALUE)
settings = patches.enabled()
print("rank", settings and settings.mamba3_mimo_rank, settings and settings.mamba3_expand)
print("patched", "megatron.core.ssm.mamba_layer:MambaLayer.__init__" in patches.applied())
"""


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "beside.py").write_text("VALUE = 7")
    path = tmp_path / "pretrain.py"
    path.write_text(SCRIPT)
    return path


def python(*arguments: str | Path, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_launch_reads_the_file_and_the_flags_win(script, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "mamba3: {use_mamba3_mixer: true, mamba3_mimo_rank: 2, mamba3_expand: 3}\n"
        "megatron: {num_layers: 4, bf16: true, fp16: false, data_path: [a, b]}\n"
    )
    launcher = ("-m", "mindspeed_mamba3_plugin", "launch", "--config", config, script)
    out = python(*launcher, "--mamba3-mimo-rank", "8", "--seed", "3")
    assert (
        "argv ['--num-layers', '4', '--bf16', '--data-path', 'a', 'b', '--mamba3-mimo-rank', '8', '--seed', '3']"
        in out
    )
    assert "main True 7" in out
    assert "rank 8 3" in out
    assert "patched True" in out


def test_torchrun_launches_it_in_each_rank(script):
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    out = python(*ranks, "-m", "mindspeed_mamba3_plugin", "launch", script, "--use-mamba3-mixer")
    assert out.count("main True 7") == out.count("patched True") == 2


def test_one_import_line_does_the_same(script):
    script.write_text("import mindspeed_mamba3_plugin.auto\n" + SCRIPT)
    out = python(script, "--use-mamba3-mixer", "--mamba3-mimo-rank", "8")
    assert "rank 8 2" in out and "patched True" in out
    out = python(script, "--seed", "3")
    assert "rank None None" in out and "patched False" in out


def test_without_the_switch_nothing_is_changed(script):
    out = python("-m", "mindspeed_mamba3_plugin", "launch", script, "--num-layers", "4")
    assert "argv ['--num-layers', '4']" in out
    assert "rank None None" in out and "patched False" in out
    with pytest.raises(ConfigError, match="--mamba3-mimo-rank is given without --use-mamba3-mixer"):
        launch.prepare(str(script), ["--mamba3-mimo-rank", "8"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: {}", "unknown section 'model': allowed are mamba3, megatron"),
        ("mamba3: [1]", "section mamba3 must be a mapping of keys, not list"),
        ("mamba3: {mamba3_rank: 4}", "unknown setting 'mamba3_rank'"),
        ("mamba3: {mamba3_mimo_rank: 0}", "--mamba3-mimo-rank 0: must be"),
        ("[", "not valid YAML"),
        ("3", "must be a mapping of sections, not int"),
    ],
)
def test_a_bad_file_is_named_before_anything_runs(script, tmp_path, capsys, content, message):
    config = tmp_path / "run.yaml"
    config.write_text(content)
    assert main(["launch", "--config", str(config), str(script)]) == 2
    assert message in capsys.readouterr().err


def test_what_is_missing_is_named(tmp_path, capsys):
    assert main(["launch", str(tmp_path / "none.py")]) == 2
    assert "none.py: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import mindspeed.megatron_adaptor", True),
        ("from mindspeed_llm import megatron_adaptor", True),
        ("import mindspeed_mamba3_plugin.auto\nimport megatron.core", False),
    ],
)
def test_a_script_that_imports_mindspeed_is_recognised(tmp_path, source, found):
    path = tmp_path / "script.py"
    path.write_text(source)
    assert launch.imports_mindspeed(str(path)) is found
    if found:
        with pytest.raises(ConfigError, match="imports MindSpeed, which is not installed"):
            launch.prepare(str(path), ["--use-mamba3-mixer"])
